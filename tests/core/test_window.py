"""Windowed clients: a named conversation's last messages are completed from what stood in front of them, if sure."""

import contextlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import window
from proxy.core.lineage import Link
from proxy.core.profile import Profile
from tests.core.conftest import ANALYST, as_bytes, read_body

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "You help."}


def turns(*numbers: int, words: str = "question") -> Messages:
    return [
        message
        for number in numbers
        for message in (
            {"role": "user", "content": f"{words} {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        )
    ]


def asked(number: int, words: str = "question") -> dict[str, Any]:
    return {"role": "user", "content": f"{words} {number}"}


class Memory:
    """What a conversation has stored; `take` completes a request and stores it, as the pipeline does."""

    def __init__(self, read_price: float = 0.1, lifetime: float = 3_600.0) -> None:
        self.links: dict[bytes, Link] = {}
        self.profile = Profile(read=read_price, lifetime_seconds=lifetime)

    def take(self, *messages: dict[str, Any], idle: float = 0.0) -> Messages:
        request = read_body({"model": "m", "messages": [SYSTEM, *messages], "seed": 1})
        front = window.left_out(
            request, self.links, weigh=len, look=ANALYST.analyse, profile=self.profile, idle_seconds=idle
        )
        if front:
            request = read_body(window.completed(request, front))
        links = window.links(request)
        self.links = {**links, **self.links}
        body = orjson.loads(request.body)
        assert list(body) == ["model", "messages", "seed"]
        assert body["messages"][0] == SYSTEM
        found: Messages = body["messages"][1:]
        return found


def whole(upto: int) -> Memory:
    """Remember a conversation whose client sent everything so far."""
    memory = Memory()
    for number in range(1, upto + 1):
        memory.take(*turns(*range(1, number)), asked(number))
    return memory


def test_a_window_is_completed() -> None:
    """However often it has moved: the prompt is the whole conversation."""
    memory = Memory()
    for number in range(1, 20):
        seen = turns(*range(max(1, number - 4), number))
        assert memory.take(*seen, asked(number)) == [*turns(*range(1, number)), asked(number)]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([*turns(5, 6), asked(7)], id="two turns, of which one was answered when they were stored"),
        pytest.param([asked(7)], id="no history"),
        pytest.param([*turns(9, 3, 4, 5, 6), asked(7)], id="another first message"),
        pytest.param([{"role": "user", "content": "Summary: much."}, *turns(4, 5, 6), asked(7)], id="a summary"),
        pytest.param([*turns(3, 5, 6), asked(7)], id="a gap"),
        pytest.param([*turns(1, 2, 3, 4, 5, 6), asked(7)], id="all of it"),
        pytest.param([*turns(1, 2), asked(3, "other")], id="an edit"),
        pytest.param([], id="nothing"),
    ],
)
def test_what_is_not_sure_is_left_alone(messages: Messages) -> None:
    """Nothing is put in front of it."""
    assert whole(6).take(*messages) == messages


@pytest.mark.parametrize(
    ("messages", "front"),
    [
        pytest.param([*turns(4, 5, 6), asked(7)], turns(1, 2, 3), id="three turns"),
        pytest.param([*turns(3, 4, 5, 6)[1:], asked(7)], [*turns(1, 2), asked(3)], id="it begins with an answer"),
        pytest.param([*turns(3, 4, 5), asked(6)], turns(1, 2), id="the same again"),
        pytest.param([*turns(3, 4, 5), asked(6, "other")], turns(1, 2), id="the newest question edited"),
        pytest.param([*turns(3, 4), asked(5, "other")], turns(1, 2), id="an earlier question edited"),
        pytest.param([{"role": "user", "content": " question \n4"}, *turns(4, 5, 6)[1:], asked(7)], turns(1, 2, 3),
                     id="white space"),
    ],
)  # fmt: skip
def test_what_is_sure_is_completed(messages: Messages, front: Messages) -> None:
    """By the messages that stood in front of it, as the client sent them."""
    assert whole(6).take(*messages) == [*front, *messages]


def test_messages_are_put_back_as_they_were_spelled() -> None:
    """Byte for byte, calls with their results."""
    function = {"name": "look", "arguments": '{"a":  1}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    steps = [asked(1), called, {"role": "tool", "tool_call_id": "c", "content": "x"}, turns(1)[1]]
    memory = Memory()
    for number in range(2, 6):
        sent = memory.take(*steps, *turns(*range(2, number)), asked(number))
    assert sent[:4] == steps
    assert memory.take(*turns(3, 4, 5), asked(6)) == [*steps, *turns(2, 3, 4, 5), asked(6)]


def test_where_the_prompt_cache_has_gone_cold_it_begins_anew() -> None:
    """And what was given up is not taken up again."""
    memory = whole(6)
    assert memory.take(*turns(4, 5, 6), asked(7), idle=4_000) == [*turns(4, 5, 6), asked(7)]
    assert memory.take(*turns(4, 5, 6), asked(7)) == [*turns(4, 5, 6), asked(7)]
    assert memory.take(*turns(5, 6, 7), asked(8)) == [*turns(4, 5, 6, 7), asked(8)]


def test_where_reading_the_front_costs_more_than_the_window_it_begins_anew() -> None:
    """A prefix that only grows is worth its price up to there."""
    memory, longest, shrank = Memory(read_price=0.5), 0, 0
    for number in range(1, 60):
        sent = memory.take(*turns(*range(max(1, number - 4), number)), asked(number))
        shrank += len(sent) < longest
        longest = len(sent)
        assert sent[-9:] == [*turns(*range(max(1, number - 4), number)), asked(number)]
        assert len(sent) <= 3 * 9 + 2
    assert 2 <= shrank <= 8


def test_a_branch_that_was_given_up_never_comes_back() -> None:
    """The front is that of the branch the window stands in."""
    memory = whole(6)
    memory.take(*turns(1, 2), asked(3, "other"))
    branch = [*turns(1, 2), *turns(3, words="other")]
    for number in range(4, 8):
        memory.take(*branch, *turns(*range(4, number), words="other"), asked(number, "other"))
    seen = [*turns(4, 5, 6, 7, words="other"), asked(8, "other")]
    assert memory.take(*seen) == [*branch, *seen]


def test_a_missing_link_leaves_the_window_alone() -> None:
    """Memory that has lost a message has lost what stood in front of it."""
    memory = whole(6)
    del memory.links[next(place for place, link in memory.links.items() if b"question 2" in link.raw)]
    messages = [*turns(4, 5, 6), asked(7)]
    assert memory.take(*messages) == messages


def test_an_empty_body_is_none() -> None:
    """There is nothing a window could stand in."""
    request = read_body(as_bytes({"messages": []}))
    assert window.left_out(request, {}, weigh=len, look=ANALYST.analyse, profile=Profile(), idle_seconds=0.0) == ()


def test_of_two_branches_nobody_can_say_which_goes_on() -> None:
    """Where the first words were edited away, and all others are the same, they stay away."""
    memory = Memory()
    rest = turns(2, 3, 4, 5)
    for first in ("My key is 1.", "(removed)"):
        begun = [{"role": "user", "content": first}, {"role": "assistant", "content": "Noted."}]
        for at in range(0, len(rest), 2):
            memory.take(*begun, *rest[:at], rest[at])
    messages = [*rest, asked(6)]
    assert memory.take(*messages) == messages


def test_a_conversation_that_starts_over_is_what_it_is() -> None:
    """The same words again, from the start: nothing stood in front of them."""
    ping = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
    memory = Memory()
    for number in range(6):
        memory.take(*ping * number, ping[0])
    again = [*ping * 2, ping[0]]
    assert memory.take(*again) == again


def test_a_window_that_begins_with_a_result_is_left_alone() -> None:
    """Its call may have been another's."""
    calls = [{"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "x", "content": "found"}
    memory = Memory()
    steps = [asked(1), called, result, turns(1)[1]]
    for number in range(2, 6):
        memory.take(*steps, *turns(*range(2, number)), asked(number))
    messages = [result, turns(1)[1], *turns(2, 3, 4), asked(5)]
    assert memory.take(*messages) == messages


@pytest.mark.parametrize(
    "first",
    [
        [{"type": "image_url", "image_url": {"url": "https://a.b/c.png?expires=1"}}],
        [{"type": "text", "text": "question 1", "cache_control": {"type": "ephemeral"}}],
    ],
)
def test_what_cannot_be_sent_again_is_not(first: object) -> None:
    """An address that has expired, or one cache mark too many, is refused."""
    memory = Memory()
    begun = [{"role": "user", "content": first}, {"role": "assistant", "content": "answer 1"}]
    for number in range(2, 7):
        memory.take(*begun, *turns(*range(2, number)), asked(number))
    messages = [*turns(3, 4, 5), asked(6)]
    assert memory.take(*messages) == messages


def test_a_memory_that_lies_is_not_believed() -> None:
    """A link in a circle, or of other words than its place says."""
    for lie in (
        lambda place, link: Link(place, link.raw),
        lambda _, link: Link(link.before, b'{"role":"user","content":"x"}'),
    ):
        memory = whole(6)
        place = next(place for place, link in memory.links.items() if b"question 2" in link.raw)
        memory.links[place] = lie(place, memory.links[place])
        messages = [*turns(4, 5, 6), asked(7)]
        assert memory.take(*messages) == messages


def test_words_that_recur_without_end_take_bounded_time(
    guard: Callable[[int], contextlib.AbstractContextManager[None]],
) -> None:
    """A thousand times the same is nobody's place."""
    go_on = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "ok"}]
    memory = Memory()
    memory.take(*go_on * 1_000, go_on[0])
    messages = [*go_on * 200, go_on[0]]
    with guard(5):
        assert memory.take(*messages) == messages
