"""One request and its response on the wire: reading, pausing, sending, breaking off.

Speaks plain ASGI. Resetting a connection needs `proxy.simulator.server`, which offers it as the scope extension
`ABORT`; under another server the request fails with `ConnectionResetError` instead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from proxy.simulator.accounting import Charge
from proxy.simulator.faults import NONE, FaultTextError, parse
from proxy.simulator.record import Entry, Simulator
from proxy.simulator.refusal import Refusal, bad_key, of_status
from proxy.simulator.shape import Body, text

ABORT = "simulator.abort"
"""Scope extension, ``{"reset": f}``: calling ``f`` resets the connection."""
FAULT_HEADER = "x-sim-fault"

EPOCH_SECONDS = 1_750_000_000
"""Replies are dated by request number from here, so that equal runs give equal bytes."""

_HTML_502 = b"""<html>\r
<head><title>502 Bad Gateway</title></head>\r
<body>\r
<center><h1>502 Bad Gateway</h1></center>\r
<hr><center>nginx</center>\r
</body>\r
</html>\r
"""
_BROKEN_EVENT = b'data: {"id":"sim-broken","choices":[{"index":0,"delta":{"content":"tru\n\n'
_NOT_JSON = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP library "
    "correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON. If you have trouble "
    "figuring out how to fix this, please contact us through our help center at help.openai.com.)"
)


class ClientGoneError(Exception):
    """The client closed the connection before the response was complete."""


class BrokenOffError(Exception):
    """A fault ended the response before it was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A stream in the order in which it is sent; every event is a whole SSE event in bytes.

    ``ending`` holds finish reasons and usage, ``done`` the last event of the protocol. ``tokens`` counts the deltas.
    """

    deltas: tuple[bytes, ...]
    ending: tuple[bytes, ...]
    done: tuple[bytes, ...]
    tokens: int


class Exchange:
    """The response side of one request, with its faults and the client's presence."""

    def __init__(self, simulator: Simulator, entry: Entry, raw: bytes, *, scope: Scope, send: Send) -> None:
        self.simulator = simulator
        self.entry = entry
        self.raw = raw
        self.faults = NONE
        self.scope = scope
        self._send = send
        self._gone = asyncio.Event()
        self._started_seconds = time.perf_counter()

    @property
    def created(self) -> int:
        """Unix time the response is dated with."""
        return EPOCH_SECONDS + self.entry.index

    def body(self) -> Body:
        """Parsed JSON body; refuses what is no JSON object."""
        try:
            parsed = orjson.loads(self.raw)
        except orjson.JSONDecodeError:
            raise Refusal(message=_NOT_JSON) from None
        if not isinstance(parsed, dict):
            raise Refusal(message=_NOT_JSON)
        return parsed

    def charge(self, body: Body, prompts: Iterable[Iterable[int]]) -> Charge:
        """Account for the prompts; key, model and vLLM's ``cache_salt`` separate caches."""
        partition = "\0".join((self.entry.key, text(body.get("model")), text(body.get("cache_salt"))))
        return self.simulator.charge(self.entry, prompts, partition=partition)

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to leave."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than the client does; raises `ClientGoneError`."""
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._gone.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        if self._gone.is_set():
            raise ClientGoneError

    async def json(self, payload: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a JSON response without generation time."""
        await self.send(orjson.dumps(payload), "application/json", status=status, headers=headers)

    async def generate(self, payload: object, tokens: int, deltas: int) -> None:
        """Send a JSON response after the time its ``deltas`` events would have taken, with the faults of a reply."""
        await self.pause(self._first_token_seconds() + self._gap_seconds() * deltas)
        self.simulator.generated(self.entry, tokens)
        whole = orjson.dumps(payload)
        if self.faults.in_band_error is not None:
            await self.json(of_status(500).body)
            raise BrokenOffError
        if self.faults.reset_mid is not None:
            await self._start(200, "application/json", {"content-length": str(len(whole))})
            await self._chunk(whole[: len(whole) // 2])
            await self.reset()
        elif self.faults.malformed or self.faults.cut is not None:
            await self.send(whole[: len(whole) // 2], "application/json")
            raise BrokenOffError
        else:
            await self.send(whole, "application/json")

    async def send(
        self, body: bytes, media_type: str, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole response."""
        await self._start(status, media_type, {"content-length": str(len(body)), **(headers or {})})
        await self._finish(body)

    async def send_chunks(self, chunks: Iterable[bytes], media_type: str) -> None:
        """Send a response of unstated length piece by piece."""
        await self._start(200, media_type, {})
        for chunk in chunks:
            await self.pause(self._gap_seconds())
            await self._chunk(chunk)
        await self._finish(b"")

    async def stream(self, script: Script) -> None:
        """Send a stream of events, first after the provider's time to first token, with the faults of a stream."""
        await self._start(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        try:
            await self.pause(self._first_token_seconds())
            for index, event in enumerate(script.deltas):
                await self._break_off(index)
                if self.faults.malformed and index == (len(script.deltas) + 1) // 2:
                    await self._chunk(_BROKEN_EVENT)
                await self._event(event, first=index == 0)
            await self._break_off(len(script.deltas), last=True)
        except (ClientGoneError, BrokenOffError):
            self.simulator.generated(self.entry, min(script.tokens, self.entry.events))
            raise
        self.simulator.generated(self.entry, script.tokens)
        for event in (*script.ending, *(() if self.faults.no_done else script.done)):
            await self._event(event)
        await self._finish(b"")

    async def reset(self) -> None:
        """Reset the connection; always raises."""
        abort: Callable[[], None] | None = self.scope.get("extensions", {}).get(ABORT, {}).get("reset")
        if abort is None:
            raise ConnectionResetError("simulated reset")
        abort()
        async with asyncio.timeout(5):
            await self._gone.wait()
        raise BrokenOffError

    async def html_502(self) -> None:
        """Answer as a gateway in front of the provider does."""
        await self.send(_HTML_502, "text/html", status=502)
        raise BrokenOffError

    def _first_token_seconds(self) -> float:
        options = self.simulator.options
        uncached = self.entry.charge.uncached_tokens if self.entry.charge else 0
        computed = options.first_token_seconds + options.seconds_per_uncached_token * uncached
        return computed + (self.faults.first_token_delay or 0.0)

    def _gap_seconds(self) -> float:
        return self.simulator.options.event_seconds if self.faults.gap is None else self.faults.gap

    async def _break_off(self, sent: int, *, last: bool = False) -> None:
        """End here when a fault says so; a count beyond the stream's length means its end."""

        def due(count: int | None) -> bool:
            return count is not None and (sent == count or (last and count > sent))

        if due(self.faults.reset_mid):
            await self.pause(0.02)  # the bytes sent so far are on the wire before the reset overtakes them
            await self.reset()
        if due(self.faults.in_band_error):
            await self._chunk(sse(of_status(500).body))
            await self._finish(b"")
            raise BrokenOffError
        if due(self.faults.cut):
            await self._finish(b"")
            raise BrokenOffError

    async def _event(self, event: bytes, *, first: bool = False) -> None:
        await self.pause(0 if first else self._gap_seconds())
        await self._chunk(event)
        self.entry.events += 1

    async def _start(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self.entry.status = status
        elapsed_ms = round((time.perf_counter() - self._started_seconds) * 1000)
        named = {
            "content-type": media_type,
            "x-request-id": self.entry.request_id,
            "openai-processing-ms": str(elapsed_ms),
            "openai-version": "2020-10-01",
            **headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _chunk(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _finish(self, body: bytes) -> None:
        if self._gone.is_set():
            raise ClientGoneError
        self.entry.outcome = "complete"  # before the last byte: whoever has read it finds the request settled
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """ASGI app around one handler: records the request, applies early faults, checks the key, words refusals."""

    simulator: Simulator
    handler: Handler
    open: bool = False
    """Answer anyone, without faults and without a record."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = _entry(scope, self.simulator.next_index())
        if not self.open:
            self.simulator.open(entry)
        raw = await _read(receive)
        if raw is None:
            entry.outcome = "client_gone"
            return
        entry.receive(raw, keep=self.simulator.options.keep_bodies)
        exchange = Exchange(self.simulator, entry, raw, scope=scope, send=send)
        lost: ConnectionResetError | None = None
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(exchange.watch(receive))
            try:
                await self._answer(exchange)
            except ConnectionResetError as error:
                lost = error
            finally:
                watcher.cancel()
        if lost is not None:
            entry.outcome = "fault"
            raise lost

    async def _answer(self, exchange: Exchange) -> None:
        entry = exchange.entry
        try:
            try:
                if not self.open:
                    await self._admit(exchange)
                await self.handler(exchange)
            except Refusal as refusal:
                await exchange.json(refusal.body, status=refusal.status, headers=refusal.headers)
                if exchange.faults.status is not None:
                    entry.outcome = "fault"
        except ClientGoneError:
            entry.outcome = "client_gone"
        except BrokenOffError:
            entry.outcome = "fault"

    async def _admit(self, exchange: Exchange) -> None:
        entry, keys = exchange.entry, self.simulator.options.keys
        entry.fault = entry.headers.get(FAULT_HEADER) or self.simulator.faults.take()
        try:
            faults = exchange.faults = parse(entry.fault)
        except FaultTextError as error:
            raise Refusal(message=str(error), param=FAULT_HEADER, code="invalid_fault") from error
        if faults.reset:
            await exchange.reset()
        if faults.delay is not None:
            await exchange.pause(faults.delay)
        if faults.html502:
            await exchange.html_502()
        if faults.status is not None:
            headers = {} if faults.retry_after is None else {"retry-after": f"{faults.retry_after:g}"}
            raise of_status(faults.status, headers)
        if keys is not None and entry.key not in keys:
            raise bad_key(entry.key)


def sse(payload: object, *, event: str | None = None) -> bytes:
    """One server-sent event: ``data: {...}`` and a blank line, after an ``event:`` line if it is named."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return b"".join((head, b"data: ", orjson.dumps(payload), b"\n\n"))


def _entry(scope: Scope, index: int) -> Entry:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return Entry(
        index=index,
        method=scope["method"],
        path=scope["path"],
        raw_path=scope.get("raw_path", scope["path"].encode()).decode("latin-1"),
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        key=token.strip() if scheme.lower() == "bearer" else headers.get("api-key", ""),
    )


async def _read(receive: Receive) -> bytes | None:
    """Whole request body; nothing when the client left while sending it."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
