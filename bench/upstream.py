"""A mock OpenAI upstream that does as little as possible: `python bench/upstream.py --port N`.

A chat request gets the canned answer, or, where its body says `"stream":true`, a stream of `x-bench-events` content
events at `x-bench-rate` per second (0: as fast as they go), each in a write and a chunk of its own. `GET /bench/stats`
returns what was received so far, so that the load generator can see that nothing was answered twice or from a store.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from dataclasses import dataclass
from time import monotonic
from typing import cast

import orjson
import uvloop
from typing_extensions import override

import answers
from pacer import Pacer

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_OK_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_REFUSED = b"HTTP/1.1 %b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")
_EVENTS = re.compile(rb"\r\nx-bench-events: *(\d+)")
_RATE = re.compile(rb"\r\nx-bench-rate: *(\d+)")
_TRUE = re.compile(rb"\s*:\s*true")


@dataclass(slots=True)
class Stats:
    """What the upstream received: chat requests, and the bytes of their bodies."""

    requests: int = 0
    body_bytes: int = 0


class Shared:
    """What the connections of one upstream share."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.pacer = Pacer()
        self.phases = random.Random(0)


def _number(pattern: re.Pattern[bytes], head: bytes, default: int) -> int:
    match = pattern.search(head)
    return int(match[1]) if match else default


def _is_true(key: bytes, body: bytes) -> bool:
    """Say whether `key` (in its quotes) stands before a true; `find` is fast where a pattern would read 400 KB."""
    at = body.find(key)
    return at >= 0 and _TRUE.match(body, at + len(key)) is not None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stream:
    """One paced stream: a random phase after the request, content events at equal intervals, then what ends it."""

    def __init__(
        self, shared: Shared, transport: asyncio.Transport, events: int, rate: int, last: tuple[bytes, ...]
    ) -> None:
        self._pacer = shared.pacer
        self._transport = transport
        self._events = events
        self._interval = 1 / rate if rate else 0.0
        self._last = last
        self._sent = 0
        self._start = monotonic() + shared.phases.random() * self._interval
        transport.write(_OK_STREAM + _chunk(answers.FIRST_EVENT))
        self._wait()

    def _wait(self) -> None:
        self._pacer.call_at(self._start + self._sent * self._interval, self._send)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._sent < self._events:
            self._transport.write(_chunk(answers.content_event(self._sent)))
            self._sent += 1
            self._wait()
            return
        for event in self._last:
            self._transport.write(_chunk(event))
        self._transport.write(b"0\r\n\r\n")


class Upstream(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, bodies by content length, one request at a time on a connection."""

    _transport: asyncio.Transport

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._head = b""
        self._parts: list[bytes] = []
        self._missing = 0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        """Collect a request's head, then its body, then answer."""
        if self._missing:
            self._collect(data)
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return
        body = self._head[end + 4 :]
        self._head = self._head[: end + 2].lower()
        if b"\r\ntransfer-encoding:" in self._head:
            self._refuse(b"501 Chunked requests are not understood")
            return
        self._missing = _number(_LENGTH, self._head, 0)
        self._collect(body)

    def _collect(self, data: bytes) -> None:
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        body = b"".join(self._parts)
        head = self._head
        self._head, self._parts, self._missing = b"", [], 0
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post /v1/chat/completions "):
            self._shared.stats.requests += 1
            self._shared.stats.body_bytes += len(body)
            if _is_true(b'"stream"', body):
                self._stream(head, body)
            else:
                self._send(answers.answer(len(body)))
        elif head.startswith(b"get /bench/stats "):
            self._send(orjson.dumps(self._shared.stats))
        elif head.startswith(b"get /v1/models "):
            self._send(orjson.dumps({"object": "list", "data": [{"id": answers.MODEL, "object": "model"}]}))
        else:
            self._refuse(b"404 Not Found")

    def _stream(self, head: bytes, body: bytes) -> None:
        events = _number(_EVENTS, head, 1)
        include_usage = _is_true(b'"include_usage"', body)
        last = answers.last_events(events, len(body), include_usage=include_usage)
        Stream(self._shared, self._transport, events, _number(_RATE, head, 0), last)

    def _send(self, body: bytes) -> None:
        self._transport.write(_OK % len(body) + body)

    def _refuse(self, status: bytes) -> None:
        self._transport.write(_REFUSED % status)
        self._transport.close()


async def _serve(port: int) -> None:
    shared = Shared()
    server = await asyncio.get_running_loop().create_server(lambda: Upstream(shared), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="mock OpenAI upstream")
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
