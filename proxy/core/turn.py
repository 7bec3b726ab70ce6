"""Messages → L1, turns and exchanges: the units that are kept or go as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.message import Message


@dataclass(frozen=True, slots=True)
class Span:
    """Messages `start:end` of a request, by index."""

    start: int
    end: int

    @property
    def indexes(self) -> range:
        """Those of its messages."""
        return range(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`leading` system messages, then turns without a gap; the last one is the newest.

    A greeting in front of the first user message is a turn of its own.
    """

    leading: int
    turns: tuple[Span, ...]

    @property
    def newest(self) -> Span:
        """The newest turn; empty where there is nothing but L1."""
        return self.turns[-1] if self.turns else Span(self.leading, self.leading)


def shape(messages: Sequence[Message]) -> Shape:
    """Cut a conversation in front of each user message.

    One that stands between a call and its result begins none; older turns are cut behind that result instead.
    """
    leading = next((index for index, message in enumerate(messages) if not message.leads), len(messages))
    inside = _inside(messages)
    users = [index for index in range(leading, len(messages)) if messages[index].role == "user"]
    latest = max((index for index in users if not inside[index]), default=leading)
    starts = [leading] if leading < len(messages) else []
    spoken = False
    for index in range(leading + 1, latest + 1):
        if not inside[index] and (spoken or messages[index].role == "user"):
            starts.append(index)
        spoken = inside[index] and (spoken or messages[index].role == "user")
    ends = [*starts[1:], len(messages)]
    return Shape(leading=leading, turns=tuple(Span(start, end) for start, end in zip(starts, ends, strict=False)))


def exchanges(messages: Sequence[Message], turn: Span) -> tuple[Span, ...]:
    """Return what follows the turn's user message in units: an assistant message with all the results it called for.

    What stands between a call and its result, be it another call, is of the same unit: neither goes without the other.
    """
    start = turn.start + (messages[turn.start].role == "user") if turn.end > turn.start else turn.start
    inside = _inside(messages[: turn.end])
    starts = [
        index for index in range(start, turn.end) if index == start or not (messages[index].result or inside[index])
    ]
    return tuple(Span(begin, end) for begin, end in zip(starts, [*starts[1:], turn.end], strict=False))


def _inside(messages: Sequence[Message]) -> list[bool]:
    """Say of each message whether it stands behind a call whose result is yet to come, or is that result."""
    inside = [False] * len(messages)
    asked: dict[str, list[int]] = {}
    until: dict[int, int] = {}
    for index, message in enumerate(messages):
        for call in message.calls:
            asked.setdefault(call, []).append(index)
        if message.result and asked.get(message.answers):
            # Ids come back: the latest call is meant.
            until[asked[message.answers].pop()] = index
    end = -1
    for index in range(len(messages)):
        inside[index] = index <= end
        end = max(end, until.get(index, -1))
    return inside
