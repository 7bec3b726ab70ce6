"""Quotas: what a tenant may use in a period. Pure; Redis runs the same rules in one script (`memory.quotas`).

An estimate is reserved before a request is forwarded and settled on what the upstream reported. Rates refill without a
pause (a token bucket of one minute); days and months are those of UTC. All amounts are integers: tokens, and
billionths of a US dollar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from typing import Literal, get_args

Kind = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
    "usd_per_day",
    "usd_per_month",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
RATES: frozenset[Kind] = frozenset({"requests_per_minute", "tokens_per_minute", "concurrent_requests"})
"""Over one of these a client waits a little; over the others the period's allowance is used up."""

GRAINS = 60_000
"""A minute's milliseconds: a bucket that holds `limit` tokens gains `limit` grains a millisecond."""
LEASE_SECONDS = 120.0
"""A reservation that nobody renews for so long is given back: whoever made it has died."""
_LEASE_MS = int(LEASE_SECONDS * 1000)
_NANO = Decimal(1_000_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits by kind; `shadow` evaluates and reports, and refuses nothing."""

    limits: Mapping[Kind, int] = field(default_factory=dict)
    shadow: bool = False

    def __bool__(self) -> bool:
        return bool(self.limits)


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request reserves. `id` is the request's own."""

    id: str
    tokens: int
    nanos: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A rate's allowance in grains as it was at a moment, in milliseconds."""

    grains: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one owner has used: settled by day and month, and what is reserved by requests under way."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    day: tuple[str, int, int] = ("", 0, 0)
    month: tuple[str, int, int] = ("", 0, 0)
    live: Mapping[str, tuple[Ask, int]] = field(default_factory=dict)


NEW = Account()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which quotas forbid a request, if any. `used` is by kind, this request included where it goes.

    `wait_seconds` is how long until it could go, where waiting helps.
    """

    over: tuple[Kind, ...]
    used: Mapping[Kind, int]
    wait_seconds: float | None = None


def nanos(usd: Decimal | None) -> int:
    """Return US dollars in billionths, rounded up; an unknown amount is none."""
    return 0 if usd is None else int((usd * _NANO).to_integral_value(ROUND_CEILING))


def periods(now_ms: int) -> tuple[str, str]:
    """Return the names of a moment's day and month: `2026-11-30`, `2026-11`."""
    day = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%d")
    return day, day[:7]


def admit(account: Account, quotas: Quotas, ask: Ask, now_ms: int) -> tuple[Account, Verdict]:
    """Reserve what a request asks for, or say which quota forbids it. Nothing is taken then."""
    limits = quotas.limits
    account = _current(account, now_ms)
    requests = _refilled(account.requests, limits.get("requests_per_minute"), now_ms)
    tokens = _refilled(account.tokens, limits.get("tokens_per_minute"), now_ms)
    over = _over(account, limits, ask, requests, tokens)
    if not over or quotas.shadow:
        live = {**account.live, ask.id: (ask, now_ms + _LEASE_MS)}
        account = dataclasses.replace(account, live=live)
    if not over:
        # In shadow, rates are those of the requests that would have gone.
        requests, tokens = _taken(requests, 1), _taken(tokens, ask.tokens)
    account = dataclasses.replace(account, requests=requests, tokens=tokens)
    left = (requests.grains if requests else 0, tokens.grains if tokens else 0)
    used = usage(limits, left=left, live=len(account.live), day=_with(account, account.day),
                 month=_with(account, account.month))  # fmt: skip
    return account, Verdict(over=over, used=used, wait_seconds=wait(over, limits, left, ask))


def settle(account: Account, ask: Ask, *, tokens: int, nanos: int, now_ms: int) -> Account:
    """Put what a request has used in the place of what it reserved."""
    account = _current(account, now_ms)
    bucket = account.tokens
    if bucket is not None and ask.id in account.live:
        bucket = Bucket(bucket.grains + (ask.tokens - tokens) * GRAINS, bucket.at)
    (day, day_tokens, day_nanos), (month, month_tokens, month_nanos) = account.day, account.month
    return dataclasses.replace(
        account,
        tokens=bucket,
        live={name: held for name, held in account.live.items() if name != ask.id},
        day=(day, day_tokens + tokens, day_nanos + nanos),
        month=(month, month_tokens + tokens, month_nanos + nanos),
    )


def renew(account: Account, ids: frozenset[str], now_ms: int) -> Account:
    """Keep the reservations of requests that are still under way."""
    until = now_ms + _LEASE_MS
    live = {name: (ask, until if name in ids else end) for name, (ask, end) in account.live.items()}
    return dataclasses.replace(account, live=live)


def usage(
    limits: Mapping[Kind, int],
    *,
    left: tuple[int, int],
    live: int,
    day: tuple[int, int],
    month: tuple[int, int],
) -> dict[Kind, int]:
    """Return what is used of each limit; `left` are grains of the two rates, `day` and `month` tokens and money."""
    all_used: dict[Kind, int] = {
        "requests_per_minute": limits.get("requests_per_minute", 0) - left[0] // GRAINS,
        "tokens_per_minute": limits.get("tokens_per_minute", 0) - left[1] // GRAINS,
        "concurrent_requests": live,
        "tokens_per_day": day[0],
        "tokens_per_month": month[0],
        "usd_per_day": day[1],
        "usd_per_month": month[1],
    }
    return {kind: amount for kind, amount in all_used.items() if kind in limits}


def wait(over: Sequence[Kind], limits: Mapping[Kind, int], left: tuple[int, int], ask: Ask) -> float | None:
    """Return how many seconds until the rates allow the request; None where they never will, or not in this period."""
    waits = [_wait(kind, limits, left, ask) for kind in over]
    return max((each for each in waits if each is not None), default=None) if None not in waits else None


def _wait(over: Kind, limits: Mapping[Kind, int], left: tuple[int, int], ask: Ask) -> float | None:
    match over:
        case "requests_per_minute":
            return max(0, GRAINS - left[0]) / limits[over] / 1000
        case "tokens_per_minute" if ask.tokens <= limits[over]:
            return max(0, ask.tokens * GRAINS - left[1]) / limits[over] / 1000
        case "concurrent_requests":
            return 1.0
        case _:
            return None


def _current(account: Account, now_ms: int) -> Account:
    """Begin new periods, and give back what nobody holds any more."""
    day, month = periods(now_ms)
    latest = now_ms + _LEASE_MS
    live = account.live
    if not all(now_ms <= end <= latest for _, end in live.values()):
        # A clock that went back has left leases that would never end.
        live = {name: (ask, min(end, latest)) for name, (ask, end) in live.items() if end >= now_ms}
    return dataclasses.replace(
        account,
        live=live,
        day=account.day if account.day[0] == day else (day, 0, 0),
        month=account.month if account.month[0] == month else (month, 0, 0),
    )


def _refilled(bucket: Bucket | None, limit: int | None, now_ms: int) -> Bucket | None:
    if limit is None:
        return None
    full = limit * GRAINS
    if bucket is None:
        return Bucket(full, now_ms)
    # A clock that went back fills nothing, and what it says now counts from here on.
    return Bucket(min(full, bucket.grains + max(0, now_ms - bucket.at) * limit), now_ms)


def _taken(bucket: Bucket | None, amount: int) -> Bucket | None:
    return None if bucket is None else Bucket(bucket.grains - amount * GRAINS, bucket.at)


def _with(account: Account, period: tuple[str, int, int]) -> tuple[int, int]:
    held = [ask for ask, _ in account.live.values()]
    return period[1] + sum(ask.tokens for ask in held), period[2] + sum(ask.nanos for ask in held)


def _over(
    account: Account, limits: Mapping[Kind, int], ask: Ask, requests: Bucket | None, tokens: Bucket | None
) -> tuple[Kind, ...]:
    day, month = _with(account, account.day), _with(account, account.month)
    over: dict[Kind, bool] = {
        "requests_per_minute": requests is not None and requests.grains < GRAINS,
        "tokens_per_minute": tokens is not None and tokens.grains < ask.tokens * GRAINS,
    }
    wanted: dict[Kind, int] = {
        "concurrent_requests": len(account.live) + 1,
        "tokens_per_day": day[0] + ask.tokens,
        "tokens_per_month": month[0] + ask.tokens,
        "usd_per_day": day[1] + ask.nanos,
        "usd_per_month": month[1] + ask.nanos,
    }
    over |= {kind: wanted[kind] > limits[kind] for kind in wanted if kind in limits}
    return tuple(kind for kind in KINDS if over.get(kind))
