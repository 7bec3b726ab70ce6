"""Which earlier requests a request extends, and what was forwarded for them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from proxy.core.chain import Place
from proxy.core.epoch import Epoch
from proxy.core.lineage import NOTHING, Frozen, Recalled, current, match
from proxy.core.request import Request

Read = Callable[[object], Request]
Said = Sequence[tuple[str, object]]

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TALK: Said = [("s", "You help."), ("u", "One?"), ("a", "1"), ("u", "Two?"), ("a", "2"), ("u", "Three?")]


def request(said: Said, read: Read) -> Request:
    return read({"messages": [{"role": ROLES[role], "content": text} for role, text in said]})


def places(said: Said, read: Read) -> tuple[Place, ...]:
    return request(said, read).places


def epoch(place: Place, number: int = 0) -> Epoch:
    return Epoch(place=place, number=number, started=0, reason="first", leading=(), l1=b"", tools=b"")


def test_the_current_epoch_is_the_latest_that_began_on_this_branch(read: Read) -> None:
    """An edit in front of where an epoch began leaves it, and an epoch of another branch is not its own."""
    whole = places(TALK, read)
    first, second = epoch(whole[1]), epoch(whole[3], 1)
    recalled = Recalled(epochs={first.place: first, second.place: second})
    assert current(whole, recalled) is second
    assert current(whole[:3], recalled) is first
    assert current(places([*TALK[:3], ("u", "Zwei?")], read), recalled) is first
    assert current(places([TALK[0], ("u", "Eins?")], read), recalled) is None
    assert current((), recalled) is current(whole, NOTHING) is None


def frozen(raw: bytes, *replies: bytes, started: float = 0) -> Frozen:
    return Frozen(started=started, raw=raw, replies=frozenset(replies))


def matched(
    said: Said, log: Mapping[int, tuple[tuple[bytes, tuple[str, ...], float], ...]], read: Read
) -> dict[int, bytes]:
    """Match with a log of `{index: ((raw, the answers to it, started), …)}`; return what was found by index."""
    found = request(said, read)
    digests = {text: request([("a", text)], read).messages[0].said for text in "12345"}
    recalled = Recalled(
        log={
            (b"e", found.places[index]): tuple(
                frozen(raw, *(digests[told] for told in replies), started=started) for raw, replies, started in attempts
            )
            for index, attempts in log.items()
        }
    )
    assert match(found, recalled, b"other") == {}
    return {index: one.raw for index, one in match(found, recalled, b"e").items()}


@pytest.mark.parametrize(
    ("log", "found"),
    [
        pytest.param({}, {}, id="nothing stored"),
        pytest.param({1: ((b"x", ("1",), 0),)}, {1: b"x"}, id="the reply is in the request"),
        pytest.param({1: ((b"x", ("2",), 0),)}, {}, id="another reply"),
        pytest.param({1: ((b"x", (), 0),)}, {}, id="an answer nobody saw"),
        pytest.param({1: ((b"x", ("1", "5"), 0),)}, {1: b"x"}, id="one of several answers"),
        pytest.param(
            {1: ((b"x", ("1",), 1), (b"y", ("1",), 3), (b"z", ("1",), 2))}, {1: b"y"}, id="the latest attempt"
        ),
        pytest.param(
            {1: ((b"x", ("1",), 1), (b"y", ("2",), 3))}, {1: b"x"}, id="the latest attempt whose answer is here"
        ),
        pytest.param(
            {1: ((b"x", ("1",), 0),), 2: ((b"r", (), 0),)}, {1: b"x", 2: b"r"}, id="the reply as it was forwarded"
        ),
        pytest.param(
            {1: ((b"x", ("1",), 0),), 2: ((b"r", (), 2), (b"s", (), 1))}, {1: b"x", 2: b"s"}, id="the first form of it"
        ),
        pytest.param({2: ((b"r", (), 0),)}, {}, id="a reply alone"),
        pytest.param({3: ((b"x", ("2",), 0),)}, {3: b"x"}, id="a later turn"),
        pytest.param({5: ((b"x", (), 0),)}, {}, id="never the newest turn"),
        pytest.param({5: ((b"x", ("1",), 0),)}, {}, id="never the newest turn, answered or not"),
    ],
)
def test_a_stored_message_counts_only_with_its_reply(log: Any, found: dict[int, bytes], read: Read) -> None:
    """What was forwarded is used where the request holds, word for word, the replies that followed."""
    assert matched(TALK, log, read) == found


@pytest.mark.parametrize("order", [1, -1])
def test_attempts_of_one_instant_are_told_apart_by_their_bytes(order: int, read: Read) -> None:
    """Replicas hold attempts in different orders and must choose the same."""
    turn, reply = ((b"x", ("1",), 1), (b"y", ("1",), 1)), ((b"r", (), 1), (b"s", (), 1))
    assert matched(TALK, {1: turn[::order], 2: reply[::order]}, read) == {1: b"y", 2: b"r"}


def test_every_reply_of_a_turn_must_be_known(read: Read) -> None:
    """An agent's turn with a step nobody saw is not replayed."""
    talk: Said = [("u", "Go."), ("a", "1"), ("a", "2"), ("u", "Thanks.")]
    assert matched(talk, {0: ((b"x", ("1",), 0),)}, read) == {}
    assert matched(talk, {0: ((b"x", ("1", "2", "3"), 0),)}, read) == {0: b"x"}


def test_a_turn_without_an_answer_matches_nothing(read: Read) -> None:
    """Two user messages in a row: nothing shows that what was stored for the first was ever answered."""
    assert matched([("u", "One?"), ("u", "Two?")], {0: ((b"x", (), 0), (b"y", ("1",), 0))}, read) == {}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "?"}], id="media"),
        pytest.param([{"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}], id="the client's marks"),
    ],
)
def test_what_does_not_freeze_is_never_replayed(content: object, read: Read) -> None:
    """Addresses expire, and a request may hold only a few marks."""
    talk: Said = [("u", content), ("a", "1"), ("u", "Two?")]
    assert matched(talk, {0: ((b"x", ("1",), 0),), 1: ((b"r", (), 0),)}, read).keys() == {1}
