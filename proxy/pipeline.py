"""The life of a chat request: read → recall → plan → forward → record. `handle` is all of it on one screen."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Sequence

import orjson
from starlette.types import Receive, Scope, Send

from proxy import explain
from proxy.call import INLINE_BYTES, LONG_BYTES, Call
from proxy.core import conversation, plan
from proxy.core.known import Known
from proxy.core.lineage import Recalled
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.price import Amount, Price, cost
from proxy.core.quota import nanos
from proxy.core.request import Request, read
from proxy.core.tools import Toolset
from proxy.downstream import JSON, ClientGone, Downstream
from proxy.errors import INTERNAL, SHUTTING_DOWN, TOO_LONG, Odd, StrataError
from proxy.forward import Forwarder
from proxy.memo import Analyst, count
from proxy.memory.calibrations import Calibrations
from proxy.memory.store import Keys, Tally
from proxy.meter import Meter
from proxy.observe.record import Outcome, Record
from proxy.prices import Prices
from proxy.recall import Recall
from proxy.settings import Settings
from proxy.summaries import Summaries
from proxy.tenants import Tenants, allowed
from proxy.upstream.client import Interrupted
from proxy.weigh import Weigher

_FAILED = 400
_LEAST_BYTES_PER_TOKEN = 3
"""Less than text has nearly everywhere: an estimate that is to be reserved should not fall short."""
_OUTCOME_OF: dict[str, Outcome] = {"upstream_error": "upstream_error", "server_error": "error"}

Sink = Callable[[Record], None]


class Pipeline:
    """Everything a chat request needs, built once at start."""

    def __init__(
        self,
        *,
        settings: Settings,
        tenants: Tenants,
        keys: Callable[[], Keys],
        analyst: Analyst,
        calibrations: Calibrations,
        prices: Prices,
        recall: Recall,
        weigher: Weigher,
        meter: Meter,
        forwarder: Forwarder,
        summaries: Summaries,
        sinks: Sequence[Sink],
        taking: Callable[[Call], None],
    ) -> None:
        self._settings = settings
        self._tenants = tenants
        self._keys = keys
        self._analyst = analyst
        self._calibrations = calibrations
        self._prices = prices
        self._recall = recall
        self._weigher = weigher
        self._meter = meter
        self._forwarder = forwarder
        self._summaries = summaries
        self._sinks = sinks
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
            self._recall.leave(call)
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
            await asyncio.to_thread(self._weigher.weigh, call, notes=False)
            await client.answer(200, orjson.dumps(explain.told(call)), [], JSON)
        except ClientGone:
            return
        except StrataError as error:
            await client.refuse(error, [])

    def _open(self) -> Call:
        return Call(
            request_id=os.urandom(12).hex(), at=time.time(), started=time.monotonic(), tenant=self._tenants.nobody,
            keys=self._keys(),
        )  # fmt: skip

    async def _prepare(self, call: Call, client: Downstream, scope: Scope, *, refuses: bool = True) -> bytes:
        """Find out whose a request is, read and plan it; returns its body. What is too odd to plan has no plan."""
        call.belongs(self._tenants.resolve(client.headers, scope["query_string"].decode("latin-1")))
        raw = await client.body(self._settings.max_body_bytes)
        try:
            request = await self._read(call, client, raw)
            request, recalled, known = await self._recall.of(call, request)
            await self._plan(call, request, recalled, known, refuses=refuses)
        except Odd as odd:
            call.cause = odd.cause
        return raw

    async def _read(self, call: Call, client: Downstream, raw: bytes) -> Request:
        call.started = time.monotonic()
        reader = self._analyst.reader()

        def work() -> Request:
            return read(raw, reader, count, self._analyst.tags)

        request = call.request = call.sent = await asyncio.to_thread(work) if len(raw) > LONG_BYTES else work()
        call.unseen_bytes = reader.unseen_bytes
        call.model = describe(request.model, self._settings.windows, beta=client.headers.get("anthropic-beta", ""))
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

    async def _plan(
        self, call: Call, request: Request, recalled: Recalled, known: Known, *, refuses: bool = True
    ) -> None:
        scale = await self._weigher.scale(call.model)
        given = await self._tools(call, request.member("tools"))
        call.orders = await self._recall.orders(call, given)

        def work() -> Plan:
            return plan.make(
                request,
                recalled,
                model=call.model,
                policy=call.policy,
                named=call.replays,
                scale=scale,
                ratio=call.ratio,
                look=self._analyst.analyse,
                now=call.at,
                given=given,
                orders=call.orders,
                known=known,
            )

        call.unseen_bytes += sum(len(raw) for epoch in recalled.epochs.values() for raw in epoch.leading)
        heavy = call.heavy or len(request.member("tools")) > LONG_BYTES
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
            await asyncio.to_thread(self._weigher.weigh, call)
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
            call.outcome = "shutdown"

    def _record(self, call: Call) -> None:
        record = call.record(time.monotonic())
        if call.reservation is not None:
            tokens, money = call.used()
            self._meter.settle(call.reservation, tokens=tokens, nanos=money)
        for sink in self._sinks:
            sink(record)
        if 0 < call.status < _FAILED and not call.told.failed:
            self._weigher.forwarded(call)
        self._learn_ratio(call)
        tally = Tally(
            prompt_tokens=record.usage.input_tokens if record.usage else 0,
            cached_tokens=(record.usage.cache_read_tokens or 0) if record.usage else 0,
        )
        self._recall.seen(call, tally)

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
