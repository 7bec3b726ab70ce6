"""Why tokens were not read from the prompt cache: each token's one cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from proxy.core.divergence import Break, Trace
from proxy.core.profile import Profile

Cause = Literal["new", "cold_start", "expired", "changed", "below_minimum", "provider_miss", "unreported"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Tokens = Mapping[Cause, int]


def attribute(
    *,
    total: int,
    cached: int | None,
    counted: int,
    before: Trace | None,
    found: Break | None,
    idle_seconds: float | None,
    profile: Profile,
    predicted: int | None,
) -> Tokens:
    """Give each input token that was not read from the cache its cause; they sum to `total - cached`.

    `total` and `cached` are the upstream's tokens, `counted` is the same prompt in ours. `before` is the lineage's
    prompt before this one, None where there was none; `predicted` is what the cache should have held.
    """
    if cached is None:
        return {"unreported": total}
    missed = max(0, total - cached)
    scale = total / counted if counted else 1.0
    if before is None:
        # Prompts of others may share its beginning.
        lost = min(missed, max(0, round((predicted or 0) * scale) - cached))
        return _counts(provider_miss=lost, cold_start=missed - lost)
    shared = min(total, round((found.shared_tokens if found else before.tokens) * scale))
    changed = min(max(0, total - shared), round((before.tokens - found.shared_tokens) * scale)) if found else 0
    held = max(0, min(shared, missed) if cached == 0 else shared - cached)
    left = missed - held
    changed = min(changed, left)
    rest = _lost(held, shared, idle_seconds, profile, scale)
    return _counts(new=left - changed, changed=changed, **rest)


def _lost(held: int, shared: int, idle: float | None, profile: Profile, scale: float) -> dict[Cause, int]:
    """Say why what stood before was not read."""
    if not held:
        return {}
    if idle is not None and idle > profile.lifetime_seconds:
        return {"expired": held}
    if shared < profile.minimum_tokens * scale:
        return {"below_minimum": held}
    rounding = min(held, int(profile.block_tokens * scale))
    return {"below_minimum": rounding, "provider_miss": held - rounding}


def _counts(**tokens: int) -> Tokens:
    return {cause: tokens[cause] for cause in CAUSES if tokens.get(cause)}
