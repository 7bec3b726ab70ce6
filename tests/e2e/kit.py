"""What the end-to-end tests stand on: a proxy, a provider, scripted upstreams and bare clients, all on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from proxy import app, environment
from proxy.head import Protocol
from proxy.simulator.app import Options, Simulator, create
from proxy.simulator.record import Entry
from proxy.simulator.server import Serving, serve

HANG = 20.0
"""Seconds after which something that should come certainly never will."""
USAGE_ASKED = b',"stream_options":{"include_usage":true}}'
MODEL = "gpt-5.1"

Headers = list[tuple[str, str]]


def chat_body(text: str = "hi", **more: object) -> dict[str, object]:
    """Return a small chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def note(path: str, text: str) -> str:
    """Return a context block long enough to be an item."""
    return f"<note_context>\n<path>{path}</path>\n<content>\n{text * 60}\n</content>\n</note_context>"


# the proxy


@dataclass
class Proxy:
    """A running Strata."""

    serving: Serving
    http: httpx.AsyncClient

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return self.serving.origin

    @property
    def base_url(self) -> str:
        """What an SDK is pointed at."""
        return self.serving.base_url

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.serving.port

    def openai(self, key: str = "key-one", **options: Any) -> AsyncOpenAI:
        """Return the real SDK, without retries of its own."""
        return AsyncOpenAI(base_url=self.base_url, api_key=key, max_retries=0, **options)

    async def samples(self) -> dict[str, float]:
        """Read `/metrics`: `name{label="value",…}` with labels sorted → value."""
        return parse_metrics((await self.http.get("/metrics")).text)

    async def total(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that carry these labels."""
        return total(await self.samples(), name, **labels)

    async def outcomes(self) -> dict[str, int]:
        """Count the requests so far by outcome, without the zeros."""
        return outcomes(await self.samples())

    async def settled(self, count: int) -> dict[str, int]:
        """Wait until so many requests are recorded; return them by outcome."""
        async with asyncio.timeout(HANG):
            while sum((found := await self.outcomes()).values()) < count:
                await asyncio.sleep(0.01)
        return found

    async def post(self, body: object, **options: Any) -> httpx.Response:
        """Send a chat request: a value as JSON, bytes as they are."""
        headers = {"authorization": "Bearer key-one", **options.pop("headers", {})}
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        headers.setdefault("content-type", "application/json")
        path = options.pop("path", "/v1/chat/completions")
        return await self.http.post(path, content=content, headers=headers, **options)


def parse_metrics(text: str) -> dict[str, float]:
    """Read Prometheus's text."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """Sum the samples of a metric that carry these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value for key, value in samples.items() if key.startswith(f"{name}{{") and all(pair in key for pair in wanted)
    )


def outcomes(samples: dict[str, float]) -> dict[str, int]:
    """Count requests by outcome, without the zeros."""
    found: dict[str, int] = {}
    for key, value in samples.items():
        if key.startswith("strata_requests_total{") and value:
            outcome = key.partition('outcome="')[2].partition('"')[0]
            found[outcome] = found.get(outcome, 0) + int(value)
    return found


@contextlib.asynccontextmanager
async def strata(upstream: str, **options: str) -> AsyncIterator[Proxy]:
    """Run the proxy in this loop; `options` are settings without their prefix: `MODE="observe"`."""
    given = {"STRATA_UPSTREAM_URL": upstream, **{f"STRATA_{name}": text for name, text in options.items()}}
    application = app.create(environment.load(given))
    async with (
        serve(application, protocol=Protocol) as serving,
        httpx.AsyncClient(base_url=serving.origin, trust_env=False, timeout=HANG) as http,
    ):
        yield Proxy(serving, http)


# the provider


@dataclass
class Rig:
    """A provider with Strata before it."""

    simulator: Simulator
    upstream: Serving
    proxy: Proxy

    @property
    def entries(self) -> list[Entry]:
        """What the provider got."""
        return list(self.simulator.requests)

    @property
    def last(self) -> Entry:
        """What the provider got last."""
        return self.simulator.requests[-1]

    async def outcome(self, entry: Entry) -> str:
        """Wait until the provider is done with a request."""
        async with asyncio.timeout(HANG):
            while entry.outcome == "pending":
                await asyncio.sleep(0.005)
        return entry.outcome

    async def arrived(self, count: int = 1) -> Entry:
        """Wait until so many requests have reached the provider, body and all."""
        async with asyncio.timeout(HANG):
            while len(self.simulator.requests) < count or not self.simulator.requests[-1].body_sha256:
                await asyncio.sleep(0.005)
        return self.simulator.requests[-1]


@contextlib.asynccontextmanager
async def rigged(
    provider_options: Options | None = None, /, *, base: str = "/v1", **settings: str
) -> AsyncIterator[Rig]:
    """Run a fresh provider and Strata before it; `base` is the path of the upstream's URL."""
    provider = create(provider_options)
    async with serve(provider) as upstream, strata(upstream.origin + base, **settings) as proxy:
        yield Rig(provider.state.simulator, upstream, proxy)


# scripted upstreams


@dataclass(frozen=True)
class Got:
    """A request as a scripted upstream read it from the wire."""

    method: str
    target: str
    headers: Headers
    body: bytes

    def all(self, name: str) -> list[str]:
        """Return a header's values."""
        return [value for key, value in self.headers if key.lower() == name]

    def header(self, name: str) -> str:
        """Return a header's only value; empty when absent."""
        found = self.all(name)
        assert len(found) < 2, f"{name} came {len(found)} times"
        return found[0] if found else ""


class Wire:
    """One side of an HTTP/1.1 connection, written and read by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> tuple[str, Headers]:
        """Read a start line and headers. Raises IncompleteReadError when the peer has closed."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw[:-4].split("\r\n")
        pairs = [line.partition(":") for line in lines]
        return first, [(name, value.strip()) for name, _, value in pairs]

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at its end."""
        size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def body(self, headers: Headers, *, until_close: bool = False) -> bytes:
        """Read a body by its framing."""
        named = {name.lower(): value for name, value in headers}
        if named.get("transfer-encoding", "").lower() == "chunked":
            pieces = []
            while piece := await self.chunk():
                pieces.append(piece)
            return b"".join(pieces)
        if "content-length" in named:
            return await self.reader.readexactly(int(named["content-length"]))
        return await self.reader.read() if until_close else b""

    async def request(self) -> Got:
        """Read a whole request."""
        line, headers = await self.head()
        method, target, _ = line.split(" ")
        return Got(method, target, headers, await self.body(headers))

    async def response(self) -> tuple[int, Headers, bytes]:
        """Read a whole response."""
        line, headers = await self.head()
        return int(line.split(" ")[1]), headers, await self.body(headers, until_close=True)

    async def send(self, data: bytes) -> None:
        """Write bytes, now."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, body: bytes, *, status: str = "200 OK", kind: str = "application/json", headers: Iterable[str] = ()
    ) -> None:
        """Write a whole response."""
        lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def begin_stream(self, *headers: str, kind: str = "text/event-stream") -> None:
        """Write the head of a chunked response."""
        lines = ["HTTP/1.1 200 OK", f"content-type: {kind}", "transfer-encoding: chunked", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def send_chunk(self, data: bytes) -> None:
        """Write one chunk; an empty one ends the body."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def gone(self) -> None:
        """Wait until the peer has closed."""
        async with asyncio.timeout(HANG):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65_536):
                    pass

    def reset(self) -> None:
        """Drop the connection with a TCP reset."""
        peer = self.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """Close in good order."""
        self.writer.close()


Script = Callable[[Wire], Awaitable[None]]


@dataclass
class Scripted:
    """An upstream that does what a test says, connection by connection."""

    port: int = 0
    connections: int = 0
    got: list[Got] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Its address, as an upstream base."""
        return f"http://127.0.0.1:{self.port}/v1"


@contextlib.asynccontextmanager
async def scripted(script: Script, *, receive_buffer: int | None = None) -> AsyncIterator[Scripted]:
    """Run `script` for every connection; what it raises, other than that the peer left, fails the test."""
    upstream = Scripted()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = _Noting(reader, writer, upstream.got)
        try:
            await script(wire)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            upstream.failures.append(error)
        finally:
            writer.close()
            tasks.discard(task)

    listener = socket.create_server(("127.0.0.1", 0))
    if receive_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    server = await asyncio.start_server(connected, sock=listener, limit=1 << 24)
    upstream.port = listener.getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not upstream.failures, upstream.failures


class _Noting(Wire):
    """Keeps what it read for the test to look at."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, got: list[Got]) -> None:
        super().__init__(reader, writer)
        self._got = got

    @override
    async def request(self) -> Got:
        """Read a whole request and keep it."""
        found = await super().request()
        self._got.append(found)
        return found


def always(
    body: bytes, *, status: str = "200 OK", kind: str = "application/json", headers: Iterable[str] = ()
) -> Script:
    """Answer every request with the same."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.answer(body, status=status, kind=kind, headers=headers)

    return script


def streaming(pieces: Iterable[bytes], *headers: str, kind: str = "text/event-stream") -> Script:
    """Answer every request with an event stream sent in these pieces."""
    fixed = tuple(pieces)

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.begin_stream(*headers, kind=kind)
            for piece in fixed:
                await wire.send_chunk(piece)
            await wire.send_chunk(b"")

    return script


def chunk(text: str | None = None, *, finish: str | None = None, **more: object) -> bytes:
    """Return one event of a chat stream."""
    delta: dict[str, object] = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + orjson.dumps({**frame, **more}) + b"\n\n"


def usage_chunk(prompt: int = 7, cached: int | None = None) -> bytes:
    """Return the chunk that tells usage."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counted = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2, **details}
    return chunk(choices=[], usage=counted)


DONE = b"data: [DONE]\n\n"
COMPLETION = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }
)
"""A whole answer."""
WHOLE = (chunk("one "), chunk("two"), chunk(finish="stop"), DONE)
"""A whole stream that tells no usage."""


# bare clients


@contextlib.asynccontextmanager
async def dial(port: int) -> AsyncIterator[Wire]:
    """Open a bare connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def plain_request(
    body: bytes, *headers: str, path: str = "/v1/chat/completions", method: str = "POST", key: str = "key-one"
) -> bytes:
    """Return a request's bytes."""
    lines = [f"{method} {path} HTTP/1.1", "host: strata.test", f"authorization: Bearer {key}", *headers]
    lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def events(raw: bytes) -> list[bytes]:
    """Cut a stream's bytes into events, without their blank lines."""
    return [event for event in raw.replace(b"\r\n", b"\n").split(b"\n\n") if event]


def error_events(raw: bytes) -> list[dict[str, Any]]:
    """Return the errors told in band."""
    found = []
    for event in events(raw):
        text = event.partition(b"data: ")[2]
        if text.startswith(b'{"error"'):
            found.append(orjson.loads(text)["error"])
    return found


def content(raw: bytes) -> str:
    """Return the text that a chat stream's bytes say."""
    said = []
    for event in events(raw):
        with contextlib.suppress(orjson.JSONDecodeError):
            read = orjson.loads(event.partition(b"data:")[2])
            said += [choice["delta"].get("content") or "" for choice in read.get("choices", [])]
    return "".join(said)


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(HANG):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)
