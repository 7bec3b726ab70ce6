"""Everything that is no chat: passed through as it is, both ways, never held as a whole.

Where a tenant has quotas or a list of models, what it asks for here counts too: a copy of the answer is read for usage.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from proxy.core import sse
from proxy.core import usage as usages
from proxy.core.price import Amount, cost
from proxy.core.quota import nanos
from proxy.core.usage import Usage
from proxy.downstream import ClientGone, Downstream
from proxy.errors import INTERNAL, NO_WEBSOCKET, NOT_ALLOWED, SHUTTING_DOWN, StrataError
from proxy.meter import Meter, Reservation
from proxy.prices import Prices
from proxy.settings import Settings
from proxy.tenants import Tenant, Tenants, allowed
from proxy.upstream import headers
from proxy.upstream.client import Answer, Clients, Exchange, Interrupted, Truncated
from proxy.upstream.target import is_stateless, keeps_nothing, makes_response, normal

_MOST_KEPT = 262_144
_HEAD = 16_384
_BYTES_PER_TOKEN = 3
_INLINE = 65_536
_MOST_TOKENS = 100_000_000
_FAILED = 400
_WRITING = frozenset({b"responses", b"completions", b"messages", b"chat"})
"""Resources whose answers are written by a model, token by token."""


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
        client.idle_seconds = self._clients.idle_seconds
        exchange = Exchange()
        watching = asyncio.ensure_future(_watch(client, exchange))
        try:
            tenant = self._resolved(client)
            body = await self._body(client, tenant)
            asked = await self._asked(client, tenant, body)
            held = await self._reserve(client, tenant, asked)
            heard = _Heard() if held else None
            try:
                answer = await self._send(client, tenant, body, exchange, heard)
                if tenant.hides_credentials:
                    answer.headers = headers.unsigned(answer.headers)
                try:
                    await _relay(answer, client, held, heard)
                finally:
                    await answer.close()
            finally:
                if held and heard:
                    self._settle(tenant, held, asked, heard)
        except (ClientGone, Interrupted, Truncated):
            return
        except asyncio.CancelledError:
            # uvicorn's deadline for a graceful shutdown has passed: an answer that has begun is cut short.
            if not client.begun:
                await client.refuse(StrataError(SHUTTING_DOWN, "The proxy is shutting down."), [])
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
        method, path = scope["method"], normal(scope["raw_path"])
        if tenant.shares_key and not is_stateless(method, path) and not makes_response(method, path):
            raise _keeps(client, tenant)
        return tenant

    async def _body(self, client: Downstream, tenant: Tenant) -> bytes | AsyncIterator[bytes]:
        """Return the body as it comes; read where what it asks for must be known: models, quotas, what is kept."""
        if client.bodiless():
            return b""
        text = "json" in client.headers.get("content-type", "json")
        if not tenant.models and not (tenant.quotas and text) and not _may_keep(client, tenant):
            return client.pieces()
        return await client.raw(self._settings.max_body_bytes)

    async def _asked(self, client: Downstream, tenant: Tenant, body: bytes | AsyncIterator[bytes]) -> _Asked:
        """Look at what a request asks for, and hold it to its tenant's models and to its key. Raises StrataError."""
        if not isinstance(body, bytes) or not body:
            if _may_keep(client, tenant):
                raise _keeps(client, tenant)
            return _Asked()
        plain = await client.decoded(body, self._settings.max_body_bytes)
        if _may_keep(client, tenant) and not keeps_nothing(plain):
            raise _keeps(client, tenant)
        if tenant.models:
            await allowed(tenant, client.scope["raw_path"], client.headers, plain)
        if not tenant.quotas:
            return _Asked()
        return await asyncio.to_thread(_asked, plain) if len(plain) > _INLINE else _asked(plain)

    async def _reserve(self, client: Downstream, tenant: Tenant, asked: _Asked) -> Reservation | None:
        if client.scope["method"] != "POST" or not tenant.quotas:
            return None
        output = 0
        if _WRITING & set(normal(client.scope["raw_path"]).split(b"/")):
            output = asked.output or tenant.policy.reserve_tokens
        price = self._prices.of(asked.model, tenant.upstream_url, time.time())
        money = nanos(cost(price, Amount(input=asked.input, output=output))) if price else 0
        return await self._meter.reserve(tenant, os.urandom(12).hex(), tokens=asked.input + output, nanos=money)

    def _settle(self, tenant: Tenant, held: Reservation, asked: _Asked, heard: _Heard) -> None:
        """Count what the answer says it used; else, of one that was given, the estimate and what came of it."""
        usage, model = heard.usage()
        if usage is not None:
            amount = Amount(
                input=usage.input_tokens,
                cached_read=usage.cache_read_tokens or 0,
                cached_write=usage.cache_write_tokens or 0,
                output=usage.output_tokens or 0,
            )
        else:
            # Who leaves before the answer's head has made the upstream work all the same.
            refused = heard.status >= _FAILED or not heard.forwarded
            amount = Amount(input=0) if refused else Amount(input=asked.input, output=heard.events)
        price = self._prices.of(model or asked.model, tenant.upstream_url, time.time())
        self._meter.settle(held, tokens=amount.input + amount.output, nanos=nanos(cost(price, amount)) if price else 0)

    async def _send(
        self,
        client: Downstream,
        tenant: Tenant,
        body: bytes | AsyncIterator[bytes],
        exchange: Exchange,
        heard: _Heard | None,
    ) -> Answer:
        scope = client.scope
        drop = frozenset({b"expect", b"accept-encoding"}) if heard else frozenset({b"expect"})
        sent = headers.upstream(scope["headers"], key=tenant.upstream_key, hide=tenant.hides_credentials, drop=drop)
        if heard:
            # Uncompressed, so that the usage in it can be read.
            sent.append((b"accept-encoding", b"identity"))
            heard.forwarded = True
        try:
            return await self._clients(tenant.upstream_url).send(
                scope["method"],
                path=scope["raw_path"],
                query=headers.query(scope["query_string"], hide=tenant.hides_credentials),
                headers=sent,
                body=body,
                exchange=exchange,
            )
        except StrataError:
            if heard:
                heard.forwarded = False
            raise


def _may_keep(client: Downstream, tenant: Tenant) -> bool:
    """Whether it is the body that says if something is kept under a key that tenants share."""
    return tenant.shares_key and makes_response(client.scope["method"], normal(client.scope["raw_path"]))


def _keeps(client: Downstream, tenant: Tenant) -> StrataError:
    otherwise = '"store": false and nothing stored to go on from, or ' if _may_keep(client, tenant) else ""
    return StrataError(
        NOT_ALLOWED,
        f"{client.scope['path']} keeps data at the upstream, where tenants share one key; it needs {otherwise}a key of "
        f"the tenant's own (STRATA_TENANTS__{tenant.name.upper()}__UPSTREAM_KEY).",
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks for, as far as its body says: tokens by estimate."""

    model: str = ""
    input: int = 0
    output: int = 0


class _Limits(msgspec.Struct):
    model: object = None
    max_output_tokens: object = None
    max_completion_tokens: object = None
    max_tokens: object = None


def _asked(body: bytes) -> _Asked:
    try:
        read = msgspec.json.decode(body, type=_Limits)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return _Asked(input=_estimate(body))
    limits = (read.max_output_tokens, read.max_completion_tokens, read.max_tokens)
    numbers = (limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool))
    output = next((limit for limit in numbers if limit > 0), 0)
    model = read.model if isinstance(read.model, str) else ""
    return _Asked(model, _estimate(body), min(output, _MOST_TOKENS))


_ENCODED = re.compile(rb"(?<![\w+/=-])[\w+/=-]{4096,}")
"""A picture or a file in base64: it begins where nothing of it stands in front, so that the search is linear."""
_ENCODED_TOKENS = 1_000


def _estimate(body: bytes) -> int:
    """Return about how many tokens a body holds, pictures and files at a thousand each."""
    encoded = [found.end() - found.start() for found in _ENCODED.finditer(body)]
    return (len(body) - sum(encoded)) // _BYTES_PER_TOKEN + _ENCODED_TOKENS * len(encoded)


class _Heard:
    """A copy of an answer's end, read for its usage when it has passed: JSON, or the events that tell it."""

    def __init__(self) -> None:
        self._head = b""
        self._kept: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._streams = False
        self.forwarded = False
        self.status = 0
        self.events = 0

    def begin(self, answer: Answer) -> None:
        """Look at the head of an answer."""
        self.status = answer.status
        self._streams = answer.header(b"content-type").startswith(b"text/event-stream")

    def hear(self, data: bytes) -> None:
        """Keep the end of what passes, and its beginning."""
        if len(self._head) < _HEAD:
            self._head += data[: _HEAD - len(self._head)]
        self.events += data.count(b"\ndata:") + data.startswith(b"data:") if self._streams else 0
        self._kept.append(data)
        self._bytes += len(data)
        while self._bytes > _MOST_KEPT and len(self._kept) > 1:
            self._bytes -= len(self._kept.popleft())

    def usage(self) -> tuple[Usage | None, str]:
        """Return what the answer says it used, and of which model it says it is."""
        whole = b"".join(self._kept)
        if self._streams:
            return self._of_events(self._head if whole.startswith(self._head) else self._head + b"\n\n", whole)
        model = usages.model(whole) or _named(self._head)
        found = usages.parse(whole)
        if found is None and (told := _USAGE.findall(whole)):
            # Too long to be kept whole: usage stands at its end.
            found = usages.parse(b'{"usage":' + told[-1] + b"}")
        return found, model

    def _of_events(self, head: bytes, whole: bytes) -> tuple[Usage | None, str]:
        told = [sse.data(event) for part in (head, whole) for event in sse.events(part) if b'"usage"' in event]
        read = [usage for data in told if (usage := usages.parse(data)) is not None]
        model = next((name for data in told if (name := usages.model(data))), "") or _named(self._head)
        if not read:
            return None, model
        # Anthropic's first event has the input and its last the output.
        output = max((each for data in told if (each := usages.output(data)) is not None), default=None)
        return dataclasses.replace(read[-1], output_tokens=output), model


_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')


def _named(head: bytes) -> str:
    found = _MODEL.search(head)
    return found.group(1).decode("utf-8", "replace") if found else ""


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
