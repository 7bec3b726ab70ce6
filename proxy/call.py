"""What is found out about one request while it is under way; at its end it becomes the record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from decimal import Decimal

from proxy.core.cause import Tokens, attribute
from proxy.core.chain import Place
from proxy.core.conversation import Name
from proxy.core.divergence import Break, Trace
from proxy.core.lineage import NOTHING, Recalled
from proxy.core.measure import NO_LOSSES, Layers, Losses
from proxy.core.models import Model, describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.prefix import Step
from proxy.core.price import Amount, Price, cost
from proxy.core.quota import Kind, nanos
from proxy.core.request import Request
from proxy.core.tools import Order
from proxy.memory.store import Entry, Keys
from proxy.meter import Reservation
from proxy.observe.record import Outcome, Record
from proxy.relay import Told
from proxy.tenants import Tenant
from proxy.upstream.client import Exchange

_FAILED = 400
INLINE_BYTES = 16_384
"""More new text than this is counted in a thread, so that no other request waits for it."""
LONG_BYTES = 262_144
"""A longer body is read in a thread: what of it is new is not known before."""


@dataclass(slots=True, kw_only=True)
class Call:
    """`started` and `forwarded` are seconds of the monotonic clock, `at` of the wall clock.

    `place` is where how the prompt stands is remembered. `sent` is the client's own request; `request` is the same, or
    a windowed client's with `kept_messages` in front.
    """

    request_id: str
    at: float
    started: float
    tenant: Tenant
    keys: Keys
    policy: Policy = field(init=False)
    partition: str = field(init=False)
    model: Model = field(default_factory=lambda: describe(""))
    sent: Request | None = None
    request: Request | None = None
    name: Name | None = None
    conversation: str | None = None
    entry: Entry | None = None
    place: Place | None = None
    recalled: Recalled = NOTHING
    orders: tuple[Order, ...] = ()
    plan: Plan | None = None
    layers: Layers | None = None
    referenced_tokens: int = 0
    losses: Losses = NO_LOSSES
    trace: Trace | None = None
    before: Trace | None = None
    divergence: Break | None = None
    lineage: tuple[bytes, ...] = ()
    kept_messages: int = 0
    steps: tuple[Step, ...] = ()
    predicted_tokens: int | None = None
    as_sent_tokens: int | None = None
    as_sent_input_tokens: int | None = None
    price: Price | None = None
    ratio: float | None = None
    reservation: Reservation | None = None
    reserved: Amount | None = None
    unseen_bytes: int = 0
    degraded: bool = False
    ignored: bool = False
    cause: str | None = None
    outcome: Outcome = "error"
    status: int = 0
    forwarded: float | None = None
    measuring: asyncio.Future[None] | None = None
    exchange: Exchange = field(default_factory=Exchange)
    told: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.belongs(self.tenant)

    def belongs(self, tenant: Tenant) -> None:
        """Say whose it is."""
        self.tenant, self.policy, self.partition = tenant, tenant.policy, self.keys.partition(tenant.owner)

    def spot(self, place: Place) -> Place:
        """Return a place of its conversation as memory knows it: its owner's, its name's and its end user's."""
        user = self.name.user if self.name else (self.request.user or "" if self.request else "")
        return self.keys.place(self.partition, self.name.id if self.name else "", user, place)

    @property
    def replays(self) -> bool:
        """Whether its turns are forwarded again as they were: it is named, and its content may be remembered."""
        return self.name is not None and self.tenant.remember_content

    @property
    def heavy(self) -> bool:
        """Whether so much of it is new that no other request should wait until it is counted."""
        return self.unseen_bytes > INLINE_BYTES

    def overhead(self, now: float) -> float:
        """Seconds the proxy itself took before the upstream was called."""
        return (self.forwarded or now) - self.started

    @property
    def awaits_answer(self) -> bool:
        """Whether it is an anonymous request whose turn can be put back, once it is known how it was answered."""
        return self.place is not None and self.plan is not None and bool(self.plan.recurring.log)

    @property
    def over_quota(self) -> tuple[Kind, ...]:
        """The quotas this request is over, where it was let through all the same."""
        verdict = self.reservation.verdict if self.reservation else None
        return verdict.over if verdict else ()

    def used(self) -> tuple[int, int]:
        """Return the tokens and the money, in billionths, to be settled: what was reported, else an estimate."""
        usage, pieces = self.told.usage, self.told.pieces
        if usage is not None:
            paid, _ = self._money()
            return usage.input_tokens + (pieces if usage.output_tokens is None else usage.output_tokens), nanos(paid)
        if self.forwarded is None or self.reserved is None or self.status >= _FAILED:
            return 0, 0
        given = self.layers.total if self.layers else self.reserved.input
        amount = Amount(input=given, output=pieces if self.request and self.request.stream else 0)
        return given + amount.output, nanos(cost(self.price, amount)) if self.price else 0

    def conclude(self, status: int) -> None:
        """Say how an exchange ended whose answer has been passed on."""
        self.status = status
        match self.told.end:
            case "whole":
                good = status < _FAILED and not self.told.failed
                self.outcome = ("bypass" if self.cause else "ok") if good else "upstream_error"
            case "interrupted":
                self.outcome, self.cause = "upstream_interrupted", self.told.why
            case "client_gone":
                self.outcome = "client_closed"
            case "shutdown":
                self.outcome = "shutdown"

    def _reported(self, tokens: int | None) -> int | None:
        # Vocabularies differ: a prediction counts in the upstream's tokens, where it says how many the prompt has.
        own, usage = sum(step.tokens for step in self.steps), self.told.usage
        if not tokens or not own or usage is None or not usage.input_tokens:
            return tokens
        return round(tokens * usage.input_tokens / own)

    def _money(self) -> tuple[Decimal | None, Decimal | None]:
        """Return what the answer cost, and what the client's own bytes would have cost."""
        usage = self.told.usage
        if self.price is None or usage is None:
            return None, None
        read, output = usage.cache_read_tokens or 0, usage.output_tokens or 0
        written = usage.cache_write_tokens or 0
        paid = Amount(input=usage.input_tokens, cached_read=read, cached_write=written, output=output)
        total, cached = self._reported(self.as_sent_input_tokens), self._reported(self.as_sent_tokens) or 0
        if total is None or usage.cache_read_tokens is None:
            return cost(self.price, paid), None
        # Where the upstream charges for writing, it would have charged for what was not read.
        own = Amount(input=total, cached_read=cached, cached_write=total - cached if written else 0, output=output)
        return cost(self.price, paid), cost(self.price, own)

    def _causes(self) -> Tokens:
        """Say why what was not read from the prompt cache was not."""
        usage = self.told.usage
        if usage is None or self.trace is None:
            return {}
        return attribute(
            total=usage.input_tokens,
            cached=usage.cache_read_tokens,
            counted=self.trace.tokens,
            before=self.before,
            found=self.divergence,
            idle_seconds=self.at - self.before.at if self.before else None,
            profile=self.policy.profile,
            predicted=self.predicted_tokens,
        )

    def record(self, now: float) -> Record:
        """Freeze what is known."""
        plan, told = self.plan, self.told
        paid, as_sent = self._money()
        return Record(
            request_id=self.request_id,
            at=self.at,
            tenant=self.tenant.name,
            model=self.model.name,
            mode=self.tenant.policy.mode,
            stream=bool(self.request and self.request.stream),
            outcome=self.outcome,
            status=self.status,
            cause=self.cause,
            conversation=self.conversation,
            layers=self.layers,
            limit_tokens=plan.limit if plan else None,
            dropped_turns=plan.dropped_turns if plan else 0,
            dropped_exchanges=plan.dropped_exchanges if plan else 0,
            actions=plan.actions if plan else (),
            losses=self.losses,
            divergence=self.divergence,
            causes=self._causes(),
            lineage=self.conversation or (self.lineage[-1].hex() if self.lineage else self.request_id),
            owner=self.tenant.owner,
            kept_messages=self.kept_messages,
            current_values=len(plan.current.slots) if plan else 0,
            lines_behind=plan.formed.behind if plan and plan.formed else 0,
            references=len(plan.draft.referenced) if plan else 0,
            referenced_tokens=self.referenced_tokens,
            library_items=len(plan.draft.library.items) if plan else 0,
            epoch=plan.epoch.number if plan and plan.epoch else None,
            began=plan.began if plan else None,
            over_quota=self.over_quota,
            predicted_tokens=self._reported(self.predicted_tokens),
            as_sent_tokens=self._reported(self.as_sent_tokens),
            as_sent_input_tokens=self._reported(self.as_sent_input_tokens),
            cost_usd=paid,
            as_sent_usd=as_sent,
            usage=told.usage,
            usage_due=self.outcome in {"ok", "bypass"},
            output_events=told.pieces,
            overhead_seconds=self.overhead(now),
            first_token_seconds=None if told.first_at is None else told.first_at - self.started,
            duration_seconds=now - self.started,
        )
