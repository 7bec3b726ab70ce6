"""What stays the same while one request is planned, and the three things every way of planning it does.

They are: telling current values, arranging the client's own messages, and holding a prompt to its limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.core import budget, guard, history, layers, library
from proxy.core.cut import WHOLE, Cut
from proxy.core.draft import Draft, Slot, Values
from proxy.core.epoch import Epoch
from proxy.core.guard import Arrange, Fitted
from proxy.core.library import NO_LIBRARY, Library
from proxy.core.measure import Scale
from proxy.core.message import RESULT_ROLES, Look
from proxy.core.policy import Policy
from proxy.core.request import Request
from proxy.core.tools import Order
from proxy.core.values import Current

NO_FORMS: Mapping[int, Slot] = {}
NOT_TOLD: Mapping[int, str] = {}


@dataclass(frozen=True, slots=True)
class Arranged:
    """A prompt within its limit, and the epoch it belongs to, if it belongs to one; new where it `began`."""

    fitted: Fitted
    epoch: Epoch | None = None
    began: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to be planned. `order` and `tools` are its tools as they are to stand.

    `current` is L1 without its volatile lines; `replays` says whether turns are forwarded again as they were.
    """

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

    def told(self, at_start: Mapping[int, str] = NOT_TOLD, earlier: Mapping[int, str] = NOT_TOLD) -> Values:
        """Say where current values are told that do not stand yet: in `earlier` turns, or in this one `at_start`.

        Within an agent's loop they come last where the upstream takes them there, so that the loop stays a prefix; and
        so do all of those that nothing `replays`, since the message that holds them would be another one in the next
        turn.
        """
        current, newest = self.current, self.request.parts.newest
        last = self.request.messages[-1].role if self.policy.profile.system_last else ""
        leading = self.request.parts.leading
        role = self.request.messages[leading - 1].role if leading else "system"
        if not self.replays and last in {"user", *RESULT_ROLES}:
            return Values(l1=current.l1, last=current.frame(current.told({})), role=role)
        if newest.end - newest.start > 1 and last in RESULT_ROLES:
            first = tuple(at_start.items())
            changed = current.frame(current.told({**earlier, **at_start}))
            return Values(l1=current.l1, told=first, text=current.frame(first), last=changed, role=role)
        told = current.told(earlier)
        return Values(l1=current.l1, told=told, text=current.frame(told))

    def own(
        self,
        shelf: Library = NO_LIBRARY,
        *,
        lasting: bool = False,
        sent: bool = False,
        forms: Mapping[int, Slot] = NO_FORMS,
    ) -> Arrange:
        """Arrange the client's own messages, some in other `forms`.

        Where the library was `sent` in them, its items go with their turns.
        """
        slots = [forms.get(index) or Slot(message) for index, message in enumerate(self.request.messages)]
        told = self.told()

        def arrange(cut: Cut) -> Draft:
            stands = library.without(shelf, self.request, cut) if sent and cut.dropped else shelf
            mine = list(slots)
            history.shorten_slots(mine, self.request, cut.shortened, self.look)
            return layers.arrange(
                mine,
                self.request.parts,
                library=library.outlined(stands, library.arriving(self.request), {}) if cut.outlined else stands,
                lasting=lasting,
                context=self.request.hints.context,
                cut=cut,
                values=told,
            )

        return arrange

    def fitted(self, arrange: Arrange, least: Cut = WHOLE) -> Fitted:
        """Arrange, and hold against the limit where the bytes do not prove that all fits."""

        def whole(cut: Cut) -> Draft:
            return dataclasses.replace(arrange(cut), tools=self.tools)

        draft = whole(WHOLE)
        if self.limit is None or self.surely_fits(draft):
            return Fitted(draft=draft)
        return guard.fit(
            self.request,
            whole,
            limit=self.limit,
            over_budget=self.policy.over_budget,
            scale=self.scale,
            least=least,
        )

    def surely_fits(self, draft: Draft) -> bool:
        """Whether the bytes alone prove that all fits: no token is less than a byte, but in parts that are no text."""
        request, scale = self.request, self.scale
        media = (scale.message(request.raw(at), each.digest) for at, each in enumerate(request.messages) if each.media)
        most = (
            len(request.body)
            + sum(media)
            + sum(len(raw) for raw in draft.forms.values())
            + sum(run.size_bytes for index in draft.forms for run in draft.runs(index))
            + sum(len(item.content.encode()) + 200 for item in draft.library.items)
            + 400 * len(self.current.slots)
        )
        return self.limit is None or most <= self.limit.tokens
