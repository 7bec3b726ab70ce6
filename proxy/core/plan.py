"""Request and memory → Plan: the layering, the guard, and why each thing was done. Pure.

One page: `make` arranges everything, looks whether it fits, and takes away in one order until it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core import budget, layers, library, lineage, measure, tokens
from proxy.core.layers import Draft
from proxy.core.library import Library
from proxy.core.lineage import Link, Recalled
from proxy.core.measure import Scale
from proxy.core.message import Message
from proxy.core.models import Model
from proxy.core.request import Request
from proxy.core.turn import Shape, Span, exchanges, shape

Mode = Literal["layered", "observe"]
OverBudget = Literal["forward", "reject"]
Action = Literal["turns_dropped", "exchanges_dropped", "library_left_out", "forwarded_over_budget", "rejected"]
ACTIONS: tuple[Action, ...] = (
    "turns_dropped", "exchanges_dropped", "library_left_out", "forwarded_over_budget", "rejected",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings a plan depends on, of one tenant; tokens."""

    mode: Mode
    budget_tokens: int | None
    reserve_tokens: int
    over_budget: OverBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is forwarded and why. `total` is None where the bytes alone proved that all fits."""

    draft: Draft
    links: tuple[Link, ...]
    total: int | None
    limit: int | None
    dropped_turns: int = 0
    dropped_exchanges: int = 0
    actions: tuple[Action, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the limit is held."""
        return self.total is None or self.limit is None or self.total <= self.limit

    @property
    def rejected(self) -> bool:
        """Whether the tenant's budget forbids the request."""
        return "rejected" in self.actions


def make(request: Request, recalled: Recalled, *, model: Model, policy: Policy, named: bool, scale: Scale) -> Plan:
    """Plan one request. The same request, memory and settings give the same plan, in any process."""
    messages = request.messages
    parts = shape(messages)
    links = lineage.chain(messages, parts) if named else ()
    if policy.mode == "observe":
        draft = Draft(leading=parts.leading, newest=parts.newest, dropped=(), library=Library())
        return Plan(draft=draft, links=links, total=None, limit=None)
    shelf = library.of(messages, parts, lineage.match(links, recalled)) if named else Library()
    draft = layers.arrange(messages, parts, library=shelf, context=request.hints.context, dropped=())
    limit = budget.limit(
        model=model, budget=policy.budget_tokens, reserve=policy.reserve_tokens, reply=request.reply_tokens
    )
    most = (
        len(request.body)
        + sum(message.media for message in messages) * tokens.MOST_PER_PART
        + sum(len(entry.item.content.encode()) + 200 for entry in shelf.entries)
    )
    if limit is None or most <= limit.tokens:
        return Plan(draft=draft, links=links, total=None, limit=limit.tokens if limit else None)
    total = measure.layers(request, draft, scale).total
    if total <= limit.tokens:
        return Plan(draft=draft, links=links, total=total, limit=limit.tokens)
    return _fit(request, parts, draft, links=links, total=total, limit=limit, policy=policy, scale=scale)


def _fit(
    request: Request,
    parts: Shape,
    draft: Draft,
    *,
    links: tuple[Link, ...],
    total: int,
    limit: budget.Limit,
    policy: Policy,
    scale: Scale,
) -> Plan:
    """Take away what the client left out itself, then the oldest whole units of history, on the grid."""
    messages, context = request.messages, request.hints.context
    actions: list[Action] = []
    if draft.library:
        draft = layers.arrange(messages, parts, library=Library(), context=context, dropped=())
        total = measure.layers(request, draft, scale).total
        actions.append("library_left_out")
    units = _units(messages, parts)
    sizes = [sum(_bare(request, index, scale) for index in range(unit.start, unit.end)) for unit in units]
    fixed = sum(scale.message(request.raw(index), messages[index].digest) for index in range(parts.leading))
    step = budget.step(limit.base, fixed + _schemas(request, scale))
    lost, gone = budget.lost(total=total, limit=limit.tokens, step=step), 0
    while total > limit.tokens and gone < len(units):
        gone = budget.units(sizes, lost)
        draft = layers.arrange(messages, parts, library=Library(), context=context, dropped=units[:gone])
        total = measure.layers(request, draft, scale).total
        lost += step
    turns = min(gone, max(0, len(parts.turns) - 1))
    if turns:
        actions.append("turns_dropped")
    if gone > turns:
        actions.append("exchanges_dropped")
    if total > limit.tokens:
        own = limit.own is not None and total > limit.own
        actions.append("rejected" if own and policy.over_budget == "reject" else "forwarded_over_budget")
    return Plan(
        draft=draft,
        links=links,
        total=total,
        limit=limit.tokens,
        dropped_turns=turns,
        dropped_exchanges=gone - turns,
        actions=tuple(actions),
    )


def _units(messages: Sequence[Message], parts: Shape) -> tuple[Span, ...]:
    """Return what may go, oldest first: whole turns, then the newest turn's exchanges up to its last tool exchange.

    Exchanges with signed reasoning stay: it is accepted back only behind what it was made from.
    """
    newest = exchanges(messages, parts.newest)
    if any(message.signed for message in messages[parts.newest.start : parts.newest.end]):
        newest = ()
    last = max((place for place, span in enumerate(newest) if messages[span.start].calls), default=len(newest) - 1)
    return (*parts.turns[:-1], *newest[: max(0, last)])


def _bare(request: Request, index: int, scale: Scale) -> int:
    """Weigh a message without its context blocks, so that the cut does not depend on what was attached."""
    message = request.messages[index]
    blocks = [block.item.content for text in message.texts for block in text.blocks if block.item]
    return scale.message(request.raw(index), message.digest) - sum(scale.text(block) for block in blocks)


def _schemas(request: Request, scale: Scale) -> int:
    return sum(scale.schema(raw) for raw in map(request.member, ("tools", "functions", "response_format")) if raw)
