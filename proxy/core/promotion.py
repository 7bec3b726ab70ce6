"""When items of a named conversation move to L2: at an epoch's end (`deferred`), or as soon as they can (`eager`)."""

from __future__ import annotations

import dataclasses

from proxy.core import history, library, lineage, measure
from proxy.core.cut import WHOLE
from proxy.core.draft import Draft
from proxy.core.epoch import NO_EPOCH, Epoch, Reason, State, ends
from proxy.core.guard import Fitted
from proxy.core.history import Past
from proxy.core.job import Arranged, Job
from proxy.core.lineage import Recalled
from proxy.core.models import LONGEST_NAME
from proxy.core.shorten import OUTLINE


def eager(job: Job, recalled: Recalled) -> Arranged:
    """The seed's own rule: L2 grows as soon as it can and never loses an item; history is the client's own."""
    messages = job.request.messages
    found = lineage.match(job.request, recalled, NO_EPOCH)
    sent = {index: job.look(frozen.raw) for index, frozen in found.items() if messages[index].role == "user"}
    shelf = library.left_out(job.request, sent)
    fitted = job.fitted(job.own(shelf))
    if shelf and set(fitted.actions) - {"library_outlined"}:
        # What the client itself did not send goes first.
        fitted = job.fitted(job.own())
        fitted = dataclasses.replace(fitted, actions=("library_left_out", *fitted.actions))
    return Arranged(fitted)


def deferred(job: Job, recalled: Recalled) -> Arranged:
    """The log: continue the epoch this request extends, or end it and begin another."""
    request = job.request
    found = history.past(request, recalled, job.order, job.current.l1, job.look)
    epoch = found.epoch
    if epoch is None:
        return _begun(job, found, job.fitted(job.own(lasting=True)), "first")
    told = job.told(found.begun, history.told(found))
    resumed = history.resume(request, epoch, found, job.look, values=told)
    draft = dataclasses.replace(resumed, tools=job.tools)
    state = _state(job, epoch, found, draft, recalled.seen_at)
    reason = ends(epoch, state, job.policy.profile)
    if reason is None:
        whole = _for_another(job, epoch, found, draft)
        return _begun(job, found, whole, "limit") if whole else Arranged(Fitted(draft=draft), epoch)
    told = job.told()
    if reason == "l1_changed" and not state.rewritten:
        fitted = job.fitted(job.own(lasting=True))
    elif request.signed:
        fitted = job.fitted(lambda cut: history.resume(request, epoch, found, job.look, values=told, cut=cut))
    else:
        least = draft.cut if reason == "limit" else WHOLE
        fitted = job.fitted(history.compact(request, found, job.look, draft, values=told), least)
    return _begun(job, found, fitted, reason)


def _for_another(job: Job, epoch: Epoch, found: Past, draft: Draft) -> Fitted | None:
    """Arrange all that one model's limit took where another's holds it: that one's prompt cache is cold anyway."""
    if epoch.model in {"", _model(job)} or job.request.signed:
        return None
    whole = job.fitted(history.compact(job.request, found, job.look, draft, values=job.told()))
    return whole if whole.draft.cut == WHOLE and not whole.actions else None


def _model(job: Job) -> str:
    return job.request.model[:LONGEST_NAME]


def _begun(job: Job, found: Past, fitted: Fitted, reason: Reason) -> Arranged:
    epoch = history.begin(job.request, fitted.draft, found, reason=reason, now=job.now)
    taken = _model(job) if fitted.draft.cut != WHOLE else ""
    return Arranged(fitted, dataclasses.replace(epoch, model=taken), began=True)


def _state(job: Job, epoch: Epoch, found: Past, draft: Draft, seen_at: float | None) -> State:
    """Weigh what the epoch carries. Tokens are only counted where they can decide anything."""
    dead = _dead_tokens(job, found, draft)
    sure = job.surely_fits(draft)
    total = measure.layers(job.request, draft, job.scale).total if dead or not sure else 0
    began = job.request.places.index(epoch.place)
    return State(
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


def _dead_tokens(job: Job, found: Past, draft: Draft) -> int:
    """Weigh items that stand and are not held any more in that version, and values that are told and hold no longer."""
    held = {item.key: item.sha256 for message in job.request.messages for item in library.items(message)}
    held |= {item.key: item.sha256 for item in job.request.hints.context}
    outlined = {item.label for item in draft.library.items if item.partial}
    stands = (item for item in draft.before if item.tag != OUTLINE or item.label not in outlined)
    dead = sum(job.scale.text(item.content) for item in stands if held.get(item.key) != item.sha256)
    return dead + sum(job.scale.text(text) for text in history.outdated(found, job.current.slots))
