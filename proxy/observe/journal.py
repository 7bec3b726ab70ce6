"""The newest records of this process, by request: what `GET /strata/requests/{id}` and the live page show."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from proxy.observe.record import Record

MOST = 2_000


class Journal:
    """A bounded run of records, and whose each is."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._held: collections.OrderedDict[str, Record] = collections.OrderedDict()

    def emit(self, record: Record) -> None:
        """Keep a record."""
        self._held[record.request_id] = record
        while len(self._held) > self._most:
            self._held.popitem(last=False)

    def find(self, request_id: str) -> Record | None:
        """Return a record, None where it is not known here."""
        return self._held.get(request_id)

    def __iter__(self) -> Iterator[Record]:
        """Newest first."""
        return iter(reversed(self._held.values()))
