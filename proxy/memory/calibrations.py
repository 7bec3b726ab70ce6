"""Calibrations of this process, shared with replicas where there is Redis; never waited for."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from proxy.background import Background
from proxy.core import calibration
from proxy.core.calibration import KEPT
from proxy.memory.redis import ROOT, RedisStore

_MOST_MODELS = 1_000
_FRESH_SECONDS = 30.0

Told = Callable[[str, float], None]


class Calibrations:
    """Ratios by model and upstream. `told` hears a model's ratio whenever it changes."""

    def __init__(self, store: RedisStore | None, *, background: Background, told: Told) -> None:
        self._store = store
        self._background = background
        self._told = told
        self._samples: collections.OrderedDict[str, list[float]] = collections.OrderedDict()
        self._ratios: dict[str, float] = {}
        self._asked: dict[str, float] = {}

    def ratio(self, key: str, label: str) -> float | None:
        """Return a model's ratio in force, None where too little is known. Asks replicas for it beside the request."""
        now = time.monotonic()
        if self._store is not None and now - self._asked.get(key, -_FRESH_SECONDS) >= _FRESH_SECONDS:
            if len(self._asked) >= _MOST_MODELS:
                self._asked.clear()
            self._asked[key] = now
            self._background.start(self._fetch(self._store, key, label))
        return self._ratios.get(key)

    def learn(self, key: str, label: str, *, counted: int, reported: int) -> None:
        """Add what an answer reported of a prompt that was counted."""
        found = calibration.sample(counted, reported)
        if found is None:
            return
        samples = self._samples.setdefault(key, [])
        self._samples.move_to_end(key)
        samples.append(found)
        del samples[:-KEPT]
        while len(self._samples) > _MOST_MODELS:
            oldest, _ = self._samples.popitem(last=False)
            self._ratios.pop(oldest, None)
        self._tell(key, label)
        if self._store is not None:
            self._background.start(self._store.push("calibration", _name(key), repr(found), most=KEPT))

    async def _fetch(self, store: RedisStore, key: str, label: str) -> None:
        shared = await store.newest("calibration", _name(key), most=KEPT)
        if shared:
            # The replicas' samples hold this process's own.
            self._samples[key] = shared
            self._tell(key, label)

    def _tell(self, key: str, label: str) -> None:
        before = self._ratios.get(key)
        now = calibration.ratio(self._samples[key], before)
        if now is not None and now != before:
            self._ratios[key] = now
            self._told(label, now)


def _name(key: str) -> str:
    return f"{ROOT}:calibration:{key}"
