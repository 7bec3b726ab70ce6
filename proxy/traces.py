"""The prompt before, of each lineage, in this process's memory alone: what a new one is compared with. Bounded."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from proxy.core.divergence import Trace


class Traces:
    """The latest prompt at each place, least recently used first; `max_bytes` bounds them all."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._held: collections.OrderedDict[bytes, Trace] = collections.OrderedDict()

    def find(self, keys: Iterable[bytes]) -> Trace | None:
        """Return the prompt under the first key that is known."""
        return next((self._held[key] for key in keys if key in self._held), None)

    def all(self, keys: Iterable[bytes]) -> Iterator[Trace]:
        """Return the prompts under these keys that are known."""
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
