# ruff: noqa: E501 -- tables
"""Planted breaks of the prompt cache, each named by where it is and what kind of thing it is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import divergence, measure, tokens
from proxy.core.divergence import Break, Piece, Trace
from proxy.core.kind import KINDS, OURS
from proxy.core.measure import Name
from proxy.core.plan import Plan
from proxy.core.request import Request
from proxy.memo import TokenScale

Make = Callable[..., tuple[Request, Plan]]
Body = dict[str, Any]
RULES = "\n".join(f"Rule {number}: treat every customer of region {number} alike." for number in range(20))


def tool(name: str, **more: Any) -> Body:
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}, **more}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


def body(**more: Any) -> Body:
    return {
        "model": "gpt-5.1",
        "tools": [tool("read"), tool("write"), tool("list")],
        "messages": [
            {"role": "system", "content": f"You help.\n{RULES}"},
            {"role": "user", "content": "What does the report say about the harbour?"},
            {"role": "assistant", "content": "It says that the harbour is full."},
            {"role": "user", "content": "And the quay?"},
            {"role": "assistant", "content": "The quay is empty."},
            {"role": "user", "content": "Thank you. What now?"},
        ],
        **more,
    }


def grown(sent: Body) -> Body:
    later = copy.deepcopy(sent)
    later["messages"] += [{"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "Sure?"}]
    return later


def find(before: Body, now: Body, make: Make, scale: TokenScale) -> Break | None:
    def traced(each: Body) -> Trace:
        found, made = make(each, mode="observe")
        return divergence.trace(found, made.draft, scale, at=0.0)

    return divergence.divergence(traced(before), traced(now))


def system(text: str, at: str = "head") -> Callable[[Body], None]:
    def plant(sent: Body) -> None:
        lines = {"head": f"{text}\n{RULES}", "tail": f"{RULES}\n{text}", "middle": f"Be kind.\n{text}\n{RULES}"}
        sent["messages"][0]["content"] = lines[at]

    return plant


def message(index: int, content: Any) -> Callable[[Body], None]:
    def plant(sent: Body) -> None:
        sent["messages"][index]["content"] = content

    return plant


def member(name: str, value: Any) -> Callable[[Body], None]:
    def plant(sent: Body) -> None:
        sent[name] = value

    return plant


def image(url: str, **more: Any) -> list[Body]:
    return [{"type": "text", "text": "See this."}, {"type": "image_url", "image_url": {"url": url, **more}}]


def cut(count: int) -> Callable[[Body], None]:
    def plant(sent: Body) -> None:
        del sent["messages"][1 : 1 + count]

    return plant


Plant = Callable[[Body], None]
NOTHING: Plant = lambda sent: None  # noqa: E731

PLANTED: list[tuple[str, str, Plant, Plant]] = [
    # kind, layer, the prompt before, the prompt now
    ("clock", "L1", system("Time: 2026-11-30 10:01"), system("Time: 2026-11-30 10:02")),
    ("clock", "L1", system("Today is Monday, 30 November 2026."), system("Today is Tuesday, 1 December 2026.")),
    ("clock", "L1", system("now: 2026-11-30T10:01:07.123Z", "middle"), system("now: 2026-11-30T10:01:09.456Z", "middle")),
    ("clock", "L1", system("It is 9:59 am here.", "tail"), system("It is 10:00 am here.", "tail")),
    ("clock", "L1", system("Current date: 11/30/2026"), system("Current date: 12/01/2026")),
    ("clock", "L1", system("timestamp=1796005440"), system("timestamp=1796005999")),
    ("clock", "L1", system("timestamp=1796005440123", "tail"), system("timestamp=1796005999456", "tail")),
    ("clock", "L1", system("Good morning! Be brief."), system("Good evening! Be brief.")),
    ("clock", "L1", system("Today's date is Nov 30, 2026."), system("Today's date is Dec 1, 2026.")),
    ("clock", "L1", system("今天是2026年11月30日。"), system("今天是2026年12月1日。")),
    ("nonce", "L1", system("request 3f2b8c1e-9d4a-4b6e-8f7a-1c2d3e4f5a6b"), system("request 91aa0c77-1b2c-4d3e-9f8a-0b1c2d3e4f5a")),
    ("nonce", "L1", system("session: sess_8fK2mQ9xLp", "tail"), system("session: sess_Zt71bWq0aR", "tail")),
    ("nonce", "L1", system("trace=deadbeef12345678"), system("trace=0badcafe87654321")),
    ("nonce", "L1", system("run id a1b2c3d4e5f6a7b8 begins", "middle"), system("run id ffeeddccbbaa0099 begins", "middle")),
    ("nonce", "L1", system("conv-9f8e7d6c5b"), system("conv-1a2b3c4d5e")),
    ("number", "L1", system("You have 14 unread messages."), system("You have 15 unread messages.")),
    ("number", "L1", system("Balance: $1,204.50", "tail"), system("Balance: $1,310.00", "tail")),
    ("number", "L1", system("Battery at 87%"), system("Battery at 86%")),
    ("number", "L1", system("Turn 3 of this talk", "middle"), system("Turn 4 of this talk", "middle")),
    ("number", "L1", system("tokens left: 120000"), system("tokens left: 118411")),
    ("other", "L1", system("The user's name is Alice."), system("The user's name is Robert.")),
    ("other", "L1", system("Memory: likes tea.", "tail"), system("Memory: likes coffee and rain.", "tail")),
    ("other", "L1", system("Answer in English."), system("Answer in German, please.")),
    ("other", "L1", system("cwd: /home/alice/project"), system("cwd: /home/alice/other")),
    ("whitespace", "L1", system("Be kind to all."), system("Be kind  to all.")),
    ("whitespace", "L1", system("Be kind.\nBe brief."), system("Be kind.\r\nBe brief.")),
    ("whitespace", "L1", system("Be kind."), system("Be kind. ")),
    ("whitespace", "L4", message(1, "What is it?"), message(1, "What is it?\n")),
    ("whitespace", "L4", message(2, "It says this:\n- one"), message(2, "It says this:\n\n- one")),
    ("tool_order", "tools", NOTHING, member("tools", [tool("write"), tool("read"), tool("list")])),
    ("tool_order", "tools", NOTHING, member("tools", [tool("list"), tool("write"), tool("read")])),
    ("tool_order", "tools", member("tools", [tool("a"), tool("b")]), member("tools", [tool("b"), tool("a")])),
    ("tool_order", "tools", member("functions", [{"name": "a"}, {"name": "b"}]), member("functions", [{"name": "b"}, {"name": "a"}])),
    ("tool_set", "tools", NOTHING, member("tools", [tool("read"), tool("write"), tool("list"), tool("find")])),
    ("tool_set", "tools", NOTHING, member("tools", [tool("read"), tool("list")])),
    ("tool_set", "tools", NOTHING, member("tools", [tool("read"), tool("write"), tool("remove")])),
    ("tool_set", "tools", NOTHING, lambda sent: sent.pop("tools")),
    ("tool_schema", "tools", NOTHING, member("tools", [tool("read", required=["path"]), tool("write"), tool("list")])),
    ("tool_schema", "tools", NOTHING, member("tools", [tool("read"), tool("write"), {**tool("list"), "strict": True}])),
    ("tool_schema", "tools", member("tools", [{"function": {"name": "a", "description": "It is 10:01"}}]), member("tools", [{"function": {"name": "a", "description": "It is 10:02"}}])),
    ("tool_schema", "tools", NOTHING, lambda sent: sent["tools"][1]["function"].update(description="Writes.")),
    ("response_format", "tools", NOTHING, member("response_format", {"type": "json_object"})),
    ("response_format", "tools", member("response_format", {"type": "json_object"}), member("response_format", {"type": "text"})),
    ("response_format", "tools", member("response_format", {"a": {"x": 1}}), member("response_format", {"a": {"x": 2}})),
    ("response_format", "tools", member("response_format", {"type": "json_object"}), NOTHING),
    ("parameter", "parameters", NOTHING, member("model", "gpt-5-mini")),
    ("parameter", "parameters", member("reasoning_effort", "low"), member("reasoning_effort", "high")),
    ("parameter", "parameters", NOTHING, member("parallel_tool_calls", value=False)),
    ("parameter", "parameters", member("prompt_cache_key", "a"), member("prompt_cache_key", "b")),
    ("parameter", "parameters", member("service_tier", "flex"), NOTHING),
    ("image_url", "L4", message(1, image("https://s3.test/a?sig=1")), message(1, image("https://s3.test/a?sig=2"))),
    ("image_url", "L4", message(3, image("data:image/png;base64,AAAA")), message(3, image("data:image/png;base64,BBBB"))),
    ("image_url", "L4", message(1, [{"type": "file", "file": {"file_id": "f1"}}]), message(1, [{"type": "file", "file": {"file_id": "f2"}}])),
    ("image_url", "L4", message(1, [{"type": "input_image", "image_url": "u1"}]), message(1, [{"type": "input_image", "image_url": "u2"}])),
    ("history_edited", "L4", NOTHING, message(1, "What does the letter say about the town?")),
    ("history_edited", "L4", NOTHING, message(2, "I would rather not say that.")),
    ("history_edited", "L4", NOTHING, message(4, "The quay is full again.")),
    ("history_edited", "L4", NOTHING, lambda sent: sent["messages"].insert(1, {"role": "user", "content": "Before all:"})),
    ("history_edited", "L4", NOTHING, lambda sent: sent["messages"][2].update(tool_calls=[{"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}])),
    ("history_edited", "L4", message(2, image("u")[:1]), message(2, [{"type": "text", "text": "See nothing at all."}])),
    ("history_cut", "L4", NOTHING, cut(2)),
    ("history_cut", "L4", NOTHING, cut(4)),
    ("history_cut", "L4", NOTHING, lambda sent: sent["messages"].__delitem__(slice(1, 4))),
    ("clock", "L4", message(1, "[10:01] What is it?"), message(1, "[10:02] What is it?")),
    ("nonce", "L4", message(1, "msg_a8Xk29QpLz What is it?"), message(1, "msg_Zq81LmN0aB What is it?")),
]  # fmt: skip
CLEAN = [NOTHING, system("Time: 10:01"), member("response_format", {"type": "json_object"}), message(1, image("u"))]


@pytest.mark.parametrize(("kind", "layer", "before", "now"), PLANTED)
def test_planted_breaks_are_named(
    kind: str, layer: str, before: Plant, now: Plant, make: Make, scale: TokenScale
) -> None:
    """By layer and kind, in a prompt that has grown since."""
    first, later = body(), grown(body())
    before(first)
    later_planted = later
    now(later_planted)
    found = find(first, later_planted, make, scale)
    assert found is not None
    assert (found.kind, found.layer) == (kind, layer)


def test_there_are_sixty_and_every_kind_that_a_client_can_break() -> None:
    """The labelled set."""
    assert len(PLANTED) >= 60
    assert {kind for kind, *_ in PLANTED} == set(KINDS) - OURS


@pytest.mark.parametrize("plant", CLEAN)
def test_growth_is_no_break(plant: Plant, make: Make, scale: TokenScale) -> None:
    """The prompt before is the beginning of this one; so is the same prompt again."""
    first = body()
    plant(first)
    assert find(first, grown(first), make, scale) is None
    assert find(first, first, make, scale) is None


def test_the_first_differing_character_is_told_with_both_sides(make: Make, scale: TokenScale) -> None:
    """By the message's index and the place in its text, and how much stands in front of it."""
    first, later = body(), grown(body())
    first["messages"][0]["content"] = f"You help.\n{RULES}\nTime: 10:01"
    later["messages"][0]["content"] = f"You help.\n{RULES}\nTime: 10:02"
    found = find(first, later, make, scale)
    assert found is not None
    assert found.message == 0
    assert found.character == len(f"You help.\n{RULES}\nTime: 10:0")
    assert (found.was[-3:], found.now[-3:]) == (":01", ":02")
    assert 250 < found.shared_tokens < 700


def test_a_prompt_weighs_what_its_layers_weigh(make: Make, scale: TokenScale) -> None:
    """Also where a message with a picture is changed: its bytes are no text."""
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'iVBORw0KGgo' * 10_000}"}}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
    context = [{"id": "a.md", "content": "A fact. " * 100}]
    found, made = make({"messages": [asked], "strata": {"context": context}})
    traced = divergence.trace(found, made.draft, scale, at=0.0)
    # What primes the answer is no part of the prompt.
    assert traced.tokens == measure.layers(found, made.draft, scale).total - tokens.PRIMING
    assert traced.tokens < 5_000


def test_what_only_strata_changed_is_named_as_its_own() -> None:
    """The client's bytes are the same; where they are not, they say what it was, whatever was forwarded."""

    def said(role: str, text: str) -> bytes:
        return orjson.dumps({"role": role, "content": text})

    def pair(layer: Name, role: str, before: tuple[str, str], now: tuple[str, str]) -> Break | None:
        first, later = (
            Trace(0.0, (), (Piece(layer, 0, said(role, sent), 10, said(role, own)), Piece("L5", 1, b"{}", 1)))
            for sent, own in (before, now)
        )
        return divergence.divergence(first, later)

    same = pair("L1", "system", ("Time: 1", "Time: 1"), ("Time: [current value 1]", "Time: 1"))
    assert same
    assert (same.kind, same.character) == ("current_values", 6)
    moved = pair("L4", "user", ("<current>x</current> Hi", "Hi"), ("Hi", "Hi"))
    assert moved
    assert (moved.kind, moved.character) == ("turn_context", 0)
    edited = pair("L1", "system", ("Time: 10:01", "Time: 10:01"), ("[current value 1]", "Time: 10:02"))
    assert edited
    assert (edited.kind, edited.character, edited.shared_tokens) == ("clock", 10, 0)


def test_our_own_breaks_are_named_as_ours(talk: Callable[[], Any], scale: TokenScale) -> None:
    """An epoch's end, and under `eager` the library that grew."""
    note = "<note_context><path>a.md</path>" + "word " * 100 + "</note_context>"
    for how, kind in (
        ({"promotion": "eager"}, "library_grew"),
        ({"budget": 4_500, "reserve_tokens": 500}, "epoch_end"),
    ):
        chat, history = talk(), [{"role": "system", "content": "You help."}]
        traces: list[tuple[Trace, Plan]] = []
        for turn in range(24):
            attached = f"{note}\n" if turn == 0 else ""
            history.append({"role": "user", "content": f"{turn}? " + "word " * 150})
            sent = [*history[:-1], {"role": "user", "content": attached + str(history[-1]["content"])}]
            from tests.core.conftest import read_body  # the request as it was planned

            found = read_body({"model": "gpt-4o", "messages": sent})
            chat.say({"model": "gpt-4o", "messages": sent}, "Fine.", **how)
            made = chat.plans[-1]
            traces.append((divergence.trace(found, made.draft, scale, at=turn), made))
            history.append({"role": "assistant", "content": "Fine."})
        kinds = [found.kind for (one, _), (other, made) in itertools.pairwise(traces)
                 if (found := divergence.divergence(one, other, made.began))]  # fmt: skip
        assert set(kinds) == {kind}


def limited(how: str) -> list[Body]:
    """Return the requests of a conversation that outgrows its limit in one way."""
    long = "\n".join(f"Line {number} of what the tool has found." for number in range(400))
    system: Body = {"role": "system", "content": "You help." + (" The time is 10:00." if how == "clock" else "")}
    sent, history = [], [system]
    for turn in range(50):
        asked: Body = {"role": "user", "content": f"{turn}? " + "word " * 150}
        history.append(asked)
        if how == "outputs":
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            history += [{"role": "assistant", "content": None, "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": f"c{turn}", "content": long}]  # fmt: skip
        if how == "clock":
            history[0] = {**system, "content": f"You help. The time is 10:{turn:02}."}
        sent.append({"model": "gpt-4o", "messages": [*history]})
        history.append({"role": "assistant", "content": "Fine."})
    return sent


def breaks(sent: list[Body], make: Make, scale: TokenScale, **how: Any) -> list[Break]:
    made = [make(each, budget=4_500, reserve_tokens=500, **how) for each in sent]
    traces = [divergence.trace(found, planned.draft, scale, at=0.0) for found, planned in made]
    found = [divergence.divergence(one, other) for one, other in itertools.pairwise(traces)]
    return [each for each in found if each]


@pytest.mark.parametrize("how", ["turns", "outputs"])
def test_what_the_limit_took_of_an_anonymous_conversation_is_ours(how: str, make: Make, scale: TokenScale) -> None:
    """The client sent what it had sent, and more: no break is its own."""
    found = breaks(limited(how), make, scale)
    assert found
    assert {each.kind for each in found} == {"limit"}


def test_what_the_client_changes_over_the_limit_is_its_own(make: Make, scale: TokenScale) -> None:
    """It edits what stands, or leaves its oldest turns out, while the limit takes more."""
    sent = limited("turns")
    edited, shorter = (copy.deepcopy(sent[-1]) for _ in range(2))
    edited["messages"][-5]["content"] = "Something else?"
    shorter["messages"][1:9] = []
    kinds = [{each.kind for each in breaks([sent[-2], now], make, scale)} for now in (edited, shorter)]
    assert all(each and not each & OURS for each in kinds)
    assert {each.kind for each in breaks(limited("clock"), make, scale) if each.layer == "L1"} == {"clock"}


def test_packed_context_is_the_limits(make: Make, scale: TokenScale) -> None:
    """Of one turn; in the next it is gone because nobody sends it any more."""
    items = [{"id": f"{name}.md", "content": f"A fact about {name}. " * 300} for name in "abc"]
    said = {"role": "user", "content": "Well?"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop = [{"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "word " * 3_900}]  # fmt: skip
    asked = {"model": "gpt-4o", "strata": {"context": items[:2]}}
    (found,) = breaks([{**asked, "messages": each} for each in ([said], [said, *loop])], make, scale)
    assert (found.layer, found.kind) == ("L5", "limit")
    later = {"model": "gpt-4o", "messages": [said, {"role": "assistant", "content": "Yes."}, said]}
    (found,) = breaks([{**asked, "strata": {"context": items}, "messages": [said]}, later], make, scale)
    assert found.kind == "turn_context"


def test_values_at_the_end_of_the_prompt_before_are_no_edit_of_the_history() -> None:
    """They are told anew each time; what follows them in the next prompt is its growth."""
    system = Piece("L1", 0, b'{"role":"system","content":"s"}', 100)
    asked = Piece("L5", 1, b'{"role":"user","content":"a"}', 10)
    rest = [
        Piece("L4", 2, b'{"role":"assistant","content":"b"}', 20),
        Piece("L5", 3, b'{"role":"user","content":"c"}', 5),
    ]
    told = [Piece("L3", None, b'{"role":"system","content":"10:0%d"}' % minute, 7) for minute in (1, 2)]
    before = Trace(0.0, (), (system, asked, told[0]))
    found = divergence.divergence(before, Trace(1.0, (), (system, asked, *rest, told[1])))
    assert found == Break(layer="L3", kind="turn_context", was="10:01", shared_tokens=110)
    again = divergence.divergence(before, Trace(1.0, (), (system, asked, told[1])))
    assert again is not None
    assert (again.layer, again.kind) == ("L3", "clock")
