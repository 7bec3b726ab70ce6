"""The ladder over random conversations: limits hold, calls keep their results, the prefix stays for many turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import measure
from proxy.core.plan import Plan
from proxy.core.request import Request
from proxy.memo import TokenScale
from proxy.simulator.validity import check_chat

Make = Callable[..., tuple[Request, Plan]]
Messages = list[dict[str, Any]]
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")
SYSTEM = {"role": "system", "content": "You keep a codebase in order. " * 20}


def prose(chance: random.Random, least: int, most: int) -> str:
    lines = [" ".join(chance.choices(WORDS, k=9)) + "." for _ in range(chance.randrange(least, most))]
    return "\n".join(lines)


def note(chance: random.Random, name: str) -> str:
    sections = "\n".join(f"## Part {part}\n{prose(chance, 5, 40)}" for part in range(chance.randrange(1, 5)))
    return f"<note_context>\n<path>{name}</path>\n{sections}\n</note_context>"


def turn(chance: random.Random, number: int, notes: list[str]) -> Messages:
    """One turn: a question, perhaps notes, exchanges with parallel calls, long outputs, long answers."""
    attached = "\n".join(chance.sample(notes, k=chance.choice((0, 0, 0, 1, 2))))
    made: Messages = [{"role": "user", "content": f"{attached}\nQuestion {number}: {prose(chance, 1, 4)}".strip()}]
    for step in range(chance.choice((0, 0, 1, 2, 5))):
        ids = [f"t{number}s{step}c{place}" for place in range(chance.choice((1, 1, 2, 3)))]
        calls = [{"id": each, "type": "function", "function": {"name": "read", "arguments": "{}"}} for each in ids]
        made.append({"role": "assistant", "content": None, "tool_calls": calls})
        made += [{"role": "tool", "tool_call_id": each, "content": prose(chance, 1, chance.choice((4, 30, 150)))}
                 for each in ids]  # fmt: skip
    made.append({"role": "assistant", "content": prose(chance, 1, chance.choice((5, 5, 120)))})
    return made


def said(sent: bytes) -> Messages:
    found: Messages = orjson.loads(sent)["messages"]
    return found


@pytest.mark.parametrize("seed", range(200))
def test_random_histories_fit_and_stay_valid(
    seed: int, make: Make, forward: Callable[..., bytes], scale: TokenScale
) -> None:
    """Whatever the budget: within it or said so; accepted by a provider; the newest words and exchange are whole."""
    chance = random.Random(seed)
    notes = [note(chance, f"{name}.md") for name in ("a", "b", "c")]
    talk: Messages = [message for number in range(chance.randrange(1, 14)) for message in turn(chance, number, notes)]
    newest = turn(chance, 99, notes)
    newest = newest[: chance.choice((1, len(newest) - 1))]
    context = [{"id": f"c{place}", "content": prose(chance, 3, 80)} for place in range(chance.choice((0, 0, 2)))]
    body = {
        "model": "gpt-4o",
        "messages": [SYSTEM, *talk, *newest],
        **({"strata": {"context": context}} if context else {}),
    }
    for budget in (500, 1_500, 4_000, 12_000, 40_000, 120_000):
        found, made = make(body, budget=256 + budget, reserve_tokens=256)
        total = measure.layers(found, made.draft, scale).total
        assert made.limit == budget
        assert (total > budget) == ("forwarded_over_budget" in made.actions)
        sent = forward(body, budget=256 + budget, reserve_tokens=256)
        check_chat(orjson.loads(sent), strict=False)
        messages = said(sent)
        assert messages[0] == SYSTEM
        words = newest[0]["content"].rpartition("Question 99")[2]
        asked = [message for message in messages if message["role"] == "user" and words in message["content"]]
        assert len(asked) == 1
        calls = [index for index, message in enumerate(newest) if message.get("tool_calls")]
        tail = newest[calls[-1] :] if calls else newest[1:]
        assert messages[len(messages) - len(tail) :] == tail


@pytest.mark.parametrize("named", [False, True])
def test_the_prefix_is_unbroken_in_seven_of_ten_over_budget_turns(
    named: bool, forward: Callable[..., bytes], talk: Callable[[], Any]
) -> None:
    """Anonymous or named: what was forwarded for a turn is the beginning of what is forwarded for the next."""
    found = [played(seed, forward, talk() if named else None) for seed in range(5)]
    assert all(over >= 20 and unbroken >= 0.6 * over for over, unbroken in found)
    assert sum(unbroken for _, unbroken in found) >= 0.7 * sum(over for over, _ in found)


def played(seed: int, forward: Callable[..., bytes], chat: Any) -> tuple[int, int]:
    """Hold a conversation; return how many turns were over the budget, and how many of them kept their prefix."""
    chance = random.Random(1_000 + seed)
    notes = [note(chance, f"{name}.md") for name in ("a", "b", "c")]
    history, before, over, unbroken = [SYSTEM], b"", 0, 0
    how = {"budget": chance.choice((30_000, 60_000)), "reserve_tokens": 1_000}
    for number in range(70):
        one = turn(chance, number, notes)
        for end in [index for index, message in enumerate(one) if message["role"] == "assistant"]:
            body = {"model": "gpt-4o", "messages": [*history, *one[:end]]}
            sent = chat.say(body, one[end]["content"] or "", **how) if chat else forward(body, **how)
            check_chat(orjson.loads(sent), strict=False)
            if end == 1:
                prompt = sent.partition(b'"messages":')[2].rstrip(b"}]")
                if len(sent) < len(orjson.dumps(body)) - 3_000 and before:
                    over += 1
                    unbroken += prompt.startswith(before)
                before = prompt
        history += one
    return over, unbroken


def test_within_an_epoch_what_was_shortened_stays_so(talk: Callable[[], Any]) -> None:
    """Outputs that kept head and tail when an epoch began do so until it ends, in any process."""
    chance, chat = random.Random(7), talk()
    history: Messages = [SYSTEM]
    before: list[bytes] = []
    epochs = set()
    for number in range(40):
        ids = f"call-{number}"
        call = {"id": ids, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        history.append({"role": "user", "content": f"Question {number}?"})
        history += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": ids, "content": prose(chance, 100, 140)},
        ]
        sent = chat.say({"model": "gpt-4o", "messages": history}, "Fine.", budget=40_000, reserve_tokens=1_000)
        history.append({"role": "assistant", "content": "Fine."})
        plan = chat.plans[-1]
        messages = [orjson.dumps(message) for message in said(sent)]
        if plan.began is None:
            assert messages[: len(before)] == before
        before = messages
        epochs.add(plan.epoch.number)
        assert plan.total is None or plan.total <= plan.limit
    assert len(epochs) > 2
    assert any("outputs_shortened" in plan.actions for plan in chat.plans)
    assert any(b"left out \\u2026" in raw or "left out …".encode() in raw for raw in before)


def test_the_librarys_items_become_outlines_and_come_back_whole(talk: Callable[[], Any]) -> None:
    """When the limit ends an epoch; a note that is attached again is sent whole, never referenced by its outline."""
    chance, chat = random.Random(11), talk()
    page = note(chance, "plan.md").replace("## Part 0", "# The plan", 1)
    how = {"budget": 9_000, "reserve_tokens": 1_000}
    pages = f"{page}\n{page.replace('plan.md', 'other.md')}"
    history: Messages = [SYSTEM, {"role": "user", "content": f"{pages}\nRead them."}]
    sent = b""
    for number in range(60):
        sent = chat.say({"model": "gpt-4o", "messages": history}, f"Answer {number}.", **how)
        history.append({"role": "assistant", "content": f"Answer {number}."})
        if "library_outlined" in chat.plans[-1].actions:
            break
        history.append({"role": "user", "content": f"Question {number}: {prose(chance, 20, 21)}"})
    assert chat.plans[-1].began == "limit"
    system = said(sent)[0]["content"]
    assert system.count("<prior_context source=") == 2
    assert '<prior_context source="plan.md" type="note_context">' in system
    assert page not in system
    history.append({"role": "user", "content": f"{page}\nOnce more?"})
    again = chat.say({"model": "gpt-4o", "messages": history}, "Yes.", **how)
    assert said(again)[-1]["content"].endswith(f"{page}\nOnce more?")
    assert chat.plans[-1].began is None
    assert not chat.plans[-1].draft.referenced
    assert said(again)[: len(said(sent))] == said(sent)


def test_context_that_does_not_fit_is_packed_for_its_turn(talk: Callable[[], Any]) -> None:
    """Doubles go, ends are cut; in the turn's loop it stays as it was, and whole items are never mistaken for parts."""
    chance, chat = random.Random(13), talk()
    chunk = prose(chance, 150, 151)
    texts = {"a": chunk, "b": chunk[60:], "c": prose(chance, 150, 151)}
    context = [{"id": f"{name}.md", "content": text} for name, text in texts.items()]
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    loop: Messages = [{"role": "assistant", "content": None, "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c1", "content": "ok"}]  # fmt: skip
    messages: Messages = [SYSTEM, {"role": "user", "content": "Why?"}]
    how = {"budget": 3_000, "reserve_tokens": 500}
    sent = [
        said(chat.say({"model": "gpt-4o", "messages": each, "strata": {"context": context}}, "Yes.", **how))
        for each in (messages, [*messages, *loop])
    ]
    first = sent[0][1]["content"]
    assert "context_packed" in chat.plans[0].actions
    assert chat.plans[0].total <= 2_500
    assert "[a.md:1]\n" in first
    assert "b.md" not in first
    assert first.count(" [truncated]\n</document>") == 2
    assert first.endswith("Why?")
    assert sent[1][:2] == sent[0]


@pytest.mark.parametrize(
    ("lines", "least"),
    [
        pytest.param([700], 7_000, id="one that is nearly as long as the limit"),
        pytest.param([140] * 5, 7_000, id="five that nearly fit"),
        pytest.param([20, 40, 600, 600], 7_000, id="short ones beside long ones"),
        pytest.param([20, 40, 60], 0, id="what fits"),
    ],
)
def test_context_shares_the_room_there_is(
    lines: list[int], least: int, make: Make, forward: Callable[..., bytes]
) -> None:
    """Under a limit of 8,000 nearly all of it is used; what is short stays whole, what is long is cut evenly."""
    chance = random.Random(3)
    context = [{"id": f"{name}.md", "content": prose(chance, many, many + 1)} for name, many in enumerate(lines)]
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Why?"}], "strata": {"context": context}}
    _, plan = make(body, budget=12_096)
    assert plan.total is None or least <= plan.total <= 8_000
    assert (plan.draft.cut.packed > 0) is bool(least)
    stands = said(forward(body, budget=12_096))[0]["content"].split("\n\n")
    whole = [item["content"] in block for item, block in zip(context, stands, strict=False)]
    assert whole == [len(item["content"]) <= (plan.draft.cut.packed or 10**9) for item in context]
    cut = [len(block) for block, kept in zip(stands, whole, strict=False) if not kept]
    assert not cut or max(cut) - min(cut) < 150


@pytest.mark.parametrize("named", [True, False])
def test_packed_context_stays_as_it_is_in_the_loop_of_its_turn(
    named: bool, talk: Callable[[], Any], forward: Callable[..., bytes]
) -> None:
    """Each step extends the one before, and a retry has its bytes; where the loop has filled the room, it is cut."""
    chance, chat = random.Random(5), talk()
    context = [{"id": f"{name}.md", "content": prose(chance, 400, 401)} for name in "ab"]
    messages: Messages = [SYSTEM, {"role": "user", "content": "Why?"}]
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    steps = []
    for step in range(24):
        body = {"model": "gpt-4o", "messages": messages, "tools": tools, "strata": {"context": context}}
        both = [chat.say(body, None, budget=12_096) if named else forward(body, budget=12_096) for _ in range(2)]
        assert both[0] == both[1]
        steps.append(said(both[0]))
        call = {"id": f"c{step}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": f"c{step}", "content": prose(chance, 20, 21)}]  # fmt: skip
    assert steps[0][1]["content"].count("[truncated]") == 2
    # Where exchanges went a line says so in front of it.
    assert all(step[1]["content"].endswith(steps[0][1]["content"]) for step in steps)
    moved = [place for place in range(1, 24) if steps[place][: len(steps[place - 1])] != steps[place - 1]]
    assert not moved or moved[0] > 4


@pytest.mark.parametrize(("lines", "budget"), [(450, 20_000), (80, 8_000), (400, 30_000)])
def test_what_a_budget_took_from_a_conversation_does_not_come_back(
    lines: int, budget: int, talk: Callable[[], Any]
) -> None:
    """However large one turn is: what was dropped stays dropped, and shortening comes before dropping."""
    chance, chat = random.Random(lines), talk()
    history: Messages = [SYSTEM]
    gone, dropped = 0, []
    for number in range(30):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        history += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": prose(chance, lines, lines + 1)},
        ]
        chat.say({"model": "gpt-4o", "messages": history}, "Fine.", budget=budget, reserve_tokens=1_000)
        history.append({"role": "assistant", "content": "Fine."})
        plan = chat.plans[-1]
        dropped.append(len(plan.draft.cut.gone))
        assert dropped[-1] >= gone
        gone = dropped[-1]
    first = next(place for place, plan in enumerate(chat.plans) if plan.draft.cut.shortened)
    assert dropped[first] == 0
    assert dropped[-1] < len(history) - 8


def test_a_window_that_cannot_be_met_lifts_no_budget(make: Make) -> None:
    """A reply allowance beyond the window leaves the tenant's budget where it is."""
    talk = [message for number in range(12) for message in turn(random.Random(number), number, ["Note.", "Another."])]
    body = {"model": "gpt-4o", "messages": [SYSTEM, *talk, {"role": "user", "content": "Now?"}]}
    _, made = make({**body, "max_completion_tokens": 1_000_000}, budget=9_000, reserve_tokens=1_000)
    assert made.total <= 8_000
    assert made.limit == 1
    _, made = make({**body, "max_completion_tokens": 1_000_000}, budget=900_000, reserve_tokens=1_000)
    assert not made.draft.cut.dropped


def test_outlines_are_no_dead_weight(talk: Callable[[], Any]) -> None:
    """An epoch that holds them ends for no reason of theirs."""
    chance, chat = random.Random(3), talk()
    pages = [note(chance, f"{name}.md") for name in "abcdef"]
    history: Messages = [SYSTEM, {"role": "user", "content": "\n".join([*pages, "Read them."])}]
    for number in range(50):
        chat.say({"model": "gpt-4o", "messages": history}, "Fine.", budget=7_000, reserve_tokens=1_000)
        history.append({"role": "assistant", "content": "Fine."})
        history.append({"role": "user", "content": f"{number}: {prose(chance, 4, 9)}"})
    assert any("library_outlined" in plan.actions for plan in chat.plans)
    assert not [plan.began for plan in chat.plans if plan.began == "dead_weight"]
