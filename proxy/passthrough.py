"""Everything that is no chat: passed through as it is, both ways, never held as a whole.

Where a tenant has quotas or a list of models, what it asks for here counts too: a copy of the answer is read for usage.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

from starlette.types import Receive, Scope, Send

from proxy.core import sse
from proxy.core import usage as usages
from proxy.core.price import Amount, cost
from proxy.core.quota import nanos
from proxy.core.usage import Usage
from proxy.downstream import ClientGone, Downstream
from proxy.errors import INTERNAL, NO_MODEL, NO_WEBSOCKET, NOT_ALLOWED, StrataError
from proxy.meter import Meter, Reservation
from proxy.prices import Prices
from proxy.settings import Settings
from proxy.tenants import Tenant, Tenants
from proxy.upstream import headers
from proxy.upstream.client import Answer, Clients, Exchange, Interrupted, Truncated
from proxy.upstream.target import is_stateless, models_asked, normal

_MOST_KEPT = 2_097_152
_BYTES_PER_TOKEN = 3


class Passthrough:
    """The upstreams' other routes."""

    def __init__(self, *, settings: Settings, tenants: Tenants, clients: Clients, meter: Meter, prices: Prices) -> None:
        self._settings = settings
        self._tenants = tenants
        self._clients = clients
        self._meter = meter
        self._prices = prices

    def take(self, settings: Settings) -> None:
        """Put these settings in the place of those before."""
        self._settings = settings

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request; an answer that breaks off ends the connection, so that the client notices."""
        client = Downstream(scope, receive, send)
        exchange = Exchange()
        watching = asyncio.ensure_future(_watch(client, exchange))
        try:
            tenant = self._resolved(client)
            body = await self._body(client, tenant)
            held = await self._reserve(client, tenant)
            heard = _Heard() if held else None
            try:
                answer = await self._send(client, tenant, body, exchange)
                try:
                    await _relay(answer, client, held, heard)
                finally:
                    await answer.close()
            finally:
                if held and heard:
                    self._settle(tenant, held, heard)
        except (ClientGone, Interrupted, Truncated):
            return
        except StrataError as error:
            if not client.begun:
                await client.refuse(error, [])
        except Exception as error:  # noqa: BLE001 -- the outer edge: whatever it is, the client gets an answer
            if not client.begun:
                await client.refuse(StrataError(INTERNAL, f"Internal error ({type(error).__name__})"), [])
        finally:
            watching.cancel()

    def _resolved(self, client: Downstream) -> Tenant:
        scope = client.scope
        tenant = self._tenants.resolve(client.headers, scope["query_string"].decode("latin-1"))
        if client.headers.get("upgrade", "").lower() == "websocket":
            raise StrataError(NO_WEBSOCKET, "WebSocket upgrades are not supported; use the HTTP form of this route.")
        if tenant.shares_key and not is_stateless(scope["method"], normal(scope["raw_path"])):
            raise StrataError(
                NOT_ALLOWED,
                f"{scope['path']} keeps data at the upstream, where tenants share one key; it needs a key of the "
                f"tenant's own (STRATA_TENANTS__{tenant.name.upper()}__UPSTREAM_KEY).",
            )
        return tenant

    async def _body(self, client: Downstream, tenant: Tenant) -> bytes | AsyncIterator[bytes]:
        """Return the body as it comes; of a tenant that may use some models only, read and looked at."""
        if client.bodiless():
            return b""
        if not tenant.models:
            return client.pieces()
        raw = await client.raw(self._settings.max_body_bytes)
        for name in models_asked(client.scope["raw_path"], client.decoded(raw, self._settings.max_body_bytes)):
            if not tenant.may_use(name):
                why = f"The model {name[:200]!r} does not exist or this key may not use it."
                raise StrataError(NO_MODEL, why, param="model")
        return raw

    async def _reserve(self, client: Downstream, tenant: Tenant) -> Reservation | None:
        if client.scope["method"] != "POST" or not tenant.quotas:
            return None
        text = "json" in client.headers.get("content-type", "")
        size = int(client.headers.get("content-length") or 0) if text else 0
        return await self._meter.reserve(tenant, os.urandom(12).hex(), tokens=size // _BYTES_PER_TOKEN, nanos=0)

    def _settle(self, tenant: Tenant, held: Reservation, heard: _Heard) -> None:
        usage, model = heard.usage()
        price = self._prices.of(model, tenant.upstream_url, time.time())
        tokens = usage.input_tokens + (usage.output_tokens or 0) if usage else 0
        amount = Amount(
            input=usage.input_tokens,
            cached_read=usage.cache_read_tokens or 0,
            cached_write=usage.cache_write_tokens or 0,
            output=usage.output_tokens or 0,
        ) if usage else None  # fmt: skip
        self._meter.settle(held, tokens=tokens, nanos=nanos(cost(price, amount)) if price and amount else 0)

    async def _send(
        self, client: Downstream, tenant: Tenant, body: bytes | AsyncIterator[bytes], exchange: Exchange
    ) -> Answer:
        scope = client.scope
        sent = headers.upstream(
            scope["headers"], key=tenant.upstream_key, hide=tenant.hides_credentials, drop=frozenset({b"expect"})
        )
        return await self._clients(tenant.upstream_url).send(
            scope["method"],
            path=scope["raw_path"],
            query=headers.query(scope["query_string"], hide=tenant.hides_credentials),
            headers=sent,
            body=body,
            exchange=exchange,
        )


class _Heard:
    """A copy of an answer, read for its usage when it has passed: JSON, or the events that tell it."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._bytes = 0
        self._events = False

    def begin(self, answer: Answer) -> None:
        kind = answer.header(b"content-type")
        self._events = kind.startswith(b"text/event-stream")
        if not self._events and b"json" not in kind:
            self._bytes = _MOST_KEPT

    def hear(self, data: bytes) -> None:
        """Keep a stream's end, or the whole of an answer that is not too long."""
        self._bytes += len(data)
        if self._events:
            self._kept.append(data)
            while self._bytes > _MOST_KEPT and len(self._kept) > 1:
                self._bytes -= len(self._kept.pop(0))
        elif self._bytes <= _MOST_KEPT:
            self._kept.append(data)
        else:
            self._kept.clear()

    def usage(self) -> tuple[Usage | None, str]:
        """Return what the answer says it used, and of which model it says it is."""
        whole = b"".join(self._kept)
        if not self._events:
            return usages.parse(whole), usages.model(whole)
        told = [sse.data(event) for event in sse.events(whole) if b'"usage"' in event]
        last = next(((usage, usages.model(data)) for data in reversed(told) if (usage := usages.parse(data))), None)
        return last or (None, "")


async def _relay(answer: Answer, client: Downstream, held: Reservation | None, heard: _Heard | None) -> None:
    told = held.headers if held else []
    drop = frozenset(name for name, _ in told)
    await client.begin(answer.status, [*headers.downstream(answer.headers, drop=drop), *told])
    if heard:
        heard.begin(answer)
    while data := await answer.read():
        if heard:
            heard.hear(data)
        await client.send(data, more=True)
    await client.send(b"", more=False)


async def _watch(client: Downstream, exchange: Exchange) -> None:
    await client.gone()
    exchange.end("client")
