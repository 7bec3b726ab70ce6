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
    """Cut a conversation in front of each user message."""
    leading = next((index for index, message in enumerate(messages) if not message.leads), len(messages))
    starts = [index for index in range(leading, len(messages)) if messages[index].role == "user"]
    if leading < len(messages) and (not starts or starts[0] != leading):
        starts.insert(0, leading)
    ends = [*starts[1:], len(messages)]
    return Shape(leading=leading, turns=tuple(Span(start, end) for start, end in zip(starts, ends, strict=False)))


def exchanges(messages: Sequence[Message], turn: Span) -> tuple[Span, ...]:
    """Return what follows the turn's user message in units: an assistant message with all the results it called for."""
    start = turn.start + (messages[turn.start].role == "user") if turn.end > turn.start else turn.start
    starts = [index for index in range(start, turn.end) if index == start or not messages[index].result]
    return tuple(Span(begin, end) for begin, end in zip(starts, [*starts[1:], turn.end], strict=False))
