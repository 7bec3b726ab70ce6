"""When an epoch ends: each reason, each price."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.core.epoch import REASONS, Epoch, Reason, State, ends
from proxy.core.profile import USUAL, Profile

EPOCH = Epoch(place=b"p", number=3, started=1.0, reason="first", leading=(), l1=b"l1", tools=b"tools", rewritten=True)
QUIET = State(
    l1=b"l1", tools=b"tools", turns=4, idle_seconds=10.0, dead_tokens=0, live_tokens=1_000, fits=True, signed=False,
    rewritten=True,
)  # fmt: skip
HOUR = 3_600.0


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        pytest.param({}, None, id="nothing happened"),
        pytest.param({"fits": False}, "limit", id="the limit"),
        pytest.param({"l1": b"other"}, "l1_changed", id="L1"),
        pytest.param({"tools": b"other"}, "tools_changed", id="the tools"),
        pytest.param({"l1": b"other", "tools": b"other"}, "l1_changed", id="both"),
        pytest.param({"fits": False, "l1": b"other"}, "limit", id="the limit comes first"),
        pytest.param({"dead_tokens": 2_251}, "dead_weight", id="dead weight that costs more than one read"),
        pytest.param({"dead_tokens": 2_250}, None, id="dead weight that costs as much"),
        pytest.param({"dead_tokens": 512, "live_tokens": 0}, "dead_weight", id="dead weight and nothing to read"),
        pytest.param({"dead_tokens": 511, "live_tokens": 0}, None, id="too little to be worth it"),
        pytest.param({"dead_tokens": 2_251, "turns": 3}, None, id="a young epoch is expected to last less long"),
        pytest.param({"dead_tokens": 901, "turns": 10}, "dead_weight", id="an old one longer"),
        pytest.param({"idle_seconds": HOUR * 9}, None, id="cold alone ends nothing"),
        pytest.param({"idle_seconds": HOUR + 1, "dead_tokens": 1_001}, "cold", id="cold and more dead than alive"),
        pytest.param({"idle_seconds": HOUR + 1, "dead_tokens": 1_000}, None, id="cold and as much alive"),
        pytest.param({"idle_seconds": HOUR, "dead_tokens": 1_001}, None, id="not certainly cold"),
        pytest.param({"idle_seconds": None, "dead_tokens": 1_001}, None, id="never seen before"),
    ],
)
def test_an_epoch_ends_for_the_first_reason_that_holds(state: dict[str, Any], reason: Reason | None) -> None:
    """Where the provider reads at a tenth of the price and writes at the price."""
    assert ends(EPOCH, replace(QUIET, **state), USUAL) == reason
    assert reason is None or reason in REASONS


@pytest.mark.parametrize(
    ("profile", "least"),
    [
        pytest.param({}, 2_251, id="a tenth"),
        pytest.param({"read": 0.5}, 512, id="half"),
        pytest.param({"read": 0.25}, 751, id="a quarter"),
        pytest.param({"write": 1.25}, 2_876, id="writing costs more"),
        pytest.param({"read": 1.0}, 512, id="no discount: what is carried costs its price"),
        pytest.param({"read": 0.0}, None, id="reading is free: nothing is dead weight"),
    ],
)
def test_dead_weight_has_the_providers_price(profile: dict[str, float], least: int | None) -> None:
    """It ends an epoch from the token on that makes carrying dearer than one re-read, and not one sooner."""
    prices = Profile(**profile)

    def ended(dead: int) -> bool:
        return ends(EPOCH, replace(QUIET, dead_tokens=dead), prices) == "dead_weight"

    if least is None:
        assert not ended(10_000_000)
    else:
        assert ended(least)
        assert not ended(least - 1)


@pytest.mark.parametrize("lifetime", [300.0, HOUR, 24 * HOUR])
def test_cold_is_the_providers_lifetime(lifetime: float) -> None:
    """After which its prompt cache has certainly gone cold."""
    profile = Profile(lifetime_seconds=lifetime)
    for idle, reason in ((lifetime, None), (lifetime + 1, "cold")):
        assert ends(EPOCH, replace(QUIET, idle_seconds=idle, dead_tokens=1_001), profile) == reason


WORST = {"tools": b"other", "dead_tokens": 10**9, "live_tokens": 0, "idle_seconds": 10**9, "turns": 10**6}


def test_what_was_never_rewritten_is_never_compacted() -> None:
    """There is nothing to get rid of; the limit ends it, and a changed L1 begins another with the client's own."""
    plain = replace(QUIET, **WORST, rewritten=False)
    assert ends(EPOCH, plain, USUAL) is None
    assert ends(EPOCH, replace(plain, fits=False), USUAL) == "limit"
    assert ends(EPOCH, replace(plain, l1=b"other"), USUAL) == "l1_changed"


def test_signed_reasoning_leaves_only_the_limit() -> None:
    """It is accepted back only behind what it was made from."""
    signed = replace(QUIET, **WORST, signed=True)
    assert ends(EPOCH, signed, USUAL) is None
    assert ends(EPOCH, replace(signed, l1=b"other"), USUAL) is None
    assert ends(EPOCH, replace(signed, fits=False), USUAL) == "limit"


WORDS = "word " * 200


def note(name: str, version: int = 1) -> str:
    return f"<note_context><path>{name}</path>{WORDS}{version}</note_context>"


def chat(*texts: str, system: str = "You help.", signed: bool = False) -> dict[str, Any]:
    """A conversation of user messages, each but the last answered with `ok`."""
    talk: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for text in texts:
        talk += [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        if signed:
            talk[-1]["reasoning_details"] = [{"x": 1}]
    return {"model": "gpt-4o", "messages": talk[:-1]}


def began(chat: Any) -> list[str | None]:
    return [made.began for made in chat.plans]


def test_an_idle_conversation_goes_on(talk: Callable[[], Any]) -> None:
    """Cold alone ends nothing: what is forwarded after a week is what would have been forwarded at once."""
    soon, late = talk(), talk()
    for named, pause in ((soon, 1.0), (late, 700_000.0)):
        named.say(chat(f"{note('a.md')}\nOne?"), "ok", now=pause)
        named.say(chat("One?", f"{note('a.md')}\nTwo?"), "ok", now=2 * pause)
        sent = named.say(chat("One?", "Two?", f"{note('a.md')}\nThree?"), "ok", now=3 * pause)
        assert began(named) == ["first", None, None]
    assert sent == soon.say(chat("One?", "Two?", f"{note('a.md')}\nThree?"), "ok")


def test_a_new_system_prompt_is_taken_in_place(talk: Callable[[], Any]) -> None:
    """And behind it everything is read anew anyway."""
    named = talk()
    named.say(chat(f"{note('a.md')}\nOne?"), "ok")
    named.say(chat("One?", f"{note('a.md')}\nTwo?"), "ok")
    sent = named.say(chat("One?", "Two?", "Three?", system="You help, and more."), "ok")
    assert began(named) == ["first", None, "l1_changed"]
    assert b"You help, and more." in sent
    again = named.say(chat("One?", "Two?", "Three?", "Four?", system="You help, and more."), "ok")
    assert began(named)[-1] is None
    assert again.startswith(sent.removesuffix(b"]}"))


def test_dead_weight_ends_an_epoch(talk: Callable[[], Any]) -> None:
    """Notes that the client no longer sends are carried for a while, then left out."""
    named = talk()
    questions = [f"{number}?" for number in range(40)]
    named.say({**chat(questions[0]), "strata": {"context": [{"content": "x"}]}}, "ok")
    for number in range(1, 40):
        attached = f"{note(f'{number}.md')}\n" if number < 8 else ""
        named.say(chat(*questions[:number], attached + questions[number]), "ok")
    ends_at = [number for number, reason in enumerate(began(named)) if reason == "dead_weight"]
    assert ends_at
    assert {*began(named)} == {"first", None, "dead_weight"}
    sent = named.say(chat(*questions, "Now?"), "ok")
    assert note("1.md").encode() not in sent
    assert sent.count(WORDS.encode()) < 7


def test_signed_reasoning_keeps_what_stands_before_it(talk: Callable[[], Any]) -> None:
    """Whatever else changes, the frozen messages are forwarded as they were when it was made."""
    named = talk()
    first = named.say(chat(f"{note('a.md')}\nOne?"), "ok")
    second = named.say(chat("One?", f"{note('a.md')}\nTwo?", signed=True), "ok", now=10.0**7)
    third = named.say(chat("One?", "Two?", "Three?", signed=True), "ok", now=10.0**8)
    assert began(named) == ["first", None, None]
    assert second.startswith(first.removesuffix(b"]}"))
    assert third.startswith(second.removesuffix(b"]}"))


def test_what_one_models_limit_took_comes_back_where_anothers_holds_it(talk: Callable[[], Any]) -> None:
    """Once, in an epoch of its own; where it would not fit, or for another answer's length, the cut stays."""
    chat, messages = talk(), [{"role": "system", "content": "You help."}]

    def say(model: str, **more: Any) -> int:
        messages.append({"role": "user", "content": f"Question {len(messages)} " + "word " * 1_000})
        sent = orjson.loads(chat.say({"model": model, "messages": messages, **more}, "Fine."))["messages"]
        messages.append({"role": "assistant", "content": "Fine."})
        return len(messages) - 1 - len(sent)

    for _ in range(6):
        last = say("gpt-4")
    assert last > 0
    assert say("gpt-4", max_tokens=16) == last
    assert say("gpt-4-0613") >= last
    assert say("gpt-4.1") == 0
    assert chat.plans[-1].began == "limit"
    assert say("gpt-4.1") == 0
    assert chat.plans[-1].began is None
    assert say("gpt-4") > 0
    for _ in range(12):
        say("gpt-4")
    assert say("gpt-3.5-turbo") > 0
    assert chat.plans[-1].began is None
    assert say("somebody/elses") == 0
