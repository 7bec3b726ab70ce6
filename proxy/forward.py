"""Sending a planned request upstream and its answer downstream. Ends early when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from proxy import relay
from proxy.call import Call
from proxy.core import body as json_body
from proxy.core import render
from proxy.core.request import OWN
from proxy.downstream import Downstream
from proxy.observe import receipt
from proxy.upstream import headers
from proxy.upstream.client import Answer, Client
from proxy.upstream.target import normal

_DROPPED = frozenset({b"content-length", b"content-encoding", b"accept-encoding", b"expect"})
_REFUSALS = frozenset({400, 422})
_OPTIONS = (b"stream_options", b"include_usage")


class Forwarder:
    """`measure` weighs the layers of a call while the upstream works; `streams` is told of each that begins or ends."""

    def __init__(
        self,
        client: Client,
        *,
        measure: Callable[[Call], None],
        streams: Callable[[int], None],
        inline_bytes: int,
    ) -> None:
        self._client = client
        self._measure = measure
        self._streams = streams
        self._inline_bytes = inline_bytes

    async def forward(self, call: Call, client: Downstream, raw: bytes) -> None:
        """Forward, and conclude the call. Raises StrataError when no answer came, Interrupted when the client left."""
        watching = asyncio.ensure_future(_watch(call, client))
        try:
            answer, asked = await self._send(call, client, raw)
            try:
                if call.layers is None:
                    self._measure(call)
                await self._relay(call, client, answer, asked=asked)
            finally:
                await answer.close()
        finally:
            watching.cancel()

    async def _send(self, call: Call, client: Downstream, raw: bytes) -> tuple[Answer, bool]:
        """Send once; a second time only where the upstream refused what the proxy had asked on its own account."""
        request = call.request
        asks = request is not None and request.stream and request.wants_usage is False
        ask = asks and not self._client.refuses_stream_options
        sending = self._once(call, client, _render(call, raw, ask_usage=ask))
        call.forwarded = time.monotonic()
        if call.unseen_bytes > self._inline_bytes:
            answer, _ = await asyncio.gather(sending, asyncio.to_thread(self._measure, call))
        else:
            asyncio.get_running_loop().call_soon(self._measure, call)
            answer = await sending
        if ask and answer.status in _REFUSALS and _names_options(await answer.peek()):
            await answer.close()
            answer = await self._once(call, client, _render(call, raw, ask_usage=False))
            self._client.refuses_stream_options = answer.status not in _REFUSALS
            return answer, False
        return answer, ask

    async def _once(self, call: Call, client: Downstream, body: bytes) -> Answer:
        tenant, scope = call.tenant, client.scope
        sent = headers.upstream(scope["headers"], key=tenant.upstream_key, hide=tenant.hides_credentials, drop=_DROPPED)
        # Uncompressed, so that events leave as they come and usage can be read.
        sent.append((b"accept-encoding", b"identity"))
        path = normal(scope["raw_path"])
        return await self._client.send(
            "POST",
            path=path,
            query=headers.query(scope["query_string"], hide=tenant.hides_credentials),
            headers=sent,
            body=body,
            exchange=call.exchange,
        )

    async def _relay(self, call: Call, client: Downstream, answer: Answer, *, asked: bool) -> None:
        told = receipt.headers(
            request_id=call.request_id,
            conversation=call.name.id if call.name else None,
            plan=call.plan,
            layers=call.layers,
            cause=call.cause,
            overhead_seconds=call.overhead(time.monotonic()),
            degraded=call.degraded,
        )
        keep = call.entry is not None
        if relay.readable(answer):
            choices = call.request.choices if call.request else 1
            self._streams(1)
            try:
                await relay.stream(
                    answer, client, told, call.told,
                    strip_usage=asked, choices=choices, keep=keep, clock=time.monotonic,
                )  # fmt: skip
            finally:
                self._streams(-1)
        else:
            await relay.body(answer, client, told, call.told, keep=keep, clock=time.monotonic)
        call.conclude(answer.status)


def _render(call: Call, raw: bytes, *, ask_usage: bool) -> bytes:
    if call.request is not None and call.plan is not None:
        return render.body(call.request, call.plan.draft, ask_usage=ask_usage)
    if OWN.encode() not in raw and b"\\u" not in raw:
        return raw
    return json_body.splice(raw, json_body.remove(json_body.lenient(raw), {OWN}))


def _names_options(refusal: bytes) -> bool:
    return any(word in refusal for word in _OPTIONS)


async def _watch(call: Call, client: Downstream) -> None:
    """End the exchange as soon as the client leaves: the upstream then stops working, and charging, for nobody."""
    await client.gone()
    call.exchange.end("the client left")
