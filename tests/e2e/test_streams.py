"""Streams: events leave as they come, whatever the upstream's pieces; a stream that breaks off says so once."""

from __future__ import annotations

import asyncio
import gzip
import os
import zlib
from collections.abc import Iterable

import httpx
import openai
import orjson
import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from tests.e2e.kit import (
    COMPLETION,
    DONE,
    HANG,
    MODEL,
    WHOLE,
    Rig,
    Script,
    Wire,
    always,
    chat_body,
    chunk,
    content,
    dial,
    error_events,
    events,
    plain_request,
    rigged,
    scripted,
    strata,
    streaming,
    until,
    usage_chunk,
)

STREAM = chat_body(stream=True)
CODE = "upstream_stream_interrupted"


async def test_first_event_before_the_end() -> None:
    """A client has the first event while the upstream still holds back the others."""
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        await wire.send_chunk(WHOLE[0])
        await go_on.wait()
        for piece in (*WHOLE[1:], b""):
            await wire.send_chunk(piece)

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        proxy.openai() as client,
    ):
        made = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        first = await anext(made)
        assert first.choices[0].delta.content == "one "
        go_on.set()
        assert [item.choices[0].delta.content async for item in made] == ["two", None]


async def test_events_come_one_by_one() -> None:
    """Each event reaches the client before the upstream sends the next one."""
    next_one = asyncio.Semaphore(0)

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        for number in range(20):
            await wire.send_chunk(chunk(f"{number} "))
            await next_one.acquire()
        for piece in (*WHOLE[2:], b""):
            await wire.send_chunk(piece)

    async with (
        asyncio.timeout(HANG),
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(plain_request(orjson.dumps(STREAM)))
        await wire.head()
        for number in range(20):
            assert content(await wire.chunk()) == f"{number} "
            next_one.release()
        rest = b"".join([await wire.chunk() for _ in range(2)])
        assert DONE in rest


async def test_head_before_the_first_event(rig: Rig) -> None:
    """The head of a stream does not wait for its first event."""
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(STREAM), "x-sim-fault: first_token_delay=60"))
        line, headers = await wire.head()
        assert line.startswith("HTTP/1.1 200")
        assert dict(headers)["content-type"].startswith("text/event-stream")
        assert dict(headers)["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    "fault",
    ["gap=60", "first_token_delay=60", "delay=60"],
    ids=("in mid-stream", "before the first event", "before the head"),
)
@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaving_stops_the_upstream(rig: Rig, fault: str, stream: bool) -> None:
    """When the client leaves, at whatever moment, the upstream loses its reader within a second, and it is recorded."""
    async with dial(rig.proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(chat_body(stream=stream)), f"x-sim-fault: {fault}"))
        entry = await rig.arrived()
        if stream and fault != "delay=60":
            await wire.head()
        if stream and fault == "gap=60":
            await wire.chunk()
    async with asyncio.timeout(1):
        assert await rig.outcome(entry) == "client_gone"
    assert await rig.proxy.settled(1) == {"client_closed": 1}
    assert await rig.proxy.total("strata_live_streams") == 0


async def test_sdk_closing_a_stream_stops_the_upstream(rig: Rig) -> None:
    """Closing the SDK's stream early reaches the upstream too."""
    async with rig.proxy.openai(default_headers={"x-sim-fault": "gap=0.02"}) as client:
        made = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        await anext(made)
        await made.close()
        async with asyncio.timeout(1):
            assert await rig.outcome(rig.last) == "client_gone"
    assert await rig.proxy.settled(1) == {"client_closed": 1}


async def test_client_leaving_while_it_uploads(rig: Rig) -> None:
    """A client that leaves before its request is whole is recorded, and nothing goes upstream."""
    async with dial(rig.proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(STREAM))[:-10])
        await asyncio.sleep(0.1)
    assert await rig.proxy.settled(1) == {"client_closed": 1}
    assert not rig.entries


@pytest.mark.parametrize("fault", ["cut=3", "cut=0", "reset_mid=3", "reset_mid=0"])
async def test_broken_off_ends_in_one_error_event(rig: Rig, fault: str) -> None:
    """A stream cut or reset before its finish keeps its events, then ends in exactly one error event."""
    answer = await rig.proxy.post(STREAM, headers={"x-sim-fault": fault})
    raw = answer.content
    assert answer.status_code == 200
    errors = error_events(raw)
    assert [error["code"] for error in errors] == [CODE]
    assert set(errors[0]) == {"message", "type", "param", "code"}
    kept = events(raw)
    assert len(kept) == int(fault[-1]) + 1
    assert b'"finish_reason":"' not in raw
    assert DONE not in raw
    assert await rig.proxy.settled(1) == {"upstream_interrupted": 1}


async def test_sdk_raises_on_a_broken_stream(rig: Rig) -> None:
    """The OpenAI SDK raises APIError when a stream broke off, and it carries the code."""
    async with rig.proxy.openai(default_headers={"x-sim-fault": "cut=3"}) as client:
        made = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(openai.APIError) as raised:
            [item async for item in made]
    assert raised.value.code == CODE


async def test_no_done_is_complete(rig: Rig) -> None:
    """A stream with its finish reason and without `[DONE]` is whole: no error event, no invented `[DONE]`."""
    raw = (await rig.proxy.post(STREAM, headers={"x-sim-fault": "no_done"})).content
    assert not error_events(raw)
    assert b"[DONE]" not in raw
    assert b'"finish_reason":"stop"' in raw
    assert await rig.proxy.settled(1) == {"ok": 1}


async def test_malformed_event_passes(rig: Rig) -> None:
    """An event that is no JSON is the client's to judge: it passes as it came and adds no error."""
    raw = (await rig.proxy.post(STREAM, headers={"x-sim-fault": "malformed"})).content
    assert b'data: {"id":"sim-broken","choices":[{"index":0,"delta":{"content":"tru\n\n' in raw
    assert not error_events(raw)
    assert raw.endswith(DONE)
    assert await rig.proxy.settled(1) == {"ok": 1}


@pytest.mark.parametrize("count", [0, 3])
async def test_upstreams_own_error_event_is_the_only_one(rig: Rig, count: int) -> None:
    """An error the upstream tells in band passes as it came, gets no second one, and counts as the upstream's."""
    raw = (await rig.proxy.post(STREAM, headers={"x-sim-fault": f"in_band_error={count}"})).content
    errors = error_events(raw)
    assert [error["type"] for error in errors] == ["server_error"]
    assert len(events(raw)) == count + 1
    assert await rig.proxy.settled(1) == {"upstream_error": 1}


async def test_reset_after_the_finish_is_whole() -> None:
    """A connection reset behind the finish reason takes nothing from the answer."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        await wire.send_chunk(b"".join(WHOLE))
        await asyncio.sleep(0.1)
        wire.reset()

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        raw = (await proxy.post(STREAM)).content
        assert content(raw) == "one two"
        assert not error_events(raw)
        assert await proxy.settled(1) == {"ok": 1}


@pytest.mark.parametrize("finished", [True, False])
async def test_events_before_bad_framing_arrive(finished: bool) -> None:
    """Events that came whole reach the client although what comes in one packet with them is no chunk."""
    pieces = WHOLE if finished else WHOLE[:2]

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        await wire.send(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"ZZZ\r\n")
        await wire.gone()

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        raw = (await proxy.post(STREAM)).content
        assert content(raw) == "one two"
        assert [error["code"] for error in error_events(raw)] == ([] if finished else [CODE])


async def test_a_reader_that_stands_still_is_let_go() -> None:
    """A client that takes nothing for longer than the idle timeout holds neither the upstream nor the stream."""
    ended = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        try:
            while True:
                await wire.send_chunk(chunk("y" * 4_000))
        except ConnectionError:
            ended.set()

    async with (
        asyncio.timeout(HANG),
        scripted(script, receive_buffer=65_536) as upstream,
        strata(upstream.url, IDLE_TIMEOUT_SECONDS="0.5") as proxy,
    ):
        for path in ("/v1/chat/completions", "/v1/responses"):
            ended.clear()
            async with dial(proxy.port) as wire:
                wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await wire.send(plain_request(orjson.dumps(STREAM), path=path))
                await ended.wait()
        assert await proxy.settled(1) == {"client_closed": 1}


async def test_one_of_two_choices_unfinished() -> None:
    """With `n: 2` and one finish reason the stream has broken off."""
    async with scripted(streaming([chunk("a"), chunk(finish="stop")])) as upstream, strata(upstream.url) as proxy:
        raw = (await proxy.post({**STREAM, "n": 2})).content
        assert [error["code"] for error in error_events(raw)] == [CODE]


async def test_the_words_finish_and_done_in_content_finish_nothing() -> None:
    """An answer that talks about `finish_reason` and `[DONE]` has not finished by it."""
    pieces = [chunk('"finish_reason":"stop"'), chunk("\n\ndata: [DONE]\n\n")]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        raw = (await proxy.post(STREAM)).content
        assert [error["code"] for error in error_events(raw)] == [CODE]


async def test_the_word_usage_in_content_stays() -> None:
    """An answer that talks about `"usage": {` loses none of its events."""
    said = '{"usage": {"prompt_tokens": 1}, "choices": []}'
    pieces = [chunk(said), chunk(finish="stop"), usage_chunk(7), DONE]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        assert content((await proxy.post(STREAM)).content) == said


async def test_usage_beside_the_finish_reason_stays() -> None:
    """Usage in a chunk that also has choices passes, and is read."""
    counted = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
    pieces = [chunk("a"), chunk(finish="stop", usage=counted), DONE]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content == b"".join(pieces)
        await proxy.settled(1)
        assert await proxy.total("strata_cached_tokens_total", source="reported") == 5


async def test_an_event_of_three_megabytes() -> None:
    """An event line of 3 MB passes byte for byte."""
    pieces = [chunk("x" * 3_000_000), chunk(finish="stop"), DONE]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content == b"".join(pieces)
        assert await proxy.settled(1) == {"ok": 1}


async def test_a_torn_large_event_is_closed_before_the_error() -> None:
    """When a large event, passed on as it grew, breaks off, the error event stands on lines of its own."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        await wire.send_chunk(chunk("x" * 300_000)[:-200])
        await asyncio.sleep(0.1)
        wire.reset()

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        raw = (await proxy.post(STREAM)).content
        assert [error["code"] for error in error_events(raw)] == [CODE]


def crlf(pieces: Iterable[bytes]) -> list[bytes]:
    return [piece.replace(b"\n", b"\r\n") for piece in pieces]


COMMENTED = (b": keep-alive\n\n", b"event: x\nid: 1\nretry: 5\ndata: {}\n\n", *WHOLE[:-1], usage_chunk(7, 3), DONE)
KEPT = b"".join((*COMMENTED[:-2], DONE))


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"], ids=("lf", "crlf", "cr"))
async def test_split_at_every_byte(ends: str) -> None:
    """A stream cut at every byte by the upstream's socket comes out whole, comments and all, less the usage chunk."""
    whole = b"".join(COMMENTED).replace(b"\n", ends.encode())
    one_by_one = [whole[at : at + 1] for at in range(len(whole))]
    async with scripted(streaming(one_by_one)) as upstream, strata(upstream.url) as proxy:
        raw = (await proxy.post(STREAM)).content
        assert raw == KEPT.replace(b"\n", ends.encode())
        assert await proxy.settled(1) == {"ok": 1}
        assert await proxy.total("strata_cached_tokens_total", source="reported") == 3


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=("lf", "crlf"))
async def test_split_in_two_at_every_place(ends: str) -> None:
    """Wherever the network cuts the last events in two, the usage chunk goes and nothing else does."""
    head = b"".join(COMMENTED[:-3]).replace(b"\n", ends.encode())
    tail = b"".join(COMMENTED[-3:]).replace(b"\n", ends.encode())
    places = iter(range(len(tail)))

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            at = next(places)
            await wire.begin_stream()
            for piece in (head, tail[:at], tail[at:]):
                if piece:
                    await wire.send_chunk(piece)
                    await asyncio.sleep(0)
            await wire.send_chunk(b"")

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for at in range(len(tail)):
            raw = (await proxy.post(STREAM)).content
            assert raw == KEPT.replace(b"\n", ends.encode()), at


async def test_crlf_between_the_cr_and_the_lf() -> None:
    """CRLF events cut between the CR and the LF of their blank line make neither an event more nor an error."""
    whole = b"".join(crlf(WHOLE))
    pieces = whole.replace(b"\r\n\r\n", b"\r\n\r|\n").split(b"|")
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content == whole


@pytest.mark.parametrize("without_end", [DONE[:-1], DONE[:-2], DONE.rstrip() + b"\r\n"])
async def test_done_without_its_blank_line(without_end: bytes) -> None:
    """An upstream that closes right behind `[DONE]` has finished."""
    pieces = [*WHOLE[:2], without_end]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content == b"".join(pieces)
        assert await proxy.settled(1) == {"ok": 1}


def until_close(pieces: Iterable[bytes]) -> Script:
    fixed = list(pieces)

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for piece in fixed:
            await wire.send(piece)

    return script


async def test_an_upstream_of_http_1_0() -> None:
    """A stream framed by the closing of its connection is passed on whole."""
    async with scripted(until_close(WHOLE)) as upstream, strata(upstream.url) as proxy:
        assert (await proxy.post(STREAM)).content == b"".join(WHOLE)
        assert (await proxy.post(STREAM)).content == b"".join(WHOLE)
        assert await proxy.settled(2) == {"ok": 2}


def _squeeze(kind: str, pieces: Iterable[bytes]) -> list[bytes]:
    maker = zlib.compressobj(wbits=31 if kind == "gzip" else 15)
    sent = [maker.compress(piece) + maker.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]
    return [*sent, maker.flush()]


async def test_a_gzip_stream_in_several_members() -> None:
    """As some servers flush: all of it arrives."""
    whole = b"".join([*[chunk(word) for word in ("one ", "two ", "three")], chunk(finish="stop"), DONE])
    members = [gzip.compress(whole[at : at + 100]) for at in range(0, len(whole), 100)]
    async with (
        scripted(streaming([b"".join(members[:2]), *members[2:]], "content-encoding: gzip")) as upstream,
        strata(upstream.url) as proxy,
    ):
        answer = await proxy.post(STREAM)
        assert answer.content == whole


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
async def test_compressed_stream(kind: str) -> None:
    """An upstream that compresses its events all the same is read, and the client gets plain events one by one."""
    squeezed = _squeeze(kind, (*WHOLE[:3], usage_chunk(7, 4), DONE))
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        got = await wire.request()
        assert got.header("accept-encoding") == "identity"
        await wire.begin_stream(f"content-encoding: {kind}")
        await wire.send_chunk(squeezed[0])
        await go_on.wait()
        for piece in (*squeezed[1:], b""):
            await wire.send_chunk(piece)

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        async with proxy.http.stream(
            "POST", "/v1/chat/completions", json=STREAM, headers={"accept-encoding": "gzip"}
        ) as answer:
            assert "content-encoding" not in answer.headers
            pieces = answer.aiter_raw()
            assert await anext(pieces) == WHOLE[0]
            go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"".join(WHOLE[1:])
        await proxy.settled(1)
        assert await proxy.total("strata_cached_tokens_total", source="reported") == 4


async def test_a_compressed_stream_that_is_none() -> None:
    """A stream that says gzip and is not ends in one error event, not in silence."""
    async with (
        scripted(streaming([b"not gzip at all" * 9], "content-encoding: gzip")) as upstream,
        strata(upstream.url) as proxy,
    ):
        raw = (await proxy.post(STREAM)).content
        assert [error["code"] for error in error_events(raw)] == [CODE]
        assert await proxy.settled(1) == {"upstream_interrupted": 1}


async def test_compressed_json() -> None:
    """Compressed JSON passes with its own encoding, byte for byte, and its usage is read."""
    squeezed = gzip.compress(COMPLETION)
    async with (
        scripted(always(squeezed, headers=["content-encoding: gzip"])) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(plain_request(orjson.dumps(chat_body()), "accept-encoding: gzip"))
        status, headers, raw = await wire.response()
        assert (status, raw) == (200, squeezed)
        assert ("content-encoding", "gzip") in headers
        await proxy.settled(1)
        assert await proxy.total("strata_input_tokens_total") == 7


async def test_json_where_a_stream_was_asked_for() -> None:
    """An upstream that answers a stream request with JSON is passed on as it is."""
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert answer.content == COMPLETION
        assert answer.headers["content-type"] == "application/json"
        assert await proxy.settled(1) == {"ok": 1}


async def test_a_stream_where_json_was_asked_for() -> None:
    """An upstream that streams unasked is passed on event by event, usage and all."""
    pieces = [*WHOLE[:3], usage_chunk(7, 2), DONE]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(chat_body())
        assert answer.content == b"".join(pieces)
        assert answer.headers["content-type"] == "text/event-stream"
        assert await proxy.settled(1) == {"ok": 1}


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/octet-stream", ""])
async def test_a_stream_under_another_name(kind: str) -> None:
    """It comes event by event, read for its usage, which who did not ask for does not see."""
    pieces = [*WHOLE[:3], usage_chunk(7, 2), DONE]
    async with scripted(streaming(pieces, kind=kind)) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert answer.content == b"".join([*WHOLE[:3], DONE])
        assert answer.headers["content-type"] == kind
        await proxy.settled(1)
        assert await proxy.total("strata_input_tokens_total") == 7


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (b'{"error":{"message":"overloaded"}}', False),
        (b'data: {"id":"x","error":{"message":"m"},"choices":[]}\n\n' + DONE, True),
    ],
)
async def test_an_answer_that_is_an_error_is_recorded_as_one(answer: bytes, stream: bool) -> None:
    """Whatever its status; and nobody expects the prompt cache to hold what it was asked."""
    script = streaming([answer]) if stream else always(answer)
    body = {**(STREAM if stream else chat_body()), "messages": [{"role": "system", "content": "word " * 3_000}]}
    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(2):
            passed = await proxy.post(body)
            assert passed.content == answer
            assert "x-strata-predicted-cached-tokens" not in passed.headers
        assert await proxy.settled(2) == {"upstream_error": 2}


async def test_slow_reader_pauses_the_upstream() -> None:
    """A client that stops reading stops the upstream, and the proxy does not hold the answer for it."""
    sent = 0
    event = chunk("y" * 4_000)
    most = 200_000_000

    async def script(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        await wire.begin_stream()
        while sent < most:
            await wire.send_chunk(event)
            sent += len(event)

    async def stands_still() -> bool:
        before = sent
        await asyncio.sleep(0.5)
        return bool(before) and sent == before

    process = psutil.Process(os.getpid())
    async with (
        asyncio.timeout(4 * HANG),
        scripted(script, receive_buffer=65_536) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        before = process.memory_info().rss
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wire.send(plain_request(orjson.dumps(STREAM)))
        await until(stands_still)
        assert sent < 40_000_000
        assert process.memory_info().rss - before < 60_000_000
        assert (await proxy.http.get("/livez")).status_code == 200
        wire.writer.transport.abort()
        assert await proxy.settled(1) == {"client_closed": 1}


async def test_a_slow_reader_loses_nothing() -> None:
    """A client that reads late gets every byte."""
    pieces = [*(chunk(f"{number} " * 200) for number in range(4_000)), *WHOLE[2:]]
    async with asyncio.timeout(2 * HANG), scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await wire.send(plain_request(orjson.dumps(STREAM)))
            await asyncio.sleep(0.3)
            wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
            _, _, raw = await wire.response()
        assert raw == b"".join(pieces)


async def test_keep_alive_after_a_stream(rig: Rig) -> None:
    """One connection of a client carries stream after stream, and plain requests between them."""
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        for stream in (True, False, True, True, False):
            await wire.send(plain_request(orjson.dumps(chat_body(stream=stream))))
            status, _, raw = await wire.response()
            assert status == 200
            assert stream == raw.endswith(DONE)


async def test_the_upstreams_connection_is_used_again() -> None:
    """Requests one after the other share one upstream connection; streams at once have one each."""

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            await wire.begin_stream()
            for piece in WHOLE:
                await wire.send_chunk(piece)
                await asyncio.sleep(0.01)
            await wire.send_chunk(b"")

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for _ in range(5):
            await proxy.post(STREAM)
        assert upstream.connections == 1
        answers: list[httpx.Response] = await asyncio.gather(*(proxy.post(STREAM) for _ in range(8)))
        assert all(answer.content == b"".join(WHOLE) for answer in answers)
        assert upstream.connections == 8


async def test_stopped_upstream_is_told_once_per_stream() -> None:
    """Ten streams of one upstream that dies end in one error event each, and ten records."""
    alive: list[Wire] = []

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        await wire.send_chunk(WHOLE[0])
        alive.append(wire)
        await wire.gone()

    async with asyncio.timeout(HANG), scripted(script) as upstream, strata(upstream.url) as proxy:
        asked = [asyncio.ensure_future(proxy.post(STREAM)) for _ in range(10)]
        await until(lambda: len(alive) == 10)
        for wire in alive:
            wire.reset()
        answers = await asyncio.gather(*asked)
        assert [[error["code"] for error in error_events(answer.content)] for answer in answers] == [[CODE]] * 10
        assert await proxy.settled(10) == {"upstream_interrupted": 10}


async def test_plain_answer_cut_in_the_middle() -> None:
    """A plain answer that breaks off ends the client's connection short: the SDK sees an error, not half an answer."""
    async with rigged() as rig:
        with pytest.raises(httpx.RemoteProtocolError):
            await rig.proxy.post(chat_body(), headers={"x-sim-fault": "reset_mid=1"})
        assert await rig.proxy.settled(1) == {"upstream_interrupted": 1}
        async with rig.proxy.openai(default_headers={"x-sim-fault": "reset_mid=1"}) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
