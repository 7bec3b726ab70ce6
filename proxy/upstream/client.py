"""Sending one request upstream: httpx's values, the transport called directly; foreign errors end here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx
from typing_extensions import override

from proxy.errors import BROKEN, TIMED_OUT, UNREACHABLE, StrataError
from proxy.upstream.headers import Raw
from proxy.upstream.http1 import RACE_SECONDS, Transport
from proxy.upstream.target import Target

T = TypeVar("T")

_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_KEEP_NONE = httpx.Limits(max_connections=None, max_keepalive_connections=0)
_MOST_MODELS = 1_000


class Interrupted(Exception):
    """The exchange was ended from this side: the client left, or the proxy shuts down."""


class Truncated(Exception):
    """The upstream broke off in the middle of its answer, or fell silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds: to connect, to the head of the answer, between two pieces of it. No limit on the whole."""

    connect: float
    first_byte: float
    idle: float


class Exchange:
    """Lets another task end the exchange, before and after the answer began."""

    def __init__(self) -> None:
        self._end: Callable[[Exception], None] | None = None
        self.ended: Interrupted | None = None

    def watch(self, end: Callable[[Exception], None]) -> None:
        """Called by the transport with what ends the connection under way."""
        self._end = end
        if self.ended is not None:
            end(self.ended)

    def unwatch(self) -> None:
        """Nothing is under way that could be ended."""
        self._end = None

    def end(self, why: str) -> None:
        """End it: whoever waits on the upstream gets Interrupted."""
        if self.ended is None:
            self.ended = Interrupted(why)
            if self._end is not None:
                self._end(self.ended)


class Answer:
    """An answer whose body has not been read."""

    def __init__(self, response: httpx.Response, exchange: Exchange | None = None) -> None:
        self.status = response.status_code
        self.headers: Raw = response.headers.raw
        self._stream = response.stream
        self._exchange = exchange
        self._read: Callable[[], Awaitable[bytes]] | None = getattr(response.stream, "read", None)
        self._iterator: AsyncIterator[bytes] | None = None
        self._peeked = b""
        self._broke: Truncated | None = None

    def header(self, name: bytes) -> bytes:
        """Return a header's value in lower case; empty when absent."""
        return next((value.lower() for key, value in self.headers if key.lower() == name), b"")

    @property
    def whole(self) -> bool:
        """Whether all of the body has been read: then the piece before is known to be its last."""
        return not self._peeked and bool(getattr(self._stream, "whole", False))

    async def peek(self, limit: int = 65_536) -> bytes:
        """Return the body up to about `limit` bytes; `read` returns them again, and then says that it broke off."""
        pieces: list[bytes] = []
        try:
            while sum(map(len, pieces)) < limit and (piece := await self.read()):
                pieces.append(piece)
        except Truncated as error:
            self._broke = error
        self._peeked = b"".join(pieces)
        return self._peeked

    async def read(self) -> bytes:
        """Return the next piece as it came from the socket, empty at the end. Raises Truncated or Interrupted."""
        if self._peeked:
            piece, self._peeked = self._peeked, b""
            return piece
        if self._broke is not None:
            raise self._broke
        try:
            if self._read is not None:
                return await self._read()
            return await self._next()
        except httpx.ReadTimeout as error:
            raise Truncated(str(error)) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Truncated(str(error) or type(error).__name__) from error

    async def _next(self) -> bytes:
        if self._iterator is None:
            assert isinstance(self._stream, httpx.AsyncByteStream)
            self._iterator = aiter(self._stream)
        assert self._exchange is not None
        return await _cancellable(anext(self._iterator, b""), self._exchange)

    async def close(self) -> None:
        """Give the connection back, or drop it when the answer is not whole."""
        if isinstance(self._stream, httpx.AsyncByteStream):
            await self._stream.aclose()


async def _cancellable(step: Awaitable[T], exchange: Exchange) -> T:
    """Await a step of httpx's own transport, which only a cancellation can end."""
    task = asyncio.current_task()
    assert task is not None

    def end(_: Exception) -> None:
        task.cancel()

    exchange.watch(end)
    try:
        return await step
    except asyncio.CancelledError:
        if exchange.ended is None:
            raise
        task.uncancel()
        raise exchange.ended from None
    finally:
        exchange.unwatch()


def _framing(method: str, headers: Raw, body: bytes | AsyncIterator[bytes]) -> Raw:
    """Say where the body ends: a length where it is known, chunks where it is not."""
    if any(name == b"content-length" for name, _ in headers):
        return []
    if not isinstance(body, bytes):
        return [(b"transfer-encoding", b"chunked")]
    needed = body or method not in {"GET", "HEAD", "OPTIONS", "DELETE"}
    return [(b"content-length", b"%d" % len(body))] if needed else []


class _Upload(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield piece


class _Egress(httpx.AsyncBaseTransport):
    """Through a forward proxy, on httpx's own transport; kept connections are used as `Transport` uses them."""

    def __init__(self, proxy: str) -> None:
        self._kept = httpx.AsyncHTTPTransport(proxy=proxy, limits=_NO_LIMITS)
        self._fresh = httpx.AsyncHTTPTransport(proxy=proxy, limits=_KEEP_NONE)

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not isinstance(request.stream, httpx.ByteStream):
            return await self._fresh.handle_async_request(request)
        connects = False

        async def trace(event: str, _: object) -> None:
            nonlocal connects
            connects = connects or "connect_tcp" in event

        sent_at = asyncio.get_running_loop().time()
        request.extensions["trace"] = trace
        try:
            return await self._kept.handle_async_request(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if connects or asyncio.get_running_loop().time() - sent_at > RACE_SECONDS:
                raise
            return await self._fresh.handle_async_request(request)

    @override
    async def aclose(self) -> None:
        await self._kept.aclose()
        await self._fresh.aclose()


class Client:
    """One upstream. `egress_proxy` sends everything through a forward proxy, on httpx's own transport."""

    def __init__(self, base: str, *, timeouts: Timeouts, egress_proxy: str | None = None) -> None:
        self.target = Target(base)
        self._timeouts = {"connect": timeouts.connect, "read": timeouts.first_byte, "idle": timeouts.idle}
        self._transport: httpx.AsyncBaseTransport = _Egress(egress_proxy) if egress_proxy else Transport()
        self._interruptible = not egress_proxy
        if egress_proxy:
            self._timeouts |= {"write": timeouts.idle, "pool": timeouts.connect}
        self._refusing: set[str] = set()

    def refuses_options(self, model: str) -> bool:
        """Whether a model's requests were refused for the `stream_options` added to them."""
        return model in self._refusing

    def remember_refusal(self, model: str) -> None:
        """Ask no more of this model; of a bounded number of models."""
        if len(self._refusing) < _MOST_MODELS:
            self._refusing.add(model)

    async def send(
        self,
        method: str,
        *,
        path: bytes,
        query: bytes,
        headers: Raw,
        body: bytes | AsyncIterator[bytes],
        exchange: Exchange,
    ) -> Answer:
        """Send a request, bytes or a stream of pieces, and return once the head of its answer is here.

        Raises:
            StrataError: the upstream cannot be reached (502), breaks off before it answers (502), or is late (504).
            Interrupted: `exchange.end` was called.
        """
        url = self.target.url(path, query)
        request = httpx.Request(
            method,
            url,
            headers=[(b"host", url.netloc), *headers, *_framing(method, headers, body)],
            stream=httpx.ByteStream(body) if isinstance(body, bytes) else _Upload(body),
            extensions={"timeout": self._timeouts, "interruptible": exchange.watch},
        )
        try:
            if self._interruptible:
                return Answer(await self._transport.handle_async_request(request))
            return Answer(await _cancellable(self._transport.handle_async_request(request), exchange), exchange)
        except httpx.ConnectTimeout as error:
            raise StrataError(TIMED_OUT, f"The upstream could not be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise StrataError(TIMED_OUT, f"The upstream timed out: {error}") from error
        except httpx.ConnectError as error:
            raise StrataError(UNREACHABLE, f"The upstream could not be reached: {error}") from error
        except httpx.TransportError as error:
            raise StrataError(BROKEN, f"The upstream broke off before it answered: {error}") from error

    async def close(self) -> None:
        """Close all idle connections."""
        await self._transport.aclose()


class Clients:
    """A client for each upstream, made when it is first asked for."""

    def __init__(self, *, timeouts: Timeouts, egress_proxy: str | None = None) -> None:
        self.idle_seconds = timeouts.idle
        self._timeouts = timeouts
        self._egress_proxy = egress_proxy
        self._clients: dict[str, Client] = {}

    def __call__(self, base: str) -> Client:
        """Return the client of an upstream."""
        client = self._clients.get(base)
        if client is None:
            client = Client(base, timeouts=self._timeouts, egress_proxy=self._egress_proxy)
            self._clients[base] = client
        return client

    async def close(self) -> None:
        """Close all idle connections."""
        for client in self._clients.values():
            await client.close()
