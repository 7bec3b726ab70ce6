"""Request bodies: what is odd goes on untouched and says so, what is wrong is named, what is ours stays here."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import zstandard

from tests.e2e.kit import (
    COMPLETION,
    HANG,
    MODEL,
    USAGE_ASKED,
    Rig,
    always,
    chat_body,
    dial,
    note,
    plain_request,
    rigged,
    scripted,
    strata,
)
from tests.e2e.test_errors import openai_shape

SMALL = {"MAX_BODY_BYTES": "100000"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"not json", b'{"model":"m","messages":[}', b"\xff\xfe", b'{"a":1} trailing', b"{'a': 1}",
        b'{"messages":[{"role":"user","content":"\xff"}]}', b'{"model":"m",}', b'{"a":"\n"}',
    ],
)  # fmt: skip
async def test_invalid_json(rig: Rig, body: bytes) -> None:
    """A body that no JSON parser takes is a 400 in the OpenAI shape, and nothing goes upstream."""
    answer = await rig.proxy.post(body)
    assert answer.status_code == 400
    openai_shape(answer, "invalid_json")
    assert not rig.entries
    assert await rig.proxy.settled(1) == {"refused": 1}


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"messages":['])
async def test_endless_nesting(rig: Rig, opening: bytes) -> None:
    """A body nested without end is refused, by the proxy or by the upstream, and the proxy goes on."""
    assert (await rig.proxy.post(opening * 200_000)).status_code == 400
    assert (await rig.proxy.post(chat_body())).status_code == 200


ODD = {
    "lone surrogate": (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', "odd_json"),
    "duplicate key": (b'{"model":"m","model":"n","messages":[{"role":"user","content":"a"}]}', "duplicate_key"),
    "duplicate key in a message": (b'{"model":"m","messages":[{"role":"user","role":"user","content":"a"}]}', ""),
    "byte order mark": (b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"a"}]}', "odd_json"),
    "NaN": (b'{"model":"m","temperature":NaN,"messages":[{"role":"user","content":"a"}]}', "odd_json"),
    "an array": (b'[{"role":"user","content":"a"}]', "odd_json"),
    "a string": (b'"hello"', "odd_json"),
    "no messages": (b'{"model":"m","prompt":"a"}', "no_messages"),
    "messages that are none": (b'{"model":"m","messages":"a"}', "no_messages"),
    "a message that is none": (b'{"model":"m","messages":["a",7,null]}', "odd_message"),
    "a message without a role": (b'{"model":"m","messages":[{"content":"a"}]}', ""),
    "content of another kind": (b'{"model":"m","messages":[{"role":"user","content":{"a":1}}]}', ""),
    "a role of another kind": (b'{"model":"m","messages":[{"role":1,"content":"a"}]}', ""),
    "no message at all": (b'{"model":"m","messages":[]}', ""),
    "types nobody expects": (b'{"model":1,"stream":"yes","n":"2","messages":[{"role":"user","content":"a"}]}', ""),
    "deep": (b'{"model":"m","x":' + b"[" * 5_000 + b"]" * 5_000 + b',"messages":[]}', ""),
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_bodies_go_on_untouched(name: str) -> None:
    """Valid JSON that is not understood goes upstream byte for byte; a bypass is said and counted."""
    body, cause = ODD[name]
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(body)
        assert (answer.status_code, answer.content) == (200, COMPLETION)
        assert upstream.got[-1].body == body
        if cause:
            assert answer.headers["x-strata-warning"] == f"bypass: {cause}"
            assert await proxy.settled(1) == {"bypass": 1}
            assert await proxy.total("strata_bypass_total", cause=cause) == 1
        else:
            assert sum((await proxy.settled(1)).values()) == 1


ODD_SPELLING = (
    b' {\r\n\t"model" : "gpt-5.1" ,"messages":[ {"role":"user","content":"\\u00fc\\/\\n\xc3\xbc", "x" : 1.0e+2} ] ,'
    b'"temperature":1.00,"seed":9007199254740993,"top_p":1E0,"z":-0,"unknown":{"b":1,"a":[ ]} } \n'
)


async def test_spelling_is_kept(rig: Rig) -> None:
    """Numbers, escapes, blanks, key order and unknown fields arrive as the client spelled them."""
    await rig.proxy.post(ODD_SPELLING)
    assert rig.last.body == ODD_SPELLING


async def test_spelling_is_kept_where_usage_is_asked_for() -> None:
    """Asking for usage adds one member to the body and touches nothing else of it."""
    body = ODD_SPELLING.replace(b'"top_p":1E0', b'"stream" : true')
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        await proxy.post(body)
        sent = upstream.got[-1].body
    assert sent.replace(b',"stream_options":{"include_usage":true}', b"", 1) == body


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b'{"include_usage":false}', b'{"include_usage":true}'),
        (b'{ "include_obfuscation" : false }', b'{"include_usage":true, "include_obfuscation" : false }'),
        (b"{}", b'{"include_usage":true}'),
        (b"null", b'{"include_usage":true}'),
        (b'{"include_usage": true}', b'{"include_usage": true}'),
    ],
)
async def test_options_of_the_clients_own(given: bytes, sent: bytes) -> None:
    """A client's own `stream_options` are kept and only completed."""
    body = b'{"model":"m","stream":true,"stream_options":%b,"messages":[{"role":"user","content":"a"}]}'
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        await proxy.post(body % given)
        assert orjson.loads(upstream.got[-1].body) == orjson.loads(body % sent)


OWN: dict[str, Any] = {
    "first": b'{"strata":{"conversation":"c1"},"model":"m","messages":[{"role":"user","content":"a"}]}',
    "last": b'{"model":"m","messages":[{"role":"user","content":"a"}],"strata":{}}',
    "middle": b'{"model":"m", "strata" : {"conversation":"c1"} , "messages":[{"role":"user","content":"a"}]}',
    "escaped key": b'{"model":"m","messages":[{"role":"user","content":"a"}],"str\\u0061ta":{"conversation":"c1"}}',
    "beside a lone surrogate": b'{"model":"m","strata":{"x":1},"messages":[{"role":"user","content":"\\ud800"}]}',
    "beside a duplicate key": b'{"model":"m","model":"n","strata":{},"messages":[{"role":"user","content":"a"}]}',
    "twice": b'{"strata":{},"model":"m","messages":[{"role":"user","content":"a"}],"strata":{}}',
    "escaped, beside a duplicate key": b'{"a":1,"a":1,"\\u0073trata":{"conversation":"c1"},"messages":[]}',
    "behind a byte order mark": b'\xef\xbb\xbf{"strata":{},"model":"m","messages":[{"role":"user","content":"a"}]}',
    "without messages": b'{"model":"m","strata":{"conversation":"c1"},"prompt":"a"}',
}


@pytest.mark.parametrize("mode", ["layered", "observe"])
@pytest.mark.parametrize("name", OWN)
async def test_own_member_and_headers_stay_here(name: str, mode: str) -> None:
    """Neither the `strata` member nor any `x-strata-*` header goes upstream, in any mode and beside any oddity."""
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url, MODE=mode) as proxy:
        headers = {"x-strata-conversation": "c1", "X-Strata-Anything": "x"}
        answer = await proxy.post(OWN[name], headers=headers)
        assert answer.status_code == 200, answer.text
        got = upstream.got[-1]
        assert b"strata" not in got.body
        assert b"trata" not in got.body
        assert not [each for each, _ in got.headers if each.lower().startswith("x-strata")]
        assert got.body.lstrip(b"\xef\xbb\xbf").startswith(b"{")
        assert got.body.endswith(b"}")
        assert b",," not in got.body
        assert b"{," not in got.body
        assert b",}" not in got.body


async def test_own_headers_stay_here_on_other_routes(rig: Rig) -> None:
    """`x-strata-*` headers do not pass through on any route."""
    await rig.proxy.post({"model": "e", "input": "a"}, path="/v1/embeddings", headers={"x-strata-conversation": "c"})
    assert "x-strata-conversation" not in rig.last.headers


async def test_the_word_strata_elsewhere_stays(rig: Rig) -> None:
    """Only the member `strata` at the top is ours: the word in messages, metadata and tools passes."""
    body = (
        b'{"model":"m","metadata":{"strata":"a"},"messages":[{"role":"user","content":"\\"strata\\":{}","strata":1}]}'
    )
    await rig.proxy.post(body)
    assert rig.last.body == body


@pytest.mark.parametrize(
    ("own", "param", "value"),
    [
        ({"conversation": 7}, "strata.conversation", "7"),
        ({"conversation": "c" * 513}, "strata.conversation", "513"),
        ({"conversation": ""}, "strata.conversation", "0"),
        ({"context": "a.md"}, "strata.context", "a.md"),
        ({"context": [{"id": "a.md"}]}, "strata.context[0]", "content"),
        ({"context": [{"content": "x"}, {"content": 7}]}, "strata.context[1].content", "7"),
        ({"context": [{"content": "x", "type": "no tag!"}]}, "strata.context[0].type", "no tag!"),
        ({"context": [{"content": "x", "trust": "perhaps"}]}, "strata.context[0].trust", "perhaps"),
        ({"contxt": []}, "strata", "contxt"),
        ("c1", "strata", "c1"),
        (None, "strata", "null"),
    ],
)
@pytest.mark.parametrize("mode", ["layered", "observe"])
async def test_bad_own_member(own: object, param: str, value: str, mode: str) -> None:
    """A `strata` member that does not say what it must is a 400 that names the field and the value."""
    async with rigged(MODE=mode) as rig:
        answer = await rig.proxy.post(chat_body(strata=own))
        assert answer.status_code == 400
        error = openai_shape(answer, "invalid_value")
        assert error["param"] == param
        assert param in error["message"]
        assert value in error["message"]
        assert not rig.entries
        assert await rig.proxy.settled(1) == {"refused": 1}


async def test_own_context_is_layered(rig: Rig) -> None:
    """Context given in `strata.context` stands before the user's words, once, and the SDK's `extra_body` carries it."""
    async with rig.proxy.openai() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Why?"}],
            extra_body={"strata": {"context": [{"id": "a.md", "type": "note", "content": "The text. " * 60}]}},
        )
    sent = orjson.loads(rig.last.body)
    assert set(sent) == {"messages", "model"}
    said = sent["messages"][-1]["content"]
    assert said.startswith('<document id="a.md" type="note">\nThe text. ')
    assert said.endswith("\n</document>\n\nWhy?")


def _zstd_stream(data: bytes) -> bytes:
    maker = zstandard.ZstdCompressor().compressobj()
    return maker.compress(data) + maker.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "deflate ": lambda data: zlib.compress(data)[2:-4],
    "zstd": zstandard.ZstdCompressor().compress,
    "zstd ": _zstd_stream,
    "identity": bytes,
}


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_compressed_requests(rig: Rig, encoding: str) -> None:
    """A compressed request is layered like any other and goes upstream plain."""
    raw = orjson.dumps(chat_body("compress me " * 500, stream=True))
    answer = await rig.proxy.post(ENCODERS[encoding](raw), headers={"content-encoding": encoding.strip()})
    assert answer.status_code == 200
    assert rig.last.body == raw[:-1] + USAGE_ASKED
    assert "content-encoding" not in rig.last.headers
    assert rig.last.headers["content-length"] == str(len(rig.last.body))


async def test_compressed_requests_pass_through_as_they_are(rig: Rig) -> None:
    """On other routes a compressed body passes as it is."""
    squeezed = gzip.compress(b'{"model":"e","input":"a"}')
    await rig.proxy.post(squeezed, path="/v1/embeddings", headers={"content-encoding": "gzip"})
    assert rig.last.body == squeezed
    assert rig.last.headers["content-encoding"] == "gzip"


async def test_gzip_of_several_members(rig: Rig) -> None:
    """A gzip body of two members, as `cat a.gz b.gz` makes it, is read whole."""
    raw = orjson.dumps(chat_body("two members"))
    answer = await rig.proxy.post(
        gzip.compress(raw[:20]) + gzip.compress(raw[20:]), headers={"content-encoding": "gzip"}
    )
    assert answer.status_code == 200
    assert rig.last.body == raw


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_broken_compression(rig: Rig, encoding: str) -> None:
    """A body that is not what its encoding says, or is cut short, is a 400 that names the encoding."""
    squeezed = ENCODERS[encoding](orjson.dumps(chat_body("compress me " * 500)))
    for body in (squeezed[: len(squeezed) // 2], b"no such thing", orjson.dumps(chat_body())):
        answer = await rig.proxy.post(body, headers={"content-encoding": encoding})
        assert answer.status_code == 400, body
        assert encoding in openai_shape(answer, "invalid_value")["message"]
    assert not rig.entries


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_decompression_bomb(encoding: str) -> None:
    """A small body that would become huge is a 413, and is never held."""
    bomb = ENCODERS[encoding](b" " * 300_000_000)
    async with rigged() as rig:
        answer = await rig.proxy.post(bomb, headers={"content-encoding": encoding})
        assert answer.status_code == 413
        openai_shape(answer, "request_too_large")
        assert not rig.entries


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "snappy"])
async def test_unknown_encoding(rig: Rig, encoding: str) -> None:
    """An encoding that is not decoded is a 415 that names it."""
    answer = await rig.proxy.post(chat_body(), headers={"content-encoding": encoding})
    assert answer.status_code == 415
    assert encoding in openai_shape(answer, "unsupported_content_encoding")["message"]
    assert not rig.entries


async def test_over_the_limit() -> None:
    """A body over the limit is a 413, by its stated length or once it has come; one below it is not."""
    async with rigged(**SMALL) as rig:
        answer = await rig.proxy.post(chat_body("x" * 100_000))
        assert answer.status_code == 413
        assert "STRATA_MAX_BODY_BYTES" in openai_shape(answer, "request_too_large")["message"]
        assert not rig.entries
        assert (await rig.proxy.post(chat_body("x" * 90_000))).status_code == 200
        assert await rig.proxy.settled(2) == {"refused": 1, "ok": 1}


async def test_stated_length_is_refused_before_the_body_comes() -> None:
    """A body that says it is too large is refused before it is sent."""
    async with rigged(**SMALL) as rig, asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n")
        line, _ = await wire.head()
        assert line.startswith("HTTP/1.1 413")


async def test_chunked_over_the_limit() -> None:
    """A chunked body that grows over the limit is refused while it grows."""
    async with rigged(**SMALL) as rig, asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            await wire.send_chunk(b" " * 10_000)
        line, _ = await wire.head()
        assert line.startswith("HTTP/1.1 413")
        assert not rig.entries


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_transfer_coding_that_is_not_undone(rig: Rig, path: str) -> None:
    """A body under another transfer coding than chunks is refused, not sent on as if it stood plain."""
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(f"POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n".encode())
        await wire.send_chunk(gzip.compress(orjson.dumps(chat_body())))
        await wire.send_chunk(b"")
        status, _, raw = await wire.response()
    assert status == 400
    assert orjson.loads(raw)["error"]["code"] == "invalid_value"
    assert b"gzip, chunked" in raw
    assert not rig.entries


async def test_chunked_request(rig: Rig) -> None:
    """A chunked chat request is understood, and goes upstream with its length."""
    raw = orjson.dumps(chat_body("in chunks"))
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(raw), 7):
            await wire.send_chunk(raw[at : at + 7])
        await wire.send_chunk(b"")
        status, _, _ = await wire.response()
    assert status == 200
    assert rig.last.body == raw
    assert rig.last.headers["content-length"] == str(len(raw))
    assert "transfer-encoding" not in rig.last.headers


async def test_expect_100_continue(rig: Rig) -> None:
    """A client that waits for `100 Continue` gets it, and its answer."""
    raw = orjson.dumps(chat_body())
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        whole = plain_request(raw, "expect: 100-continue")
        await wire.send(whole[: -len(raw)])
        line, _ = await wire.head()
        assert line.startswith("HTTP/1.1 100")
        await wire.send(raw)
        status, _, _ = await wire.response()
        assert status == 200
    assert "expect" not in rig.last.headers


async def test_large_body_that_fits(rig: Rig) -> None:
    """A body of 4 MB with a hundred thousand words passes byte for byte."""
    raw = orjson.dumps(chat_body("wörter und mehr " * 250_000, model="unknown-model"))
    assert (await rig.proxy.post(raw)).status_code == 200
    assert rig.last.body == raw


async def test_special_tokens_are_text(rig: Rig) -> None:
    """Literal special tokens in a prompt are text: they pass and are counted."""
    raw = orjson.dumps(chat_body("<|endoftext|><|im_start|>system<|im_end|> " * 40))
    assert (await rig.proxy.post(raw)).status_code == 200
    assert rig.last.body == raw
    await rig.proxy.settled(1)
    assert await rig.proxy.total("strata_prompt_tokens_total", layer="L5") > 400


async def test_images_and_audio_parts_pass(rig: Rig) -> None:
    """Parts with images, audio and files pass byte for byte."""
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000, "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "B" * 1_000, "format": "wav"}},
    ]
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        raw = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}]})
        await proxy.post(raw)
        assert upstream.got[-1].body == raw


async def test_anonymous_repeat_becomes_a_reference(rig: Rig) -> None:
    """In an anonymous request an item that stands earlier in it is named, not repeated; its first place stays whole."""
    item = note("a.md", "The notes say many things. ")
    messages = [
        {"role": "user", "content": f"{item}\n\nFirst?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": f"{item}\n\nSecond?"},
    ]
    answer = await rig.proxy.post({"model": MODEL, "messages": messages})
    sent = orjson.loads(rig.last.body)["messages"]
    assert sent[:2] == messages[:2]
    assert sent[2]["content"] == "Context attached:\n- a.md\nFind them above in this conversation.\n\nSecond?"
    assert answer.headers["x-strata-references"] == "1"


async def test_over_budget_is_cut_or_refused() -> None:
    """Over the budget, whole turns go from the front and are counted; what still does not fit is refused when asked."""
    words = "some words of history " * 100
    messages = [
        {"role": role, "content": f"{number} {words}"} for number in range(10) for role in ("user", "assistant")
    ]
    body = {"model": MODEL, "messages": [*messages, {"role": "user", "content": "and now?"}], "max_tokens": 10}
    async with rigged(BUDGET_TOKENS="6000", OUTPUT_RESERVE_TOKENS="100", OVER_BUDGET="reject") as rig:
        answer = await rig.proxy.post(body)
        assert answer.status_code == 200
        dropped = int(answer.headers["x-strata-dropped-turns"])
        assert dropped > 0
        first, *others = orjson.loads(rig.last.body)["messages"]
        whole = [*messages, {"role": "user", "content": "and now?"}][2 * dropped :]
        told = f"[{2 * dropped} earlier messages of this conversation left out here.]\n\n"
        assert [first["content"], *others] == [told + whole[0]["content"], *whole[1:]]
        assert answer.headers["x-strata-dropped"].startswith(f"messages={2 * dropped}; tokens=")
        assert answer.headers["x-strata-budget"].endswith("; limit=5900")
        answer = await rig.proxy.post(chat_body(words * 40))
        assert answer.status_code == 400
        openai_shape(answer, "context_length_exceeded")
        assert len(rig.entries) == 1
        assert await rig.proxy.settled(2) == {"ok": 1, "refused": 1}


async def test_a_conversation_of_images_has_one_epoch(rig: Rig) -> None:
    """Messages with media are not frozen; the epoch they stand in is remembered all the same."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    first = {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
    said: list[object] = [{"role": "system", "content": "Look closely."}, first]
    epochs = []
    for turn in range(3):
        answer = await rig.proxy.post({"model": MODEL, "messages": said}, headers={"x-strata-conversation": "images"})
        epochs.append(answer.headers["x-strata-epoch"])
        said += [
            answer.json()["choices"][0]["message"],
            {**first, "content": [image, {"type": "text", "text": str(turn)}]},
        ]
        await rig.proxy.settled(turn + 1)
    assert epochs == ["0; began=first", "0", "0"]
