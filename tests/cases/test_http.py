"""Field failures of kind D: HTTP and event streams."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator

import orjson
import pytest

from tests.cases.conftest import (
    CHAT_ANSWER,
    DONE,
    GUARD_SECONDS,
    KEY,
    STREAM_ANSWER,
    Answer,
    Pairs,
    Seen,
    Start,
    Strata,
    Upstream,
    Wire,
    chat,
    chat_answer,
    delta,
    event,
    until,
    usage_chunk,
    user,
    without_usage_wish,
)

ASK = chat(user("When is high tide?"))
STREAM = {**ASK, "stream": True}
USAGE = usage_chunk({"prompt_tokens": 64, "completion_tokens": 5, "total_tokens": 69})


def answering(body: bytes, kind: str = "application/json", status: int = 200, headers: Pairs = ()) -> Answer:
    """Return a script that gives this answer to every request."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.whole(body, kind, status=status, headers=headers)

    return answer


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"stream": None}], ids=["absent", "false", "null"])
async def test_c36_no_stream_no_options(start: Start, upstream: Upstream, more: dict[str, object]) -> None:
    """Without `stream: true` no stream option is added: the body is the client's own."""
    strata = await start()
    await strata.post({**ASK, **more})
    assert upstream.bodies == [orjson.dumps({**ASK, **more})]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/audio/speech"])
async def test_c36_other_routes_get_no_options(start: Start, upstream: Upstream, path: str) -> None:
    """A stream on another route than chat is asked for as the client asked."""
    strata = await start()
    await strata.post({"model": "m", "input": "x", "stream": True}, path=path)
    assert upstream.bodies == [orjson.dumps({"model": "m", "input": "x", "stream": True})]


@pytest.mark.parametrize(
    ("options", "forwarded"),
    [
        ({"include_obfuscation": False}, {"include_usage": True, "include_obfuscation": False}),
        ({"include_usage": False, "x_vendor": [1]}, {"include_usage": True, "x_vendor": [1]}),
        ({}, {"include_usage": True}),
        (None, {"include_usage": True}),
    ],
)
async def test_c36_other_stream_options_are_kept(
    start: Start, upstream: Upstream, options: object, forwarded: object
) -> None:
    """Asking for usage leaves the client's other stream options and all the rest as they are."""
    strata = await start()
    answer = await strata.post({**STREAM, "stream_options": options})
    assert upstream.seen[0].json == {**STREAM, "stream_options": forwarded}
    assert answer.content == b"".join([*STREAM_ANSWER, DONE])


async def test_c36_an_upstream_that_knows_no_options_is_asked_without(start: Start, upstream: Upstream) -> None:
    """Where the upstream refuses the added option the request is sent once more without, and so from then on."""

    async def strict(seen: Seen, wire: Wire) -> None:
        if "stream_options" in seen.json:
            refusal = {"error": {"message": "Unrecognized request argument supplied: stream_options", "type": "x"}}
            await wire.whole(orjson.dumps(refusal), status=400)
        else:
            await chat_answer(seen, wire)

    upstream.answer = strict
    strata = await start()
    answers = [await strata.post(STREAM) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert all(answer.content == b"".join([*STREAM_ANSWER, DONE]) for answer in answers)
    assert without_usage_wish(upstream.bodies[0]) == orjson.dumps(STREAM)
    assert upstream.bodies[1:] == [orjson.dumps(STREAM)] * 3
    own = await strata.post({**STREAM, "stream_options": {"include_usage": True}})
    assert own.status_code == 400
    assert len(upstream.seen) == 5


async def test_c36_a_clients_own_bad_option_changes_nothing_for_others(start: Start, upstream: Upstream) -> None:
    """A refusal that is about a client's own stream option goes to that client; others are still asked usage for."""

    async def picky(seen: Seen, wire: Wire) -> None:
        if "x_bogus" in (seen.json.get("stream_options") or {}):
            refusal = {"error": {"message": "Unknown parameter: 'stream_options.x_bogus'.", "type": "x"}}
            await wire.whole(orjson.dumps(refusal), status=400)
        else:
            await chat_answer(seen, wire)

    upstream.answer = picky
    strata = await start()
    assert (await strata.post({**STREAM, "stream_options": {"x_bogus": 1}})).status_code == 400
    await strata.post(STREAM)
    assert without_usage_wish(upstream.bodies[-1]) == orjson.dumps(STREAM)
    assert (await strata.metrics()).total("strata_input_tokens_total") == 40


async def test_c36_another_refusal_is_not_repeated(start: Start, upstream: Upstream) -> None:
    """A 400 that is about something else goes to the client after one call."""
    refusal = b'{"error":{"message":"you must provide a model parameter"}}'
    upstream.answer = answering(refusal, status=400)
    strata = await start()
    answer = await strata.post(STREAM)
    assert (answer.status_code, answer.content, len(upstream.seen)) == (400, refusal, 1)


@pytest.mark.parametrize("pieces", [1, 7])
async def test_c39_a_line_of_three_megabytes_passes(start: Start, upstream: Upstream, pieces: int) -> None:
    """An event line of 3 MB passes whole, and the usage behind it is read."""
    huge = delta("x" * 3_000_000)

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.begin_events()
        for start_ in range(0, len(huge), size := len(huge) // pieces + 1):
            await wire.chunk(huge[start_ : start_ + size])
            await asyncio.sleep(0)
        for each in (delta("y"), delta(finish="stop"), USAGE, DONE, b""):
            await wire.chunk(each)

    upstream.answer = answer
    strata = await start()
    got = await strata.post(STREAM)
    assert got.content == b"".join([huge, delta("y"), delta(finish="stop"), DONE])
    measured = await strata.metrics()
    assert measured.total("strata_input_tokens_total") == 64
    assert measured.total("strata_requests_total", outcome="ok") == 1


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("status", "kind", "payload"),
    [
        (429, "application/json", b'{"error":{"message":"slow down","type":"tokens","param":null,"code":"x"}}'),
        (401, "application/json; charset=utf-8", b'{"error":{"message":"who?"}}\n'),
        (500, "text/plain", b""),
        (502, "text/html", b"<html><h1>502 Bad Gateway</h1></html>\r\n"),
        (529, "application/json", b'{"type":"error"}'),
    ],
)
async def test_c41_an_error_is_relayed_as_it_is(
    start: Start, upstream: Upstream, body: object, status: int, kind: str, payload: bytes
) -> None:
    """An error keeps its status, content type and body, also where a stream was asked for."""
    upstream.answer = answering(payload, kind, status)
    strata = await start()
    answer = await strata.post(body)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (status, kind, payload)
    assert (await strata.metrics()).total("strata_requests_total", outcome="upstream_error") == 1


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c41_nobody_there_is_a_502(start: Start, upstream: Upstream, body: object) -> None:
    """A refused connection is a 502 in the OpenAI shape, never an empty event stream."""
    await upstream.__aexit__()
    strata = await start()
    answer = await strata.post(body)
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("upstream_error", "upstream_unreachable")
    assert set(error) == {"message", "type", "param", "code"}


def framing(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return which framing headers an answer carries."""
    return [name.lower() for name, _ in headers if name.lower() in {b"content-length", b"transfer-encoding"}]


async def raw_answer(strata: Strata, body: object) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Post and return status, headers and body as they are on the wire, nothing decoded."""
    async with strata.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        return answer.status_code, answer.headers.raw, b"".join([piece async for piece in answer.aiter_raw()])


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
async def test_c43_an_encoded_json_answer_passes_raw(
    start: Start, upstream: Upstream, status: int, encoding: str
) -> None:
    """An encoded JSON answer, error or not, passes with its bytes, encoding and length; hop-by-hop headers stay."""
    encoders = {"gzip": gzip.compress, "deflate": zlib.compress, "br": lambda plain: b"\x0b\x02\x80" + plain + b"\x03"}
    payload = encoders[encoding](CHAT_ANSWER)
    hop = [("content-encoding", encoding), ("connection", "keep-alive, x-hop"), ("x-hop", "1"), ("keep-alive", "9")]
    upstream.answer = answering(payload, status=status, headers=hop)
    strata = await start()
    got, headers, body = await raw_answer(strata, ASK)
    named = dict(headers)
    assert (got, body) == (status, payload)
    assert (named[b"content-encoding"], framing(headers)) == (encoding.encode(), [b"content-length"])
    assert int(named[b"content-length"]) == len(payload)
    assert not named.keys() & {b"x-hop", b"keep-alive"}
    if status == 200 and encoding != "br":
        assert (await strata.metrics()).total("strata_input_tokens_total") == 40


async def test_c43_a_compressed_stream_is_readable(start: Start, upstream: Upstream) -> None:
    """A stream compressed unasked, with a length, reaches the client decoded and without either header."""
    plain = b"".join([*STREAM_ANSWER, USAGE, DONE])
    upstream.answer = answering(gzip.compress(plain), "text/event-stream", headers=[("content-encoding", "gzip")])
    strata = await start()
    _, headers, body = await raw_answer(strata, STREAM)
    assert body == b"".join([*STREAM_ANSWER, DONE])
    assert b"content-encoding" not in dict(headers)
    assert framing(headers) == [b"transfer-encoding"]
    assert (await strata.metrics()).total("strata_input_tokens_total") == 64


async def test_c43_a_stream_in_an_encoding_unknown_here_passes_raw(start: Start, upstream: Upstream) -> None:
    """A stream in an encoding that cannot be read here passes byte for byte, with its encoding; nothing is added."""
    payload = b"\x0b\x02\x80" + bytes(range(256)) + b"\x03"
    upstream.answer = answering(payload, "text/event-stream", headers=[("content-encoding", "br")])
    strata = await start()
    _, headers, body = await raw_answer(strata, STREAM)
    assert dict(headers)[b"content-encoding"] == b"br"
    assert len(framing(headers)) == 1
    assert body == payload


async def test_c43_a_stream_with_a_length_loses_it(start: Start, upstream: Upstream) -> None:
    """A plain stream that came with its length is framed anew: a chunk may have been taken out of it."""
    plain = b"".join([*STREAM_ANSWER, USAGE, DONE])
    upstream.answer = answering(plain, "text/event-stream")
    strata = await start()
    _, headers, body = await raw_answer(strata, STREAM)
    assert body == b"".join([*STREAM_ANSWER, DONE])
    assert framing(headers) == [b"transfer-encoding"]


async def test_c45_nothing_is_held_back(start: Start, upstream: Upstream) -> None:
    """Headers leave before the first byte and each event before the next is made, uncompressed, marked unbuffered."""
    gate: asyncio.Queue[None] = asyncio.Queue()

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.begin_events()
        for number in range(10):
            await gate.get()
            await wire.chunk(delta(f"word {number}"))
        await gate.get()
        for each in (delta(finish="stop"), DONE, b""):
            await wire.chunk(each)

    upstream.answer = answer
    strata = await start()
    async with (
        asyncio.timeout(GUARD_SECONDS),
        strata.http.stream(
            "POST", "/v1/chat/completions", json=STREAM, headers={"accept-encoding": "gzip, br, zstd"}
        ) as got,
    ):
        assert "content-encoding" not in got.headers
        assert got.headers["cache-control"] == "no-cache"
        assert got.headers["x-accel-buffering"] == "no"
        pieces = got.aiter_raw()
        for number in range(10):
            gate.put_nowait(None)
            assert await anext(pieces) == delta(f"word {number}")
        gate.put_nowait(None)
        assert b"".join([piece async for piece in pieces]) == delta(finish="stop") + DONE
    assert upstream.seen[0].header("accept-encoding") in {None, "identity"}


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c46_a_kept_socket_that_was_closed_is_not_used(start: Start, upstream: Upstream, body: object) -> None:
    """An upstream that closes idle sockets causes no error: the next request takes a new one."""

    async def answer(seen: Seen, wire: Wire) -> None:
        await chat_answer(seen, wire)
        await asyncio.sleep(0.02)
        wire.hang_up()

    upstream.answer = answer
    strata = await start()
    for _ in range(4):
        assert (await strata.post(body)).status_code == 200
        await asyncio.sleep(0.06)
    assert len(upstream.seen) == upstream.connections == 4


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c46_a_kept_socket_closed_at_the_moment_of_use_is_met_by_one_retry(
    start: Start, upstream: Upstream, body: object
) -> None:
    """A reused socket that closes as the request arrives, before any byte of an answer, costs one retry, no error."""
    used: set[int] = set()

    async def answer(seen: Seen, wire: Wire) -> None:
        if seen.connection in used:
            wire.hang_up()
            return
        used.add(seen.connection)
        await chat_answer(seen, wire)

    upstream.answer = answer
    strata = await start()
    answers = [await strata.post(body) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [seen.connection for seen in upstream.seen] == [1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n"], ids=["no-byte", "half-a-head"])
async def test_c46_a_new_socket_that_closes_is_not_tried_again(start: Start, upstream: Upstream, part: bytes) -> None:
    """A new connection that closes without an answer is a 502 after one call: the request may have been served."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.raw(part)
        wire.hang_up()

    upstream.answer = answer
    strata = await start()
    got = await strata.post(ASK)
    assert (got.status_code, got.json()["error"]["type"], len(upstream.seen)) == (502, "upstream_error", 1)


async def test_c46_a_reused_socket_that_breaks_off_in_its_answer_is_not_tried_again(
    start: Start, upstream: Upstream
) -> None:
    """Once a byte of the answer has come nothing is repeated, on a reused socket either."""

    async def answer(seen: Seen, wire: Wire) -> None:
        if len(upstream.seen) == 1:
            await chat_answer(seen, wire)
            return
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: appl")
        await asyncio.sleep(0.05)
        wire.hang_up()

    upstream.answer = answer
    strata = await start()
    assert (await strata.post(ASK)).status_code == 200
    assert (await strata.post(ASK)).status_code == 502
    assert len(upstream.seen) == 2


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c47_a_late_first_byte_is_a_504(start: Start, upstream: Upstream, body: object) -> None:
    """An upstream that accepts and says nothing is a 504 which names the timeout, not a client that left."""

    async def answer(_: Seen, wire: Wire) -> None:
        await asyncio.Event().wait()

    upstream.answer = answer
    strata = await start(first_byte_timeout_seconds=0.3)
    got = await strata.post(body)
    assert (got.status_code, got.json()["error"]["code"]) == (504, "upstream_timeout")
    measured = await strata.metrics()
    assert measured.total("strata_requests_total", outcome="upstream_error") == 1
    assert measured.total("strata_requests_total", outcome="client_closed") == 0


async def test_c47_silence_in_mid_stream_ends_it_with_an_error(start: Start, upstream: Upstream) -> None:
    """A stream that falls silent for longer than the limit between pieces ends in one error event."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.begin_events()
        await wire.chunk(delta("Do"))
        await asyncio.Event().wait()

    upstream.answer = answer
    strata = await start(idle_timeout_seconds=0.3)
    got = await strata.post(STREAM)
    assert got.content.startswith(delta("Do"))
    error = orjson.loads(got.content.removeprefix(delta("Do")).removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_stream_interrupted"
    assert (await strata.metrics()).total("strata_requests_total", outcome="upstream_interrupted") == 1


async def test_c47_a_live_stream_may_last(start: Start, upstream: Upstream) -> None:
    """No limit counts the whole: a stream far longer than every limit goes on while pieces keep coming."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.begin_events()
        for _number in range(10):
            await asyncio.sleep(0.25)
            await wire.chunk(delta("on"))
        for each in (delta(finish="stop"), DONE, b""):
            await wire.chunk(each)

    upstream.answer = answer
    strata = await start(connect_timeout_seconds=1, first_byte_timeout_seconds=1, idle_timeout_seconds=1.5)
    got = await strata.post(STREAM)
    assert got.content == delta("on") * 10 + delta(finish="stop") + DONE


@pytest.mark.parametrize("megabytes", [1.2, 20.0])
async def test_c48_large_bodies_pass_by_default(start: Start, upstream: Upstream, megabytes: float) -> None:
    """Bodies that providers take, up to 32 MB, pass without a setting."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * int(megabytes * 1_000_000)}}
    sent = orjson.dumps(chat({"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}))
    strata = await start()
    answer = await strata.post(sent)
    assert answer.status_code == 200
    assert upstream.bodies[0] == sent


def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """Send a body without its length."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 65_536):
            yield body[at : at + 65_536]

    return pieces()


@pytest.mark.parametrize("form", ["length", "chunked", "gzip"])
async def test_c48_over_the_cap_is_a_413(start: Start, upstream: Upstream, form: str) -> None:
    """A body over the configured cap, announced, chunked or unpacked, is a JSON 413 and never reaches the upstream."""
    body = orjson.dumps(chat(user("tide " * 100_000)))
    strata = await start(max_body_bytes=300_000)
    headers = {"content-type": "application/json", **({"content-encoding": "gzip"} if form == "gzip" else {})}
    contents: dict[str, bytes | AsyncIterator[bytes]] = {
        "length": body,
        "gzip": gzip.compress(body),
        "chunked": in_pieces(body),
    }
    answer = await strata.http.post("/v1/chat/completions", content=contents[form], headers=headers)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "request_too_large"
    assert upstream.seen == []


BOUNDARY = "tide-BOUNDARY-7"
FIELDS = b"".join(
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    for name, value in [
        ("model", "whisper-1"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
    ]
)
SOUND = bytes(range(256)) * 12_000
FORM = b"".join(
    [
        FIELDS,
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'.encode(),
        b"Content-Type: audio/wav\r\n\r\n",
        SOUND,
        f"\r\n--{BOUNDARY}--\r\n".encode(),
    ]
)


async def test_c49_an_upload_passes_unchanged(start: Start, upstream: Upstream) -> None:
    """A multipart upload keeps its repeated fields, their order, its boundary and every byte; no layer touches it."""
    strata = await start(max_body_bytes=10_000)
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    answer = await strata.post(FORM, {"content-type": kind}, path="/v1/audio/transcriptions")
    assert answer.status_code == 200
    assert upstream.bodies == [FORM]
    assert upstream.seen[0].header("content-type") == kind
    assert "x-strata-layers" not in answer.headers


async def test_c49_an_upload_is_not_collected(start: Start, upstream: Upstream) -> None:
    """What the client has sent so far reaches the upstream before the client sends the rest."""
    arrived = 0

    def count(piece: bytes) -> None:
        nonlocal arrived
        arrived += len(piece)

    async def slowly() -> AsyncIterator[bytes]:
        yield FORM[:500_000]
        await until(lambda: arrived >= 400_000)
        yield FORM[500_000:]

    upstream.on_piece = count
    strata = await start()
    answer = await strata.http.post(
        "/v1/audio/transcriptions",
        content=slowly(),
        headers={"content-type": f"multipart/form-data; boundary={BOUNDARY}"},
    )
    assert answer.status_code == 200
    assert upstream.bodies == [FORM]


async def test_c49_sound_comes_back_byte_for_byte_as_it_is_made(start: Start, upstream: Upstream) -> None:
    """A binary answer is relayed byte for byte, each piece before the next is made."""
    gate = asyncio.Event()

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.head([("content-type", "audio/mpeg"), ("transfer-encoding", "chunked")])
        await wire.chunk(SOUND[:100_000])
        await gate.wait()
        await wire.chunk(SOUND[100_000:])
        await wire.chunk(b"")

    upstream.answer = answer
    strata = await start()
    got = b""
    async with (
        asyncio.timeout(GUARD_SECONDS),
        strata.http.stream("POST", "/v1/audio/speech", json={"model": "tts-1", "input": "tide"}) as spoken,
    ):
        assert spoken.headers["content-type"] == "audio/mpeg"
        async for piece in spoken.aiter_raw():
            got += piece
            if len(got) >= 100_000:
                gate.set()
    assert got == SOUND


async def test_c50_an_upgrade_is_refused_at_once(start: Start, upstream: Upstream) -> None:
    """A WebSocket upgrade gets a clean 4xx in the OpenAI shape, so that the client can turn to HTTP."""
    strata = await start()
    host, port = strata.origin.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    request = (
        f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    writer.write(request.encode())
    async with asyncio.timeout(GUARD_SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
    writer.close()
    assert 400 <= int(head.split(" ")[1]) < 500
    assert "content-type: application/json" in head
    assert body["error"]["code"] == "websocket_unsupported"
    assert upstream.seen == []


async def test_c50_a_stream_nobody_asked_for_is_relayed(start: Start, upstream: Upstream) -> None:
    """A plain request answered as an event stream is relayed as one, usage chunk and all, and its usage is read."""
    stream = (*STREAM_ANSWER, USAGE, DONE)

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.events(*stream)

    upstream.answer = answer
    strata = await start()
    got = await strata.post({**ASK, "stream": False})
    assert got.headers["content-type"] == "text/event-stream"
    assert got.content == b"".join(stream)
    measured = await strata.metrics()
    assert measured.total("strata_input_tokens_total") == 64
    assert measured.total("strata_requests_total", outcome="ok") == 1


async def test_c50_json_in_the_place_of_a_stream_is_relayed(start: Start, upstream: Upstream) -> None:
    """A stream request answered as JSON is relayed with its true type, and its usage is read."""
    upstream.answer = answering(CHAT_ANSWER, "application/json; charset=utf-8")
    strata = await start()
    got = await strata.post(STREAM)
    assert got.headers["content-type"] == "application/json; charset=utf-8"
    assert got.content == CHAT_ANSWER
    measured = await strata.metrics()
    assert measured.total("strata_input_tokens_total") == 40
    assert measured.total("strata_requests_total", outcome="ok") == 1


async def test_c50_an_error_in_the_place_of_a_stream_keeps_its_events(start: Start, upstream: Upstream) -> None:
    """An error told inside an event stream is the upstream's own word: relayed once, nothing added."""
    told = event({"error": {"message": "overloaded", "type": "server_error", "code": None, "param": None}})

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.events(delta("Do"), told)

    upstream.answer = answer
    strata = await start()
    got = await strata.post(STREAM)
    assert got.content == delta("Do") + told
    assert (await strata.metrics()).total("strata_requests_total", outcome="upstream_error") == 1
