"""What a call asks of memory before it is planned, and what it leaves there for the next request of its lineage.

Reads are bounded in time; writes go on beside the request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

from proxy.background import Background
from proxy.call import LONG_BYTES, Call
from proxy.core import budget, chain, history, library, lineage, window
from proxy.core.epoch import NO_EPOCH
from proxy.core.known import NOTHING_KNOWN, Known, Lesson, known
from proxy.core.lineage import NOTHING, Recalled
from proxy.core.models import Model
from proxy.core.plan import Plan
from proxy.core.request import Request, read
from proxy.core.tools import Order, Toolset
from proxy.errors import Odd, StrataError
from proxy.memo import Analyst, TokenScale, count
from proxy.memory.store import DONE, Entry, Store, Tally, View, Writing


class Recall:
    """`scale` returns that of a model."""

    def __init__(
        self,
        store: Store,
        analyst: Analyst,
        background: Background,
        *,
        scale: Callable[[Model], Awaitable[TokenScale]],
    ) -> None:
        self._store = store
        self._analyst = analyst
        self._background = background
        self._scale = scale

    async def of(self, call: Call, request: Request) -> tuple[Request, Recalled, Known]:
        """Ask memory; a windowed client's request comes back with what it has left out."""
        if call.name is not None:
            call.conversation = call.keys.conversation(call.partition, call.name.id, call.name.user)
        if call.conversation is None or not call.replays:
            return request, NOTHING, await self._known(call, request)
        asked = self._store.recall(call.conversation, ttl_seconds=call.tenant.ttl_seconds)
        if call.policy.windowed:
            answer = await asked
            request = await self._complete(call, request, answer.recalled)
            known = await self._known(call, request)
        else:
            answer, known = await asyncio.gather(asked, self._known(call, request))
        call.degraded = answer.degraded
        call.recalled = answer.recalled
        return request, answer.recalled, known

    async def _complete(self, call: Call, request: Request, recalled: Recalled) -> Request:
        """Put in front of a windowed client's messages what it has left out of its history."""
        policy = call.policy
        limit = budget.limit(
            model=call.model,
            budget=policy.budget_tokens,
            reserve=policy.reserve_tokens,
            reply=request.reply_tokens,
            ratio=call.ratio,
        )
        if not recalled.links or policy.mode == "observe" or limit is None:
            # What has no limit that is known could grow beyond what its model takes.
            return request
        reader = self._analyst.reader()
        scale = await self._scale(call.model)

        def work() -> Request:
            front = window.left_out(
                request,
                recalled.links,
                weigh=lambda raw: scale.message(raw, hashlib.sha256(raw).digest()),
                look=reader,
                profile=policy.profile,
                idle_seconds=call.at - (recalled.seen_at or call.at),
            )
            if not front:
                return request
            completed = read(window.completed(request, front), reader, count, self._analyst.tags)
            call.kept_messages = len(front)
            return completed

        heavy = call.heavy or sum(len(link.raw) for link in recalled.links.values()) > LONG_BYTES
        try:
            call.request = await asyncio.to_thread(work) if heavy else work()
        except (Odd, StrataError):
            # Memory that holds no messages.
            return request
        call.unseen_bytes += reader.unseen_bytes
        return call.request

    async def _known(self, call: Call, request: Request) -> Known:
        """Ask what is known of the system prompt's lines, items that recur and keys in tools, if there are any."""
        parts, places, policy = request.parts, request.places, call.policy
        if not request.messages or policy.mode == "observe":
            return NOTHING_KNOWN
        key = call.keys.lines(call.partition)
        takes = policy.current_values and parts.leading
        lines = self._analyst.lines(request.messages[: parts.leading], key) if takes else ()
        items = policy.anonymous_library and not call.replays and library.any_items(request)
        if not (lines or items or "tools" in request.members):
            return NOTHING_KNOWN
        earlier = [call.spot(place) for place in lineage.earlier(request)]
        here = call.place = call.spot(places[-1])
        answered = lineage.answer(request)
        answers = [call.spot(answered)] if answered and items else []
        # Where one answer was given to two, all must know of both.
        learned = await self._store.learned(call.partition, (*answers, *earlier), here, sure=bool(answers))
        return known(earlier, here, learned, answers=answers, key=key, lines=lines)

    async def orders(self, call: Call, given: Toolset) -> tuple[Order, ...]:
        """Ask in which orders its owner's sets of tools were first seen; one tool has but one."""
        return await self._store.orders(call.partition, given.identities) if len(given.raws) > 1 else ()

    def leave(self, call: Call) -> None:
        """Store what the next request of this lineage, and of this tenant, is to know, before it is forwarded."""
        if call.plan is not None:
            self._leave_log(call, call.plan)
            self._leave_order(call, call.plan)
            self._leave_standing(call, call.plan)

    def _leave_log(self, call: Call, plan: Plan) -> None:
        """Store what is about to be forwarded: the client's next step may reach another replica."""
        request = call.request
        if request is None or call.conversation is None or not plan.places:
            return
        entries = log_entries(request, plan, at=call.at)
        call.entry = entries.get(plan.draft.newest.start)
        anew = lineage.outgrown(call.recalled, {*plan.places})
        stands = NOTHING if anew else call.recalled
        fresh = [entry for entry in entries.values() if _is_new(entry, stands)]
        links = window.links(request) if call.policy.windowed else {}
        links = {place: link for place, link in links.items() if place not in stands.links}
        if fresh or plan.began or links:
            epoch = plan.epoch if plan.began or anew else None
            ttl = call.tenant.ttl_seconds
            self._beside(self._store.remember(call.conversation, fresh, epoch, links, anew=anew, ttl_seconds=ttl))

    def _leave_order(self, call: Call, plan: Plan) -> None:
        """Store the order of a set of tools that was not seen before."""
        order = plan.order
        if len(order) > 1 and all(set(known) != set(order) for known in call.orders):
            self._beside(self._store.order(call.partition, order))

    def _leave_standing(self, call: Call, plan: Plan) -> None:
        """Store how the prompt stands: the next request of this lineage keeps its form."""
        if call.place is None or not plan.teaches:
            return
        self._beside(self._store.learn(call.partition, call.place, plan.standing, plan.lesson(call.at)))

    def heard(self, call: Call, replies: tuple[bytes, ...]) -> None:
        """Store what the answer said, as soon as it is whole."""
        if call.conversation is not None and call.entry is not None and replies:
            ttl = call.tenant.ttl_seconds
            self._beside(self._store.answered(call.conversation, call.entry, replies, ttl_seconds=ttl))
        if call.awaits_answer and call.plan is not None and call.request is not None:
            for said in replies:
                place = call.spot(chain.after(call.request.places[-1], said))
                self._beside(self._store.learn(call.partition, place, call.plan.standing, Lesson(call.at)))

    def seen(self, call: Call, tally: Tally) -> None:
        """Count for the tenant, and store how a named conversation looks now."""
        self._store.count(call.partition, tally)
        if call.conversation is not None and call.plan is not None:
            ttl = call.tenant.ttl_seconds
            self._background.start(self._store.seen(call.conversation, _view(call), tally, ttl_seconds=ttl))

    def _beside(self, writing: Writing) -> None:
        """Let a write go on beside the request, where it is not done already."""
        if writing is not DONE:
            self._background.start(writing)


def log_entries(request: Request, made: Plan, *, at: float) -> dict[int, Entry]:
    """Return what is to be remembered of a plan, by the message's index."""
    epoch = made.epoch.place if made.epoch else NO_EPOCH
    return {
        index: Entry(epoch, request.places[index], frozen)
        for index, frozen in history.written(request, made.draft, at=at).items()
        if made.epoch or index == made.draft.newest.start
    }


def _is_new(entry: Entry, recalled: Recalled) -> bool:
    known = recalled.log.get((entry.epoch, entry.place), ())
    return not any(each.raw == entry.frozen.raw and each.replies >= entry.frozen.replies for each in known)


def _view(call: Call) -> View:
    assert call.plan is not None
    assert call.request is not None
    layers = call.layers.each if call.layers else ()
    items = call.plan.draft.library.items
    return View(
        at=call.at,
        turns=sum(message.role == "user" for message in call.request.messages),
        layers=[[layer.name, layer.tokens, layer.sha256] for layer in layers],
        library=[[item.label, item.tag, item.sha256.hex()[:16]] for item in items],
    )
