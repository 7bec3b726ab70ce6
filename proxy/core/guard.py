"""Fitting a prompt into its limit: the ladder, cheapest loss first, until it fits.

L2's items become outlines; old tool outputs keep head and tail; the oldest whole turns go, then exchanges of the
newest; what is long in what remains keeps head and tail; the turn's own `strata.context` shares the room there is.
What is taken depends on the grid alone, so that it holds still while the conversation grows by a step.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from proxy.core import budget, measure, shorten
from proxy.core.budget import Limit
from proxy.core.cut import WHOLE, Cut, left_out
from proxy.core.draft import Draft
from proxy.core.measure import Scale
from proxy.core.message import RESULT_ROLES, Message
from proxy.core.policy import OverBudget
from proxy.core.request import Request
from proxy.core.turn import Shape, Span, exchanges

Action = Literal[
    "library_outlined", "outputs_shortened", "turns_dropped", "exchanges_dropped", "replies_shortened",
    "context_packed", "library_left_out", "forwarded_over_budget", "rejected",
]  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)

Arrange = Callable[[Cut], Draft]
"""Arranges the prompt with a cut made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A draft that has been held against its limit. `total` is None where its bytes alone proved that it fits."""

    draft: Draft
    total: int | None = None
    actions: tuple[Action, ...] = ()


def fit(
    request: Request,
    arrange: Arrange,
    *,
    limit: Limit,
    over_budget: OverBudget,
    scale: Scale,
    least: Cut = WHOLE,
) -> Fitted:
    """Take rung after rung until the prompt fits. What an earlier cut took, `least`, does not come back.

    Where no cut makes it fit the model's window nothing is cut: the upstream answers, and may know better.
    """

    def weighed(cut: Cut) -> _Tried:
        draft = arrange(cut)
        return _Tried(draft, measure.layers(request, draft, scale).total)

    def climbed(tried: _Tried) -> _Tried:
        for cut in ladder.rungs(tried.draft.cut, tried.total):
            if tried.total <= limit.tokens:
                break
            tried = weighed(cut)
        return tried

    start = whole = weighed(WHOLE)
    if whole.total <= limit.tokens:
        return Fitted(draft=whole.draft, total=whole.total)
    ladder = _Ladder(request, whole.draft, limit, scale, least=least)
    if least.packed or not request.signed:
        smaller = weighed(Cut(outlined=not request.signed, packed=least.packed))
        start = smaller if smaller.total < whole.total else whole
    tried = climbed(start)
    if tried.total > limit.tokens and (most := ladder.packed(tried, weighed)):
        # What goes beside is then cut on the grid, too: so a loop whose context is packed keeps its exchanges.
        tried = climbed(weighed(dataclasses.replace(start.draft.cut, packed=most)))
    own = limit.own is not None and tried.total > limit.own
    if tried.total > limit.tokens and not own:
        return _over_window(request, arrange, whole, limit=limit, over_budget=over_budget, scale=scale)
    over: tuple[Action, ...] = ()
    if tried.total > limit.tokens:
        over = ("rejected" if over_budget == "reject" else "forwarded_over_budget",)
    return Fitted(
        draft=tried.draft,
        total=tried.total,
        actions=(*ladder.actions(tried.draft, whole.draft), *over),
    )


def _over_window(
    request: Request,
    arrange: Arrange,
    whole: _Tried,
    *,
    limit: Limit,
    over_budget: OverBudget,
    scale: Scale,
) -> Fitted:
    """Leave a prompt that no cut makes fit the model's window to the upstream: uncut, but for the tenant's budget."""
    if limit.own is None or whole.total <= limit.own:
        return Fitted(draft=whole.draft, total=whole.total, actions=("forwarded_over_budget",))
    own = dataclasses.replace(limit, tokens=limit.own)
    fitted = fit(request, arrange, limit=own, over_budget=over_budget, scale=scale)
    return dataclasses.replace(fitted, actions=(*fitted.actions, "forwarded_over_budget"))


@dataclass(frozen=True, slots=True)
class _Tried:
    draft: Draft
    total: int


class _Ladder:
    """One request's units, what each weighs as it would be sent whole, and what shortening each message saves."""

    def __init__(self, request: Request, whole: Draft, limit: Limit, scale: Scale, *, least: Cut = WHOLE) -> None:
        parts = request.parts
        self._request, self._parts, self._limit, self._scale = request, parts, limit, scale
        self._units = _units(request.messages, parts)
        first, last = parts.leading, self._units[-1].end if self._units else parts.leading
        self._weights = {index: measure.weigh(request, whole, index, scale) for index in range(first, last)}
        self._ends = dict(zip(self._weights, itertools.accumulate(self._weights.values()), strict=True))
        fixed = sum(scale.message(request.raw(index), request.messages[index].digest) for index in range(first))
        self._fixed = fixed + _schemas(request, scale)
        self._base = limit.base
        self._step = budget.step(limit.base, self._fixed)
        self._saved: dict[int, int] = {}
        self._least = least
        gone = [all(least.drops(index) for index in unit.indexes) for unit in self._units]
        self._floor = next((place for place, all_gone in enumerate(gone) if not all_gone), len(gone))

    def rungs(self, cut: Cut, uncut: int) -> Iterator[Cut]:
        """Return cut after cut, each taking more, of a prompt that weighs `uncut` with the cut made so far.

        Turns go only where shortening all that is old is not enough, and then replies are shortened too, so that fewer
        do. What goes is counted as it would stand, shortened; the room a step leaves is given to what is newest, whole.
        """
        shorter = self._shorter(RESULT_ROLES)
        if uncut - sum(shorter.values()) > self._target(shorter):
            shorter = self._shorter(RESULT_ROLES | {"assistant"})
        least, target = uncut - sum(shorter.values()), self._target(shorter)
        # What stands shortened is small: a step of the whole would take nearly all of it.
        step = budget.step(min(target, self._base), self._fixed) if shorter else self._step
        grid = max(0, math.ceil((least - target) / step))
        lost = list(itertools.accumulate((self._loses(unit, shorter) for unit in self._units), initial=0))
        while True:
            gone = max(bisect.bisect_left(lost, min(grid * step, lost[-1])), self._floor)
            for reach in self._reaches(uncut, gone, shorter):
                cut = self._cut(cut, gone, reach, shorter)
                yield cut
            if gone >= len(self._units):
                break
            grid += 1

    def packed(self, tried: _Tried, weighed: Callable[[Cut], _Tried]) -> int:
        """Return how many characters each item of this turn's context may keep, so that they share the room left.

        It is the room there was when the turn began, on a part of the grid: so they stay as they are in its loop. Where
        there are tools, half a step is left for that loop. What does not fit even so is taken from them in such parts.
        """
        draft, newest, request = tried.draft, self._parts.newest, self._request
        brought = [item for item in dict.fromkeys(request.hints.context) if item not in draft.referenced]
        stand = shorten.packed(brought, draft.cut.packed) if draft.cut.packed else brought
        loop = [index for index in range(newest.start + 1, newest.end) if draft.keeps(index)]
        room = self._limit.tokens - tried.total + sum(self._scale.text(item.content) for item in stand)
        room += sum(measure.weigh(request, draft, index, self._scale) for index in loop)
        # The line that says what went comes with the loop, too.
        room += self._scale.text(left_out(draft.dropped))
        part = self._step // 4
        room -= room % part + (2 * part if request.member("tools") or request.member("functions") else 0)
        most = draft.cut.packed
        while brought and tried.total > self._limit.tokens and most != shorten.PACKED:
            most = shorten.share(brought, room, self._scale.text)
            most = min(most, self._least.packed or most)
            tried = weighed(dataclasses.replace(draft.cut, packed=most))
            room -= part * max(1, math.ceil((tried.total - self._limit.tokens) / part))
        return most

    def _target(self, shorter: Mapping[int, int]) -> int:
        """Return how much may stand if all that is old is shortened: the rest is kept for what is newest, whole."""
        return self._limit.tokens - min(self._step * 3 // 4, sum(shorter.values()))

    def _cut(self, cut: Cut, gone: int, reach: int, shorter: Mapping[int, int]) -> Cut:
        dropped = self._units[:gone]
        first = dropped[-1].end if dropped else 0
        old = frozenset(index for index in shorter if index >= first and self._ends[index] <= reach)
        floor = frozenset(index for index in self._least.shortened if index >= first)
        return Cut(
            dropped=dropped, shortened=old | floor, outlined=cut.outlined, packed=cut.packed, quiet=self._request.signed
        )

    def _loses(self, unit: Span, shorter: Mapping[int, int]) -> int:
        """Return what goes with a unit, as it would stand shortened."""
        return sum(self._weights[index] - shorter.get(index, 0) for index in unit.indexes)

    def _reaches(self, uncut: int, gone: int, shorter: Mapping[int, int]) -> Iterator[int]:
        """Return how far from its start history is shortened, in steps: the first that should do and those behind.

        What must go is rounded up to the grid, as it is for turns: then that holds for another step.
        """
        end = max(self._ends.values(), default=0)
        first = self._units[gone - 1].end if gone else self._parts.leading
        total = uncut - sum(weight for index, weight in self._weights.items() if index < first)
        old = [index for index in shorter if index >= first]
        ends = [self._ends[index] for index in old]
        saved = list(itertools.accumulate((shorter[index] for index in old), initial=0))
        needed = self._step * math.ceil((total - self._limit.tokens) / self._step)
        for reach in range(0, end + self._step, self._step):
            if saved[bisect.bisect_right(ends, reach)] >= needed or reach >= end:
                yield reach

    def _shorter(self, roles: frozenset[str]) -> dict[int, int]:
        """Return what shortening saves, by message, in all that is old."""
        if self._request.signed:
            return {}
        messages = self._request.messages
        return {
            index: saved for index in self._weights if messages[index].role in roles and (saved := self._saves(index))
        }

    def _saves(self, index: int) -> int:
        if index not in self._saved:
            raw, message = self._request.raw(index), self._request.messages[index]
            short = shorten.message(raw, message)
            less = 0 if short is raw else self._weights[index] - self._scale.message(short, _digest(short))
            self._saved[index] = max(0, less)
        return self._saved[index]

    def actions(self, draft: Draft, whole: Draft) -> tuple[Action, ...]:
        """Name what was done."""
        cut, messages = draft.cut, self._request.messages
        turns = max(0, len(self._parts.turns) - 1)
        done: dict[Action, bool] = {
            "library_outlined": any(item.partial for item in draft.library.items) and draft.library != whole.library,
            "outputs_shortened": any(messages[index].role != "assistant" for index in cut.shortened),
            "turns_dropped": bool(cut.dropped) and turns > 0,
            "exchanges_dropped": len(cut.dropped) > turns,
            "replies_shortened": any(messages[index].role == "assistant" for index in cut.shortened),
            "context_packed": cut.packed > 0,
        }
        return tuple(action for action, did in done.items() if did)


def _units(messages: Sequence[Message], parts: Shape) -> tuple[Span, ...]:
    """Return what may go, oldest first: whole turns, then the newest turn's exchanges up to its last tool exchange.

    Exchanges with signed reasoning stay: it is accepted back only behind what it was made from.
    """
    newest = exchanges(messages, parts.newest)
    if any(message.signed for message in messages[parts.newest.start : parts.newest.end]):
        newest = ()
    last = max((place for place, span in enumerate(newest) if messages[span.start].calls), default=len(newest) - 1)
    return (*parts.turns[:-1], *newest[: max(0, last)])


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _schemas(request: Request, scale: Scale) -> int:
    return sum(scale.schema(raw) for raw in map(request.member, ("tools", "functions", "response_format")) if raw)
