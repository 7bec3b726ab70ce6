"""Making summaries beside the requests: what a limit will take is told by a model before it goes.

No request waits for one. What fails, is late or is over a quota means that turns are dropped without.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping

from proxy.background import Background
from proxy.call import Call
from proxy.core import library, summary
from proxy.core import usage as usages
from proxy.core.price import Amount, Price, cost
from proxy.core.quota import nanos
from proxy.core.summary import Wanted
from proxy.errors import StrataError
from proxy.memory.store import Store
from proxy.meter import Meter
from proxy.observe.metrics import SummaryOutcome
from proxy.tenants import Tenant
from proxy.upstream import headers
from proxy.upstream.client import Clients, Exchange, Interrupted, Truncated
from proxy.upstream.headers import Raw
from proxy.upstream.target import normal

_PATIENCE_SECONDS = 180.0
_MOST_BYTES = 4_194_304
_MOST_UNDER_WAY = 32
_ANSWER_TOKENS = 1_000
_PLACE_BYTES = 16
_BYTES_PER_TOKEN = 3
_FIRST_WAIT_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 3_600.0
_MOST_FAILED = 10_000
_OURS = frozenset({
    b"openai-organization", b"openai-project", b"openai-beta", b"anthropic-version", b"anthropic-beta", b"api-version",
})  # fmt: skip
"""What of a request's headers goes with the calls made on its account, beside its credentials: in which dialect."""


class Summaries:
    """`price` tells what a model costs a tenant; `told` hears what became of each."""

    def __init__(
        self,
        *,
        clients: Clients,
        store: Store,
        meter: Meter,
        background: Background,
        price: Callable[[Tenant, str], Price | None],
        told: Callable[[str, SummaryOutcome, int, float], None],
    ) -> None:
        self._clients = clients
        self._store = store
        self._meter = meter
        self._background = background
        self._price = price
        self._told = told
        self._under_way: set[tuple[str, bytes]] = set()
        self._failed: dict[tuple[str, bytes], tuple[float, float]] = {}

    def consider(self, call: Call, scope: Mapping[str, object]) -> None:
        """Begin what is due after a request that went well."""
        tenant, request, plan = call.tenant, call.request, call.plan
        if tenant.summary_model is None or not tenant.remember_content or call.conversation is None:
            return
        if request is None or plan is None or plan.limit is None or call.layers is None or call.outcome != "ok":
            return
        known = call.recalled.summaries
        held = sum(layer.tokens for layer in call.layers.each if layer.name in {"L2", "L4"})
        for item in summary.due_items([item for message in request.messages for item in library.items(message)], known):
            self._begin(call, scope, item.sha256, functools.partial(summary.wanted_item, item))
        found = summary.due(
            request,
            known,
            history_tokens=held + call.losses.dropped_tokens,
            limit_tokens=plan.limit,
            messages=request.parts.newest.start - request.parts.leading,
        )
        if found is not None:
            self._begin(call, scope, found.key, functools.partial(summary.wanted, request, found))

    def _begin(self, call: Call, scope: Mapping[str, object], key: bytes, build: Callable[[], Wanted]) -> None:
        assert call.conversation is not None
        name = (call.conversation, key)
        until, _ = self._failed.get(name, (0.0, 0.0))
        if name in self._under_way or len(self._under_way) >= _MOST_UNDER_WAY or time.monotonic() < until:
            return
        self._under_way.add(name)
        if not self._background.start(self._make(call.conversation, key, build, call.tenant, scope)):
            self._under_way.discard(name)

    async def _make(
        self,
        conversation: str,
        key: bytes,
        build: Callable[[], Wanted],
        tenant: Tenant,
        scope: Mapping[str, object],
    ) -> None:
        written = None
        try:
            wanted = await asyncio.to_thread(build)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    written = await self._reduced(wanted, tenant, scope)
        finally:
            self._under_way.discard((conversation, key))
            self._note((conversation, key), failed=written is None)
        if written is None:
            return
        log = (await self._store.recall(conversation, ttl_seconds=tenant.ttl_seconds)).recalled.log
        if not log or (len(key) == _PLACE_BYTES and all(place != key for _, place in log)):
            # The conversation has been deleted since.
            return
        self._told(tenant.name, "made", 0, 0.0)
        text = summary.text(written, wanted.rules)
        await self._store.summarised(conversation, key, text, ttl_seconds=tenant.ttl_seconds)

    def _note(self, name: tuple[str, bytes], *, failed: bool) -> None:
        """Wait longer each time before what failed is tried again."""
        _, before = self._failed.pop(name, (0.0, 0.0))
        if failed:
            wait = min(_LONGEST_WAIT_SECONDS, before * 2 or _FIRST_WAIT_SECONDS)
            self._failed[name] = (time.monotonic() + wait, wait)
        while len(self._failed) > _MOST_FAILED:
            self._failed.pop(next(iter(self._failed)))

    async def _reduced(self, wanted: Wanted, tenant: Tenant, scope: Mapping[str, object]) -> str | None:
        """Summarise each piece, then what was written of them."""
        pieces = wanted.pieces
        while True:
            made = [await self._asked(wanted.instructions, piece, tenant, scope) for piece in pieces]
            if None in made:
                return None
            if len(made) == 1:
                return made[0]
            # Fewer each time: an answer is read up to `LONGEST`.
            pieces = summary.pieces("\n\n".join(filter(None, made)))

    async def _asked(self, instructions: str, piece: str, tenant: Tenant, scope: Mapping[str, object]) -> str | None:
        model = tenant.summary_model or ""
        body = summary.ask(model, instructions, piece)
        price = self._price(tenant, model)
        tokens = len(body) // _BYTES_PER_TOKEN
        money = nanos(cost(price, Amount(input=tokens, output=_ANSWER_TOKENS))) if price else 0
        try:
            held = await self._meter.reserve(tenant, os.urandom(12).hex(), tokens=tokens + _ANSWER_TOKENS, nanos=money)
        except StrataError:
            self._told(tenant.name, "refused", 0, 0.0)
            return None
        raw = b""
        try:
            raw = await self._sent(body, tenant, scope)
        except (StrataError, Interrupted, Truncated):
            raw = b""
        finally:
            usage = usages.parse(raw) if raw else None
            used = Amount(input=0)
            if usage is not None:
                used = Amount(
                    input=usage.input_tokens, cached_read=usage.cache_read_tokens or 0, output=usage.output_tokens or 0
                )
            paid = cost(price, used) if price else None
            self._told(tenant.name, "asked", used.input + used.output, float(paid or 0))
            if held is not None:
                self._meter.settle(held, tokens=used.input + used.output, nanos=nanos(paid))
        written = summary.answer(raw) if raw else None
        if written is None:
            self._told(tenant.name, "failed", 0, 0.0)
        return written

    async def _sent(self, body: bytes, tenant: Tenant, scope: Mapping[str, object]) -> bytes:
        """Ask the upstream as the request did, with its key; empty where it refused."""
        given = scope["headers"]
        assert isinstance(given, list)
        own = [(name, value) for name, value in given if name in _OURS or headers.is_credential(name)]
        sent: Raw = headers.upstream(own, key=tenant.upstream_key, hide=tenant.hides_credentials, drop=frozenset())
        sent += [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
        path, query = scope["raw_path"], scope["query_string"]
        assert isinstance(path, bytes)
        assert isinstance(query, bytes)
        answer = await self._clients(tenant.upstream_url).send(
            "POST",
            path=normal(path),
            query=headers.query(query, hide=tenant.hides_credentials),
            headers=sent,
            body=body,
            exchange=Exchange(),
        )
        try:
            pieces, size = [], 0
            while (piece := await answer.read()) and size < _MOST_BYTES:
                pieces.append(piece)
                size += len(piece)
        finally:
            await answer.close()
        return b"".join(pieces) if answer.status == 200 else b""


def price_at(prices_of: Callable[[str, str, float], Price | None]) -> Callable[[Tenant, str], Price | None]:
    """Return what tells the price of a model at a tenant's upstream, now."""
    return lambda tenant, model: prices_of(model, tenant.upstream_url, time.time())
