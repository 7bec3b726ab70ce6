"""A log line for what breaks a prompt cache in mid-conversation: one a conversation and kind, and not too many."""

from __future__ import annotations

import collections
from collections.abc import Callable

from proxy.core.kind import OURS
from proxy.observe.record import Record

_MOST = 10_000
_EVERY_SECONDS = 1.0
_STABLE = frozenset({"parameters", "tools", "L1", "L2"})

Say = Callable[..., None]


class Warnings:
    """`say(level, event, at=…, **facts)` writes a line."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._told: collections.OrderedDict[tuple[str, str], None] = collections.OrderedDict()
        self._last = float("-inf")

    def emit(self, record: Record) -> None:
        """Warn of a stable layer that changed without a known trigger."""
        found = record.divergence
        if found is None or found.layer not in _STABLE or found.kind in OURS:
            return
        key = (record.lineage, found.kind)
        if key in self._told or record.at - self._last < _EVERY_SECONDS:
            return
        self._told[key] = None
        self._last = record.at
        while len(self._told) > _MOST:
            self._told.popitem(last=False)
        self._say(
            "warning",
            "prompt_cache_broken",
            at=record.at,
            request_id=record.request_id,
            tenant=record.tenant,
            conversation=record.conversation,
            layer=found.layer,
            kind=found.kind,
            message=found.message,
            character=found.character,
        )
