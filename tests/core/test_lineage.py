"""Which stored turns a request continues."""

from collections.abc import Callable, Sequence

import pytest

from proxy.core.items import Item
from proxy.core.lineage import NOTHING, Link, Recalled, Stored, chain, match
from proxy.core.request import Request
from proxy.core.turn import shape

Read = Callable[[object], Request]
Said = Sequence[tuple[str, str]]

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TALK = [("s", "You help."), ("u", "One?"), ("a", "1"), ("u", "Two?"), ("a", "2"), ("u", "Three?")]


def links(said: Said, read: Read) -> tuple[Link, ...]:
    messages = read({"messages": [{"role": ROLES[role], "content": text} for role, text in said]}).messages
    return chain(messages, shape(messages))


def keys(said: Said, read: Read) -> list[bytes]:
    return [link.key for link in links(said, read)]


def stored(*replies: bytes, started: float = 0, items: tuple[Item, ...] = ()) -> Stored:
    return Stored(started=started, items=items, replies=frozenset(replies))


def test_a_longer_conversation_continues_a_shorter_one(read: Read) -> None:
    """Each turn's key is the same in every request that holds it, and no two turns share one."""
    whole = keys(TALK, read)
    assert len(set(whole)) == 3
    assert keys(TALK[:4], read) == whole[:2]
    assert keys(TALK[:2], read) == whole[:1]


@pytest.mark.parametrize(
    ("said", "shared"),
    [
        pytest.param([("s", "Other."), *TALK[1:]], 3, id="the system prompt is not said"),
        pytest.param([*TALK[:2], ("a", "1 "), *TALK[3:]], 3, id="white space of a reply"),
        pytest.param([*TALK[:5], ("u", "Four?")], 2, id="an edited question"),
        pytest.param([*TALK[:2], ("a", "one"), *TALK[3:]], 1, id="another reply forks what follows"),
        pytest.param([TALK[0], ("u", "Eins?"), *TALK[2:]], 0, id="an edited first turn"),
        pytest.param([TALK[0], ("u", "<file>x</file>\nOne?"), *TALK[2:]], 3, id="context is not said"),
    ],
)
def test_an_edit_forks_from_the_common_start(said: Said, shared: int, read: Read) -> None:
    """Keys are equal up to the first turn that says something else."""
    one, two = keys(TALK, read), keys(said, read)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * shared + [False] * (3 - shared)


def test_replies_are_the_assistants_messages_of_the_turn(read: Read) -> None:
    """Every step of an agent's turn is a reply; results are only part of the chain."""
    found = links([("u", "Go."), ("a", "step"), ("t", "result"), ("a", "done"), ("u", "Thanks.")], read)
    assert [len(link.replies) for link in found] == [2, 0]
    other = links([("u", "Go."), ("a", "step"), ("t", "other"), ("a", "done"), ("u", "Thanks.")], read)
    assert found[0] == other[0]
    assert found[1].key != other[1].key


LINKS = (Link(b"1", (b"r1",)), Link(b"2", (b"r2", b"r3")), Link(b"3", ()))


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        pytest.param({}, (None, None), id="nothing stored"),
        pytest.param({b"1": (stored(b"r1"),)}, (stored(b"r1"), None), id="the reply is in the request"),
        pytest.param({b"1": (stored(b"other"),)}, (None, None), id="another reply"),
        pytest.param({b"1": (stored(),)}, (None, None), id="an answer nobody saw"),
        pytest.param({b"2": (stored(b"r2"),)}, (None, None), id="one reply of two"),
        pytest.param({b"2": (stored(b"r2", b"r3"),)}, (None, stored(b"r2", b"r3")), id="all replies of a turn"),
        pytest.param({b"1": (stored(b"r1", b"x"),)}, (stored(b"r1", b"x"), None), id="one of several answers"),
        pytest.param(
            {b"1": (stored(b"r1", started=1), stored(b"r1", started=3), stored(b"r1", started=2))},
            (stored(b"r1", started=3), None),
            id="the latest attempt",
        ),
        pytest.param(
            {b"1": (stored(b"r1", started=1), stored(b"other", started=3))},
            (stored(b"r1", started=1), None),
            id="the latest attempt whose answer is here",
        ),
        pytest.param({b"3": (stored(),)}, (None, None), id="never the newest turn"),
    ],
)
def test_a_stored_turn_counts_only_with_its_reply(
    turns: dict[bytes, tuple[Stored, ...]], found: tuple[Stored | None, ...]
) -> None:
    """What was stored is used where the request holds, word for word, the replies that followed."""
    assert match(LINKS, Recalled(turns=turns)) == found


def test_a_turn_without_an_answer_matches_nothing() -> None:
    """Two user messages in a row: nothing shows that what was stored for the first was ever answered."""
    assert match((Link(b"1", ()), Link(b"2", ())), Recalled(turns={b"1": (stored(),)})) == (None,)
    assert match((), NOTHING) == ()
