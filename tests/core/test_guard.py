"""Fitting a prompt into its limit, with and without an epoch."""

import itertools
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import guard, render
from proxy.core.budget import Limit
from proxy.core.cut import Cut
from proxy.core.draft import Draft, Slot
from proxy.core.guard import ACTIONS, Fitted
from proxy.core.history import shorten_slots
from proxy.core.items import Tags
from proxy.core.layers import arrange
from proxy.core.policy import OverBudget
from proxy.core.request import Request
from proxy.core.turn import Span
from proxy.memo import Analyst, TokenScale

Read = Callable[[object], Request]
WORDS = "word " * 100
LOOK = Analyst(Tags.of(), max_bytes=1_000_000).analyse


def user(text: str = WORDS) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = WORDS, *calls: str, **more: object) -> dict[str, Any]:
    made = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **more}


def result(call: str, text: str = WORDS) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def turns(count: int) -> list[dict[str, Any]]:
    return [message for _ in range(count) for message in (user(), assistant())]


def agent(steps: int, **more: object) -> list[dict[str, Any]]:
    talk = [user("Go.")]
    for step in range(steps):
        talk += [assistant("", f"{step}", **more), result(f"{step}")]
    return talk


def fit(
    messages: list[dict[str, Any]],
    read: Read,
    scale: TokenScale,
    *,
    tokens: int,
    own: int | None = None,
    over: OverBudget = "forward",
) -> tuple[Fitted, list[tuple[Span, ...]]]:
    request = read({"model": "gpt-4o", "messages": messages})
    asked: list[tuple[Span, ...]] = []

    def draft(cut: Cut) -> Draft:
        asked.append(cut.dropped)
        slots = [Slot(message) for message in request.messages]
        shorten_slots(slots, request, cut.shortened, LOOK)
        return arrange(slots, request.parts, cut=cut)

    limit = Limit(tokens=tokens, base=tokens, own=own)
    return guard.fit(request, draft, limit=limit, over_budget=over, scale=scale), asked


def test_what_fits_is_arranged_once(read: Read, scale: TokenScale) -> None:
    """And nothing is done to it."""
    found, asked = fit([*turns(3), user("Now?")], read, scale, tokens=2_000)
    assert (found.actions, found.draft.dropped) == ((), ())
    assert asked == [()]


def test_the_oldest_turns_go_on_the_grid(read: Read, scale: TokenScale) -> None:
    """As many whole turns as hold what is lost: a step of the grid, or several."""
    found, _ = fit([*turns(20), user("Now?")], read, scale, tokens=2_000)
    assert found.actions == ("turns_dropped",)
    assert found.total is not None
    assert found.total <= 2_000
    gone, step, weight = len(found.draft.dropped), 768, 210
    assert [span.start for span in found.draft.dropped] == [2 * turn for turn in range(gone)]
    assert gone * weight >= step * 3
    assert (gone - 1) * weight < step * 4


@pytest.mark.parametrize("tokens", range(400, 4_000, 300))
def test_what_is_lost_is_no_more_than_a_step_too_much(tokens: int, read: Read, scale: TokenScale) -> None:
    """The cut holds still, so it is generous; but never by more than a step and a turn."""
    found, _ = fit([*turns(30), user("Now?")], read, scale, tokens=tokens)
    assert found.total is not None
    assert found.total <= tokens
    assert found.total >= tokens - (0.4 * tokens + 64) - 210


def test_exchanges_go_after_all_turns(read: Read, scale: TokenScale) -> None:
    """An agent's long turn keeps its task and its last exchange, with its results."""
    found, _ = fit([*turns(3), *agent(30)], read, scale, tokens=800)
    assert found.actions == ("turns_dropped", "exchanges_dropped")
    assert 3 < len(found.draft.dropped) < 33
    kept = [index for index in range(3 * 2 + 61) if found.draft.keeps(index)]
    assert kept[0] == 6
    assert kept[-2:] == [65, 66]
    assert all((index - 7) % 2 == 0 for index in kept[1::2])


def test_signed_exchanges_of_the_newest_turn_stay(read: Read, scale: TokenScale) -> None:
    """Older turns go whole, with their reasoning."""
    signed = [{**message, "reasoning_details": [1]} if message["role"] == "assistant" else message
              for message in turns(5)]  # fmt: skip
    found, _ = fit([*signed, *agent(10, reasoning_details=[1])], read, scale, tokens=600, own=600)
    assert len(found.draft.dropped) == 5
    assert found.actions == ("turns_dropped", "forwarded_over_budget")


@pytest.mark.parametrize(
    ("own", "over", "actions", "dropped"),
    [
        pytest.param(600, "forward", ("turns_dropped", "forwarded_over_budget"), 3, id="over the budget"),
        pytest.param(600, "reject", ("turns_dropped", "rejected"), 3, id="and refused"),
        pytest.param(None, "reject", ("forwarded_over_budget",), 0, id="over the window nothing is cut in vain"),
        pytest.param(9_000, "reject", ("forwarded_over_budget",), 0, id="over the window, in the budget"),
    ],
)
def test_what_cannot_be_made_to_fit(
    own: int | None, over: OverBudget, actions: tuple[str, ...], dropped: int, read: Read, scale: TokenScale
) -> None:
    """Only the tenant's own budget is a reason to cut or to refuse what will not fit all the same."""
    found, _ = fit([*turns(3), user("word " * 900)], read, scale, tokens=600, own=own, over=over)
    assert (found.actions, len(found.draft.dropped)) == (actions, dropped)
    assert set(found.actions) <= set(ACTIONS)


def note(name: str, words: int = 300) -> str:
    return f"<note_context><path>{name}</path>{'word ' * words}</note_context>"


def chat(*texts: str, answer: str = "ok", system: str = "You help.") -> dict[str, Any]:
    talk: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for text in texts:
        talk += [user(text), assistant(answer)]
    return {"model": "gpt-4o", "messages": talk[:-1]}


LIMIT = {"budget": 4_096 + 1_500}


def test_compaction_comes_before_any_cut(talk: Callable[[], Any]) -> None:
    """At a limit what is superseded or no longer sent is left out, and where that is enough no turn goes."""
    named = talk()
    named.say(chat(f"{note('a.md')}\nOne?"), "ok", **LIMIT)
    named.say(chat("One?", f"{note('b.md')}\nTwo?"), "ok", **LIMIT)
    named.say(chat("One?", "Two?", f"{note('c.md')}\nThree?"), "ok", **LIMIT)
    sent = named.say(chat("One?", "Two?", "Three?", f"{note('d.md', 700)}\nFour?"), "ok", **LIMIT)
    made = named.plans[-1]
    assert (made.began, made.actions, made.dropped_turns) == ("limit", (), 0)
    texts = [message["content"] for message in orjson.loads(sent)["messages"]]
    assert texts == ["You help.", "One?", "ok", "Two?", "ok", "Three?", "ok", f"{note('d.md', 700)}\nFour?"]


def test_the_cut_holds_still_within_an_epoch(talk: Callable[[], Any]) -> None:
    """What the limit once cost stays out until it is reached again: the prompt only grows in between."""
    named = talk()
    answer, texts, cuts, before = "so " * 100, [], [], b""
    for turn in range(40):
        texts.append(f"{turn}? " + WORDS)
        sent = named.say(chat(*texts, answer=answer), answer, **LIMIT)
        made = named.plans[-1]
        cuts.append(len(made.draft.dropped))
        assert made.total is None or made.total <= 1_500
        if made.began is None:
            assert sent.startswith(before.removesuffix(b"]}"))
            assert cuts[-1] == cuts[-2]
        before = sent
    assert cuts == sorted(cuts)
    assert [made.began for made in named.plans].count("limit") == len(set(cuts)) - 1 <= 40 * 210 // 512


def test_signed_reasoning_loses_whole_turns_only(talk: Callable[[], Any]) -> None:
    """Nothing in front of what is kept is rewritten: only the oldest turns are missing."""
    named = talk()
    texts: list[str] = []
    frozen: list[str] = []
    for turn in range(12):
        texts.append(f"{turn}?")
        body = chat(*texts[:-1], f"{note(f'{turn}.md', 100)}\n{turn}?")
        for message in body["messages"]:
            if message["role"] == "assistant":
                message["reasoning_details"] = [{"x": 1}]
        sent = orjson.loads(named.say(body, "ok", **LIMIT))["messages"]
        frozen.append(f"{note(f'{turn}.md', 100)}\n{turn}?")
        users = [message["content"] for message in sent if message["role"] == "user"]
        assert users == frozen[-len(users) :]
    assert len(users) < 12
    assert {made.began for made in named.plans} == {"first", None, "limit"}


OUTPUT = "\n".join(f"{number}: found in the file" for number in range(900))


def worker(steps: int, output: str = OUTPUT) -> list[dict[str, Any]]:
    """An agent's turn whose tools say much."""
    talk = [user("Go.")]
    for step in range(steps):
        talk += [assistant("", f"{step}"), result(f"{step}", output)]
    return [*talk, assistant("Done.")]


def test_old_tool_outputs_keep_head_and_tail_before_any_turn_goes(read: Read, scale: TokenScale) -> None:
    """In the front of the history; the newer ones stay whole."""
    talk = [*(message for _ in range(8) for message in worker(1)), user("Now?")]
    found, _ = fit(talk, read, scale, tokens=45_000)
    assert found.actions == ("outputs_shortened",)
    assert found.total is not None
    assert found.total <= 45_000
    cut = found.draft.cut
    assert not cut.dropped
    outputs = [index for index, message in enumerate(talk) if message["role"] == "tool"]
    assert sorted(cut.shortened) == outputs[: len(cut.shortened)]
    assert 0 < len(cut.shortened) < 8


def test_an_agents_long_turn_shortens_its_old_outputs_first(read: Read, scale: TokenScale) -> None:
    """Then drops its oldest exchanges; the last one stands whole."""
    found, _ = fit(worker(30)[:-1], read, scale, tokens=30_000)
    assert found.actions == ("outputs_shortened", "exchanges_dropped")
    assert found.total is not None
    assert found.total <= 30_000
    assert max(found.draft.cut.shortened) < 59
    assert found.draft.keeps(60)


def test_long_replies_keep_head_and_tail_where_turns_must_go(read: Read, scale: TokenScale) -> None:
    """So that fewer do; where outputs are enough they stay whole."""
    prose = "A sentence that somebody wrote. " * 600
    talk = [message for turn in range(12) for message in (user(f"{turn}?"), assistant(prose))]
    found, _ = fit([*talk, user("Now?")], read, scale, tokens=20_000)
    assert "replies_shortened" in found.actions
    assert found.total is not None
    assert found.total <= 20_000
    assert len(found.draft.dropped) < 5
    assert all(talk[index]["role"] == "assistant" for index in found.draft.cut.shortened)


def test_signed_reasoning_is_behind_nothing_that_was_made_smaller(read: Read, scale: TokenScale) -> None:
    """Whole turns go, and no line says so in front of it."""
    signed = [user("And?"), assistant("", "z", reasoning_details=[1]), result("z")]
    talk = [*(message for _ in range(6) for message in worker(1)), *signed]
    found, _ = fit(talk, read, scale, tokens=20_000)
    assert found.actions == ("turns_dropped",)
    assert not found.draft.cut.shortened
    assert not any(change.before for change in found.draft.changes.values())


@pytest.mark.parametrize("tokens", range(28_000, 68_000, 4_000))
def test_the_cut_is_the_same_while_the_conversation_grows_within_a_step(
    tokens: int, read: Read, scale: TokenScale
) -> None:
    """Of 60 turns with long outputs half keep it to the message; a quarter at most of what is sent is read again."""
    talk: list[dict[str, Any]] = []
    cuts: list[Cut] = []
    before: list[bytes] = []
    sent, again = 0, 0
    for turn in range(60):
        talk += [user(f"{turn} " + "word " * 40), assistant("", f"c{turn}"), result(f"c{turn}", OUTPUT[:7_000])]
        talk.append(assistant("word " * 60))
        found, _ = fit([*talk, user("And?")], read, scale, tokens=tokens)
        assert found.total is not None
        assert found.total <= tokens
        request = read({"model": "gpt-4o", "messages": [*talk, user("And?")]})
        prompt = list(render.prompt(request, found.draft))
        if found.actions:
            cuts.append(found.draft.cut)
            sent += found.total
            pairs = zip(before, prompt, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1].raw, pairs))
            again += sum(scale.message(each.raw, each.digest) for each in prompt[shared:])
        before = [each.raw for each in prompt]
    same = sum(one == other for one, other in itertools.pairwise(cuts))
    assert same >= 0.5 * (len(cuts) - 1)
    assert again <= 0.25 * sent


def test_shortened_outputs_hold_an_epoch_for_a_step(talk: Callable[[], Any]) -> None:
    """Where a turn of two outputs takes nearly half of the grid's step, every second or third turn ends an epoch."""
    chat, history = talk(), [{"role": "system", "content": "You help."}]
    for turn in range(40):
        history.append(user(f"Question {turn}?"))
        for name in "ab":
            history += [assistant("", f"{name}{turn}"), result(f"{name}{turn}", OUTPUT[:5_000])]
        chat.say({"model": "gpt-4o", "messages": history}, "Fine.", budget=20_000, reserve_tokens=1_000)
        history.append(assistant("Fine."))
    assert 0 < sum(plan.began == "limit" for plan in chat.plans) <= 16
