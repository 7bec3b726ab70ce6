"""The prompt before, of each lineage, in this process's memory alone: what a new one is compared with.

Bounded, and gone when its conversation is.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proxy.core.divergence import Trace

ROOT = b"root"
"""Behind the place of a conversation's first user message: the key of how it begins."""


@dataclass(frozen=True, slots=True)
class _Held:
    trace: Trace
    of: str | None
    until: float


class Traces:
    """The latest prompt at each place, the oldest first; `max_bytes` bounds them all, `ttl_seconds` each."""

    def __init__(self, *, max_bytes: int, ttl_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._size = 0
        self._held: collections.OrderedDict[bytes, _Held] = collections.OrderedDict()

    def before(self, now: Trace, places: Iterable[bytes], names: Iterable[bytes]) -> Trace | None:
        """Return the prompt before this one: at the first of its places that is known.

        Where its history was edited early none is; then the one under its names, if it has the same L1.
        """
        found = next(self._known(places, now.at), None)
        return found or next(filter(now.begins_as, self._known(names, now.at)), None)

    def _known(self, keys: Iterable[bytes], now: float) -> Iterator[Trace]:
        held = (self._held[key] for key in keys if key in self._held)
        return (each.trace for each in held if each.until >= now)

    def put(
        self, trace: Trace, keys: Iterable[bytes], *, of: str | None = None, ttl_seconds: float | None = None
    ) -> None:
        """Keep a prompt `of` a named conversation, or of none, under several keys."""
        until = trace.at + (ttl_seconds or self._ttl_seconds)
        for key in keys:
            self._drop(key)
            self._held[key] = _Held(trace, of, until)
            self._size += trace.size
        while self._held and (self._size > self._max_bytes or self._oldest.until < trace.at):
            self._drop(next(iter(self._held)))

    def forget(self, conversation: str) -> None:
        """Drop what a named conversation's prompts were."""
        for key in [key for key, held in self._held.items() if held.of == conversation]:
            self._drop(key)

    @property
    def _oldest(self) -> _Held:
        return next(iter(self._held.values()))

    def _drop(self, key: bytes) -> None:
        known = self._held.pop(key, None)
        self._size -= known.trace.size if known else 0
