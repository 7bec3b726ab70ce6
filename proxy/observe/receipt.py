"""Plan → response headers: what the proxy did, told before the answer begins. Bounded in size."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.divergence import Break
from proxy.core.measure import Layers, Losses
from proxy.core.plan import Plan
from proxy.core.quota import Kind

_NOTES = {
    "library_left_out": "the context library was left out: it did not fit",
    "forwarded_over_budget": "the prompt is over its limit and was forwarded all the same",
}


def headers(
    *,
    request_id: str,
    conversation: str | None,
    plan: Plan | None,
    layers: Layers | None,
    losses: Losses,
    divergence: Break | None,
    predicted_tokens: int | None,
    cause: str | None,
    overhead_seconds: float,
    degraded: bool,
    ignored: bool,
    kept_messages: int,
    over_quota: tuple[Kind, ...],
    quota_unknown: bool,
    allowance: Sequence[tuple[bytes, bytes]],
) -> list[tuple[bytes, bytes]]:
    """Return the receipt, `x-strata-layers: L1=812:9f86d081884c7d65 L4=… L5=…` among it (tokens:digest)."""
    told = [(b"x-strata-request-id", request_id)]
    if conversation is not None:
        told.append((b"x-strata-conversation", _plain(conversation)))
    if layers is not None:
        shown = " ".join(f"{layer.name}={layer.tokens}:{layer.sha256}" for layer in layers.each if layer.tokens)
        told.append((b"x-strata-layers", shown))
        if plan is not None and plan.limit is not None:
            told.append((b"x-strata-budget", f"total={layers.total}; limit={plan.limit}"))
        if predicted_tokens is not None:
            told.append((b"x-strata-predicted-tokens", str(predicted_tokens)))
    told += _lost(losses)
    if divergence is not None:
        told.append((b"x-strata-divergence", _where(divergence)))
    if kept_messages:
        told.append((b"x-strata-kept-messages", str(kept_messages)))
    if plan is not None:
        told += _planned(plan)
    warnings = _warnings(plan, cause=cause, ignored=ignored, degraded=degraded)
    warnings += _allowance(over_quota, unknown=quota_unknown)
    if warnings:
        told.append((b"x-strata-warning", "; ".join(warnings)))
    told.append((b"server-timing", f"strata;dur={overhead_seconds * 1000:.2f}"))
    return [*((name, value.encode("latin-1", "replace")) for name, value in told), *allowance]


def _where(found: Break) -> str:
    facts = (("kind", found.kind), ("message", found.message), ("character", found.character))
    return "; ".join([found.layer, *(f"{name}={value}" for name, value in facts if value is not None)])


def _lost(losses: Losses) -> list[tuple[bytes, str]]:
    told = []
    if losses.dropped_messages:
        told.append((b"x-strata-dropped", f"messages={losses.dropped_messages}; tokens={losses.dropped_tokens}"))
    if losses.shortened_messages or losses.shortened_items:
        counts = f"messages={losses.shortened_messages}; items={losses.shortened_items}"
        told.append((b"x-strata-shortened", f"{counts}; tokens={losses.shortened_tokens}"))
    return told


def _planned(plan: Plan) -> list[tuple[bytes, str]]:
    told: list[tuple[bytes, str]] = []
    if plan.epoch is not None:
        why = f"; began={plan.began}" if plan.began else ""
        told.append((b"x-strata-epoch", f"{plan.epoch.number}{why}"))
    if plan.draft.tools:
        told.append((b"x-strata-tools", "reordered"))
    if plan.formed is not None and (lines := plan.formed.behind):
        told.append((b"x-strata-lines-behind", str(lines)))
    for name, count in (
        (
            b"x-strata-replayed",
            sum(index >= plan.draft.leading and plan.draft.keeps(index) for index in plan.draft.forms),
        ),
        (b"x-strata-current-values", len(plan.current.slots)),
        (b"x-strata-library-items", len(plan.draft.library.items)),
        (b"x-strata-dropped-turns", plan.dropped_turns),
        (b"x-strata-dropped-exchanges", plan.dropped_exchanges),
        (b"x-strata-references", len(plan.draft.referenced)),
    ):
        if count:
            told.append((name, str(count)))
    return told


def _warnings(plan: Plan | None, *, cause: str | None, ignored: bool, degraded: bool) -> list[str]:
    warnings = [f"bypass: {cause}"] if cause else []
    if ignored:
        warnings.append("the body's strata member was not understood and left out")
    warnings += [_NOTES[action] for action in (plan.actions if plan else ()) if action in _NOTES]
    if degraded:
        warnings.append("memory is degraded: Redis does not answer")
    return warnings


def _allowance(over: tuple[Kind, ...], *, unknown: bool) -> list[str]:
    told = [f"over quota: {', '.join(over)} (shadow: not enforced)"] if over else []
    return [*told, "quotas were not looked up: Redis does not answer"] if unknown else told


def _plain(text: str) -> str:
    """A header holds no line breaks, and not without end."""
    return "".join(char if char.isprintable() and char.isascii() else "?" for char in text)[:128]
