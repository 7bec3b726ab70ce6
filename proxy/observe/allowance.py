"""Verdict → response headers, in the words OpenAI's SDKs know: what is left of a rate, and whether to try again."""

from __future__ import annotations

from proxy.core.quota import Kind, Quotas, Verdict

Headers = list[tuple[bytes, bytes]]
_RATES: tuple[tuple[Kind, bytes], ...] = (("requests_per_minute", b"requests"), ("tokens_per_minute", b"tokens"))
_PERIODS: tuple[Kind, ...] = ("tokens_per_day", "tokens_per_month", "usd_per_day", "usd_per_month")
_NANO = 1_000_000_000


def headers(quotas: Quotas, verdict: Verdict) -> Headers:
    """Return `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, and `x-strata-quota: tokens_per_day=120/5000`."""
    told: Headers = []
    for kind, name in _RATES:
        if kind in quotas.limits:
            limit, used = quotas.limits[kind], verdict.used[kind]
            told += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, limit - used)),
                (b"x-ratelimit-reset-" + name, _duration(60 * max(0, used) / limit).encode()),
            ]
    periods = [
        f"{kind}={amount(kind, verdict.used[kind])}/{amount(kind, quotas.limits[kind])}"
        for kind in _PERIODS
        if kind in quotas.limits
    ]
    if periods:
        told.append((b"x-strata-quota", "; ".join(periods).encode()))
    return told


def refusal(verdict: Verdict) -> Headers:
    """Return what tells a client when to try again, and whether it should."""
    if verdict.wait_seconds is None:
        return [(b"x-should-retry", b"false")]
    return [
        (b"retry-after", b"%d" % max(1, -int(-verdict.wait_seconds // 1))),
        (b"retry-after-ms", b"%d" % max(1, int(verdict.wait_seconds * 1000))),
        (b"x-should-retry", b"true"),
    ]


def amount(kind: Kind, value: int) -> str:
    """Show an amount: tokens and requests as they are, money in US dollars."""
    return f"{value / _NANO:.6f}".rstrip("0").rstrip(".") if kind.startswith("usd") else str(value)


def _duration(seconds: float) -> str:
    """Show a duration as OpenAI does: `120ms`, `7.66s`, `1m30s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // 60)}m{round(seconds % 60)}s"
