"""The prompt before, of each lineage, in this process's memory alone: what a new one is compared with. Bounded."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from proxy.core.divergence import Trace

ROOT = b"root"
"""Behind the place of a conversation's first user message: the key of how it begins."""


class Traces:
    """The latest prompt at each place, least recently used first; `max_bytes` bounds them all."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._held: collections.OrderedDict[bytes, Trace] = collections.OrderedDict()

    def before(self, now: Trace, places: Iterable[bytes], names: Iterable[bytes]) -> Trace | None:
        """Return the prompt before this one: at the first of its places that is known.

        Where its history was edited early none is; then the one under its names, if it has the same L1.
        """
        return next(self._known(places), None) or next(filter(now.begins_as, self._known(names)), None)

    def _known(self, keys: Iterable[bytes]) -> Iterator[Trace]:
        return (self._held[key] for key in keys if key in self._held)

    def put(self, trace: Trace, keys: Iterable[bytes]) -> None:
        """Keep a prompt under several keys."""
        for key in keys:
            self._drop(key)
            self._held[key] = trace
            self._size += trace.size
        while self._size > self._max_bytes and self._held:
            _, oldest = self._held.popitem(last=False)
            self._size -= oldest.size

    def _drop(self, key: bytes) -> None:
        known = self._held.pop(key, None)
        self._size -= known.size if known else 0
