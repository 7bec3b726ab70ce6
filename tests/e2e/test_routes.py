"""Routes: one `/v1` whatever base and path say, and everything that is no chat passes through both ways."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai import AsyncAzureOpenAI

from tests.e2e.kit import (
    COMPLETION,
    HANG,
    MODEL,
    USAGE_ASKED,
    WHOLE,
    Rig,
    Wire,
    always,
    chat_body,
    dial,
    error_events,
    plain_request,
    rigged,
    scripted,
    strata,
)
from tests.e2e.test_errors import openai_shape
from tests.e2e.test_processes import serving

CHAT_PATHS = (
    "/v1/chat/completions", "/chat/completions", "//v1/chat/completions", "/v1/chat/completions/",
    "/v1//chat//completions", "/chat/completions/", "//chat/completions//",
)  # fmt: skip


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/", "/some/prefix", "/some/prefix/v1", "/some/prefix/v1/"])
async def test_always_exactly_one_version(base: str) -> None:
    """Whatever the base and the client wrote, the upstream's path has one `/v1`, and no redirect is needed."""
    prefix = base.rstrip("/").removesuffix("/v1")
    async with scripted(always(COMPLETION)) as upstream, strata(f"http://127.0.0.1:{upstream.port}{base}") as proxy:
        for path in CHAT_PATHS:
            answer = await proxy.post(chat_body(stream=True), path=proxy.origin + path)
            assert answer.status_code == 200, path
            assert "x-strata-layers" in answer.headers
            assert upstream.got[-1].target == f"{prefix}/v1/chat/completions"
            assert upstream.got[-1].body.endswith(USAGE_ASKED)
        for path in ("/v1/embeddings", "/embeddings", "//v1/embeddings"):
            assert (await proxy.post(b"{}", path=proxy.origin + path)).status_code == 200
            assert upstream.got[-1].target == f"{prefix}/v1/embeddings"
        for path in ("/props", "/tokenize", "/api/tags"):
            assert (await proxy.http.get(path)).status_code == 200
            assert upstream.got[-1].target == prefix + path


@pytest.mark.parametrize("base", ["/v1beta/openai", "/v1beta/openai/", "/api/paas/v4"])
async def test_a_base_with_a_version_of_its_own(base: str) -> None:
    """A base that names another version is taken as it is."""
    async with scripted(always(COMPLETION)) as upstream, strata(f"http://127.0.0.1:{upstream.port}{base}") as proxy:
        for path in CHAT_PATHS:
            await proxy.post(chat_body(), path=proxy.origin + path)
            assert upstream.got[-1].target == f"{base.rstrip('/')}/chat/completions"
        await proxy.http.get("/v1/models")
        assert upstream.got[-1].target == f"{base.rstrip('/')}/models"


async def test_chat_query_string(rig: Rig) -> None:
    """A chat request's query goes with it, spelled as it came."""
    await rig.proxy.post(chat_body(), path="/v1/chat/completions?a=1&b=%2F%20+&a=2&c")
    assert rig.last.query == "a=1&b=%2F%20+&a=2&c"


async def test_azure() -> None:
    """Azure's deployment path with its `api-version` is a chat: layered, streamed, with its own key header."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.answer(COMPLETION)

    async with scripted(script) as upstream, strata(f"http://127.0.0.1:{upstream.port}") as proxy:
        async with AsyncAzureOpenAI(
            azure_endpoint=proxy.origin, api_version="2024-10-21", api_key="azure-key", max_retries=0
        ) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="gpt-4o", messages=[{"role": "user", "content": "x"}]
            )
        assert "L5=" in raw.headers["x-strata-layers"]
        got = upstream.got[-1]
        assert got.target == "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"
        assert got.header("api-key") == "azure-key"
        assert await proxy.settled(1) == {"ok": 1}
        answer = await proxy.post(
            chat_body(stream=True), path="/openai/deployments/my-own/chat/completions?api-version=preview"
        )
        assert answer.status_code == 200
        assert upstream.got[-1].body.endswith(USAGE_ASKED)
        assert upstream.got[-1].target == "/openai/deployments/my-own/chat/completions?api-version=preview"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/a%2Fb", "/v1/models/a%2fb%20c%C3%A9", "/v1/files/x%2E%2E", "/v1/files?after=a%2Fb&limit=2&q=a+b",
        "/v1/files?", "/v1/x//y", "/v1/x/", "/v1/fine_tuning/jobs/ftjob-1/events?after=1", "/v1/a;b=c/d,e:f@g!$&'()*",
        "/v1/x?url=http://a/b?c", "/v1/%F0%9F%99%82", "/health", "/v1",
    ],
)  # fmt: skip
async def test_paths_are_not_respelled(path: str) -> None:
    """A path and a query go upstream spelled as they came."""
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy, dial(proxy.port) as wire:
        await wire.send(plain_request(b"", path=path, method="GET"))
        status, _, _ = await wire.response()
        assert status == 200
        assert upstream.got[-1].target in {path, path.rstrip("?")}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
@pytest.mark.parametrize("body", [b"", b'{"a":1}'])
async def test_any_method(method: str, body: bytes) -> None:
    """Any method passes, with and without a body."""
    async with (
        scripted(always(b"answer", kind="text/x", status="207 Multi")) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(plain_request(body, path="/v1/anything", method=method))
        status, headers, raw = await wire.response()
        assert (status, raw) == (207, b"answer")
        assert ("content-type", "text/x") in headers
        got = upstream.got[-1]
        assert (got.method, got.target, got.body) == (method, "/v1/anything", body)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
async def test_head(path: str) -> None:
    """HEAD passes with the length the upstream states, without a body, and the connections stay usable."""

    async def heads(wire: Wire) -> None:
        while True:
            got = await wire.request()
            if got.method == "HEAD":
                await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4711\r\nx-a: 1\r\n\r\n")
            else:
                await wire.answer(COMPLETION)

    async with (
        asyncio.timeout(HANG),
        scripted(heads) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        for _ in range(3):
            await wire.send(plain_request(b"", path=path, method="HEAD"))
            _, headers = await wire.head()
            assert ("content-length", "4711") in headers
            assert ("x-a", "1") in headers
        await wire.send(plain_request(orjson.dumps(chat_body())))
        assert (await wire.response())[2] == COMPLETION


@pytest.mark.parametrize("length", [b"", b"content-length: 50\r\n"], ids=("without length", "with length"))
@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(status: int, length: bytes) -> None:
    """204 and 304 pass without a body, whatever length they state, and do not hang or end the connection."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.send(b"HTTP/1.1 %d X\r\netag: a\r\n%b\r\n" % (status, length))

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        for method, path in (("DELETE", "/v1/files/a"), ("GET", "/v1/files/a"), ("POST", "/v1/chat/completions")) * 2:
            await wire.send(plain_request(orjson.dumps(chat_body()), path=path, method=method))
            line, headers = await wire.head()
            assert int(line.split(" ")[1]) == status
            assert ("etag", "a") in headers


async def test_redirects_are_the_clients() -> None:
    """A redirect is relayed, not followed."""
    moved = always(b"", status="307 Temporary Redirect", headers=["location: https://elsewhere.test/x"])
    async with scripted(moved) as upstream, strata(upstream.url) as proxy:
        for answer in (await proxy.http.get("/v1/files/a/content"), await proxy.post(chat_body())):
            assert answer.status_code == 307
            assert answer.headers["location"] == "https://elsewhere.test/x"
        assert len(upstream.got) == 2


async def test_multipart_is_not_touched(rig: Rig) -> None:
    """A multipart body arrives byte for byte, its boundary and its length with it."""
    body = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
    )
    body += b'name="file"; filename="\xc3\xa4.bin"\r\n\r\n' + bytes(range(256)) * 4_000 + b"\r\n--b--\r\n epilogue"
    answer = await rig.proxy.post(body, path="/v1/files", headers={"content-type": 'multipart/form-data; boundary="b"'})
    assert answer.status_code == 200, answer.text
    assert rig.last.body == body
    assert rig.last.headers["content-type"] == 'multipart/form-data; boundary="b"'
    assert rig.last.headers["content-length"] == str(len(body))


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 30"])
async def test_uploads_are_streamed(framing: str) -> None:
    """The upstream has an upload's first part before the client has sent the rest, and the end with its framing."""
    first_came = asyncio.Event()
    read: list[bytes] = []

    async def script(wire: Wire) -> None:
        _, headers = await wire.head()
        named = {name.lower() for name, _ in headers}
        assert len(named & {"content-length", "transfer-encoding"}) == 1
        if "transfer-encoding" in named:
            read.append(await wire.chunk())
            first_came.set()
            while piece := await wire.chunk():
                read.append(piece)
        else:
            read.append(await wire.reader.readexactly(10))
            first_came.set()
            read.append(await wire.reader.readexactly(20))
        await wire.answer(b"{}")

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(f"POST /v1/files HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n".encode())
        pieces = (b"0123456789", b"abcdefghij", b"ABCDEFGHIJ")
        for number, piece in enumerate(pieces):
            await (wire.send_chunk(piece) if "chunked" in framing else wire.send(piece))
            if number == 0:
                await first_came.wait()
        if "chunked" in framing:
            await wire.send_chunk(b"")
        assert (await wire.response())[0] == 200
    assert b"".join(read) == b"".join(pieces)


async def test_an_upload_that_goes_on_is_no_silence() -> None:
    """However long it takes; one that stands still for longer than an answer may take is given up."""

    async def reads(wire: Wire) -> None:
        _, headers = await wire.head()
        await wire.body(headers)
        await wire.answer(b"{}")

    head = b"POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-length: 40\r\n\r\n"
    async with (
        asyncio.timeout(HANG),
        scripted(reads) as upstream,
        strata(upstream.url, FIRST_BYTE_TIMEOUT_SECONDS="0.5") as proxy,
    ):
        for pause, status in ((0.3, 200), (1.5, 504)):
            async with dial(proxy.port) as wire:
                await wire.send(head)
                for _ in range(3):
                    await wire.send(b"x" * 10)
                    await asyncio.sleep(pause)
                if status == 200:
                    await wire.send(b"x" * 10)
                assert (await wire.response())[0] == status


async def test_large_upload_is_not_held() -> None:
    """An upload that the upstream does not read stops the client instead of filling the proxy."""
    sent = 0

    async def script(wire: Wire) -> None:
        await wire.head()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(HANG)

    async with (
        asyncio.timeout(HANG),
        scripted(script, receive_buffer=65_536) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(b"POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-length: 500000000\r\n\r\n")
        try:
            async with asyncio.timeout(1.5):
                while True:
                    await wire.send(b"x" * 100_000)
                    sent += 100_000
        except TimeoutError:
            pass
        assert 0 < sent < 40_000_000


async def test_upload_cut_by_the_client() -> None:
    """A client that leaves in mid-upload ends the upstream's request."""
    ended = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.gone()
        ended.set()

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            await wire.send(b"POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\nhalf")
            await asyncio.sleep(0.1)
        await ended.wait()


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 5000"])
@pytest.mark.parametrize("status", [200, 400])
async def test_client_leaving_an_upload_that_is_answered_already(framing: str, status: int) -> None:
    """A client that leaves in mid-upload ends the upstream's request also when its answer has begun."""
    ended = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.send(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status)
        try:
            while True:
                await wire.send_chunk(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        except ConnectionError:
            ended.set()

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            await wire.send(f"POST /v1/audio HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n".encode())
            await wire.send(b"4\r\nhalf\r\n" if "chunked" in framing else b"half")
            await wire.head()
            await wire.chunk()
        await ended.wait()


async def test_download_is_streamed_and_cancelled() -> None:
    """A download's first piece arrives before its end, and a client that leaves ends it at the upstream."""
    ended = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream(kind="application/octet-stream")
        await wire.send_chunk(b"first")
        await wire.gone()
        ended.set()

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            await wire.send(plain_request(b"", path="/v1/files/a/content", method="GET"))
            await wire.head()
            assert await wire.chunk() == b"first"
        async with asyncio.timeout(1):
            await ended.wait()


async def test_download_that_breaks_off() -> None:
    """A download that breaks off upstream ends the client's connection, so that it notices."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream(kind="application/octet-stream")
        await wire.send_chunk(b"first")
        await asyncio.sleep(0.05)
        wire.reset()

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(plain_request(b"", path="/v1/files/a/content", method="GET"))
        await wire.head()
        assert await wire.chunk() == b"first"
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await wire.chunk()


async def test_passed_through_streams_come_piece_by_piece() -> None:
    """An event stream of another route (`/v1/responses`) leaves event by event, untouched."""
    next_one = asyncio.Semaphore(0)

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        for number in range(5):
            await wire.send_chunk(b'event: x\ndata: {"usage":{},"n":%d}\n\n' % number)
            await next_one.acquire()
        await wire.send_chunk(b"")

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(plain_request(b"{}", path="/v1/responses"))
        await wire.head()
        for number in range(5):
            assert await wire.chunk() == b'event: x\ndata: {"usage":{},"n":%d}\n\n' % number
            next_one.release()
        assert await wire.chunk() == b""


@pytest.mark.parametrize("path", ["/v1/realtime?model=x", "/v1/chat/completions", "/v1/responses"])
async def test_websocket_upgrade(rig: Rig, path: str) -> None:
    """A WebSocket upgrade gets a clean 4xx in the OpenAI shape, and nothing goes upstream."""
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(
            f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"
            "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        status, headers, raw = await wire.response()
    assert 400 <= status < 500
    assert ("content-type", "application/json") in headers
    assert set(orjson.loads(raw)["error"]) == {"message", "type", "param", "code"}
    assert not rig.entries


HOP = {
    "connection": "keep-alive, x-named", "keep-alive": "timeout=5", "proxy-authorization": "Basic x", "te": "trailers",
    "trailer": "x-t", "proxy-connection": "keep-alive", "x-named": "1", "upgrade": "h2c",
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_hop_by_hop_headers(path: str) -> None:
    """Headers of the hop, and those `connection` names, pass in neither direction; all others do, and once."""
    answered = [
        "connection: x-secret",
        "x-secret: 1",
        "keep-alive: timeout=9",
        "proxy-authenticate: Basic",
        "trailer: a",
    ]
    answered += ["set-cookie: a=1", "set-cookie: b=2", "date: Sun, 29 Nov 2026 00:00:00 GMT", "server: upstream"]
    answered += ["x-empty:", "x-latin: caf\xe9", "vary: a", "vary: b", "alt-svc: h3"]
    async with scripted(always(COMPLETION, headers=answered)) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            sent = [f"{name}: {value}" for name, value in HOP.items()]
            await wire.send(plain_request(orjson.dumps(chat_body()), *sent, "x-kept: 1", "x-kept: 2", path=path))
            status, headers, raw = await wire.response()
        assert (status, raw) == (200, COMPLETION)
        got = upstream.got[-1]
        for name in HOP:
            values = got.all(name)
            assert not values or name == "connection", name
        assert got.all("x-kept") == ["1", "2"]
        assert got.all("host") == [f"127.0.0.1:{upstream.port}"]
        names = [name.lower() for name, _ in headers]
        assert not {"x-secret", "keep-alive", "proxy-authenticate", "trailer"} & set(names)
        told = [(name, value) for name, value in headers if name in {"set-cookie", "date", "server", "vary"}]
        assert told == [
            ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("date", "Sun, 29 Nov 2026 00:00:00 GMT"),
            ("server", "upstream"), ("vary", "a"), ("vary", "b"),
        ]  # fmt: skip
        assert ("x-empty", "") in headers
        assert ("x-latin", "caf\xe9") in headers
        assert names.count("content-length") == 1
        assert names.count("content-type") == 1


async def test_both_timings_are_told() -> None:
    """The upstream's own `server-timing` reaches the client beside Strata's."""
    timed = always(COMPLETION, headers=["server-timing: up;dur=12"])
    async with scripted(timed) as upstream, strata(upstream.url) as proxy:
        upstreams, own = (await proxy.post(chat_body())).headers.get_list("server-timing")
        assert upstreams == "up;dur=12"
        assert own.startswith("strata;dur=")


async def test_nothing_is_added_to_what_goes_upstream() -> None:
    """The upstream sees the client's headers, and none that tell of a proxy."""
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy, dial(proxy.port) as wire:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            await wire.send(plain_request(orjson.dumps(chat_body()), "user-agent: mine", "accept: */*", path=path))
            await wire.response()
            names = {name.lower() for name, _ in upstream.got[-1].headers}
            expected = {"host", "authorization", "user-agent", "accept", "content-type", "content-length"}
            assert names - {"connection", "accept-encoding"} == expected


async def test_upstreams_path_does_not_shadow_ours(rig: Rig) -> None:
    """The proxy's own routes answer by themselves and never go upstream."""
    assert (await rig.proxy.http.get("/livez")).text == "ok\n"
    assert (await rig.proxy.http.get("/readyz")).json() == {"status": "ready", "store": "ok"}
    assert "strata_requests_total" in (await rig.proxy.http.get("/metrics")).text
    assert (await rig.proxy.http.get("/strata/conversations/none")).status_code == 404
    assert (await rig.proxy.http.post("/strata/conversations/none")).status_code in {404, 405}
    assert not rig.entries


async def test_livez_answers_while_the_upstream_is_away() -> None:
    """Without an upstream the proxy is alive and ready, and says what fails."""
    async with strata("http://127.0.0.1:9") as proxy:
        assert (await proxy.http.get("/livez")).status_code == 200
        assert (await proxy.http.get("/readyz")).status_code == 200
        answer = await proxy.http.get("/v1/models")
        assert answer.status_code == 502
        openai_shape(answer, "upstream_unreachable")


@pytest.fixture
async def pipelined() -> AsyncIterator[Rig]:
    """A rig whose requests are sent one behind the other without waiting."""
    async with rigged() as rig:
        yield rig


async def test_pipelined_requests(pipelined: Rig) -> None:
    """Requests sent one behind the other on one connection are answered in order."""
    bodies = [orjson.dumps(chat_body(f"question {number}")) for number in range(4)]
    async with asyncio.timeout(HANG), dial(pipelined.proxy.port) as wire:
        await wire.send(b"".join(plain_request(body) for body in bodies))
        answers: list[Any] = [orjson.loads((await wire.response())[2]) for _ in bodies]
    assert [entry.body for entry in pipelined.entries] == bodies
    assert [answer["id"] for answer in answers] == [f"chatcmpl-sim{number:08d}" for number in range(1, 5)]
    assert all(answer["model"] == MODEL for answer in answers)


async def test_the_chat_route_with_another_method(rig: Rig) -> None:
    """GET on the chat route passes through: a provider lists stored completions there."""
    answer = await rig.proxy.http.get("/v1/chat/completions?limit=2")
    assert answer.status_code in {404, 405}
    assert rig.last.method == "GET"
    assert rig.last.query == "limit=2"


async def test_through_a_forward_proxy() -> None:
    """With `STRATA_UPSTREAM_PROXY` everything goes through that proxy: plain, streamed, broken off, uploads."""
    ended = asyncio.Event()

    async def script(wire: Wire) -> None:
        while True:
            got = await wire.request()
            assert got.target.startswith("http://model.invalid/v1/")
            if b'"stream":true' not in got.body:
                await wire.answer(COMPLETION)
                continue
            await wire.begin_stream()
            for piece in WHOLE[:2]:
                await wire.send_chunk(piece)
            if b"break off" in got.body:
                return
            if b"hold" in got.body:
                await wire.gone()
                ended.set()
                return
            for piece in (*WHOLE[2:], b""):
                await wire.send_chunk(piece)

    async with (
        asyncio.timeout(HANG),
        scripted(script) as forward,
        strata("http://model.invalid", UPSTREAM_PROXY=f"http://127.0.0.1:{forward.port}") as proxy,
    ):
        assert (await proxy.post(chat_body())).content == COMPLETION
        assert (await proxy.post(b"upload", path="/v1/files")).content == COMPLETION
        assert forward.got[-1].body == b"upload"
        assert (await proxy.post(chat_body(stream=True))).content == b"".join(WHOLE)
        broken = (await proxy.post(chat_body("break off", stream=True))).content
        assert [error["code"] for error in error_events(broken)] == ["upstream_stream_interrupted"]
        async with dial(proxy.port) as wire:
            await wire.send(plain_request(orjson.dumps(chat_body("hold", stream=True))))
            await wire.head()
            await wire.chunk()
        await ended.wait()
        assert await proxy.settled(4) == {"ok": 2, "upstream_interrupted": 1, "client_closed": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_forward_proxy_that_closes_kept_connections(path: str) -> None:
    """One that closes a kept connection just when the next request arrives costs no client an error."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.answer(COMPLETION)
        await wire.reader.readexactly(1)

    async with (
        asyncio.timeout(HANG),
        scripted(script) as forward,
        strata("http://model.invalid", UPSTREAM_PROXY=f"http://127.0.0.1:{forward.port}") as proxy,
    ):
        for number in range(6):
            body = chat_body() if "chat" in path else b"" if number % 2 else b"upload"
            assert (await proxy.post(body, path=path)).content == COMPLETION
        assert len(forward.got) == 6


async def test_a_forward_proxy_that_breaks_off() -> None:
    """On a new connection that is no race but its answer: told after one call."""

    async def script(wire: Wire) -> None:
        await wire.request()

    async with (
        scripted(script) as forward,
        strata("http://model.invalid", UPSTREAM_PROXY=f"http://127.0.0.1:{forward.port}") as proxy,
    ):
        answer = await proxy.post(chat_body())
        assert answer.status_code == 502
        openai_shape(answer, "upstream_protocol_error")
        assert len(forward.got) == 1


async def test_a_forward_proxy_that_is_away() -> None:
    """A forward proxy that refuses connections is a 502 in the OpenAI shape."""
    async with strata("http://model.invalid", UPSTREAM_PROXY="http://127.0.0.1:9") as proxy:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            answer = await proxy.post(chat_body(), path=path)
            assert answer.status_code == 502
            openai_shape(answer, "upstream_unreachable")


async def test_the_deadline_of_a_shutdown_ends_waiting_requests(tmp_path: Path) -> None:
    """Who still waits for an answer then is told so on every route, and nothing is said of a failure."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="1") as running, dial(running.port) as wire:
        await wire.send(plain_request(b'{"model":"e","input":"a"}', "x-sim-fault: delay=600", path="/v1/embeddings"))
        await asyncio.sleep(0.3)
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG):
            status, _, raw = await wire.response()
        assert status == 503
        assert orjson.loads(raw)["error"]["code"] == "proxy_shutting_down"
        assert await running.stopped() == 0
        assert not [line for line in running.lines() if "Traceback" in line]


async def test_slow_download_is_not_held() -> None:
    """A client that reads a download slowly pauses the upstream instead of filling the proxy."""
    sent = 0

    async def script(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        await wire.begin_stream(kind="application/octet-stream")
        while sent < 200_000_000:
            await wire.send_chunk(b"z" * 50_000)
            sent += 50_000

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wire.send(plain_request(b"", path="/v1/files/a/content", method="GET"))
        await asyncio.sleep(1.5)
        assert 0 < sent < 40_000_000
