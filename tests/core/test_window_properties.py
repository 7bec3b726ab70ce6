"""Windowed clients: properties over random conversations of which the client sends the last few messages only.

It asks, runs tools, has answers made again, goes back to an earlier question, edits words in its window, and pauses.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from proxy.simulator.refusal import Refusal
from proxy.simulator.validity import check_chat
from tests.core.test_window import SYSTEM, Memory, asked, turns, whole

Messages = list[dict[str, Any]]
LIFETIME = 3_600.0


def is_valid(messages: Messages) -> bool:
    """Whether an upstream takes it: calls stand in front of their results."""
    try:
        check_chat({"model": "gpt-4o", "messages": [SYSTEM, *messages]}, strict=False)
    except Refusal:
        return False
    return True


@dataclass(frozen=True)
class Sent:
    """One request and what became of it; `said` is the whole conversation as the client has it."""

    said: Messages
    window: Messages
    forwarded: Messages
    idle: float

    @property
    def front(self) -> Messages:
        """What was put in front of the window, which stands at the end as it was sent."""
        assert self.forwarded[len(self.forwarded) - len(self.window) :] == self.window
        return self.forwarded[: len(self.forwarded) - len(self.window)]

    @property
    def left_out(self) -> Messages:
        return self.said[: len(self.said) - len(self.window)]


@dataclass
class Chat:
    """A client that sends its last `size` messages. Where not `distinct`, its words are few and come again.

    Where `careful`, its window never begins with a tool's result: it holds the call as well.
    """

    size: int
    distinct: bool = False
    careful: bool = False
    memory: Memory = field(default_factory=lambda: Memory(read_price=0.0, lifetime=LIFETIME))
    said: Messages = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    serial: int = 0
    tried: int = 0
    idle: float = 0.0

    def send(self) -> None:
        start = max(0, len(self.said) - self.size)
        while self.careful and self.said[start]["role"] == "tool":
            start -= 1
        window = self.said[start:]
        forwarded = self.memory.take(*window, idle=self.idle)
        self.sent.append(Sent([*self.said], window, forwarded, self.idle))
        self.idle = 0.0

    def words(self, which: int) -> str:
        self.serial += 1
        return f"question {self.serial if self.distinct else which % 3}"

    def answer(self) -> None:
        """Take the answer to what was asked last: the same words to the same, but where it was made again."""
        if self.said:
            asked = next(message["content"] for message in reversed(self.said) if message["role"] == "user")
            self.said.append({"role": "assistant", "content": f"answer to {asked}{' again' * self.tried}"})
        self.tried = 0

    def ask(self, which: int) -> None:
        self.answer()
        self.said.append({"role": "user", "content": self.words(which)})
        self.send()

    def step(self, which: int) -> None:
        """Run a tool or two in the turn that is open."""
        if not self.said:
            return
        self.serial += 1
        names = [f"c{self.serial}{place}" for place in range(1 + which % 2)]
        found = f"found {self.serial if self.distinct else which % 3}"
        function = {"name": "look", "arguments": f'{{"at": {self.serial if self.distinct else 0}}}'}
        calls = [{"id": name, "type": "function", "function": function} for name in names]
        self.said.append({"role": "assistant", "content": None, "tool_calls": calls})
        self.said += [{"role": "tool", "tool_call_id": name, "content": found} for name in names]
        self.send()

    def again(self, which: int) -> None:
        """Send the last request again, or have the whole turn made again; the answer says something else."""
        self.tried = 1 + which % 2
        while which > 3 and self.said and self.said[-1]["role"] != "user":
            del self.said[-1]
        if self.said:
            self.send()

    def back(self, which: int) -> None:
        """Go back to an earlier question and ask another one in its place."""
        asked = [place for place, message in enumerate(self.said) if message["role"] == "user"]
        if asked:
            del self.said[asked[max(0, len(asked) - 1 - which)] :]
            self.tried = 0
            self.said.append({"role": "user", "content": self.words(which)})
            self.send()

    def edit(self, which: int) -> None:
        """Change words of an earlier message where it stands, in the window, and ask the last question again."""
        place = len(self.said) - 1 - which
        if place >= 0 and len(self.said) - self.size <= place and self.said[place]["role"] == "user":
            self.said[place] = {"role": "user", "content": f"{self.words(which)}, edited"}
            self.send()

    def pause(self, which: int) -> None:
        self.idle = LIFETIME + 1 if which % 2 else LIFETIME

    def play(self, script: Sequence[tuple[str, int]]) -> list[Sent]:
        """Do it all, and ask a few more questions."""
        does: dict[str, Callable[[int], None]] = {
            "ask": self.ask, "step": self.step, "again": self.again, "back": self.back, "edit": self.edit,
            "pause": self.pause,
        }  # fmt: skip
        for what, which in [*script, *(("ask", which) for which in range(3))]:
            does[what](which)
        return self.sent


sizes = st.integers(3, 12)
alone = st.lists(st.tuples(st.sampled_from(["ask", "ask", "ask", "step"]), st.integers(0, 7)), min_size=3, max_size=25)
whats = st.sampled_from(["ask", "ask", "ask", "ask", "ask", "step", "again", "back", "back", "edit", "pause"])
chats = st.lists(st.tuples(whats, st.integers(0, 7)), min_size=3, max_size=25)
pauses = st.lists(st.tuples(st.sampled_from(["ask", "ask", "ask", "step", "pause"]), st.integers(0, 7)), min_size=9)
rules = settings(deadline=None, max_examples=250)


@rules
@given(sizes, st.booleans(), chats)
def test_what_is_put_in_front_stood_there(size: int, distinct: bool, script: list[tuple[str, int]]) -> None:
    """In the branch that the client is in, whatever it has abandoned; its own messages follow as it sent them.

    Where all conversations have the same words nobody knows the branch: they stood in front of the very same in one.
    """
    before: list[list[dict[str, Any]]] = []
    for each in Chat(size, distinct=distinct).play(script):
        event(f"{'distinct' if distinct else 'repeated'} words, {'completed' if each.front else 'left alone'}")
        before.append(each.said)
        here = [*each.front, *each.window[:1]]
        stood = any(here == whole[at : at + len(here)] for whole in before for at in range(len(whole)))
        known = each.left_out[-len(each.front) :] == each.front if distinct else stood
        assert not each.front or known


@rules
@given(sizes, st.booleans(), chats)
def test_calls_keep_their_results(size: int, distinct: bool, script: list[tuple[str, int]]) -> None:
    """What an upstream takes as the client sends it, it takes completed."""
    for each in Chat(size, distinct=distinct).play(script):
        assert is_valid(each.forwarded) or not is_valid(each.window)


@rules
@given(st.integers(7, 12), pauses)
def test_after_a_pause_it_begins_with_the_window(size: int, script: list[tuple[str, int]]) -> None:
    """What the prompt cache does not hold any more is not put back, then or later."""
    begins, before = 0, None
    for each in Chat(size, distinct=True, careful=True).play(script):
        if each.idle > LIFETIME:
            assert not each.front
            begins, before = len(each.left_out), each
        if before and each.said[: len(before.said)] == before.said:
            assert len(each.left_out) - len(each.front) >= begins


@rules
@given(sizes, alone)
def test_one_branch_is_whole(size: int, script: list[tuple[str, int]]) -> None:
    """A conversation that only goes on is a prefix from the last request on that could not be completed."""
    begins, stored = 0, 0
    for each in Chat(size, distinct=True, careful=True).play(script):
        start = len(each.left_out)
        starts = [place for place, message in enumerate(each.said) if message["role"] == "user" and place >= start]
        starts = starts if starts[:1] == [start] else [start, *starts]
        # A turn counts whose question is in the window and whose answer stood in the request before.
        known = sum(each.said[at]["role"] == "user" and end <= stored for at, end in itertools.pairwise(starts))
        if known < 2:
            begins = start
        event("whole" if begins < start else "left alone")
        assert each.forwarded == each.said[begins:]
        stored = len(each.said)


def looked(name: str, found: str) -> Messages:
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": name, "content": found},
    ]


def test_a_turn_made_again_keeps_its_calls_with_their_results() -> None:
    """The same call has another id, and another result."""
    memory = Memory()
    for steps in (looked("c1", "10:00"), looked("c2", "10:05")):
        memory.take(asked(1))
        memory.take(asked(1), *steps)
    for number in range(2, 5):
        memory.take(asked(1), *looked("c2", "10:05"), turns(1)[1], *turns(*range(2, number)), asked(number))
    assert is_valid(memory.take(*turns(2, 3, 4), asked(5)))


def test_a_window_that_began_with_a_result_is_never_put_in_front() -> None:
    """What an upstream refused once, it would refuse with every window that follows."""
    memory, said = Memory(), [asked(1), *looked("c1", "x"), turns(1)[1]]
    memory.take(*said[:3])
    memory.take(*said, asked(2))
    memory.take(*said[2:], *turns(2, 3), asked(4))
    assert is_valid(memory.take(*turns(2, 3, 4), asked(5)))


def test_a_small_window_of_another_branch_is_left_alone() -> None:
    """It holds too little of the branch it is in to be found there, and stands whole in the one that was abandoned."""
    memory, other = whole(6), [asked(1, "other"), turns(1)[1]]
    memory.take(*other, asked(2))
    memory.take(*other, *turns(2), asked(3))
    window = [*turns(2, 3), asked(4)]
    assert memory.take(*window) in (window, [*other, *window])


def test_a_conversation_whose_first_turn_was_taken_out_stays_without_it() -> None:
    """It has begun anew with the second question, and is all there is of it; the first was taken away."""
    memory = whole(6)
    memory.take(asked(2))
    memory.take(*turns(2), asked(3))
    assert memory.take(*turns(2, 3), asked(4)) == [*turns(2, 3), asked(4)]
