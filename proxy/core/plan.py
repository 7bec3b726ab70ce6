"""Request and memory → Plan: the layering, the guard, and why each thing was done. Pure.

`make` is one page: whose lineage it is, what its tools and L1 are to be, how it is arranged within its limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core import anonymous, budget, layers, promotion, recurring, template, tools, values
from proxy.core import known as knowledge
from proxy.core.chain import Place
from proxy.core.draft import AS_SENT, Draft, Slot
from proxy.core.epoch import Epoch, Reason
from proxy.core.form import NO_FORM
from proxy.core.guard import Action
from proxy.core.job import Arranged, Job
from proxy.core.known import NOTHING_KNOWN, Known, Lesson, Standing
from proxy.core.lineage import Recalled
from proxy.core.measure import Scale
from proxy.core.message import Look
from proxy.core.models import Model
from proxy.core.policy import Policy
from proxy.core.recurring import Recurring, Sent
from proxy.core.request import Request
from proxy.core.template import Formed
from proxy.core.tools import Keys, Order, Toolset
from proxy.core.values import Current

_PLAIN = Current(AS_SENT, (), "")
NO_SHELF = Recurring()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is forwarded and why. `total` is None where the bytes alone proved that all fits.

    `places` are those of a named conversation's messages; `epoch` is the one the request belongs to, and `began` why it
    began with it. `order` are its tools as they stand, `keys` the keys inside them. `formed` is what L1's lines are
    taken for, None where they were not looked at, and `current` what came of it; `recurring` is an anonymous request's
    L2, and how its turns can be put back.
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
    formed, current = _formed(request, stood, known)
    job = Job(
        request=request, policy=policy, limit=limit, scale=scale, look=look, now=now, order=order,
        tools=tools.spliced(given, places),
        current=current, replays=named and policy.promotion == "deferred",
    )  # fmt: skip
    shelf = NO_SHELF
    if not named and policy.anonymous_library:
        made, shelf = anonymous.fitted(job, sent, stood, known, again=again)
    elif not named or not parts.turns:
        made = Arranged(job.fitted(job.own()))
    else:
        made = (promotion.eager if policy.promotion == "eager" else promotion.deferred)(job, recalled)
    draft = made.fitted.draft
    turns = len({*draft.dropped} & {*parts.turns})
    return Plan(
        draft=draft, total=made.fitted.total, limit=limit.tokens if limit else None, actions=made.fitted.actions,
        dropped_turns=turns, dropped_exchanges=len(draft.dropped) - turns,
        places=request.places if named and parts.turns else (),
        epoch=made.epoch, began=made.epoch.reason if made.epoch and made.began else None,
        order=order, keys=keys, formed=formed, current=current, recurring=shelf,
    )  # fmt: skip


def _formed(request: Request, stood: Standing | None, known: Known) -> tuple[Formed | None, Current]:
    """Tell L1's volatile lines from the others, where there is a user message that can take their values."""
    parts = request.parts
    first = request.messages[parts.newest.start] if parts.turns else None
    if not known.lines or first is None or first.role != "user" or first.form == "none":
        return None, _PLAIN
    formed = template.formed(known.lines, stood.form if stood else None, known.templates)
    return formed, values.current(request, parts.leading, formed, known.key)
