"""The load generator: closed loops and paced streams over raw keep-alive connections, every answer checked whole.

Times are seconds of `time.perf_counter`. What the proxy costs meanwhile is the caller's affair: it hands in `sample`,
which is called at both ends of the measured window.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

from typing_extensions import override

from answers import Expected, events_in

DRAIN_SECONDS = 20.0

Sample = Callable[[], float]


class LoadError(Exception):
    """An answer was wrong, cut short, or did not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request's bytes, and what its answer must look like."""

    request: bytes
    expected: Expected


@dataclass(slots=True, kw_only=True)
class Window:
    """What happened between two samples."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    done: int = 0


@dataclass(slots=True, kw_only=True)
class LoopResult:
    """A closed loop's window, and every answer's time to its first and last byte inside it, in seconds."""

    window: Window = field(default_factory=Window)
    requests: int = 0
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StreamsResult:
    """What arrived of `events_expected` content events; the window's `done` counts those that came within it."""

    window: Window = field(default_factory=Window)
    requests: int = 0
    events_expected: int = 0
    events_received: int = 0
    first_bytes: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that sends one request at a time and calls `on_done` with itself when the answer is whole."""

    _transport: asyncio.Transport

    def __init__(self, index: int, on_done: Callable[[Client], None], on_error: Callable[[str], None]) -> None:
        self.index = index
        self.body = bytearray()
        self.busy = False
        self.sent_at = 0.0
        self.first_byte_at = 0.0
        self._on_done = on_done
        self._on_error = on_error
        self._expected: Expected | None = None
        self._in_head = True
        self._missing: int | None = None
        self._rest = b""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Report an answer that was cut off."""
        if self.busy:
            self._fail(f"connection closed before the answer was whole: {exc or 'end of file'}")

    def close(self) -> None:
        """Close the connection, without a complaint about an answer not yet whole."""
        self.busy = False
        self._transport.abort()

    def send(self, request: bytes, expected: Expected | None) -> None:
        """Send a request; an answer other than `expected` is an error (None: any answer with status 200 will do)."""
        self._expected = expected
        self._in_head = True
        self._rest = b""
        self.body.clear()
        self.busy = True
        self.first_byte_at = 0.0
        self.sent_at = perf_counter()
        self._transport.write(request)

    @override
    def data_received(self, data: bytes) -> None:
        """Parse what came: the head, then a body by content length or in chunks."""
        if not self.busy:
            self._fail(f"bytes nobody asked for: {data[:80]!r}")
            return
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if self._in_head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                return
            if not self._read_head(data[: end + 2], data):
                return
            data = data[end + 4 :]
            if not data and self._missing != 0:
                return
        if self._missing is None:
            self._read_chunks(data)
        else:
            self._read_plain(data, self._missing)

    def _read_head(self, head: bytes, data: bytes) -> bool:
        self._in_head = False
        if not head.startswith(b"HTTP/1.1 200"):
            self._fail(f"not status 200: {data[:400]!r}")
            return False
        head = head.lower()
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._missing = int(head[at + 17 : head.index(b"\r\n", at + 17)])
        elif b"\r\ntransfer-encoding: chunked\r\n" in head:
            self._missing = None
        else:
            self._fail(f"neither a content length nor chunks: {head!r}")
            return False
        return True

    def _read_plain(self, data: bytes, missing: int) -> None:
        if not self.first_byte_at:
            self.first_byte_at = perf_counter()
        self.body += data
        self._missing = missing - len(data)
        if self._missing <= 0:
            self._finish()

    def _read_chunks(self, data: bytes) -> None:
        start = 0
        while (end := data.find(b"\r\n", start)) >= 0:
            size = int(data[start:end], 16)
            stop = end + 2 + size
            if stop + 2 > len(data):
                break
            if not size:
                self._finish()
                return
            self.body += data[end + 2 : stop]
            start = stop + 2
        if start and not self.first_byte_at:
            self.first_byte_at = perf_counter()
        self._rest = data[start:]

    def _finish(self) -> None:
        self.busy = False
        if self._expected is not None and not self._expected.matches(self.body):
            self._fail(
                f"not the upstream's answer: {len(self.body)} bytes instead of {self._expected.size}, "
                f"{bytes(self.body[:120])!r} ... {bytes(self.body[-400:])!r}"
            )
            return
        self._on_done(self)

    def _fail(self, message: str) -> None:
        self.busy = False
        self._on_error(message)


class _Fleet:
    """The clients of one measurement, their errors, and what is still under way."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.errors: Counter[str] = Counter()
        self._stirred = asyncio.Event()

    def fail(self, message: str) -> None:
        self.errors[message] += 1
        self._stirred.set()

    def stir(self) -> None:
        """Wake `rest` up: a client may have become idle."""
        self._stirred.set()

    def check(self) -> None:
        """Raise if any answer was wrong so far."""
        if self.errors:
            example, _ = self.errors.most_common(1)[0]
            raise LoadError(f"{self.errors.total()} of the answers were wrong, such as: {example}")

    async def sleep(self, seconds: float) -> None:
        """Let the load run for a while."""
        await asyncio.sleep(max(seconds, 0))
        self.check()

    async def rest(self, seconds: float) -> bool:
        """Wait at most so long until all clients are idle; say whether they are."""
        deadline = perf_counter() + seconds
        while any(client.busy for client in self.clients):
            self.check()
            self._stirred.clear()
            try:
                await asyncio.wait_for(self._stirred.wait(), deadline - perf_counter())
            except TimeoutError:
                return False
        self.check()
        return True


@asynccontextmanager
async def _fleet(port: int, size: int, on_done: Callable[[Client], None]) -> AsyncIterator[_Fleet]:
    fleet = _Fleet()
    loop = asyncio.get_running_loop()

    def client() -> Client:
        return Client(len(fleet.clients), on_done, fleet.fail)

    try:
        for _ in range(size):
            _, connected = await loop.create_connection(client, "127.0.0.1", port)
            fleet.clients.append(connected)
        yield fleet
    finally:
        for connected in fleet.clients:
            connected.close()


async def fetch(port: int, request: bytes) -> bytes:
    """Send one request on a connection of its own and return the answer's body. Raises: LoadError, OSError."""

    def done(_: Client) -> None:
        fleet.stir()

    async with _fleet(port, 1, done) as fleet:
        fleet.clients[0].send(request, None)
        if not await fleet.rest(DRAIN_SECONDS):
            raise LoadError("no answer")
        return bytes(fleet.clients[0].body)


async def closed_loop(
    port: int, sources: Sequence[Iterator[Order]], *, sample: Sample, seconds: float, warm_seconds: float = 0.0
) -> LoopResult:
    """Let one client per source send its orders one after the other, for `seconds` or until the sources are empty.

    With a warm-up both ends of the window lie in the steady state; without one it starts and ends with all at rest.
    """
    result = LoopResult()
    running = measuring = True

    def done(client: Client) -> None:
        result.requests += 1
        if measuring:
            result.window.done += 1
            result.latencies.append(perf_counter() - client.sent_at)
            result.first_bytes.append(client.first_byte_at - client.sent_at)
        if running and (order := next(sources[client.index], None)) is not None:
            client.send(order.request, order.expected)
        else:
            fleet.stir()

    async with _fleet(port, len(sources), done) as fleet:
        measuring = not warm_seconds
        cpu, start = sample(), perf_counter()
        for client, source in zip(fleet.clients, sources, strict=True):
            if (order := next(source, None)) is not None:
                client.send(order.request, order.expected)
        if warm_seconds:
            await fleet.sleep(warm_seconds)
            measuring = True
            cpu, start = sample(), perf_counter()
        drained = await fleet.rest(seconds)
        running = False
        if not warm_seconds:
            drained = await fleet.rest(DRAIN_SECONDS)
        measuring = False
        result.window.seconds, result.window.cpu_seconds = perf_counter() - start, sample() - cpu
        if not drained and not await fleet.rest(DRAIN_SECONDS):
            raise LoadError(f"answers missing after {DRAIN_SECONDS:.0f} s")
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How streams run: each starts `ramp_seconds` / streams after the one before it and has `events` content events."""

    events: int
    rate: int
    ramp_seconds: float
    late_seconds: float

    @property
    def stream_seconds(self) -> float:
        """How long one stream takes."""
        return self.events / self.rate


async def streams(
    port: int, orders: Sequence[Order], pace: Pace, *, sample: Sample, observe: Callable[[], None]
) -> StreamsResult:
    """Run all streams at once and give them `late_seconds` beyond their time; what did not arrive by then is lost.

    The window lies where all streams are live; `observe` is called at its end, while they still are.
    """
    result = StreamsResult(requests=len(orders), events_expected=len(orders) * pace.events)

    def done(_: Client) -> None:
        fleet.stir()

    def received() -> int:
        return sum(events_in(client.body, pace.events) for client in fleet.clients)

    async with _fleet(port, len(orders), done) as fleet:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for at, (client, order) in enumerate(zip(fleet.clients, orders, strict=True)):
            loop.call_at(begin + pace.ramp_seconds * at / len(orders), client.send, order.request, order.expected)
        await fleet.sleep(pace.ramp_seconds + 0.2)
        cpu, start, before = sample(), perf_counter(), received()
        await fleet.sleep(begin + pace.stream_seconds - 0.4 - loop.time())
        after = received()
        result.window.seconds, result.window.cpu_seconds = perf_counter() - start, sample() - cpu
        result.window.done = after - before
        observe()
        await fleet.rest(begin + pace.ramp_seconds + pace.stream_seconds + pace.late_seconds - loop.time())
        end = perf_counter()
        result.events_received = received()
        # A stream of which nothing came waits at least until now.
        result.first_bytes = [(client.first_byte_at or end) - client.sent_at for client in fleet.clients]
    return result
