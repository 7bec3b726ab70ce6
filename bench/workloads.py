"""The workloads: what each asks of one proxy, and the figures it returns (names and units: report.METRICS)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

import msgspec

import answers
import bodies
import load
from servers import Memory, Server

Figures = dict[str, float]

START_SECONDS = 30.0
SETTLE_SECONDS = 5.0
LATE_SECONDS = 2.5

SMALL_CLIENTS = 64
STREAMS = 200
STREAM_RATE = 50
AGENTS = 16
AGENT_TURNS = 40
STREAMED_AGENTS = 4
STREAMED_TURNS = 6
STREAMED_EVENTS = 20
STREAMED_RATE = 100

_GET_STATS = b"GET /bench/stats HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class _Stats(msgspec.Struct):
    requests: int
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One proxy under one workload in one repetition: `seconds` scales the workload."""

    server: Server
    upstream_port: int
    seconds: float
    histories: Sequence[bodies.History]

    async def received(self) -> _Stats:
        """Return what the upstream got so far, whoever sent it."""
        return msgspec.json.decode(await load.fetch(self.upstream_port, _GET_STATS), type=_Stats)

    async def check_upstream(self, before: _Stats, requests: int) -> int:
        """Raise unless the upstream got each of `requests` once since `before`; return the bytes of their bodies."""
        after = await self.received()
        if after.requests - before.requests != requests:
            got = after.requests - before.requests
            raise load.LoadError(f"the upstream got {got} requests where {requests} were sent")
        return after.body_bytes - before.body_bytes


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _small_orders(start: int = 0) -> Iterator[load.Order]:
    for body in bodies.small_bodies(start=start):
        yield load.Order(request=bodies.http_request(body), expected=answers.expected_answer())


def _stream_orders(count: int, events: int, rate: int, start: int = 0) -> list[load.Order]:
    """Return orders for streams; every second client asks for the usage chunk, as clients differ in this."""
    plain = bodies.small_bodies(stream=True, start=start)
    with_usage = bodies.small_bodies(stream=True, include_usage=True, start=start + 1_000_000)
    return [
        load.Order(
            request=bodies.http_request(next(with_usage if number % 2 else plain), events=events, rate=rate),
            expected=answers.expected_stream(events, include_usage=bool(number % 2)),
        )
        for number in range(count)
    ]


def _turn_orders(history: bodies.History) -> Iterator[load.Order]:
    conversation = bodies.Conversation(history)
    while not conversation.finished:
        yield load.Order(request=bodies.http_request(conversation.next_body()), expected=answers.expected_answer())


def _streamed_turn_orders(history: bodies.History) -> Iterator[load.Order]:
    conversation = bodies.Conversation(history)
    while not conversation.finished:
        body = conversation.next_body(stream=True, include_usage=True)
        yield load.Order(
            request=bodies.http_request(body, events=STREAMED_EVENTS, rate=STREAMED_RATE),
            expected=answers.expected_stream(STREAMED_EVENTS, include_usage=True),
        )


async def settle(server: Server) -> None:
    """Wait, at most 5 s, until the server has done what it still had to do (under 3 % of a core for 0.2 s)."""
    deadline = perf_counter() + SETTLE_SECONDS
    quiet = 0
    used = server.cpu_seconds()
    while quiet < 2 and perf_counter() < deadline:
        await asyncio.sleep(0.1)
        before, used = used, server.cpu_seconds()
        quiet = quiet + 1 if used - before < 0.003 else 0


async def wait_until_ready(server: Server) -> None:
    """Wait until the server answers a chat request. Raises: ServerError, LoadError."""
    order = next(_small_orders())
    deadline = perf_counter() + START_SECONDS
    while True:
        server.check()
        try:
            await load.fetch(server.port, order.request)
        except OSError as error:
            if perf_counter() > deadline:
                raise load.LoadError(f"{server.name} does not listen after {START_SECONDS:.0f} s") from error
            await asyncio.sleep(0.05)
        else:
            return


async def warm_up(server: Server) -> None:
    """Send some chats and streams, so that what is made once is made before anything is measured."""
    chats = [islice(_small_orders(start=2_000_000 + 1_000 * client), 20) for client in range(16)]
    await load.closed_loop(server.port, chats, sample=server.cpu_seconds, seconds=10)
    events = 20
    live = [iter([order]) for order in _stream_orders(8, events, rate=STREAM_RATE, start=3_000_000)]
    await load.closed_loop(server.port, live, sample=server.cpu_seconds, seconds=10)
    await settle(server)


async def idle(subject: Subject) -> Figures:
    """A fresh process that has answered one request."""
    memory = subject.server.memory()
    return {"idle.rss_mb": memory.rss / 1e6, "idle.pss_mb": memory.pss / 1e6}


async def streams(subject: Subject) -> Figures:
    """200 streams of 50 events/s each, all live at once."""
    server = subject.server
    events = round(STREAM_RATE * (subject.seconds + 2))
    pace = load.Pace(events=events, rate=STREAM_RATE, ramp_seconds=1.0, late_seconds=LATE_SECONDS)
    memories: list[Memory] = []
    received = await subject.received()
    before = server.memory()
    result = await load.streams(
        server.port,
        _stream_orders(STREAMS, events, STREAM_RATE),
        pace,
        sample=server.cpu_seconds,
        observe=lambda: memories.append(server.memory()),
    )
    await settle(server)
    lost = result.events_expected - result.events_received
    if not lost:
        await subject.check_upstream(received, result.requests)
    window = result.window
    return {
        "streams.cpu_us": window.cpu_seconds / max(window.done, 1) * 1e6,
        "streams.events_s": window.done / window.seconds,
        "streams.lost": lost,
        "streams.ttfb_p50_ms": percentile(result.first_bytes, 0.5) * 1e3,
        "streams.ttfb_p99_ms": percentile(result.first_bytes, 0.99) * 1e3,
        "streams.rss_kb": (memories[0].rss - before.rss) / STREAMS / 1e3,
        "streams.pss_kb": (memories[0].pss - before.pss) / STREAMS / 1e3,
    }


async def single(subject: Subject) -> Figures:
    """One client, one 2 KB chat after the other, not streamed."""
    server = subject.server
    received = await subject.received()
    sources = [_small_orders(start=10_000_000)]
    seconds = subject.seconds / 2
    result = await load.closed_loop(server.port, sources, sample=server.cpu_seconds, seconds=seconds, warm_seconds=0.2)
    await subject.check_upstream(received, result.requests)
    return {
        "single.p50_ms": percentile(result.latencies, 0.5) * 1e3,
        "single.p99_ms": percentile(result.latencies, 0.99) * 1e3,
    }


async def _small(subject: Subject, seconds: float, warm_seconds: float) -> load.LoopResult:
    server = subject.server
    received = await subject.received()
    sources = [_small_orders(start=(20 + client) * 1_000_000) for client in range(SMALL_CLIENTS)]
    result = await load.closed_loop(
        server.port, sources, sample=server.cpu_seconds, seconds=seconds, warm_seconds=warm_seconds
    )
    await settle(server)
    await subject.check_upstream(received, result.requests)
    return result


async def small(subject: Subject) -> Figures:
    """64 clients in a closed loop, 2 KB chats, not streamed."""
    result = await _small(subject, subject.seconds, warm_seconds=0.5)
    return {
        "small.req_s": result.window.done / result.window.seconds,
        "small.cpu_us": result.window.cpu_seconds / result.window.done * 1e6,
        "small.p50_ms": percentile(result.latencies, 0.5) * 1e3,
    }


async def small_burst(subject: Subject) -> Figures:
    """The same right after 200 streams, whose connections to the upstream now stand idle in the proxy's pool."""
    server = subject.server
    burst = [iter([order]) for order in _stream_orders(STREAMS, 25, STREAM_RATE, start=4_000_000)]
    await load.closed_loop(server.port, burst, sample=server.cpu_seconds, seconds=10)
    # Short: httpx drops a connection that was idle for 5 s.
    result = await _small(subject, min(subject.seconds, 2.0), warm_seconds=0.2)
    return {
        "small-burst.req_s": result.window.done / result.window.seconds,
        "small-burst.cpu_us": result.window.cpu_seconds / result.window.done * 1e6,
    }


async def turns(subject: Subject) -> Figures:
    """16 agents with 400 KB of history: first seen once, then turn after turn."""
    server = subject.server
    sources = [_turn_orders(history) for history in subject.histories[:AGENTS]]
    cpu = server.cpu_seconds()
    cold = await load.closed_loop(
        server.port, [islice(source, 1) for source in sources], sample=server.cpu_seconds, seconds=10
    )
    await settle(server)
    cold_cpu_seconds = server.cpu_seconds() - cpu
    received = await subject.received()
    result = await load.closed_loop(server.port, sources, sample=server.cpu_seconds, seconds=subject.seconds + 1)
    await settle(server)
    body_bytes = await subject.check_upstream(received, result.requests)
    window = result.window
    return {
        "turns.cpu_ms": window.cpu_seconds / window.done * 1e3,
        "turns.req_s": window.done / window.seconds,
        "turns.p50_ms": percentile(result.latencies, 0.5) * 1e3,
        "turns.first_cpu_ms": cold_cpu_seconds / cold.requests * 1e3,
        "turns.upstream_kb": body_bytes / result.requests / 1e3,
    }


async def turns_streamed(subject: Subject) -> Figures:
    """4 agents with 400 KB of history whose answers are streams of 20 events, 100 per second."""
    server = subject.server
    histories = subject.histories[AGENTS : AGENTS + STREAMED_AGENTS]
    sources = [islice(_streamed_turn_orders(history), STREAMED_TURNS + 1) for history in histories]
    firsts = [islice(source, 1) for source in sources]
    await load.closed_loop(server.port, firsts, sample=server.cpu_seconds, seconds=10)
    await settle(server)
    received = await subject.received()
    result = await load.closed_loop(server.port, sources, sample=server.cpu_seconds, seconds=10)
    await subject.check_upstream(received, result.requests)
    return {
        "turns-streamed.cpu_ms": result.window.cpu_seconds / result.window.done * 1e3,
        "turns-streamed.ttfb_p50_ms": percentile(result.first_bytes, 0.5) * 1e3,
    }


Workload = Callable[[Subject], Awaitable[Figures]]

WORKLOADS: dict[str, Workload] = {
    "idle": idle,
    "single": single,
    "small": small,
    "small-burst": small_burst,
    "turns": turns,
    "turns-streamed": turns_streamed,
    "streams": streams,
}
