"""An HTTP/1.1 transport behind httpx's seam, for a proxy's load: many long streams, no pool walk.

httpx's own pool looks at every connection on every request; under 200 streams that is most of its time. Here an idle
connection is popped from a list, bytes go from the socket to the reader without a copy, and a slow reader stops the
socket. One connection carries one request at a time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar, cast

import aiohappyeyeballs
import httptools
import httpx
from typing_extensions import override

T = TypeVar("T")

_HIGH_WATER = 65_536
_NO_BODY = (204, 304)
_REFUSED = 400
_LATE = 408
RACE_SECONDS = 1.0
"""A kept connection that closes later than this after a request was sent was not idle: the upstream had begun on it."""
_NEXT_ADDRESS_SECONDS = 0.25
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_DOUBLED = re.compile(
    rb"\ncontent-length[ \t]*:[ \t]*(\d+)[ \t]*\r?"
    rb"(?=\n(?:[^\r\n]+\r?\n)*?content-length[ \t]*:[ \t]*\1[ \t]*\r?\n)",
    re.IGNORECASE,
)
"""A length that stands once more in the same head, and is the same."""
_LENIENT = {
    "lenient_headers": True,
    "lenient_chunked_length": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
"""What clients take from an upstream without a proxy passes with one; requests are read as strictly as ever."""


class StaleConnection(httpx.RemoteProtocolError):
    """A reused connection had been closed by the upstream before a byte of its answer came."""


class _Protocol(asyncio.Protocol):
    """One connection: the parser's callbacks fill a queue of chunks, the request's task empties it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.broken: Exception | None = None
        self.idle_since = 0.0
        self.used = False
        self._silence: asyncio.TimerHandle | None = None
        self._wait: asyncio.TimerHandle | None = None
        self.moved_at = 0.0
        self._silence_seconds = 0.0
        self._heard_at = 0.0
        self._writable: asyncio.Future[None] | None = None
        self.reset()

    def reset(self) -> None:
        """Make ready for the next answer."""
        self._parse_anew()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: collections.deque[bytes] = collections.deque()
        self.buffered = 0
        self.paused = False
        self.heard = False
        self.head = False
        self.complete = False
        self.keep_alive = False
        self.interim = False
        self.until_close = False
        self.expects_body = True
        self.sent_at = 0.0
        self.upload: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def _parse_anew(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.parser.set_dangerous_leniencies(**_LENIENT)

    # asyncio's side

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not asyncio's by inheritance.
        self.transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        begins, self.heard = not self.heard, True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break(httpx.RemoteProtocolError("the upstream switched protocols"))
        except httptools.HttpParserError as error:
            if self.complete:
                self._spoil()
            elif begins and not self.head and _DOUBLED.search(data):
                # The one thing that is taken everywhere and not by the parser.
                self._parse_anew()
                self.data_received(_DOUBLED.sub(b"", data))
            else:
                self._break(httpx.RemoteProtocolError(f"not HTTP/1.1: {error}"))

    @override
    def eof_received(self) -> bool:
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        transport, self.transport = self.transport, None
        if exc is not None and transport is not None and not self.complete and self.broken is None:
            self._hear_rest(transport)
        if self.head and self.until_close and not self.complete and exc is None:
            self.complete = True
        elif not self.complete and self.broken is None:
            if self.used and not self.heard and self.loop.time() - self.sent_at < RACE_SECONDS:
                self.broken = StaleConnection("the upstream closed a kept connection")
            else:
                self.broken = httpx.RemoteProtocolError("the connection was closed before the answer was whole")
        self.keep_alive = False
        self._wake()
        self._let_write()

    def _hear_rest(self, transport: asyncio.Transport) -> None:
        """Read what had come before a write failed: an upstream that refuses an upload answers, and resets.

        The event loop drops a connection whose write fails with all that was not read of it. Not of TLS: what is read
        here could not be decrypted.
        """
        if transport.get_extra_info("ssl_object") is not None:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as rest,
        ):
            while not self.complete and self.broken is None and (data := rest.recv(_HIGH_WATER)):
                self.data_received(data)

    @override
    def pause_writing(self) -> None:
        self._writable = self.loop.create_future()

    @override
    def resume_writing(self) -> None:
        self._let_write()
        self._writable = None

    def _let_write(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # httptools' side

    def on_message_begin(self) -> None:
        if self.complete:
            self._spoil()
            return
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes behind the head is a trailer, and a trailer is no header.
        if not self.head:
            self.headers.append((name, _CONTROL.sub(b" ", value)))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self.parser.get_status_code()
        self.interim = 100 <= self.status < 200
        if self.interim:
            return
        names = {name.lower() for name, _ in self.headers}
        # Who states both a length and chunks may mean either: what comes behind them is not believed.
        self.keep_alive = self.parser.should_keep_alive() and not names >= {b"content-length", b"transfer-encoding"}
        bodiless = not self.expects_body or self.status in _NO_BODY
        self.until_close = not bodiless and not names & {b"content-length", b"transfer-encoding"}
        self.head = True
        if bodiless:
            self.complete = True
        self._wake()
        if self.refuses:
            self._let_write()

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        self.chunks.append(body)
        self.buffered += len(body)
        self._heard_at = self.loop.time()
        if self.buffered > _HIGH_WATER and not self.paused and self.transport is not None:
            self.paused = True
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.interim:
            self.interim = False
            return
        self.complete = True
        self._wake()

    # the request's side

    def send(self, data: bytes) -> None:
        if self.transport is None:
            raise self.broken or httpx.WriteError("the connection is closed")
        self.transport.write(data)

    async def drain(self) -> None:
        if self._writable is not None and not self.refuses:
            await self._writable

    @property
    def refuses(self) -> bool:
        """Whether the upstream has answered in a way that makes the rest of an upload useless."""
        return self.head and (self.status >= _REFUSED or self.complete)

    def uploaded(self, upload: asyncio.Future[None]) -> None:
        """An upload has ended: one that failed is told to whoever waits for the answer or reads it."""
        error = None if upload.cancelled() else upload.exception()
        if isinstance(error, Exception) and not self.complete:
            self._break(error)

    def end_upload(self) -> None:
        """Stop sending; a connection whose upload was not finished is good for nothing else."""
        if self.upload is not None and (not self.upload.done() or self.refuses):
            self.upload.cancel()
            self.keep_alive = False

    async def wait_head(self) -> None:
        while not self.head:
            if self.broken is not None:
                raise self.broken
            self._waiter = self.loop.create_future()
            await self._waiter

    def check_fresh(self) -> None:
        """Raise StaleConnection for a head that is about the silence before the request: it was on its way already."""
        closes = self.used and self.status == _LATE and not self.keep_alive
        if closes and self.loop.time() - self.sent_at < RACE_SECONDS:
            raise StaleConnection("the upstream closed a kept connection as idle")

    async def read(self) -> bytes:
        """Return what has come, as one piece; empty at the end. Raises when the answer will never be whole."""
        while not self.chunks:
            if self.broken is not None:
                raise self.broken
            if self.complete:
                return b""
            self._waiter = self.loop.create_future()
            await self._waiter
        data = self.chunks.popleft() if len(self.chunks) == 1 else b"".join(self.chunks)
        self.chunks.clear()
        self.buffered = 0
        if self.paused and self.transport is not None:
            self.paused = False
            self._heard_at = self.loop.time()
            self.transport.resume_reading()
        return data

    def limit_wait(self, seconds: float | None) -> None:
        """Give up when no head comes for so long; an upload that goes on is no silence."""
        if seconds is not None:
            self._wait = self.loop.call_at(self.moved_at + seconds, self._expect, seconds)

    def end_wait(self) -> None:
        """The head is here."""
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def _expect(self, seconds: float) -> None:
        if self.loop.time() < self.moved_at + seconds:
            self.limit_wait(seconds)
        else:
            self.interrupt(httpx.ReadTimeout("the upstream did not answer in time"))

    def limit_silence(self, seconds: float) -> None:
        """From now on give up when a reader waits that long and nothing comes. One timer, at any rate of events."""
        self._silence_seconds = seconds
        self._heard_at = self.loop.time()
        self._silence = self.loop.call_later(seconds, self._listen)

    def end_silence(self) -> None:
        """The answer is over; silence is no matter now."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _listen(self) -> None:
        waiting = self._waiter is not None and not self._waiter.done()
        left = self._heard_at + self._silence_seconds - self.loop.time()
        if waiting and left <= 0:
            self.interrupt(httpx.ReadTimeout(f"the upstream sent nothing for {self._silence_seconds:g} s"))
            return
        self._silence = self.loop.call_later(left if left > 0 else self._silence_seconds, self._listen)

    def close(self) -> None:
        """Drop the connection at once, whatever is under way."""
        self.keep_alive = False
        if self.transport is not None:
            self.transport.abort()

    def interrupt(self, error: Exception) -> None:
        """Let the task that waits here fail with `error`, and drop the connection with all that nobody has read."""
        self.chunks.clear()
        self._break(error)

    def _break(self, error: Exception) -> None:
        self.broken = self.broken or error
        self.close()
        self._wake()

    def _spoil(self) -> None:
        """More came than the answer: what was asked for stands, and the connection is good for nothing else."""
        self.keep_alive = False
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Body(httpx.AsyncByteStream):
    """The answer's body as it comes; closing it early drops the connection, which stops the upstream."""

    def __init__(self, connection: _Protocol, release: Callable[[_Protocol], None], idle_seconds: float | None) -> None:
        self.connection = connection
        self._release = release
        self._closed = False
        self.read = connection.read
        if idle_seconds is not None and not connection.complete:
            connection.limit_silence(idle_seconds)

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.read():
            yield data

    @property
    def whole(self) -> bool:
        """Whether all of the answer has come and been read."""
        return self.connection.complete and not self.connection.chunks

    @override
    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self.connection.end_silence()
            self.connection.end_upload()
            self._release(self.connection)


class Transport(httpx.AsyncBaseTransport):
    """`max_idle_seconds` stays below common keep-alive limits of upstreams (Node 5 s is met by the retry)."""

    def __init__(self, *, verify: ssl.SSLContext | None = None, max_idle_seconds: float = 30.0) -> None:
        self._ssl = verify
        self._max_idle_seconds = max_idle_seconds
        self._idle: dict[tuple[bytes, bytes, int], list[_Protocol]] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return once its head is here.

        `request.extensions["timeout"]` holds `connect`, `read` (to the head) and `idle` (between pieces) in seconds.
        A request whose body is bytes is sent once more when a reused connection turns out to be closed before any
        byte of an answer, or by a 408 that was meant for its silence: the upstream cannot have answered it, and a new
        connection is used then.
        """
        body = request.stream if not isinstance(request.stream, httpx.ByteStream) else None
        replayable = body is None
        try:
            return await self._send(request, fresh=not replayable)
        except StaleConnection:
            if not replayable:
                raise
            return await self._send(request, fresh=True)

    async def _send(self, request: httpx.Request, *, fresh: bool) -> httpx.Response:
        url, timeouts = request.url, request.extensions.get("timeout", {})
        key = (url.raw_scheme, url.raw_host, url.port or (443 if url.scheme == "https" else 80))
        watch: Watch = request.extensions.get("interruptible", _nobody)
        connection = None if fresh else self._reuse(key)
        if connection is None:
            connection = await _interruptible(self._connect(key, timeouts.get("connect")), watch)
        connection.expects_body = request.method != "HEAD"
        watch(connection.interrupt)
        try:
            _begin(connection, request)
            connection.limit_wait(timeouts.get("read"))
            await connection.wait_head()
            connection.check_fresh()
        except BaseException:
            connection.end_upload()
            connection.close()
            raise
        finally:
            connection.end_wait()

        def release(done: _Protocol) -> None:
            self._release(key, done)

        return httpx.Response(
            connection.status,
            headers=connection.headers,
            stream=_Body(connection, release, timeouts.get("idle")),
            request=request,
        )

    def _reuse(self, key: tuple[bytes, bytes, int]) -> _Protocol | None:
        idle = self._idle.get(key, [])
        while idle:
            connection = idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            if connection.loop.time() - connection.idle_since > self._max_idle_seconds:
                connection.close()
                continue
            connection.reset()
            connection.used = True
            return connection
        return None

    def _release(self, key: tuple[bytes, bytes, int], connection: _Protocol) -> None:
        transport = connection.transport
        reusable = connection.complete and connection.keep_alive and not connection.chunks
        if not reusable or transport is None or connection.until_close or transport.get_write_buffer_size():
            connection.close()
            return
        connection.idle_since = connection.loop.time()
        self._idle.setdefault(key, []).append(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(self._max_idle_seconds, self._sweep, connection.loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what has been idle for too long; the longest idle stand first."""
        self._sweeping = None
        for idle in self._idle.values():
            while idle and loop.time() - idle[0].idle_since >= self._max_idle_seconds:
                idle.pop(0).close()
        if any(self._idle.values()):
            self._sweeping = loop.call_later(self._max_idle_seconds / 2, self._sweep, loop)

    async def _connect(self, key: tuple[bytes, bytes, int], limit: float | None) -> _Protocol:
        scheme, host, port = key
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit):
                _, connection = await loop.create_connection(
                    lambda: _Protocol(loop),
                    sock=await _dial(loop, host.decode("ascii"), port),
                    ssl=(self._ssl or _default_context()) if scheme == b"https" else None,
                    server_hostname=host.decode("ascii") if scheme == b"https" else None,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {host.decode()}:{port} in {limit} s") from error
        except (OSError, RuntimeError) as error:
            # RuntimeError is what uvloop says of some addresses; ssl.SSLError is an OSError.
            raise httpx.ConnectError(f"no connection to {host.decode()}:{port}: {error}") from error
        return connection

    @override
    async def aclose(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


Watch = Callable[[Callable[[Exception], None]], None]
"""Takes what ends the step under way; whoever holds it may call that at any time."""


def _nobody(_: Callable[[Exception], None]) -> None:
    """Watch for nothing."""


async def _interruptible(step: Coroutine[Any, Any, T], watch: Watch) -> T:
    """Await a step that only a cancellation ends, and raise what ended it."""
    task = asyncio.ensure_future(step)
    ended: list[Exception] = []

    def end(error: Exception) -> None:
        ended.append(error)
        task.cancel()

    watch(end)
    try:
        return await task
    except asyncio.CancelledError:
        if not ended:
            raise
        raise ended[0] from None


async def _dial(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """Connect to whichever of a host's addresses answers first, each tried while those before are silent (RFC 8305)."""
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop)


@functools.cache
def _default_context() -> ssl.SSLContext:
    """Build the verifying context once: it reads the whole certificate store."""
    return httpx.create_ssl_context()


def _begin(connection: _Protocol, request: httpx.Request) -> None:
    """Write the head, the body as well where it is bytes; begin the upload where it is a stream."""
    lines = [request.method.encode("ascii") + b" " + request.url.raw_path + b" HTTP/1.1\r\n"]
    lines += [name + b": " + value + b"\r\n" for name, value in request.headers.raw]
    head = b"".join([*lines, b"\r\n"])
    stream = request.stream
    connection.sent_at = connection.moved_at = connection.loop.time()
    if isinstance(stream, httpx.ByteStream):
        body = b"".join(stream)
        if len(body) < _HIGH_WATER:
            connection.send(head + body)
        else:
            # What the socket does not take waits in the transport: an answer that comes early is seen all the same.
            connection.send(head)
            connection.send(body)
        return
    assert isinstance(stream, httpx.AsyncByteStream)
    connection.send(head)
    chunked = "content-length" not in request.headers
    connection.upload = asyncio.ensure_future(_upload(connection, stream, chunked=chunked))
    connection.upload.add_done_callback(connection.uploaded)


async def _upload(connection: _Protocol, stream: httpx.AsyncByteStream, *, chunked: bool) -> None:
    """Send a body beside the answer.

    When the answer is a refusal the rest is not wanted: it is read and forgotten, so that who leaves is noticed.
    """
    async for piece in stream:
        if piece and not connection.refuses:
            connection.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await connection.drain()
            connection.moved_at = connection.loop.time()
    if chunked and not connection.refuses:
        connection.send(b"0\r\n\r\n")
