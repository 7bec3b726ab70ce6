"""Field failures C01 to C04 and C09: clocks, dates, nonces and memory in the system prompt."""

from typing import Any

import orjson
import pytest

from tests.cases.conftest import Start, Strata, Upstream, assistant, chat, system, user

RULES = "\n".join(f"Rule {number}: a line that stands in every prompt of this client." for number in range(90))
Messages = list[dict[str, Any]]


def history(turns: int) -> Messages:
    return [message for turn in range(turns) for message in (user(f"q{turn}"), assistant("Done."))]


async def forwarded(strata: Strata, upstream: Upstream, prompt: Any, turn: int) -> Messages:
    await strata.post(chat({"role": "system", "content": prompt}, *history(turn), user(f"q{turn}")), {})
    found: Messages = orjson.loads(upstream.bodies[-1])["messages"]
    return found


def clock(second: int) -> str:
    return f"Clock: 2031-03-04 10:15:{second:02}\n{RULES}"


async def test_c01_a_clock_leaves_l1(start: Start, upstream: Upstream) -> None:
    """Once learned, L1 is equal in every body and the clock stands once, value intact, before the user's words."""
    strata = await start()
    sent = [await forwarded(strata, upstream, clock(7 + 2 * turn), turn) for turn in range(4)]
    assert len({message[0]["content"] for message in sent[1:]}) == 1
    for turn, messages in enumerate(sent[1:], start=1):
        assert str(messages).count("Clock: ") == 1
        assert f"\nClock: 2031-03-04 10:15:{7 + 2 * turn:02}\n" in messages[-1]["content"]
        assert messages[1:-1] == history(turn)


async def test_c01_another_conversation_begins_with_what_was_learned(start: Start, upstream: Upstream) -> None:
    """Two first requests two seconds apart then have one L1."""
    strata = await start()
    for turn in range(2):
        await forwarded(strata, upstream, clock(turn), turn)
    one, two = [(await forwarded(strata, upstream, clock(second), 0))[0] for second in (7, 9)]
    assert one == two


async def test_c01_off_nothing_moves(start: Start, upstream: Upstream) -> None:
    """The body goes as it came."""
    strata = await start(current_values=False)
    for turn in range(3):
        messages = await forwarded(strata, upstream, clock(turn), turn)
        assert messages == [system(clock(turn)), *history(turn), user(f"q{turn}")]


async def test_c02_a_new_day_breaks_once_and_arrives(start: Start, upstream: Upstream) -> None:
    """The model gets the new date; nobody keeps the old one for the prefix's sake."""
    strata = await start()
    days = ["2031-03-04"] * 3 + ["2031-03-05"] * 3
    sent = [await forwarded(strata, upstream, f"Today: {day}\n{RULES}", turn) for turn, day in enumerate(days)]
    assert [("2031-03-04" in str(each), "2031-03-05" in str(each)) for each in sent] == [(True, False)] * 3 + [
        (False, True)
    ] * 3
    assert len({each[0]["content"] for each in sent}) == 2


@pytest.mark.parametrize("parts", [True, False])
async def test_c03_a_nonce_in_front_of_l1(start: Start, upstream: Upstream, parts: bool) -> None:
    """In string and in parts form; the same text inside a user message is untouched, and so is the client's key."""
    strata = await start()

    def prompt(turn: int) -> Any:
        nonce = f"x-meta: build=9; nonce=a{turn}b{turn};"
        texts = [nonce, RULES]
        return [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)

    first: list[Any] = []
    said: Messages = []
    for turn in range(4):
        asked = user(f"What is x-meta: build=9; nonce=a{turn}b{turn}; for?")
        await strata.post(chat({"role": "system", "content": prompt(turn)}, *said, asked, prompt_cache_key="k1"), {})
        said += [asked, assistant("Done.")]
        got = orjson.loads(upstream.bodies[-1])
        first.append(got["messages"][0])
        assert got["prompt_cache_key"] == "k1"
        assert got["messages"][-1]["content"].endswith(asked["content"])
        assert got["messages"][1:-1] == said[:-2]
        assert str(got["messages"][0]).count("nonce=") == (turn == 0)
    assert first[1] == first[2] == first[3]
    assert isinstance(first[1]["content"], list) is parts


async def test_c04_dates_that_are_content_stay(start: Start, upstream: Upstream) -> None:
    """A prompt that did not change is forwarded byte for byte."""
    strata = await start()
    contract = "Contract X was signed 2029-11-02 and lapses 2032-11-02. Format dates like 2001-01-31."
    for turn in range(3):
        assert (await forwarded(strata, upstream, contract, turn))[0] == system(contract)


async def test_c09_memory_in_the_system_prompt_in_any_order(start: Start, upstream: Upstream) -> None:
    """Facts rendered there by similarity do not break what stands behind them, whatever their order and number."""
    strata = await start()
    orders = ["123", "312", "3124", "4123", "1"]
    sent = []
    for turn, order in enumerate(orders):
        facts = "\n".join(f"Fact {number}: something that is remembered of this user." for number in order)
        sent.append(await forwarded(strata, upstream, f"<memory>\n{facts}\n</memory>\n{RULES}", turn))
        told = "\n".join(str(message["content"]) for message in sent[-1])
        assert [told.count(f"Fact {number}:") for number in "1234"] == [int(number in order) for number in "1234"]
        assert told.index(f"Fact {order[0]}:") <= told.index(f"Fact {order[-1]}:")
    assert len({each[0]["content"] for each in sent[1:]}) == 1
