"""A scripted upstream that records what it got, Strata in front of it, both on real sockets."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from proxy import app
from proxy.environment import load
from proxy.simulator.app import Options, Simulator
from proxy.simulator.app import create as create_provider
from proxy.simulator.prompt import render
from proxy.simulator.server import serve
from proxy.simulator.tokens import tokenizer

Pairs = Sequence[tuple[str, str]]
KEY = "sk-client-0123456789"
GUARD_SECONDS = 20.0
"""A test that hangs fails after this; nothing is expected to take that long."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One request as the upstream got it; `connection` numbers the sockets it came on."""

    method: str
    target: str
    headers: Pairs
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        """Return a header's value; fails when it came twice."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        """Return the body, parsed."""
        return orjson.loads(self.body)


class Wire:
    """What a script writes its answer to."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.open = True

    async def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, headers: Pairs = (), *, status: int = 200) -> None:
        """Write the head of an answer."""
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {value}" for name, value in headers), "", ""]
        await self.raw("\r\n".join(lines).encode())

    async def whole(
        self, body: bytes, kind: str = "application/json", *, status: int = 200, headers: Pairs = ()
    ) -> None:
        """Write an answer with its length."""
        await self.head([("content-type", kind), ("content-length", str(len(body))), *headers], status=status)
        await self.raw(body)

    async def events(self, *events: bytes, headers: Pairs = (), status: int = 200) -> None:
        """Write an event stream, a chunk for each event."""
        await self.begin_events(headers, status=status)
        for event in events:
            await self.chunk(event)
        await self.chunk(b"")

    async def begin_events(self, headers: Pairs = (), *, status: int = 200) -> None:
        """Write the head of an event stream."""
        await self.head(
            [("content-type", "text/event-stream"), ("transfer-encoding", "chunked"), *headers], status=status
        )

    async def chunk(self, data: bytes) -> None:
        """Write one piece of a chunked body; an empty one ends it."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    def hang_up(self) -> None:
        """Close the connection."""
        self.open = False
        self._writer.close()


Answer = Callable[[Seen, Wire], Awaitable[None]]

CHAT_ANSWER = orjson.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42},
    }
)


LEFT_OUT = re.compile(r"^\[\d+ earlier messages? of this conversation left out here\.\]\n\n")


def untold(messages: list[Any]) -> list[Any]:
    """Return messages without the line that says how many were left out before them."""
    return [
        {**message, "content": LEFT_OUT.sub("", message["content"])} if isinstance(message["content"], str) else message
        for message in messages
    ]


def event(payload: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + (payload if isinstance(payload, bytes) else orjson.dumps(payload)) + b"\n\n"


def delta(content: str = "", *, finish: str | None = None, **more: object) -> bytes:
    """Return one chunk of a streamed chat answer."""
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return event(
        {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}
    )


def usage_chunk(usage: object) -> bytes:
    """Return the chunk that holds nothing but usage."""
    return event(
        {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}
    )


DONE = event(b"[DONE]")
STREAM_ANSWER = (delta("Do"), delta("ne."), delta(finish="stop"))


async def chat_answer(seen: Seen, wire: Wire) -> None:
    """Answer like a plain chat API, streaming and usage as asked for."""
    body = seen.json if seen.body[:1] == b"{" else {}
    if not (isinstance(body, dict) and body.get("stream")):
        await wire.whole(CHAT_ANSWER)
        return
    asked = (body.get("stream_options") or {}).get("include_usage")
    usage = (usage_chunk({"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}),) if asked else ()
    await wire.events(*STREAM_ANSWER, *usage, DONE)


class Upstream:
    """A server on a real socket that does what `answer` says and remembers every request."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.answer: Answer = chat_answer
        self.on_piece: Callable[[bytes], None] | None = None
        self.origin = ""
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Its base URL."""
        return self.origin + "/v1"

    @property
    def bodies(self) -> list[bytes]:
        """The bodies it got, in order."""
        return [seen.body for seen in self.seen]

    async def __aenter__(self) -> "Upstream":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.origin = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        wire, number = Wire(writer), self.connections
        try:
            while wire.open:
                seen = await self._request(reader, number)
                self.seen.append(seen)
                await self.answer(seen, wire)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, number: int) -> Seen:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in head[1:] if line)]
        named = {name.lower(): value for name, value in headers}
        pieces: list[bytes] = []

        async def take(size: int) -> None:
            while size:
                pieces.append(await reader.read(min(size, 65_536)))
                if not pieces[-1]:
                    raise asyncio.IncompleteReadError(b"", size)
                size -= len(pieces[-1])
                if self.on_piece:
                    self.on_piece(pieces[-1])

        if named.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await take(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        else:
            await take(int(named.get("content-length", "0")))
        return Seen(method=method, target=target, headers=headers, body=b"".join(pieces), connection=number)


@dataclass(frozen=True)
class Measured:
    """One scrape of `/metrics`."""

    samples: list[tuple[str, dict[str, str], float]]

    def total(self, name: str, **labels: str) -> float:
        """Sum the samples of this name that carry these labels."""
        return sum(value for found, has, value in self.samples if found == name and labels.items() <= has.items())


@dataclass(frozen=True, kw_only=True)
class Strata:
    """A running proxy and a client that talks to it."""

    origin: str
    http: httpx.AsyncClient = field(repr=False)

    async def post(
        self, body: object, headers: Mapping[str, str] | None = None, path: str = "/v1/chat/completions"
    ) -> httpx.Response:
        """Send a body: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        sent = {"content-type": "application/json", "authorization": f"Bearer {KEY}", **(headers or {})}
        return await self.http.post(path, content=raw, headers=sent)

    async def metrics(self) -> Measured:
        """Scrape."""
        text = (await self.http.get("/metrics")).text
        families = text_string_to_metric_families(text)
        return Measured([(each.name, dict(each.labels), each.value) for family in families for each in family.samples])


Start = Callable[..., Awaitable[Strata]]


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream() as running:
        yield running


@pytest.fixture
async def start(upstream: Upstream) -> AsyncIterator[Start]:
    """Start proxies: `await start(budget_tokens=6000)`; each before `upstream` unless `upstream_url` is given."""
    async with AsyncExitStack() as stack:

        async def begin(**given: object) -> Strata:
            environment = {"STRATA_UPSTREAM_URL": upstream.url, "STRATA_LOG_LEVEL": "info"}
            environment |= {f"STRATA_{name.upper()}": str(value) for name, value in given.items()}
            running = await stack.enter_async_context(serve(app.create(load(environment))))
            http = httpx.AsyncClient(base_url=running.origin, trust_env=False, timeout=GUARD_SECONDS)
            return Strata(origin=running.origin, http=await stack.enter_async_context(http))

        yield begin


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A running simulated provider."""

    url: str
    simulator: Simulator

    @property
    def bodies(self) -> list[bytes]:
        """The bodies it got, in order."""
        return [entry.body for entry in self.simulator.requests]


StartProvider = Callable[[Options], Awaitable[Provider]]


@pytest.fixture
async def provide() -> AsyncIterator[StartProvider]:
    """Start simulated providers."""
    async with AsyncExitStack() as stack:

        async def begin(options: Options) -> Provider:
            application: Starlette = create_provider(options)
            running = await stack.enter_async_context(serve(application))
            return Provider(url=running.base_url, simulator=application.state.simulator)

        yield begin


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait until a condition holds; fails where it never does."""
    async with asyncio.timeout(GUARD_SECONDS):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.01)


def system(text: str) -> dict[str, object]:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, object]:
    """Return a user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, object]:
    """Return an assistant message."""
    return {"role": "assistant", "content": text}


def call(identity: str, name: str = "look_up", arguments: str = '{"q":"tides"}') -> dict[str, object]:
    """Return one tool call."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(identity: str, text: str) -> dict[str, object]:
    """Return the result of a tool call."""
    return {"role": "tool", "tool_call_id": identity, "content": text}


def chat(*messages: object, model: object = "gpt-4o", **more: object) -> dict[str, object]:
    """Return a chat request."""
    return {"model": model, "messages": list(messages), **more}


def words(count: int, seed: str = "harbour") -> str:
    """Return plain text of about `count` tokens."""
    return " ".join(f"{seed} report {number} lists tide and wind;" for number in range(count // 9))


def without_usage_wish(body: bytes) -> bytes:
    """Return a forwarded body without the `stream_options` that Strata adds; fails when it is not there once."""
    wish = b'"stream_options":{"include_usage":true}'
    assert body.count(wish) == 1
    head, _, tail = body.partition(wish)
    if head.endswith(b","):
        return head[:-1] + tail
    return head + tail.removeprefix(b",")


def provider_tokens(body: bytes) -> int:
    """Count a body's prompt as the simulated provider does: an independent witness."""
    read = orjson.loads(body)
    return render(read, tokenizer(str(read["model"]))).count()


def roles(body: bytes) -> list[str]:
    """Return the roles of a forwarded body's messages."""
    return [message["role"] for message in orjson.loads(body)["messages"]]


def note(name: str, count: int = 90) -> str:
    """Return a context block that is worth a reference."""
    return f"<note_context>\n<path>{name}</path>\n<content>\n{words(count, name)}\n</content>\n</note_context>"
