"""The chain of what was said: each message's place."""

from collections.abc import Callable, Sequence

import pytest

from proxy.core.chain import Place
from proxy.core.request import Request

Read = Callable[[object], Request]
Said = Sequence[tuple[str, object]]

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TALK: Said = [("s", "You help."), ("u", "One?"), ("a", "1"), ("u", "Two?"), ("a", "2"), ("u", "Three?")]


def places(said: Said, read: Read) -> tuple[Place, ...]:
    return read({"messages": [{"role": ROLES[role], "content": text} for role, text in said]}).places


def test_a_longer_conversation_continues_a_shorter_one(read: Read) -> None:
    """Each message's place is the same in every request that holds it, and no two messages share one."""
    whole = places(TALK, read)
    assert len(set(whole)) == len(TALK)
    for end in range(1, len(TALK)):
        assert places(TALK[:end], read) == whole[:end]


def test_leading_system_messages_have_no_place_of_their_own(read: Read) -> None:
    """What stands in front may change and the conversation is the same; in the middle it is said."""
    assert places([("s", "A."), ("s", "B."), ("u", "One?")], read)[:2] == (b"", b"")
    assert places([("u", "One?")], read)[-1] == places([("s", "A."), ("s", "B."), ("u", "One?")], read)[-1]
    middle = [places([("u", "One?"), ("s", text), ("u", "Two?")], read) for text in "ab"]
    assert [one == two for one, two in zip(*middle, strict=True)] == [True, False, False]


def test_the_same_words_at_another_place_are_another_place(read: Read) -> None:
    """A place is all that was said up to it."""
    found = places([("u", "Go on."), ("a", "1"), ("u", "Go on."), ("a", "1"), ("u", "Go on.")], read)
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    ("said", "shared"),
    [
        pytest.param([("s", "Other."), *TALK[1:]], 6, id="the system prompt is not said"),
        pytest.param([*TALK[:2], ("a", "1 "), *TALK[3:]], 6, id="white space of a reply"),
        pytest.param([*TALK[:2], ("a", [{"type": "text", "text": "1"}]), *TALK[3:]], 6, id="another form"),
        pytest.param([*TALK[:5], ("u", "Four?")], 5, id="an edited question"),
        pytest.param([*TALK[:2], ("a", "one"), *TALK[3:]], 2, id="another reply forks what follows"),
        pytest.param([TALK[0], ("u", "Eins?"), *TALK[2:]], 1, id="an edited first turn"),
        pytest.param([TALK[0], ("a", "One?"), *TALK[2:]], 1, id="another role"),
        pytest.param([TALK[0], ("u", "<file>x</file>\nOne?"), *TALK[2:]], 6, id="context is not said"),
    ],
)
def test_an_edit_forks_from_the_common_start(said: Said, shared: int, read: Read) -> None:
    """Places are equal up to the first message that says something else."""
    one, two = places(TALK, read), places(said, read)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * shared + [False] * (6 - shared)


def test_tool_calls_are_said(read: Read) -> None:
    """What is called and with what is part of the chain; how its arguments are spaced is not."""

    def steps(arguments: str, output: str) -> tuple[Place, ...]:
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        return read({
            "messages": [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": output},
            ]
        }).places  # fmt: skip

    base = steps('{"a":1}', "x")
    assert steps('{"a": 1}', "x") == base
    assert [one == two for one, two in zip(base, steps('{"a":2}', "x"), strict=True)] == [True, False, False]
    assert [one == two for one, two in zip(base, steps('{"a":1}', "y"), strict=True)] == [True, True, False]
