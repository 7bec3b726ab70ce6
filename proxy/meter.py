"""Holding tenants to their quotas: an estimate reserved before a request is forwarded, settled when it has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from proxy.background import Background
from proxy.core.quota import RATES, Ask, Quotas, Verdict
from proxy.errors import NO_QUOTA, OVER_QUOTA, RATE_LIMITED, StrataError
from proxy.memory.quotas import Counting
from proxy.observe import allowance
from proxy.tenants import Tenant

_RENEW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a request under way holds. `verdict` is None where the store did not answer and it was let through."""

    owner: str
    quotas: Quotas
    ask: Ask
    verdict: Verdict | None

    @property
    def headers(self) -> allowance.Headers:
        """What the answer tells the client of its rates."""
        return allowance.headers(self.quotas, self.verdict) if self.verdict else []


class Meter:
    """`owner` digests whose quotas they are; `told` hears each verdict, None where the store did not answer.

    `closed` refuses requests while the store does not answer.
    """

    def __init__(
        self,
        counting: Counting,
        *,
        owner: Callable[[Tenant], str],
        closed: Callable[[], bool],
        told: Callable[[str, Quotas, Verdict | None], None],
        background: Background,
    ) -> None:
        self._counting = counting
        self._owner = owner
        self._closed = closed
        self._told = told
        self._background = background
        self._held: dict[str, Reservation] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(self, tenant: Tenant, request_id: str, *, tokens: int, nanos: int) -> Reservation | None:
        """Reserve an estimate; None for a tenant without quotas. Raises StrataError (429, 403, 503)."""
        quotas = tenant.quotas
        if not quotas:
            return None
        owner, ask = self._owner(tenant), Ask(request_id, tokens, nanos)
        verdict = await self._counting.admit(owner, quotas, ask, _now_ms())
        self._told(tenant.name, quotas, verdict)
        if verdict is None and self._closed():
            # It may have been admitted after we stopped waiting.
            settled = self._counting.settle(owner, ask, tokens=0, nanos=0, now_ms=_now_ms())
            self._background.start(settled)
            raise StrataError(NO_QUOTA, "Quotas cannot be looked up now, and STRATA_QUOTA_WITHOUT_REDIS is closed.")
        if verdict is not None and verdict.over and not quotas.shadow:
            raise _refusal(tenant, ask, verdict)
        held = self._held[request_id] = Reservation(owner, quotas, ask, verdict)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RENEW_SECONDS, self._due)
        return held

    def settle(self, held: Reservation, *, tokens: int, nanos: int) -> None:
        """Count what was used in the place of what was reserved."""
        self._held.pop(held.ask.id, None)
        self._background.start(
            self._counting.settle(held.owner, held.ask, tokens=tokens, nanos=nanos, now_ms=_now_ms())
        )

    def _due(self) -> None:
        """Keep the reservations of long answers."""
        self._timer = None
        asks: dict[str, list[Ask]] = {}
        for held in self._held.values():
            asks.setdefault(held.owner, []).append(held.ask)
        if asks:
            self._timer = asyncio.get_running_loop().call_later(_RENEW_SECONDS, self._due)
            self._background.start(self._counting.renew(asks, _now_ms()))


def _now_ms() -> int:
    return int(time.time() * 1000)


def _refusal(tenant: Tenant, ask: Ask, verdict: Verdict) -> StrataError:
    # A period that is used up is what to tell, whatever rate is over too.
    kind = next((kind for kind in verdict.over if kind not in RATES), verdict.over[0])
    limit, used = tenant.quotas.limits[kind], verdict.used[kind]
    wanted = {"requests_per_minute": 1, "concurrent_requests": 1}.get(kind, ask.tokens)
    wanted = ask.nanos if kind.startswith("usd") else wanted
    told = ", ".join(
        f"{name} {allowance.amount(kind, value)}"
        for name, value in (("limit", limit), ("used", used), ("requested", wanted))
    )
    again = "" if verdict.wait_seconds is None else f" Please try again in {max(0.01, verdict.wait_seconds):.2f}s."
    if verdict.wait_seconds is None and kind in RATES:
        again = " It will never fit: shorten it, or lower max_completion_tokens."
    headers = [*allowance.headers(tenant.quotas, verdict), *allowance.refusal(verdict)]
    if kind in RATES:
        return StrataError(RATE_LIMITED, f"Rate limit reached on {kind}: {told}.{again}", headers=headers)
    return StrataError(OVER_QUOTA, f"This request is over its tenant's quota {kind}: {told}.", headers=headers)
