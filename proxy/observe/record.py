"""The record: one frozen value a request, emitted last whatever happened. Every number elsewhere is a field of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, get_args

from proxy.core.cause import Tokens
from proxy.core.divergence import Break
from proxy.core.epoch import Reason
from proxy.core.guard import Action
from proxy.core.measure import NO_LOSSES, Layers, Losses
from proxy.core.quota import Kind
from proxy.core.usage import Usage

Outcome = Literal[
    "ok", "bypass", "refused", "upstream_error", "upstream_interrupted", "client_closed", "shutdown", "error"
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One chat request. Times are seconds; `model` is a label from a closed set. Holds no content and no key.

    `predicted_tokens` are those the upstream's prompt cache should hold of what was forwarded, `as_sent_tokens` those
    it would have held of the client's own bytes, in its tokens where it reports any; the uplift is their difference.
    `cost_usd` is what the answer cost, `as_sent_usd` what the client's own bytes would have cost, being
    `as_sent_input_tokens`; None where the price is unknown. The saving is their difference, and may be negative.
    `losses` are what the limit took from what is sent, in this request or when its epoch began.
    `divergence` is where the prompt first differs from the one before in its `lineage`, and `causes` are the tokens
    that were not read from the cache, by why. `owner` is whose it is, and is shown nowhere.
    `kept_messages` stand in front of what a windowed client sent; `current_values` are places of L1 whose values are
    told elsewhere, `lines_behind` its lines that stand behind what others share.
    `over_quota` are the quotas it was over, where it was let through (`shadow`).
    `overhead_seconds` is what the proxy itself took before the upstream was called; `output_events` counts pieces of a
    stream that reached the client, known also where usage never came.
    """

    request_id: str
    at: float
    tenant: str
    model: str
    mode: str
    stream: bool
    outcome: Outcome
    status: int
    cause: str | None = None
    conversation: str | None = None
    layers: Layers | None = None
    limit_tokens: int | None = None
    dropped_turns: int = 0
    dropped_exchanges: int = 0
    actions: tuple[Action, ...] = ()
    losses: Losses = NO_LOSSES
    divergence: Break | None = None
    causes: Tokens = field(default_factory=dict)
    lineage: str = ""
    owner: str | Mapping[str, str] = field(default="", repr=False)
    kept_messages: int = 0
    current_values: int = 0
    lines_behind: int = 0
    references: int = 0
    referenced_tokens: int = 0
    library_items: int = 0
    epoch: int | None = None
    began: Reason | None = None
    over_quota: tuple[Kind, ...] = ()
    predicted_tokens: int | None = None
    as_sent_tokens: int | None = None
    as_sent_input_tokens: int | None = None
    cost_usd: Decimal | None = None
    as_sent_usd: Decimal | None = None
    usage: Usage | None = None
    usage_due: bool = False
    output_events: int = 0
    overhead_seconds: float = 0.0
    first_token_seconds: float | None = None
    duration_seconds: float = 0.0

    @property
    def saved_usd(self) -> Decimal | None:
        """What was saved, in US dollars; negative where the client's own bytes would have cost less."""
        return None if self.cost_usd is None or self.as_sent_usd is None else self.as_sent_usd - self.cost_usd
