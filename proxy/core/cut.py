"""What a limit takes from a prompt: which messages go, which keep head and tail, whether L2 and L3 are made smaller."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from proxy.core.turn import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`dropped` runs of messages, `shortened` messages by index, items in L2 `outlined`, those of this turn `packed`.

    `packed` is how many characters each of those may keep, 0 for all. `quiet` where no line may say what was left out:
    behind it stands signed reasoning.
    """

    dropped: tuple[Span, ...] = ()
    shortened: frozenset[int] = frozenset()
    outlined: bool = False
    packed: int = 0
    quiet: bool = False
    gone: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gone = frozenset(index for span in self.dropped for index in span.indexes)
        object.__setattr__(self, "gone", gone)

    def drops(self, index: int) -> bool:
        """Whether the message at this place goes."""
        return index in self.gone


WHOLE = Cut()


def left_out(dropped: Collection[Span]) -> str:
    """Return the line that says what is not there; it changes only when the cut moves."""
    count = sum(span.end - span.start for span in dropped)
    if not count:
        return ""
    return f"[{count} earlier message{'s' if count > 1 else ''} of this conversation left out here.]"
