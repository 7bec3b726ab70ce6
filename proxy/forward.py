"""Sending a planned request upstream and its answer downstream. Ends early when the client leaves."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable

from proxy import relay
from proxy.call import Call
from proxy.core import body as json_body
from proxy.core import render, reply
from proxy.core.request import OWN
from proxy.downstream import Downstream
from proxy.observe import receipt
from proxy.upstream import headers
from proxy.upstream.client import Answer, Clients
from proxy.upstream.target import normal

_DROPPED = frozenset({b"content-length", b"content-encoding", b"accept-encoding", b"expect"})
_REFUSED = 400
_PATIENCE_SECONDS = 0.05
_LONG_BYTES = 65_536
_OPTIONS = re.compile(rb"stream_?options|include_?usage", re.IGNORECASE)


class Forwarder:
    """`measure` weighs a call's layers; `streams` is told of each that begins or ends; `heard` of whole answers."""

    def __init__(
        self,
        clients: Clients,
        *,
        measure: Callable[[Call], None],
        streams: Callable[[int], None],
        heard: Callable[[Call, tuple[bytes, ...]], None],
    ) -> None:
        self._clients = clients
        self._measure = measure
        self._streams = streams
        self._heard = heard

    async def forward(self, call: Call, client: Downstream, raw: bytes) -> None:
        """Forward, and conclude the call. Raises StrataError when no answer came, Interrupted when the client left."""
        client.idle_seconds = self._clients.idle_seconds
        watching = asyncio.ensure_future(_watch(call, client))
        try:
            answer, asked = await self._send(call, client, raw)
            if call.tenant.hides_credentials:
                answer.headers = headers.unsigned(answer.headers)
            try:
                await self._relay(call, client, answer, asked=asked)
            finally:
                await answer.close()
        finally:
            watching.cancel()
            if call.measuring is not None:
                await call.measuring

    async def _send(self, call: Call, client: Downstream, raw: bytes) -> tuple[Answer, bool]:
        """Send once; a second time only where the upstream refused what the proxy had asked on its own account."""
        request = call.request
        asks = request is not None and request.stream and request.wants_usage is False
        model, upstream = request.model if request else "", self._clients(call.tenant.upstream_url)
        ask = asks and not upstream.refuses_options(model)
        body = await _render(call, raw, ask_usage=ask)
        call.forwarded = time.monotonic()
        call.measuring = self._measured(call)
        answer = await self._once(call, client, body)
        if ask and await _refuses_options(answer):
            await answer.close()
            answer = await self._once(call, client, await _render(call, raw, ask_usage=False))
            if answer.status < _REFUSED:
                upstream.remember_refusal(model)
            return answer, False
        return answer, ask

    def _measured(self, call: Call) -> asyncio.Future[None] | None:
        """Weigh the layers while the upstream works: little in this loop, much in a thread."""
        if call.heavy:
            return asyncio.ensure_future(asyncio.to_thread(self._measure, call))
        asyncio.get_running_loop().call_soon(self._measure, call)
        return None

    async def _once(self, call: Call, client: Downstream, body: bytes) -> Answer:
        tenant, scope = call.tenant, client.scope
        sent = headers.upstream(scope["headers"], key=tenant.upstream_key, hide=tenant.hides_credentials, drop=_DROPPED)
        # Uncompressed, so that events leave as they come and usage can be read.
        sent.append((b"accept-encoding", b"identity"))
        path = normal(scope["raw_path"])
        return await self._clients(tenant.upstream_url).send(
            "POST",
            path=path,
            query=headers.query(scope["query_string"], hide=tenant.hides_credentials),
            headers=sent,
            body=body,
            exchange=call.exchange,
        )

    async def _relay(self, call: Call, client: Downstream, answer: Answer, *, asked: bool) -> None:
        if call.measuring is not None:
            # A receipt without its layers is better than an answer that waits for them.
            await asyncio.wait({call.measuring}, timeout=_PATIENCE_SECONDS)
        elif call.layers is None:
            self._measure(call)
        told = receipt.headers(
            request_id=call.request_id,
            conversation=call.name.id if call.name else None,
            plan=call.plan,
            layers=call.layers,
            losses=call.losses,
            divergence=call.divergence,
            predicted_tokens=call.predicted_tokens,
            cause=call.cause,
            overhead_seconds=call.overhead(time.monotonic()),
            degraded=call.degraded,
            ignored=call.ignored,
            kept_messages=call.kept_messages,
            over_quota=call.over_quota,
            quota_unknown=call.reservation is not None and call.reservation.verdict is None,
            allowance=call.reservation.headers if call.reservation else (),
        )
        heard = functools.partial(self._heard, call) if call.entry is not None or call.awaits_answer else None
        passing = relay.Passing(client=client, told=call.told, clock=time.monotonic, heard=heard)
        if await relay.readable(answer, asked=call.request is not None and call.request.stream):
            choices = call.request.choices if call.request else 1
            self._streams(1)
            try:
                await relay.stream(answer, passing, told, strip_usage=asked, choices=choices)
            finally:
                self._streams(-1)
            if asked and call.request and _OPTIONS.search(call.told.refusal):
                # The client has seen it: the next one will not.
                self._clients(call.tenant.upstream_url).remember_refusal(call.request.model)
        else:
            await relay.body(answer, passing, told)
        call.conclude(answer.status)


async def _render(call: Call, raw: bytes, *, ask_usage: bool) -> bytes:
    if call.request is not None and call.plan is not None:
        return render.body(call.request, call.plan.draft, ask_usage=ask_usage)
    if OWN.encode() not in raw and b"\\u" not in raw:
        return raw
    members = await asyncio.to_thread(json_body.lenient, raw) if len(raw) > _LONG_BYTES else json_body.lenient(raw)
    edits = json_body.remove(members, {OWN})
    call.ignored = bool(edits)
    return json_body.splice(raw, edits)


async def _refuses_options(answer: Answer) -> bool:
    """Whether an answer refuses the options that were added, in whatever words and with whatever status.

    Of what succeeded only JSON whose length is stated is looked at: all else may be a stream under another name.
    """
    try:
        if answer.status < _REFUSED:
            json = answer.header(b"content-type").startswith(b"application/json")
            length = answer.header(b"content-length")
            if not json or not length.isdigit() or int(length) > _LONG_BYTES:
                return False
        refusal = relay.plain(await answer.peek(), answer.header(b"content-encoding"))
    except BaseException:
        await answer.close()
        raise
    return _OPTIONS.search(refusal) is not None and (answer.status >= _REFUSED or reply.fails(refusal))


async def _watch(call: Call, client: Downstream) -> None:
    """End the exchange as soon as the client leaves: the upstream then stops working, and charging, for nobody."""
    await client.gone()
    call.exchange.end("the client left")
