"""Request and memory → Plan: the layering, the guard, and why each thing was done. Pure.

One page: what a request extends is continued while it fits and pays, else compacted; then it is held to its limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.core import (
    budget,
    guard,
    history,
    layers,
    library,
    lineage,
    measure,
    recipe,
    recurring,
    remake,
    template,
    tools,
    values,
)
from proxy.core import epoch as epochs
from proxy.core import known as knowledge
from proxy.core.chain import Place
from proxy.core.cut import WHOLE, Cut
from proxy.core.epoch import USUAL, Profile
from proxy.core.form import NO_FORM
from proxy.core.guard import ACTIONS, Action, Arrange, Fitted, OverBudget
from proxy.core.history import Look, Past
from proxy.core.known import NOTHING_KNOWN, Known, Lesson, Standing
from proxy.core.layers import AS_SENT, Draft, Slot, Values
from proxy.core.library import Library
from proxy.core.lineage import Epoch, Reason, Recalled
from proxy.core.measure import Scale
from proxy.core.models import Model
from proxy.core.recurring import Recurring, Sent
from proxy.core.request import Request
from proxy.core.shorten import OUTLINE
from proxy.core.template import Formed
from proxy.core.tools import Keys, Order, Toolset
from proxy.core.turn import Shape
from proxy.core.values import Current

__all__ = ["ACTIONS", "Action", "Mode", "Plan", "Policy", "Promotion", "make"]

Mode = Literal["layered", "observe"]
Promotion = Literal["deferred", "eager"]
_PLAIN = Current(AS_SENT, (), "")
NO_SHELF = Recurring()
NO_FORMS: Mapping[int, Slot] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings a plan depends on, of one tenant; tokens."""

    mode: Mode
    promotion: Promotion = "deferred"
    budget_tokens: int | None
    reserve_tokens: int
    over_budget: OverBudget
    current_values: bool = True
    anonymous_library: bool = True
    windowed: bool = False
    profile: Profile = USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is forwarded and why. `total` is None where the bytes alone proved that all fits.

    `places` are those of a named conversation's messages; `epoch` is the one the
    request belongs to, new where `began`. `order` are its tools as they stand, `keys` the keys inside them. `formed` is
    what L1's lines are taken for, None where they were not looked at, and `current` what came of it; `recurring` is an
    anonymous request's L2, and how its turns can be put back.
    """

    draft: Draft
    total: int | None
    limit: int | None
    dropped_turns: int = 0
    dropped_exchanges: int = 0
    actions: tuple[Action, ...] = ()
    places: tuple[Place, ...] = ()
    epoch: Epoch | None = None
    began: Reason | None = None
    order: Order = ()
    keys: Keys = ()
    formed: Formed | None = None
    current: Current = _PLAIN
    recurring: Recurring = NO_SHELF

    @property
    def standing(self) -> Standing:
        """What the lineage's next request is to know."""
        form = self.formed.form if self.formed else NO_FORM
        shelf = self.recurring
        keys = tools.digest(self.keys)
        return Standing(form, shelf.shelf, shelf.brought, shelf.calm, keys, shelf.log)

    def lesson(self, at: float) -> Lesson:
        """What the tenant's other lineages are to know."""
        return Lesson(at, self.formed.template if self.formed else None, self.recurring.learned, self.keys)

    @property
    def teaches(self) -> bool:
        """Whether there is anything in it to know."""
        shelf = self.recurring
        return self.formed is not None or bool(shelf.shelf or shelf.brought or shelf.log or self.keys)

    @property
    def rejected(self) -> bool:
        """Whether the tenant's budget forbids the request."""
        return "rejected" in self.actions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    request: Request
    policy: Policy
    limit: budget.Limit | None
    scale: Scale
    look: Look
    now: float
    order: Order
    tools: bytes
    current: Current
    replays: bool


def make(
    request: Request,
    recalled: Recalled,
    *,
    model: Model,
    policy: Policy,
    named: bool,
    scale: Scale,
    look: Look,
    now: float,
    ratio: float | None = None,
    given: Toolset = tools.NONE,
    orders: Iterable[Order] = (),
    known: Known = NOTHING_KNOWN,
) -> Plan:
    """Plan one request. The same request, memory, settings and time give the same plan, in any process.

    `ratio` is the upstream's tokens for each counted, where known. `given` are the request's tools; `orders` are those
    in which the tenant's sets of tools were first seen; `known` is what was learned of the tenant's prompts and of this
    lineage.
    """
    parts = request.parts
    if policy.mode == "observe":
        # The client's own bytes; what it brings in `strata.context` is its own as well.
        fixed = [Slot(message, fixed=True) for message in request.messages]
        draft = layers.arrange(fixed, parts, context=request.hints.context)
        return Plan(draft=draft, total=None, limit=None)
    limit = budget.limit(
        model=model, budget=policy.budget_tokens, reserve=policy.reserve_tokens, reply=request.reply_tokens, ratio=ratio
    )
    sent = Sent() if named else recurring.sent(request, known.key)
    stood, again = knowledge.continued(known, sent.brought, sent.held)
    given, keys = tools.as_first(given, known.keys.get(stood.keys, ()) if stood else ())
    places = tools.arrange(given, orders)
    order = tuple(given.identities[place] for place in places)
    formed, current = _formed(request, parts, stood, known)
    job = _Job(
        request=request, policy=policy, limit=limit, scale=scale, look=look, now=now, order=order,
        tools=tools.spliced(given, places),
        current=current, replays=named and policy.promotion == "deferred",
    )  # fmt: skip
    shelf = NO_SHELF
    if not named or not parts.turns:
        if policy.anonymous_library and not named:
            shelf = recurring.stands(request, sent, stood, known, again=again, frozen=request.signed)
            fitted, shelf = _anonymous(job, shelf, known.key, goes_on=again or sent.looping)
        else:
            fitted = _fitted(job, _own(job))
        made = _plan(job, fitted)
    elif policy.promotion == "eager":
        made = _eager(job, recalled)
    else:
        made = _deferred(job, recalled)
    return dataclasses.replace(made, order=order, keys=keys, formed=formed, current=current, recurring=shelf)


def _formed(request: Request, parts: Shape, stood: Standing | None, known: Known) -> tuple[Formed | None, Current]:
    """Tell L1's volatile lines from the others, where there is a user message that can take their values."""
    first = request.messages[parts.newest.start] if parts.turns else None
    if not known.lines or first is None or first.role != "user" or first.form == "none":
        return None, _PLAIN
    formed = template.formed(known.lines, stood.form if stood else None, known.templates)
    return formed, values.current(request, parts.leading, formed, known.key)


def _told(job: _Job, at_start: Mapping[int, str], standing: Mapping[int, str] | None = None) -> Values:
    """Say where current values are told that do not stand yet: `standing` in earlier turns, `at_start` in this one.

    Within an agent's loop they come last where the upstream takes them there, so that the loop stays a prefix; and so
    do all of those that nothing `replays`, since the message that holds them would be another one in the next turn.
    """
    current, newest = job.current, job.request.parts.newest
    before = standing or {}
    last = job.request.messages[-1].role if job.policy.profile.system_last else ""
    role = job.request.messages[job.request.parts.leading - 1].role if job.request.parts.leading else "system"
    if not job.replays and last in {"user", "tool", "function"}:
        return Values(last=current.frame(current.told({})), role=role)
    if newest.end - newest.start > 1 and last in {"tool", "function"}:
        first = tuple(at_start.items())
        changed = current.frame(current.told({**before, **at_start}))
        return Values(told=first, text=current.frame(first), last=changed, role=role)
    told = current.told(before)
    return Values(told=told, text=current.frame(told))


def _own(
    job: _Job,
    shelf: Library = layers.NO_LIBRARY,
    *,
    lasting: bool = False,
    sent: bool = False,
    forms: Mapping[int, Slot] = NO_FORMS,
) -> Arrange:
    """Arrange the client's own messages, some in other `forms`. Where L2 was `sent` in them, items go with turns."""
    slots = [forms.get(index) or Slot(message) for index, message in enumerate(job.request.messages)]
    told = _told(job, {})

    def arrange(cut: Cut) -> Draft:
        stands = library.without(shelf, job.request, cut.dropped) if sent and cut.dropped else shelf
        mine = list(slots)
        history.shorten_slots(mine, job.request, cut.shortened, job.look)
        return layers.arrange(
            mine,
            job.request.parts,
            library=library.outlined(stands, library.arriving(job.request), {}) if cut.outlined else stands,
            lasting=lasting,
            context=job.request.hints.context,
            cut=cut,
            l1=job.current.l1,
            values=told,
        )

    return arrange


def _anonymous(job: _Job, shelf: Recurring, key: bytes, *, goes_on: bool) -> tuple[Fitted, Recurring]:
    """Put turns back as they stood, if all fits then and little is added; else the log begins anew with this turn."""
    context = recurring.context(job.request, shelf, key)
    log = recipe.log(job.request, shelf.log, context, key, goes_on=goes_on and bool(shelf.log))
    slots = remake.slots(job.request, log)
    fitted = _fitted(job, _own(job, shelf.library, sent=True, forms=slots))
    if slots and (fitted.actions or _outgrows(job, fitted.draft, slots)):
        log = recipe.log(job.request, (), context, key, goes_on=False)
        fitted = _fitted(job, _own(job, shelf.library, sent=True))
    return fitted, dataclasses.replace(shelf, log=log.recipes)


_LITTLE_BYTES = 1_024


def _outgrows(job: _Job, draft: Draft, slots: Mapping[int, Slot]) -> bool:
    """Whether the lines that refer to items weigh more than the items: each turn adds some.

    Where nobody knows what the model takes, they may weigh little.
    """
    runs = [run for index in slots for run in draft.runs(index)]
    lines = sum(run.size_bytes for run in runs if not run.spelled)
    unknown = job.limit is None and lines > max(_LITTLE_BYTES, len(job.request.body) // 16)
    items = sum(len(run.spelled) for run in runs) + sum(len(item.content) for item in draft.library.items)
    return unknown or lines > items


def _eager(job: _Job, recalled: Recalled) -> Plan:
    """The seed's own rule: L2 grows as soon as it can and never loses an item; history is the client's own."""
    messages = job.request.messages
    found = lineage.match(job.request, recalled, lineage.NO_EPOCH)
    sent = {index: job.look(frozen.raw) for index, frozen in found.items() if messages[index].role == "user"}
    shelf = library.left_out(job.request, sent)
    fitted = _fitted(job, _own(job, shelf))
    if shelf and set(fitted.actions) - {"library_outlined"}:
        # What the client itself did not send goes first.
        fitted = _fitted(job, _own(job))
        fitted = dataclasses.replace(fitted, actions=("library_left_out", *fitted.actions))
    return _plan(job, fitted, places=job.request.places)


def _deferred(job: _Job, recalled: Recalled) -> Plan:
    """The log: continue the epoch this request extends, or end it and begin another."""
    request, l1 = job.request, job.current.l1
    found = history.past(request, recalled, job.order, l1)
    epoch = found.epoch
    if epoch is None:
        fitted = _fitted(job, _own(job, lasting=True))
        return _plan(job, fitted, places=request.places, began=_begin(job, found, fitted, "first"))
    told = _told(job, found.begun, history.told(found))
    resumed = history.resume(request, epoch, found, job.look, l1=l1, values=told)
    draft = dataclasses.replace(resumed, tools=job.tools)
    state = _state(job, epoch, found, draft, recalled.seen_at)
    reason = epochs.ends(epoch, state, job.policy.profile)
    if reason is None:
        return _plan(job, Fitted(draft=draft), places=request.places, epoch=epoch)
    told = _told(job, {})
    if reason == "l1_changed" and not state.rewritten:
        fitted = _fitted(job, _own(job, lasting=True))
    elif request.signed:
        fitted = _fitted(job, lambda cut: history.resume(request, epoch, found, job.look, l1=l1, values=told, cut=cut))
    else:
        least = draft.cut if reason == "limit" else WHOLE
        fitted = _fitted(job, history.compact(request, found, job.look, draft, l1=l1, values=told), least)
    return _plan(job, fitted, places=request.places, began=_begin(job, found, fitted, reason))


def _begin(job: _Job, found: Past, fitted: Fitted, reason: Reason) -> Epoch:
    return history.begin(job.request, fitted.draft, found, reason=reason, now=job.now)


def _state(job: _Job, epoch: Epoch, found: Past, draft: Draft, seen_at: float | None) -> epochs.State:
    """Weigh what the epoch carries. Tokens are only counted where they can decide anything."""
    held = {item.key: item.sha256 for message in job.request.messages for item in library.items(message)}
    held |= {item.key: item.sha256 for item in job.request.hints.context}
    outlined = {item.label for item in draft.library.items if item.partial}
    stands = (item for item in draft.before if item.tag != OUTLINE or item.label not in outlined)
    dead = sum(job.scale.text(item.content) for item in stands if held.get(item.key) != item.sha256)
    dead += sum(job.scale.text(text) for text in history.outdated(found, job.current.slots))
    began = job.request.places.index(epoch.place)
    sure = _surely_fits(job, draft)
    total = measure.layers(job.request, draft, job.scale).total if dead or not sure else 0
    return epochs.State(
        l1=found.l1,
        tools=found.tools,
        turns=sum(turn.start > began for turn in job.request.parts.turns),
        idle_seconds=None if seen_at is None else job.now - seen_at,
        dead_tokens=dead,
        live_tokens=max(0, total - dead),
        fits=sure or job.limit is None or total <= job.limit.tokens,
        signed=job.request.signed,
        rewritten=history.rewritten(job.request, draft) or epoch.rewritten,
    )


def _surely_fits(job: _Job, draft: Draft) -> bool:
    """Whether the bytes alone prove that all fits: no token is less than one byte, but for parts that are no text."""
    request = job.request
    most = (
        len(request.body)
        + sum(
            job.scale.message(request.raw(index), message.digest)
            for index, message in enumerate(request.messages)
            if message.media
        )
        + sum(len(raw) for raw in draft.forms.values())
        + sum(run.size_bytes for index in draft.forms for run in draft.runs(index))
        + sum(len(item.content.encode()) + 200 for item in draft.library.items)
        + 400 * len(job.current.slots)
    )
    return job.limit is None or most <= job.limit.tokens


def _fitted(job: _Job, arrange: Arrange, least: Cut = WHOLE) -> Fitted:
    """Arrange, and hold against the limit where the bytes do not prove that all fits."""

    def whole(cut: Cut) -> Draft:
        return dataclasses.replace(arrange(cut), tools=job.tools)

    draft = whole(WHOLE)
    if job.limit is None or _surely_fits(job, draft):
        return Fitted(draft=draft)
    return guard.fit(
        job.request,
        whole,
        limit=job.limit,
        over_budget=job.policy.over_budget,
        scale=job.scale,
        least=least,
    )


def _plan(
    job: _Job,
    fitted: Fitted,
    *,
    places: tuple[Place, ...] = (),
    epoch: Epoch | None = None,
    began: Epoch | None = None,
) -> Plan:
    turns = len(set(fitted.draft.dropped) & set(job.request.parts.turns))
    return Plan(
        draft=fitted.draft,
        total=fitted.total,
        limit=job.limit.tokens if job.limit else None,
        dropped_turns=turns,
        dropped_exchanges=len(fitted.draft.dropped) - turns,
        actions=fitted.actions,
        places=places,
        epoch=began or epoch,
        began=began.reason if began else None,
    )
