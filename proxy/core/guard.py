"""Fitting a prompt into its limit: what goes, in one order, until it fits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from proxy.core import budget, measure, render
from proxy.core.budget import Limit
from proxy.core.layers import Draft
from proxy.core.measure import Scale
from proxy.core.message import Message
from proxy.core.request import Request
from proxy.core.turn import Shape, Span, exchanges

OverBudget = Literal["forward", "reject"]
Action = Literal["turns_dropped", "exchanges_dropped", "library_left_out", "forwarded_over_budget", "rejected"]
ACTIONS: tuple[Action, ...] = get_args(Action)

Arrange = Callable[[tuple[Span, ...]], Draft]
"""Arranges the prompt without some runs of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A draft that has been held against its limit. `total` is None where its bytes alone proved that it fits."""

    draft: Draft
    total: int | None = None
    dropped_turns: int = 0
    dropped_exchanges: int = 0
    actions: tuple[Action, ...] = ()


def fit(
    request: Request, parts: Shape, arrange: Arrange, *, limit: Limit, over_budget: OverBudget, scale: Scale
) -> Fitted:
    """Take the oldest whole units of history away, on the grid, until the prompt fits.

    What is lost and what the units weigh is in one currency: the prompt as it would be sent whole. Where no cut makes
    it fit the model's window nothing is cut: the upstream answers, and may know better.
    """
    messages = request.messages
    whole = draft = arrange(())
    uncut = total = measure.layers(request, draft, scale).total
    units = _units(messages, parts)
    sizes = [sum(_weight(request, draft, index, scale) for index in range(unit.start, unit.end)) for unit in units]
    fixed = sum(scale.message(request.raw(index), messages[index].digest) for index in range(parts.leading))
    step = budget.step(limit.base, fixed + _schemas(request, scale))
    lost, gone = budget.lost(total=total, limit=limit.tokens, step=step), 0
    while total > limit.tokens and gone < len(units):
        gone = budget.units(sizes, lost)
        draft = arrange(units[:gone])
        total = measure.layers(request, draft, scale).total
        lost += step
    own = limit.own is not None and total > limit.own
    if total > limit.tokens and not own:
        return Fitted(draft=whole, total=uncut, actions=("forwarded_over_budget",))
    turns = min(gone, max(0, len(parts.turns) - 1))
    actions: list[Action] = []
    if turns:
        actions.append("turns_dropped")
    if gone > turns:
        actions.append("exchanges_dropped")
    if total > limit.tokens:
        actions.append("rejected" if over_budget == "reject" else "forwarded_over_budget")
    return Fitted(draft=draft, total=total, dropped_turns=turns, dropped_exchanges=gone - turns, actions=tuple(actions))


def _units(messages: Sequence[Message], parts: Shape) -> tuple[Span, ...]:
    """Return what may go, oldest first: whole turns, then the newest turn's exchanges up to its last tool exchange.

    Exchanges with signed reasoning stay: it is accepted back only behind what it was made from.
    """
    newest = exchanges(messages, parts.newest)
    if any(message.signed for message in messages[parts.newest.start : parts.newest.end]):
        newest = ()
    last = max((place for place, span in enumerate(newest) if messages[span.start].calls), default=len(newest) - 1)
    return (*parts.turns[:-1], *newest[: max(0, last)])


def _weight(request: Request, draft: Draft, index: int, scale: Scale) -> int:
    if index not in draft.forms and index not in draft.changes:
        return scale.message(request.raw(index), request.messages[index].digest)
    raw = render.sent(request, draft, index)
    return scale.message(raw, hashlib.sha256(raw).digest())


def _schemas(request: Request, scale: Scale) -> int:
    return sum(scale.schema(raw) for raw in map(request.member, ("tools", "functions", "response_format")) if raw)
