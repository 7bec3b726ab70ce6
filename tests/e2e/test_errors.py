"""Errors: the upstream's own pass as they came; where it gives no answer the client gets one in the OpenAI shape."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from proxy.simulator.app import Options
from tests.e2e.kit import (
    COMPLETION,
    DONE,
    HANG,
    MODEL,
    WHOLE,
    Rig,
    Wire,
    always,
    chat_body,
    chunk,
    content,
    dial,
    error_events,
    plain_request,
    rigged,
    scripted,
    strata,
    streaming,
    until,
    usage_chunk,
)

STREAM = chat_body(stream=True)
PATHS = ("/v1/chat/completions", "/v1/embeddings")


def openai_shape(answer: httpx.Response, code: str) -> dict[str, Any]:
    """Check that an answer is an error as an OpenAI SDK reads it."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 429, 500, 503, 529])
async def test_upstreams_error_is_relayed_once(rig: Rig, status: int, stream: bool) -> None:
    """An error status passes with its body, after exactly one upstream call."""
    answer = await rig.proxy.post(chat_body(stream=stream), headers={"x-sim-fault": f"status={status}"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"] == rig.last.request_id
    assert len(rig.entries) == 1
    assert await rig.proxy.settled(1) == {"upstream_error": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_no_stream_whatever_it_says(stream: bool) -> None:
    """Some say `text/event-stream` and send JSON: it arrives as it came."""
    body = (
        b'{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":"context_length_exceeded"}}'
    )
    answers = always(body, status="400 Bad Request", kind="text/event-stream")
    async with scripted(answers) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(chat_body(stream=stream))
        assert (answer.status_code, answer.content) == (400, body)
        assert await proxy.settled(1) == {"upstream_error": 1}


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_refusal_that_breaks_off(leaves: bool) -> None:
    """Of a request to which something was added: as far as it came it arrives, and no connection is left behind."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
        await (wire.gone() if leaves else asyncio.sleep(0.05))
        wire.close()

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            await wire.send(plain_request(orjson.dumps(chat_body(stream=True))))
            if leaves:
                await until(lambda: len(upstream.got) == 1)
                wire.close()
            else:
                assert (await wire.head())[0].startswith("HTTP/1.1 400")
        assert await proxy.settled(1) == {"client_closed" if leaves else "upstream_interrupted": 1}


async def test_broken_key() -> None:
    """The upstream's 401 reaches the SDK as AuthenticationError with the upstream's words and headers."""
    async with rigged(Options(keys=frozenset({"right-key"}))) as rig:
        async with rig.proxy.openai("wrong-key-of-mine") as client:
            with pytest.raises(openai.AuthenticationError) as raised:
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
            assert raised.value.code == "invalid_api_key"
            assert "mine" in raised.value.message
            assert raised.value.response.headers["openai-version"] == "2020-10-01"
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with rig.proxy.openai("right-key") as client:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("path", PATHS)
async def test_rate_limit_headers(path: str) -> None:
    """`retry-after`, `x-should-retry` and the rate-limit headers are relayed, each once, to be obeyed by the client."""
    told = {
        "retry-after": "17", "retry-after-ms": "17000", "x-should-retry": "false", "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "6m0s", "openai-processing-ms": "3", "x-request-id": "req_1",
    }  # fmt: skip
    body = b'{"error":{"message":"Slow down","type":"tokens","param":null,"code":"rate_limit_exceeded"}}'
    lines = [f"{name}: {value}" for name, value in told.items()]
    async with (
        scripted(always(body, status="429 Too Many Requests", headers=lines)) as upstream,
        strata(upstream.url) as proxy,
    ):
        answer = await proxy.post(chat_body(), path=path)
        assert (answer.status_code, answer.content) == (429, body)
        for name, value in told.items():
            assert answer.headers.get_list(name) == [value]
        assert len(upstream.got) == 1


async def test_sdk_retries_as_the_upstream_says(rig: Rig) -> None:
    """The SDK's own retry works through Strata: a 429 with `retry-after: 0`, then the answer."""
    rig.simulator.faults.append("status=429; retry_after=0")
    async with rig.proxy.openai() as client:
        reply = await client.with_options(max_retries=1).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}]
        )
    assert reply.choices[0].message.content
    assert len(rig.entries) == 2
    assert await rig.proxy.settled(2) == {"ok": 1, "upstream_error": 1}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_html_502(rig: Rig, path: str, stream: bool) -> None:
    """A gateway's page of HTML passes as it came."""
    answer = await rig.proxy.post(chat_body(stream=stream), path=path, headers={"x-sim-fault": "html502"})
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "text/html"
    assert answer.content.startswith(b"<html>\r\n")
    assert len(rig.entries) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_refused_connection(path: str) -> None:
    """An upstream that is not there is a 502 in the OpenAI shape."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with strata(f"http://127.0.0.1:{port}") as proxy:
        answer = await proxy.post(STREAM, path=path)
        assert answer.status_code == 502
        assert openai_shape(answer, "upstream_unreachable")["type"] == "upstream_error"
        if path == PATHS[0]:
            assert await proxy.settled(1) == {"upstream_error": 1}


async def test_unknown_host() -> None:
    """A host name that does not resolve is a 502 in the OpenAI shape."""
    async with strata("http://no-such-host.invalid") as proxy:
        answer = await proxy.post(chat_body())
        assert answer.status_code == 502
        openai_shape(answer, "upstream_unreachable")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", ["delay=60", "reset"], ids=("silent", "resets"))
async def test_no_answer(path: str, fault: str) -> None:
    """A silent upstream is a 504 after the first-byte timeout, one that resets a 502, after one call each."""
    async with rigged(FIRST_BYTE_TIMEOUT_SECONDS="0.3") as rig:
        answer = await rig.proxy.post(STREAM, path=path, headers={"x-sim-fault": fault})
        if fault == "reset":
            assert answer.status_code == 502
            openai_shape(answer, "upstream_protocol_error")
        else:
            assert answer.status_code == 504
            openai_shape(answer, "upstream_timeout")
            assert await rig.outcome(rig.last) == "client_gone"
        assert len(rig.entries) == 1


async def test_reset_on_a_kept_connection_is_not_sent_again_without_end(rig: Rig) -> None:
    """A reset by a living upstream on a kept connection is retried at most once, then told."""
    assert (await rig.proxy.post(chat_body())).status_code == 200
    answer = await rig.proxy.post(chat_body(), headers={"x-sim-fault": "reset"})
    assert answer.status_code == 502
    openai_shape(answer, "upstream_protocol_error")
    assert len(rig.entries) <= 3


@pytest.mark.parametrize("fault", ["gap=60", "first_token_delay=60"])
async def test_stalled_stream(fault: str) -> None:
    """A stream that stalls longer than the idle timeout ends in one error event, and the upstream is let go."""
    async with rigged(IDLE_TIMEOUT_SECONDS="0.3") as rig:
        answer = await rig.proxy.post(STREAM, headers={"x-sim-fault": fault})
        assert [error["code"] for error in error_events(answer.content)] == ["upstream_stream_interrupted"]
        assert await rig.outcome(rig.last) == "client_gone"
        assert await rig.proxy.settled(1) == {"upstream_interrupted": 1}


async def test_idle_timeout_begins_anew_with_each_piece() -> None:
    """A long stream whose pieces keep coming never meets the idle timeout."""
    async with rigged(IDLE_TIMEOUT_SECONDS="1", FIRST_BYTE_TIMEOUT_SECONDS="1") as rig:
        answer = await rig.proxy.post(STREAM, headers={"x-sim-fault": "gap=0.05"})
        assert answer.content.endswith(DONE)
        assert await rig.proxy.settled(1) == {"ok": 1}


async def test_stalled_plain_answer() -> None:
    """A plain answer that stalls ends the client's connection, and is recorded as interrupted."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await wire.gone()

    async with scripted(script) as upstream, strata(upstream.url, IDLE_TIMEOUT_SECONDS="0.3") as proxy:
        with pytest.raises(httpx.RemoteProtocolError):
            await proxy.post(chat_body())
        assert await proxy.settled(1) == {"upstream_interrupted": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
        b"HTTP/1.1 200 OK\r\nx-a : b\r\ncontent-length: 2\r\n\r\n{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
async def test_an_upstream_that_speaks_no_http(answer: bytes, path: str) -> None:
    """What is no HTTP is a 502 in the OpenAI shape."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer)
        await wire.gone()

    async with scripted(script) as upstream, strata(upstream.url, FIRST_BYTE_TIMEOUT_SECONDS="2") as proxy:
        told = await proxy.post(chat_body(), path=path)
        assert told.status_code == 502
        openai_shape(told, "upstream_protocol_error")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(COMPLETION)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + LENGTH + b"x-a: 1\r\n" + LENGTH + b"\r\n" + COMPLETION,
        HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
        HEAD + CHUNKED + b"content-length: 3\r\n\r\n" + CHUNKS,
        HEAD + b"x-a: b\r\n  c\r\n" + LENGTH + b"\r\n" + COMPLETION,
        (HEAD + LENGTH + b"\r\n").replace(b"\r", b"") + COMPLETION,
        HEAD + b"x-a: b\x01c\r\n" + LENGTH + b"\r\n" + COMPLETION,
        HEAD + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b"  \r\n", 1),
    ],
    ids=("length twice", "length and chunks", "chunks and length", "folded", "lf only", "control", "blanks"),
)
@pytest.mark.parametrize("path", PATHS)
async def test_answers_that_clients_take(answer: bytes, path: str) -> None:
    """What an SDK takes from an upstream without a proxy it gets through Strata."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.send(answer)

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(2):
            told = await proxy.post(chat_body(), path=path)
            assert (told.status_code, told.content) == (200, COMPLETION)
            assert told.headers.get("x-a", "b c").split() in (["b", "c"], ["1"])


async def test_interim_answers_are_skipped() -> None:
    """`100 Continue` and `103 Early Hints` before the answer do not stand for it."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
            await wire.answer(COMPLETION, headers=["x-after: 1"])

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(3):
            answer = await proxy.post(chat_body())
            assert (answer.status_code, answer.content) == (200, COMPLETION)
            assert answer.headers["x-after"] == "1"
            assert "link" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
async def test_idle_connections_closed_by_the_upstream(path: str) -> None:
    """An upstream that closes every connection after its answer, a moment later, costs no client an error."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.answer(COMPLETION)
        await asyncio.sleep(0.02)

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for pause in (0.0, 0.01, 0.019, 0.02, 0.021, 0.03, 0.1) * 6:
            assert (await proxy.post(chat_body(), path=path)).status_code == 200
            await asyncio.sleep(pause)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reset", [False, True])
async def test_connection_closed_exactly_when_the_next_request_arrives(path: str, reset: bool) -> None:
    """A kept connection that the upstream ends just when it gets the next request is no error: it is sent again."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.answer(COMPLETION)
        await wire.reader.readexactly(1)
        if reset:
            wire.reset()

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(8):
            answer = await proxy.post(chat_body(), path=path)
            assert (answer.status_code, answer.content) == (200, COMPLETION)
        assert len(upstream.got) == 8


async def test_an_idle_connection_that_is_closed_with_a_408() -> None:
    """A 408 that was on its way before the request is not its answer: the request is sent again."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.answer(COMPLETION)
        await wire.reader.readexactly(1)
        await wire.answer(b"", status="408 Request Timeout", headers=["connection: close"])

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(4):
            answer = await proxy.post(chat_body())
            assert (answer.status_code, answer.content) == (200, COMPLETION)
        assert len(upstream.got) == 4


async def test_a_408_of_a_connection_that_stays_open() -> None:
    """It is the answer to the request, and the client's to see."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.answer(COMPLETION)
        await wire.request()
        await wire.answer(b"", status="408 Request Timeout")

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        assert [(await proxy.post(chat_body())).status_code for _ in range(2)] == [200, 408]
        assert len(upstream.got) == 2


async def test_many_stale_connections_at_once() -> None:
    """When all kept connections have gone stale at once, every request still gets its answer."""
    wires: list[Wire] = []
    together = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wires.append(wire)
        await together.wait()
        await wire.answer(COMPLETION)
        await wire.reader.readexactly(1)

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(2):
            wires.clear()
            together.clear()
            asked = [asyncio.ensure_future(proxy.post(chat_body())) for _ in range(12)]
            await until(lambda: len(wires) == 12)
            together.set()
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 12


async def test_answer_with_more_than_its_length() -> None:
    """Bytes behind an answer's end are not taken for the next answer."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.answer(COMPLETION)
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await wire.gone()

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(4):
            assert (await proxy.post(chat_body())).content == COMPLETION
            await asyncio.sleep(0.02)


async def test_strict_upstream_is_asked_once_more_without_options() -> None:
    """An upstream that refuses `stream_options` gets the client's own bytes, and is not asked again."""
    async with rigged(Options(strict=True)) as rig:
        raw = orjson.dumps(STREAM)
        for _ in range(3):
            answer = await rig.proxy.post(raw)
            assert answer.status_code == 200
            assert answer.content.endswith(DONE)
        assert [b"stream_options" in entry.body for entry in rig.entries] == [True, False, False, False]
        assert [entry.body for entry in rig.entries[1:]] == [raw] * 3
        assert await rig.proxy.settled(3) == {"ok": 3}


async def test_strict_upstream_refuses_what_the_client_asked_for() -> None:
    """Where the client itself sent `stream_options`, the upstream's refusal is the client's to see."""
    async with rigged(Options(strict=True)) as rig:
        answer = await rig.proxy.post({**STREAM, "stream_options": {"include_usage": True}})
        assert answer.status_code == 400
        assert "stream_options" in answer.text
        assert len(rig.entries) == 1


async def test_refusal_for_another_reason_is_not_retried(rig: Rig) -> None:
    """A 400 that does not name `stream_options` is relayed after one call, and usage goes on being asked for."""
    answer = await rig.proxy.post(STREAM, headers={"x-sim-fault": "status=400"})
    assert answer.status_code == 400
    assert len(rig.entries) == 1
    await rig.proxy.post(STREAM)
    assert b"include_usage" in rig.last.body


NAMES = b'{"error":{"message":"Unsupported parameter: stream_options"}}'
CAMEL = b'{"detail":"unknown field streamOptions"}'


@pytest.mark.parametrize(
    ("status", "refusal", "headers"),
    [
        (400, gzip.compress(NAMES), ["content-encoding: gzip"]),
        (400, CAMEL, []),
        (422, NAMES, []),
        (500, b'{"error":{"message":"create() got an unexpected keyword argument \'include_usage\'"}}', []),
        (501, NAMES, []),
        (403, NAMES, []),
        (405, CAMEL, []),
        (200, NAMES, []),
    ],
)
async def test_options_refused_in_any_words(status: int, refusal: bytes, headers: list[str]) -> None:
    """However an upstream refuses what Strata adds to a stream, the client gets its answer, and it is asked once."""

    async def script(wire: Wire) -> None:
        while True:
            got = await wire.request()
            if b"stream_options" in got.body:
                await wire.answer(refusal, status=f"{status} X", headers=headers)
                continue
            await wire.begin_stream()
            for piece in (*WHOLE, b""):
                await wire.send_chunk(piece)

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(3):
            answer = await proxy.post(STREAM)
            assert (answer.status_code, answer.content) == (200, b"".join(WHOLE))
        assert [b"stream_options" in got.body for got in upstream.got] == [True, False, False, False]


@pytest.mark.parametrize("named", [b"", b"event: error\n"])
async def test_options_refused_in_a_stream(named: bytes) -> None:
    """A stream is not held back for what it may say: the client sees the refusal, and the next one has its answer."""

    async def script(wire: Wire) -> None:
        while True:
            got = await wire.request()
            await wire.begin_stream()
            refused = b"stream_options" in got.body
            told = named + b"data: " + (CAMEL if named else NAMES) + b"\n\n"
            for piece in (b": wait\n\n", told) if refused else WHOLE:
                await wire.send_chunk(piece)
            await wire.send_chunk(b"")

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content.count(b"data: ") == 1
        assert (await proxy.post(STREAM)).content == b"".join(WHOLE)
        assert len(upstream.got) == 2


async def test_words_about_options_in_a_stream_that_fails() -> None:
    """A stream whose words are about `stream_options` and that fails for another reason is no refusal of them."""
    whole = chunk("Use stream_options.") + b'data: {"error":{"message":"overloaded"}}\n\n'
    async with scripted(streaming([whole])) as upstream, strata(upstream.url) as proxy:
        for _ in range(2):
            assert (await proxy.post(STREAM)).content == whole
            assert b"stream_options" in upstream.got[-1].body


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 422, 429, 500])
async def test_what_is_not_about_the_options_is_not_sent_again(status: int) -> None:
    """A status that says something else is believed, on the first use of a model too."""
    refusal = b'{"error":{"message":"no"}}'
    async with scripted(always(refusal, status=f"{status} X")) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert (answer.status_code, answer.content) == (status, refusal)
        assert len(upstream.got) == 1


async def test_options_refused_twice() -> None:
    """An upstream that refuses with and without the options is asked twice, never more, and its last words arrive."""
    async with scripted(always(NAMES, status="429 X")) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert (answer.status_code, answer.content) == (429, NAMES)
        assert [b"stream_options" in got.body for got in upstream.got] == [True, False]


async def test_an_answer_about_options_is_an_answer() -> None:
    """JSON where a stream was asked for passes as it came, whatever its words are about."""
    whole = COMPLETION.replace(b"fine", b"Use stream_options.")
    async with scripted(always(whole)) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content == whole
        assert len(upstream.got) == 1


async def test_refusal_that_quotes_the_request_is_relayed_whole() -> None:
    """A refusal of 200 KB passes whole although its beginning was looked into."""
    body = b'{"error":{"param":"messages","message":"' + b"e" * 200_000 + b'"}}'
    async with scripted(always(body, status="400 Bad Request")) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert (answer.status_code, answer.content) == (400, body)
        assert len(upstream.got) == 1


@pytest.mark.parametrize("first", [66_000, 70_000, 99_000])
async def test_refusal_whose_rest_comes_later(first: int) -> None:
    """A refusal that was looked into passes whole also when its end came before the look was passed on."""
    body = b'{"error":{"param":"messages","message":"' + b"e" * 100_000 + b'"}}'
    whole = b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.send(whole[:first])
            await asyncio.sleep(0.01)
            await wire.send(whole[first:])

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        # Weighing a long prompt gives the rest the time to come.
        answer = await proxy.post(
            chat_body(" ".join(f"{n * 2654435761 % 2**32:x}" for n in range(20_000)), stream=True)
        )
        assert (answer.status_code, answer.content) == (400, body)


async def test_usage_missing_is_counted() -> None:
    """An answer without usage is counted as such and is no failure."""
    async with scripted(streaming(WHOLE)) as upstream, strata(upstream.url) as proxy:
        assert content((await proxy.post(STREAM)).content) == "one two"
        assert await proxy.settled(1) == {"ok": 1}
        assert await proxy.total("strata_usage_missing_total") == 1


async def test_client_that_leaves_is_not_an_upstream_error(rig: Rig) -> None:
    """A client that leaves while a refusal is on its way is its own outcome."""
    async with dial(rig.proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(STREAM), "x-sim-fault: delay=5; status=500"))
        await rig.arrived()
    assert await rig.proxy.settled(1) == {"client_closed": 1}


async def test_early_refusal_of_a_large_body() -> None:
    """An upstream that refuses by the head of a large request and closes gives its refusal, not a 502."""

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.answer(b'{"error":{"message":"too big"}}', status="413 Too Large", headers=["connection: close"])
        await asyncio.sleep(0.2)

    async with scripted(script, receive_buffer=65_536) as upstream, strata(upstream.url) as proxy:
        for path in PATHS:
            answer = await proxy.post(chat_body("x" * 8_000_000), path=path)
            assert answer.status_code == 413
            assert "too big" in answer.text


@pytest.mark.parametrize("chunked", [False, True])
async def test_early_refusal_of_an_upload_by_a_reset(chunked: bool) -> None:
    """An upstream that answers an upload and closes with the rest unread, which resets, has given its answer."""

    async def script(wire: Wire) -> None:
        await wire.head()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.005)
        await wire.answer(b'{"error":{"message":"too big"}}', status="413 Too Large", headers=["connection: close"])
        wire.close()

    async def uploads(wire: Wire) -> None:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await (wire.send_chunk if chunked else wire.send)(b"y" * 50_000)

    framing = "transfer-encoding: chunked" if chunked else "content-length: 5000000"
    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(25):
            async with dial(proxy.port) as wire:
                await wire.send(f"POST /v1/files HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n".encode())
                uploading = asyncio.ensure_future(uploads(wire))
                status, _, raw = await wire.response()
                uploading.cancel()
                assert (status, raw) == (413, b'{"error":{"message":"too big"}}')


async def test_stream_with_an_error_status() -> None:
    """An error told as an event stream keeps its status and its one event."""

    async def script(wire: Wire) -> None:
        await wire.request()
        event = b'data: {"error":{"message":"overloaded","type":"server_error","param":null,"code":null}}\n\n'
        await wire.answer(event, status="503 Service Unavailable", kind="text/event-stream")

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert answer.status_code == 503
        assert [error["message"] for error in error_events(answer.content)] == ["overloaded"]
        assert await proxy.settled(1) == {"upstream_error": 1}


async def test_empty_stream() -> None:
    """A stream that ends before its first event ends in the one error event."""
    async with scripted(streaming([])) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert [error["code"] for error in error_events(answer.content)] == ["upstream_stream_interrupted"]


async def test_usage_chunk_alone_finishes_nothing() -> None:
    """A stream cut behind its usage chunk and before any finish has broken off, and its usage is still known."""
    async with scripted(streaming([chunk("a"), usage_chunk(7, 6)])) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert [error["code"] for error in error_events(answer.content)] == ["upstream_stream_interrupted"]
        await proxy.settled(1)
        assert await proxy.total("strata_cached_tokens_total", source="reported") == 6


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """Listen on a port whose connections are never accepted, and whose queue is full: connecting to it hangs."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield address[1]


@pytest.mark.parametrize("path", PATHS)
async def test_connecting_takes_too_long(path: str) -> None:
    """An upstream that does not take the connection is a 504 after the connect timeout."""
    with deaf() as port:
        async with strata(f"http://127.0.0.1:{port}", CONNECT_TIMEOUT_SECONDS="0.3") as proxy:
            answer = await proxy.post(STREAM, path=path)
            assert answer.status_code == 504
            openai_shape(answer, "upstream_timeout")


async def test_an_address_that_is_silent_does_not_hold_up_the_next(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of several addresses, of which some cannot be reached, is reached as its own client would reach it."""
    known = socket.getaddrinfo

    def two(host: str | None, port: int, *rest: int, **more: int) -> list[Any]:
        if host != "two.test":
            return known(host, port, *rest, **more)
        return [*known("127.0.0.1", silent, *rest, **more), *known("127.0.0.1", port, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with deaf() as silent:
        async with strata(f"http://two.test:{rig.upstream.port}/v1", CONNECT_TIMEOUT_SECONDS="60") as proxy:
            assert (await proxy.post(chat_body())).status_code == 200


async def test_client_that_leaves_while_connecting() -> None:
    """A client that leaves while the proxy still connects ends that, within a second, and it is recorded."""
    with deaf() as port:
        async with strata(f"http://127.0.0.1:{port}", CONNECT_TIMEOUT_SECONDS="60") as proxy:
            async with dial(proxy.port) as wire:
                await wire.send(plain_request(orjson.dumps(STREAM)))
                await asyncio.sleep(0.2)
            async with asyncio.timeout(5):
                assert await proxy.settled(1) == {"client_closed": 1}


async def test_chunk_extensions_and_trailers() -> None:
    """Chunk extensions and trailers of the upstream's framing are the hop's own and end there."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.begin_stream("trailer: x-sum")
            whole = b"".join(WHOLE)
            await wire.send(b"%x;name=value\r\n%b\r\n0\r\nx-sum: 1\r\n\r\n" % (len(whole), whole))

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(3):
            answer = await proxy.post(STREAM)
            assert answer.content == b"".join(WHOLE)
            assert "x-sum" not in answer.headers
            assert "trailer" not in answer.headers
        assert upstream.connections == 1


async def test_long_and_many_headers() -> None:
    """An answer with 20 KB of headers is relayed, header by header."""
    told = [f"x-many-{number}: {'v' * 100}" for number in range(200)]
    async with scripted(always(COMPLETION, headers=told)) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(chat_body())
        assert sum(name.startswith("x-many-") for name in answer.headers) == 200
