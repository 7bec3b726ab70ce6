"""An anonymous request's prompt: its turns put back as they stood, where all fits then and little is added."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from proxy.core import recipe, recurring, remake
from proxy.core.draft import Draft, Slot
from proxy.core.job import Arranged, Job
from proxy.core.known import Known, Standing
from proxy.core.recurring import Recurring, Sent

_LITTLE_BYTES = 1_024


def fitted(job: Job, sent: Sent, stood: Standing | None, known: Known, *, again: bool) -> tuple[Arranged, Recurring]:
    """Return the prompt within its limit, and what the lineage's next request is to know.

    Where it would not fit, or the references outgrow what they refer to, the log begins anew with this turn. The same
    request `again` was noted before, and so was a turn that goes on.
    """
    request, key = job.request, known.key
    shelf = recurring.stands(request, sent, stood, known, again=again, frozen=request.signed)
    context = recurring.context(request, shelf, key)
    goes_on = (again or sent.looping) and bool(shelf.log)
    log = recipe.log(request, shelf.log, context, key, goes_on=goes_on)
    slots = remake.slots(request, log)
    found = job.fitted(job.own(shelf.library, sent=True, forms=slots))
    if slots and (found.actions or _outgrows(job, found.draft, slots)):
        log = recipe.log(request, (), context, key, goes_on=False)
        found = job.fitted(job.own(shelf.library, sent=True))
    return Arranged(found), dataclasses.replace(shelf, log=log.recipes)


def _outgrows(job: Job, draft: Draft, slots: Mapping[int, Slot]) -> bool:
    """Whether the lines that refer to items weigh more than the items: each turn adds some.

    Where nobody knows what the model takes, they may weigh little.
    """
    runs = [run for index in slots for run in draft.runs(index)]
    lines = sum(run.size_bytes for run in runs if not run.spelled)
    unknown = job.limit is None and lines > max(_LITTLE_BYTES, len(job.request.body) // 16)
    items = sum(len(run.spelled) for run in runs) + sum(len(item.content) for item in draft.library.items)
    return unknown or lines > items
