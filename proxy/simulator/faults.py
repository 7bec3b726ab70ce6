"""Faults a request can ask for: what goes wrong, at which moment, read from one line of text.

``status=429; retry_after=2`` or ``reset_mid=3; gap=0.1``: several faults separated by ``;``.
"""

from collections import deque
from dataclasses import dataclass, fields
from typing import get_args, get_type_hints


class FaultTextError(ValueError):
    """A fault that does not exist, or whose value cannot be read; names the offending text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """All that goes wrong with one request; an unset field goes well. Seconds, and counts of stream events."""

    status: int | None = None
    """Answer this status with an OpenAI-shaped error."""
    retry_after: float | None = None
    """Send this ``retry-after`` with the ``status``."""
    delay: float | None = None
    """Wait before the response headers."""
    first_token_delay: float | None = None
    """Wait between the response headers and the first event."""
    reset: bool = False
    """Reset the connection before any byte."""
    reset_mid: int | None = None
    """Reset the connection after this many events; in the middle of the body of a plain reply."""
    cut: int | None = None
    """End the stream cleanly after this many events, without finish reason and ``[DONE]``; halve a plain reply."""
    no_done: bool = False
    """Leave out ``[DONE]``."""
    malformed: bool = False
    """Put one broken event into the middle of the stream; break a plain reply's JSON."""
    no_usage: bool = False
    """Leave out the usage."""
    html502: bool = False
    """Answer 502 with a page of HTML."""
    gap: float | None = None
    """Wait this long between events instead of the configured time."""
    in_band_error: int | None = None
    """Send an error event after this many events and end; a plain reply becomes 200 with an error body."""


NONE = Faults()


def parse(text: str) -> Faults:
    """Read faults, e.g. ``first_token_delay=0.2; cut=3``; raises `FaultTextError` naming a bad one."""
    chosen: dict[str, bool | int | float] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, separator, value = (part.strip() for part in item.partition("="))
        kind = _KINDS.get(name)
        if kind is None or (kind is bool) == bool(separator):
            raise FaultTextError(f"unknown fault {item!r}; known: {', '.join(_USAGE)}")
        try:
            chosen[name] = True if kind is bool else kind(value)
        except ValueError:
            raise FaultTextError(f"fault {item!r} needs a number") from None
        if chosen[name] < 0:
            raise FaultTextError(f"fault {item!r} needs a number of at least 0")
    return Faults(**chosen)  # type: ignore[arg-type]  # each value was made by its field's own type


class FaultQueue:
    """Faults waiting for requests, used up one per request in order."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, text: str) -> None:
        """Queue faults for the next request that has none yet; an empty text lets that request go well."""
        parse(text)
        self._waiting.append(text)

    def take(self) -> str:
        """Next text, empty when nothing waits."""
        return self._waiting.popleft() if self._waiting else ""

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting.clear()


def _kind(hint: object) -> type[bool | int | float]:
    return hint if isinstance(hint, type) else get_args(hint)[0]


_KINDS = {field.name: _kind(get_type_hints(Faults)[field.name]) for field in fields(Faults)}
_USAGE = tuple(name if kind is bool else f"{name}={'N' if kind is int else 'SECONDS'}" for name, kind in _KINDS.items())
