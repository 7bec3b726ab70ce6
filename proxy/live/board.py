"""Records → what the live page shows: today's numbers, the newest requests by layer, causes, conversations, tenants."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from proxy.core.kind import OURS
from proxy.core.quota import LEASE_SECONDS, RATES, Kind, Quotas, Verdict, periods
from proxy.observe.record import Record

_MOST_REQUESTS = 200
_MOST_CONVERSATIONS = 50


@dataclass(slots=True)
class _Day:
    """Numbers since midnight, UTC."""

    name: str = ""
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    reported_tokens: int = 0
    cached_tokens: int = 0
    as_sent_tokens: int = 0
    cost_usd: float = 0.0
    saved_usd: float = 0.0
    causes: collections.Counter[str] = field(default_factory=collections.Counter)
    breaks: collections.Counter[str] = field(default_factory=collections.Counter)


@dataclass(slots=True)
class _Held:
    """How a tenant stood to its quotas at a moment, and how many of its requests have ended since."""

    quotas: Quotas
    verdict: Verdict
    at: float
    ended: int = 0

    def used(self, kind: Kind, now: float) -> int:
        """Return what of a quota is used now: rates refill, a new day or month begins at nothing."""
        used, seconds = self.verdict.used[kind], max(0.0, now - self.at)
        if kind == "concurrent_requests":
            # Only chat requests report their end here; of others a reservation is the most that is still held.
            return max(0, used - self.ended) if seconds < LEASE_SECONDS else 0
        if kind in RATES:
            return max(0, used - int(seconds * self.quotas.limits[kind] / 60))
        then, today = periods(int(self.at * 1000)), periods(int(now * 1000))
        place = int("month" in kind)
        return used if then[place] == today[place] else 0


class Board:
    """Bounded; a record costs a few additions. `tenants` are those configured."""

    def __init__(self, tenants: Callable[[], tuple[str, ...]], *, now: Callable[[], float]) -> None:
        self._tenants = tenants
        self._now = now
        self._day = _Day()
        self._newest: collections.deque[tuple[int, Record]] = collections.deque(maxlen=_MOST_REQUESTS)
        self._conversations: collections.OrderedDict[str, list[float]] = collections.OrderedDict()
        self._quotas: dict[str, _Held] = {}
        self.number = 0

    def quota(self, tenant: str, quotas: Quotas, verdict: Verdict | None) -> None:
        """Note how a tenant stands to its quotas."""
        if verdict is not None and tenant in self._tenants():
            self._quotas[tenant] = _Held(quotas, verdict, self._now())

    def emit(self, record: Record) -> None:
        """Note a record."""
        self.number += 1
        self._newest.append((self.number, record))
        if (held := self._quotas.get(record.tenant)) is not None and record.outcome != "refused":
            held.ended += 1
        day = self._today()
        day.requests += 1
        day.failed += record.outcome in {"error", "upstream_error", "upstream_interrupted"}
        usage = record.usage
        if usage is not None:
            day.input_tokens += usage.input_tokens
            day.as_sent_tokens += record.as_sent_tokens or 0
            if usage.cache_read_tokens is not None:
                day.reported_tokens += usage.input_tokens
                day.cached_tokens += usage.cache_read_tokens
        day.cost_usd += float(record.cost_usd or 0)
        day.saved_usd += float(record.saved_usd or 0)
        day.causes.update(record.causes)
        if record.divergence is not None:
            day.breaks[f"{record.divergence.layer}: {record.divergence.kind}"] += 1
        if record.conversation is not None:
            self._converse(record.conversation, record)

    def _converse(self, name: str, record: Record) -> None:
        known = self._conversations.setdefault(name, [0, 0, 0, 0.0])
        self._conversations.move_to_end(name)
        known[0] += 1
        known[1] += record.usage.input_tokens if record.usage else 0
        known[2] += (record.usage.cache_read_tokens or 0) if record.usage else 0
        known[3] = record.at
        while len(self._conversations) > _MOST_CONVERSATIONS:
            self._conversations.popitem(last=False)

    def state(self, since: int = 0) -> dict[str, object]:
        """Return what the page shows; of the requests those behind number `since`."""
        day, now = self._today(), self._now()
        return {
            "number": self.number,
            "day": day.name,
            "requests": day.requests,
            "failed": day.failed,
            "input_tokens": day.input_tokens,
            "cached_share": day.cached_tokens / day.reported_tokens if day.reported_tokens else None,
            "uplift_tokens": day.cached_tokens - day.as_sent_tokens if day.reported_tokens else None,
            "cost_usd": day.cost_usd,
            "saved_usd": day.saved_usd,
            "causes": dict(day.causes),
            "breaks": dict(day.breaks.most_common(10)),
            "own_kinds": sorted(OURS),
            "newest": [_shown(number, record) for number, record in self._newest if number > since][-50:],
            "conversations": [
                {
                    "conversation": name,
                    "requests": held[0],
                    "input_tokens": held[1],
                    "cached_tokens": held[2],
                    "at": held[3],
                }
                for name, held in reversed(self._conversations.items())
            ],
            "tenants": [
                {"tenant": tenant, "quota": kind, "used": held.used(kind, now), "limit": limit}
                for tenant, held in sorted(self._quotas.items())
                if tenant in self._tenants()
                for kind, limit in held.quotas.limits.items()
            ],
        }

    def _today(self) -> _Day:
        name = datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%d")
        if self._day.name != name:
            self._day = _Day(name)
        return self._day


def _shown(number: int, record: Record) -> dict[str, object]:
    usage, found = record.usage, record.divergence
    layers = [[layer.name, layer.tokens] for layer in record.layers.each if layer.tokens] if record.layers else []
    return {
        "number": number,
        "id": record.request_id,
        "at": record.at,
        "tenant": record.tenant,
        "model": record.model,
        "outcome": record.outcome,
        "layers": layers,
        "input_tokens": usage.input_tokens if usage else None,
        "cached_tokens": usage.cache_read_tokens if usage else None,
        "predicted_tokens": record.predicted_tokens,
        "break": [found.layer, found.kind, found.shared_tokens] if found else None,
        "seconds": record.duration_seconds,
    }
