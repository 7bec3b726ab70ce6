"""The life of a chat request: read → recall → plan → forward → record. `handle` is all of it on one screen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Sequence

import orjson
from starlette.types import Receive, Scope, Send

from proxy import explain
from proxy.background import Background
from proxy.call import Call
from proxy.core import budget, chain, conversation, divergence, history, library, lineage, measure, plan, prefix, window
from proxy.core.chain import Place
from proxy.core.known import NOTHING_KNOWN, Known, Lesson, known
from proxy.core.layers import Draft
from proxy.core.lineage import NO_EPOCH, NOTHING, Recalled
from proxy.core.models import Encoding, Model, describe
from proxy.core.plan import Plan, Policy
from proxy.core.prefix import Ledger
from proxy.core.price import Amount, Price, cost
from proxy.core.quota import nanos
from proxy.core.request import Request, read
from proxy.core.tools import Toolset
from proxy.downstream import JSON, ClientGone, Downstream
from proxy.errors import INTERNAL, SHUTTING_DOWN, TOO_LONG, Odd, StrataError
from proxy.forward import Forwarder
from proxy.memo import Analyst, TokenScale, count
from proxy.memory.calibrations import Calibrations
from proxy.memory.store import DONE, Entry, Keys, Store, Tally, View, Writing
from proxy.meter import Meter
from proxy.observe.record import Outcome, Record
from proxy.prices import Prices
from proxy.settings import Settings
from proxy.summaries import Summaries
from proxy.tenants import Tenants, allowed
from proxy.traces import ROOT, Traces
from proxy.upstream.client import Clients, Interrupted

_FAILED = 400
LONG_BYTES = 262_144
"""A longer body is read in a thread: what of it is new is not known before."""
_LEAST_BYTES_PER_TOKEN = 3
"""Less than text has nearly everywhere: an estimate that is to be reserved should not fall short."""
INLINE_BYTES = 16_384
"""More new text than this is counted in a thread, so that no other request waits for it."""
_OUTCOME_OF: dict[str, Outcome] = {"upstream_error": "upstream_error", "server_error": "error"}

Sink = Callable[[Record], None]


class Pipeline:
    """Everything a chat request needs, built once at start."""

    def __init__(
        self,
        *,
        settings: Settings,
        tenants: Tenants,
        clients: Clients,
        store: Store,
        meter: Meter,
        calibrations: Calibrations,
        summaries: Summaries,
        keys: Callable[[], Keys],
        analyst: Analyst,
        prices: Prices,
        background: Background,
        sinks: Sequence[Sink],
        streams: Callable[[int], None],
        taking: Callable[[Call], None],
        memo_bytes: int,
        ledger_bytes: int,
        traces: Traces,
    ) -> None:
        self._settings = settings
        self._tenants = tenants
        self._forwarder = Forwarder(
            clients, measure=self._weigh, streams=streams, heard=self._heard, inline_bytes=INLINE_BYTES
        )
        self._store = store
        self._meter = meter
        self._calibrations = calibrations
        self._summaries = summaries
        self._keys = keys
        self._analyst = analyst
        self._prices = prices
        self._background = background
        self._sinks = sinks
        self._memo_bytes = memo_bytes
        self._scales: dict[Encoding, TokenScale] = {}
        self._ledger, self._sent = Ledger(max_bytes=ledger_bytes), Ledger(max_bytes=ledger_bytes)
        self._traces = traces
        self._taking = taking

    def take(self, settings: Settings) -> None:
        """Put these settings in the place of those before."""
        self._settings = settings

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one chat request; exactly one record is emitted, whatever happens."""
        client = Downstream(scope, receive, send)
        call = self._open()
        try:
            raw = await self._prepare(call, client, scope)
            await self._reserve(call, client, raw)
            self._remember(call)
            await self._forwarder.forward(call, client, raw)
        except (ClientGone, Interrupted):
            call.outcome = "client_closed"
        except asyncio.CancelledError:
            # uvicorn's deadline for a graceful shutdown has passed. The answer has been ended: no more is to be done.
            await self._shut(call, client)
        except StrataError as error:
            await self._refuse(call, client, error)
        except Exception as error:  # noqa: BLE001 -- the outer edge: whatever it is, the client gets an answer
            await self._refuse(call, client, StrataError(INTERNAL, f"Internal error ({type(error).__name__})"))
            call.cause = f"{type(error).__name__}: {error}"
        finally:
            self._record(call)
            self._summaries.consider(call, scope)
            self._taking(call)

    async def explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say what would be done with a chat request. Nothing is forwarded or remembered."""
        client = Downstream(scope, receive, send)
        call = self._open()
        try:
            await self._prepare(call, client, scope, refuses=False)
            await asyncio.to_thread(self._weigh, call, notes=False)
            await client.answer(200, orjson.dumps(explain.told(call)), [], JSON)
        except ClientGone:
            return
        except StrataError as error:
            await client.refuse(error, [])

    def _open(self) -> Call:
        tenant = self._tenants.nobody
        return Call(
            request_id=os.urandom(12).hex(), at=time.time(), started=time.monotonic(), tenant=tenant,
            policy=tenant.policy,
        )  # fmt: skip

    async def _prepare(self, call: Call, client: Downstream, scope: Scope, *, refuses: bool = True) -> bytes:
        """Find out whose a request is, read and plan it; returns its body. What is too odd to plan has no plan."""
        call.tenant = self._tenants.resolve(client.headers, scope["query_string"].decode("latin-1"))
        call.policy = call.tenant.policy
        raw = await client.body(self._settings.max_body_bytes)
        try:
            request = await self._read(call, client, raw)
            request, recalled, known = await self._recall(call, request)
            await self._plan(call, request, recalled, known, refuses=refuses)
        except Odd as odd:
            call.cause = odd.cause
        return raw

    # read

    async def _read(self, call: Call, client: Downstream, raw: bytes) -> Request:
        call.started = time.monotonic()
        reader = self._analyst.reader()

        def work() -> Request:
            return read(raw, reader, count, self._analyst.tags)

        request = call.request = call.sent = await asyncio.to_thread(work) if len(raw) > LONG_BYTES else work()
        call.unseen_bytes = reader.unseen_bytes
        call.model = describe(request.model, self._settings.windows)
        call.price = self._prices.of(request.model, call.tenant.upstream_url, call.at)
        call.ratio = self._calibrations.ratio(self._calibrated(call), call.model.name)
        call.policy = self._priced(call.tenant.policy, call.price)
        call.name = conversation.name(
            request,
            client.headers,
            id_headers=self._settings.conversation_headers,
            user_headers=self._settings.user_headers,
        )
        return request

    def _priced(self, policy: Policy, price: Price | None) -> Policy:
        """Weigh an epoch at the model's own prices, where the settings do not say others."""
        shares = price.shares() if price else None
        if shares is None:
            return policy
        read = policy.profile.read if self._settings.cached_read_price is not None else shares[0]
        write = policy.profile.write if self._settings.cached_write_price is not None else shares[1]
        return dataclasses.replace(policy, profile=dataclasses.replace(policy.profile, read=read, write=write))

    # recall

    async def _recall(self, call: Call, request: Request) -> tuple[Request, Recalled, Known]:
        """Ask memory; a windowed client's request comes back with what it has left out."""
        if call.name is None:
            return request, NOTHING, await self._known(call, request)
        keys = self._keys()
        call.conversation = keys.conversation(self._partition(call), call.name.id, call.name.user)
        if call.tenant.policy.windowed:
            answer = await self._store.recall(call.conversation, ttl_seconds=call.tenant.ttl_seconds)
            request = await self._complete(call, request, answer.recalled)
            known = await self._known(call, request)
        else:
            answer, known = await asyncio.gather(
                self._store.recall(call.conversation, ttl_seconds=call.tenant.ttl_seconds), self._known(call, request)
            )
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

        heavy = call.unseen_bytes > INLINE_BYTES or sum(len(link.raw) for link in recalled.links.values()) > LONG_BYTES
        try:
            call.request = await asyncio.to_thread(work) if heavy else work()
        except (Odd, StrataError):
            # Memory that holds no messages.
            return request
        call.unseen_bytes += reader.unseen_bytes
        return call.request

    async def _known(self, call: Call, request: Request) -> Known:
        """Ask what is known of the system prompt's lines, items that recur and keys in tools, if there are any."""
        parts, places, policy = request.parts, request.places, call.tenant.policy
        if not request.messages or policy.mode == "observe":
            return NOTHING_KNOWN
        key = self._keys().lines(self._partition(call))
        takes = self._settings.current_values and parts.leading
        lines = self._analyst.lines(request.messages[: parts.leading], key) if takes else ()
        items = policy.anonymous_library and call.name is None and library.any_items(request)
        if not (lines or items or "tools" in request.members):
            return NOTHING_KNOWN
        earlier = [self._place(call, place) for place in lineage.earlier(request)]
        here = call.place = self._place(call, places[-1])
        answered = lineage.answer(request)
        answers = [self._place(call, answered)] if answered and items else []
        # Where one answer was given to two, all must know of both.
        learned = await self._store.learned(self._partition(call), (*answers, *earlier), here, sure=bool(answers))
        return known(earlier, here, learned, answers=answers, key=key, lines=lines)

    def _place(self, call: Call, place: Place) -> Place:
        name = call.name
        user = name.user if name else (call.request.user or "" if call.request else "")
        return self._keys().place(self._partition(call), name.id if name else "", user, place)

    # plan

    async def _plan(
        self, call: Call, request: Request, recalled: Recalled, known: Known, *, refuses: bool = True
    ) -> None:
        scale = await self._scale(call.model)
        given = await self._tools(call, request.member("tools"))
        if len(given.raws) > 1:
            call.orders = await self._store.orders(self._partition(call), given.identities)

        def work() -> Plan:
            return plan.make(
                request,
                recalled,
                model=call.model,
                policy=call.policy,
                named=call.name is not None,
                scale=scale,
                ratio=call.ratio,
                look=self._analyst.analyse,
                now=call.at,
                given=given,
                orders=call.orders,
                known=known,
            )

        call.unseen_bytes += sum(len(raw) for epoch in recalled.epochs.values() for raw in epoch.leading)
        heavy = call.unseen_bytes > INLINE_BYTES or len(request.member("tools")) > LONG_BYTES
        heavy = heavy or (
            len(request.body) > LONG_BYTES and any(stood.log for stood in (*known.standing, *known.again))
        )
        try:
            call.plan = await asyncio.to_thread(work) if heavy else work()
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise Odd("plan_failed") from error
        if call.plan.rejected and refuses:
            total, limit = call.plan.total, call.plan.limit
            raise StrataError(
                TOO_LONG,
                f"This request holds {total} tokens in its messages and tools, and its limit is {limit} tokens. "
                "Its history has been cut as far as it may be.",
                param="messages",
            )

    async def _tools(self, call: Call, array: bytes) -> Toolset:
        """Read a request's tools, many that are new in a thread."""
        seen = self._analyst.seen_tools(array)
        if seen is not None:
            return seen
        call.unseen_bytes += len(array)
        heavy = len(array) > INLINE_BYTES
        return await asyncio.to_thread(self._analyst.tools, array) if heavy else self._analyst.tools(array)

    # reserve

    async def _reserve(self, call: Call, client: Downstream, raw: bytes) -> None:
        """Hold the request to its tenant's models and quotas. Raises StrataError."""
        tenant, request = call.tenant, call.request
        if tenant.models:
            await allowed(tenant, client.scope["raw_path"], client.headers, raw)
        if not tenant.quotas:
            return
        given = call.plan.total if call.plan else None
        if given is None and request is not None and any(message.media for message in request.messages):
            # What is no text has no size in bytes that says anything.
            await asyncio.to_thread(self._weigh, call)
            given = call.layers.total if call.layers else None
        reply = (request.reply_tokens if request else None) or tenant.policy.reserve_tokens
        amount = Amount(
            input=len(raw) // _LEAST_BYTES_PER_TOKEN if given is None else given,
            output=reply * (request.choices if request else 1),
        )
        call.reserved = amount
        money = nanos(cost(call.price, amount)) if call.price else 0
        call.reservation = await self._meter.reserve(
            tenant, call.request_id, tokens=amount.input + amount.output, nanos=money
        )

    # remember, beside the upstream call

    def _remember(self, call: Call) -> None:
        """Store what the next request of this lineage, and of this tenant, is to know."""
        if call.plan is not None:
            self._remember_log(call, call.plan)
            self._remember_order(call, call.plan)
            self._remember_standing(call, call.plan)

    def _remember_log(self, call: Call, plan: Plan) -> None:
        """Store what is about to be forwarded: the client's next step may reach another replica."""
        request = call.request
        if request is None or call.conversation is None or not plan.places or not call.tenant.remember_content:
            return
        entries = log_entries(request, plan, at=call.at)
        call.entry = entries.get(plan.draft.newest.start)
        anew = lineage.outgrown(call.recalled, {*plan.places})
        stands = NOTHING if anew else call.recalled
        fresh = [entry for entry in entries.values() if _is_new(entry, stands)]
        links = window.links(request) if call.tenant.policy.windowed else {}
        links = {place: link for place, link in links.items() if place not in stands.links}
        if fresh or plan.began or links:
            epoch = plan.epoch if plan.began or anew else None
            ttl = call.tenant.ttl_seconds
            self._beside(self._store.remember(call.conversation, fresh, epoch, links, anew=anew, ttl_seconds=ttl))

    def _remember_order(self, call: Call, plan: Plan) -> None:
        """Store the order of a set of tools that was not seen before."""
        order = plan.order
        if len(order) > 1 and all(set(known) != set(order) for known in call.orders):
            self._beside(self._store.order(self._partition(call), order))

    def _remember_standing(self, call: Call, plan: Plan) -> None:
        """Store how the prompt stands: the next request of this lineage keeps its form."""
        if call.place is None or not plan.teaches:
            return
        self._beside(self._store.learn(self._partition(call), call.place, plan.standing, plan.lesson(call.at)))

    def _beside(self, writing: Writing) -> None:
        """Let a write go on beside the request, where it is not done already."""
        if writing is not DONE:
            self._background.start(writing)

    def _partition(self, call: Call) -> str:
        call.partition = call.partition or self._keys().partition(call.tenant.owner)
        return call.partition

    def _heard(self, call: Call, replies: tuple[bytes, ...]) -> None:
        """Store what the answer said, as soon as it is whole."""
        if call.conversation is not None and call.entry is not None and replies:
            ttl = call.tenant.ttl_seconds
            self._beside(self._store.answered(call.conversation, call.entry, replies, ttl_seconds=ttl))
        if call.awaits_answer and call.plan is not None and call.request is not None:
            for said in replies:
                place = self._place(call, chain.after(call.request.places[-1], said))
                self._beside(self._store.learn(self._partition(call), place, call.plan.standing, Lesson(call.at)))

    # record

    async def _refuse(self, call: Call, client: Downstream, error: StrataError) -> None:
        call.outcome = _OUTCOME_OF.get(error.fault.type, "refused")
        call.cause = call.cause or error.fault.code
        call.status = error.fault.status
        if not client.begun:
            await client.refuse(error, [(b"x-strata-request-id", call.request_id.encode())])

    async def _shut(self, call: Call, client: Downstream) -> None:
        if client.begun:
            call.told.end = "shutdown"
            call.conclude(client.status)
        else:
            await self._refuse(call, client, StrataError(SHUTTING_DOWN, "The proxy is shutting down."))

    def _record(self, call: Call) -> None:
        record = call.record(time.monotonic())
        if call.reservation is not None:
            tokens, money = call.used()
            self._meter.settle(call.reservation, tokens=tokens, nanos=money)
        for sink in self._sinks:
            sink(record)
        if call.steps and 0 < call.status < _FAILED:
            self._ledger.forward(self._start(call), call.steps, now=call.at)
            if call.trace is not None:
                ttl = call.tenant.ttl_seconds
                self._traces.put(call.trace, call.lineage, of=call.conversation, ttl_seconds=ttl)
        self._learn_ratio(call)
        tally = Tally(
            prompt_tokens=record.usage.input_tokens if record.usage else 0,
            cached_tokens=(record.usage.cache_read_tokens or 0) if record.usage else 0,
        )
        self._store.count(self._partition(call), tally)
        if call.conversation is None or call.plan is None:
            return
        ttl = call.tenant.ttl_seconds
        self._background.start(self._store.seen(call.conversation, _view(call), tally, ttl_seconds=ttl))

    def _learn_ratio(self, call: Call) -> None:
        """Learn from what the upstream reported of a prompt of text; other parts have rules of their own."""
        usage, request = call.told.usage, call.request
        if usage is None or call.layers is None or request is None or call.outcome != "ok":
            return
        if not any(message.media for message in request.messages):
            self._calibrations.learn(
                self._calibrated(call), call.model.name, counted=call.layers.total, reported=usage.input_tokens
            )

    def _calibrated(self, call: Call) -> str:
        name = call.request.model if call.request else ""
        return hashlib.sha256(f"{call.tenant.upstream_url}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    # weighing

    def _weigh(self, call: Call, *, notes: bool = True) -> None:
        """Weigh a call's layers; what is forwarded does not depend on it."""
        if call.request is None or call.plan is None or call.layers is not None:
            return
        scale = self._scales[call.model.encoding].of(call.model.media)
        with contextlib.suppress(LookupError, ValueError, TypeError, ArithmeticError, RuntimeError):
            call.layers = measure.layers(call.request, call.plan.draft, scale)
            call.losses = measure.losses(call.request, call.plan.draft, scale)
            call.referenced_tokens = sum(scale.text(item.content) for item in call.plan.draft.referenced)
            self._predict(call, call.request, call.plan.draft, scale, notes=notes)
            self._compare(call, call.request, call.plan, scale)

    def _predict(self, call: Call, request: Request, draft: Draft, scale: TokenScale, *, notes: bool) -> None:
        """Say what the prompt cache should hold of this prompt, and would have held of the client's own."""
        start, profile = self._start(call), call.policy.profile
        call.steps = prefix.forwarded(request, draft, scale, self._analyst.chunks)
        sent = call.sent if call.sent is not request else None
        own = prefix.as_sent(request, draft, scale, self._analyst.chunks, sent=sent) or call.steps
        call.as_sent_input_tokens = sum(step.tokens for step in own)
        call.predicted_tokens = self._ledger.cached(start, call.steps, now=call.at, profile=profile)
        call.as_sent_tokens = self._sent.cached(start, own, now=call.at, profile=profile)
        if notes:
            self._sent.forward(start, own, now=call.at)

    def _compare(self, call: Call, request: Request, made: Plan, scale: TokenScale) -> None:
        """Find where the prompt differs from the one before in its lineage."""
        parts, places = request.parts, request.places
        if not call.tenant.remember_content or not parts.turns:
            return
        call.trace = divergence.trace(request, made.draft, scale, at=call.at)
        here = self._place(call, places[-1])
        earlier = [self._place(call, place) for place in lineage.earlier(request)]
        # A history that was edited is found by its name, or by how its conversation begins.
        root = self._place(call, places[parts.leading]) + ROOT
        names = (call.conversation.encode(), root) if call.conversation else (root,)
        call.lineage = (here, *names)
        call.before = self._traces.before(call.trace, [here, *earlier], names if len(parts.turns) > 1 else ())
        if call.before is not None:
            call.divergence = divergence.divergence(call.before, call.trace, made.began)

    def _start(self, call: Call) -> int:
        """What separates prompt caches: whose key it is, and the model."""
        return hash((self._partition(call), call.request.model if call.request else ""))

    async def _scale(self, model: Model) -> TokenScale:
        """Return the scale of a model; a tokenizer's data is loaded when it is first asked for."""
        encoding = model.encoding
        if encoding not in self._scales:
            made = await asyncio.to_thread(TokenScale, encoding, max_bytes=self._memo_bytes)
            self._scales.setdefault(encoding, made)
        return self._scales[encoding].of(model.media)


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
