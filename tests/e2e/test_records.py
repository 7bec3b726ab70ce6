"""Records: one for every request whatever happened to it, told in metrics and in one log line, neither too much."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.kit import (
    DONE,
    MODEL,
    Proxy,
    Rig,
    chat_body,
    chunk,
    dial,
    note,
    outcomes,
    plain_request,
    rigged,
    scripted,
    strata,
    streaming,
    total,
    usage_chunk,
)

Capture = pytest.CaptureFixture[bytes]
STREAM = chat_body(stream=True)


def lines(capture: Capture) -> list[dict[str, Any]]:
    """Return the log lines about requests so far."""
    read = [orjson.loads(line) for line in capture.readouterr().err.splitlines() if line.startswith(b"{")]
    return [line for line in read if line["event"] == "request"]


SETTINGS = {
    "TENANTS__ACME__KEYS": "key-one", "FIRST_BYTE_TIMEOUT_SECONDS": "1", "IDLE_TIMEOUT_SECONDS": "1",
    "MAX_BODY_BYTES": "100000", "UPSTREAM_KEY": "sk-held",
}  # fmt: skip


def fault(text: str, *, stream: bool = True) -> Callable[[Proxy], Awaitable[object]]:
    async def request(proxy: Proxy) -> None:
        try:
            await proxy.post(chat_body(stream=stream), headers={"x-sim-fault": text})
        except httpx.RemoteProtocolError:
            assert not stream

    return request


def body(raw: object, **headers: str) -> Callable[[Proxy], Awaitable[object]]:
    async def request(proxy: Proxy) -> None:
        await proxy.post(raw, headers=headers)

    return request


async def leaves(proxy: Proxy) -> None:
    async with dial(proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(STREAM), "x-sim-fault: gap=60"))
        await wire.head()
        await wire.chunk()


async def leaves_early(proxy: Proxy) -> None:
    async with dial(proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(STREAM), "x-sim-fault: delay=0.2"))
        await asyncio.sleep(0.05)


async def leaves_while_sending(proxy: Proxy) -> None:
    async with dial(proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(STREAM))[:-9])
        await asyncio.sleep(0.05)


ENDINGS: dict[str, tuple[Callable[[Proxy], Awaitable[object]], str]] = {
    "plain": (fault("", stream=False), "ok"),
    "stream": (fault(""), "ok"),
    "no done": (fault("no_done"), "ok"),
    "no usage": (fault("no_usage"), "ok"),
    "malformed": (fault("malformed"), "ok"),
    "malformed, plain": (fault("malformed", stream=False), "ok"),
    "bypass": (body(b'{"model":"gpt-5.1","model":"gpt-5.1","messages":[{"role":"user","content":"a"}]}'), "bypass"),
    "bypass that fails": (body(b'{"messages":[],"messages":[]}', **{"x-sim-fault": "status=500"}), "upstream_error"),
    "not json": (body(b"{"), "refused"),
    "too large": (body(chat_body("x" * 200_000)), "refused"),
    "bad encoding": (body(b"x", **{"content-encoding": "br"}), "refused"),
    "bad member": (body(chat_body(strata=7)), "refused"),
    "unknown key": (body(STREAM, authorization="Bearer wrong"), "refused"),
    "status 429": (fault("status=429"), "upstream_error"),
    "status 500, plain": (fault("status=500", stream=False), "upstream_error"),
    "html": (fault("html502"), "upstream_error"),
    "reset": (fault("reset"), "upstream_error"),
    "silent": (fault("delay=60"), "upstream_error"),
    "in-band error": (fault("in_band_error=2"), "upstream_error"),
    "cut": (fault("cut=2"), "upstream_interrupted"),
    "reset in the middle": (fault("reset_mid=2"), "upstream_interrupted"),
    "reset in the middle, plain": (fault("reset_mid=2", stream=False), "upstream_interrupted"),
    "stalled": (fault("gap=60"), "upstream_interrupted"),
    "leaves": (leaves, "client_closed"),
    "leaves early": (leaves_early, "client_closed"),
    "leaves while sending": (leaves_while_sending, "client_closed"),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_one_record_a_request(capsysbinary: Capture, name: str) -> None:
    """However a request ends, exactly one record tells it: in the counters, the durations and one log line."""
    request, outcome = ENDINGS[name]
    async with rigged(**SETTINGS) as rig:
        await request(rig.proxy)
        assert await rig.proxy.settled(1) == {outcome: 1}
        await asyncio.sleep(0.1)  # a second record would come late
        samples = await rig.proxy.samples()
    assert outcomes(samples) == {outcome: 1}
    assert total(samples, "strata_request_duration_seconds_count", outcome=outcome) == 1
    assert total(samples, "strata_overhead_seconds_count") == 1
    assert total(samples, "strata_live_streams") == 0
    told = lines(capsysbinary)
    assert [line["outcome"] for line in told] == [outcome]
    tenant = "default" if name == "unknown key" else "acme"
    assert total(samples, "strata_requests_total", tenant=tenant) == 1
    assert told[0]["tenant"] == tenant
    assert told[0]["level"] == (
        "warning" if outcome in {"bypass", "upstream_error", "upstream_interrupted"} else "info"
    )


async def test_other_routes_make_no_chat_record(capsysbinary: Capture) -> None:
    """What is no chat counts as none."""
    async with rigged(**SETTINGS) as rig:
        await rig.proxy.post({"model": "e", "input": "a"}, path="/v1/embeddings")
        await rig.proxy.http.get("/livez")
        assert await rig.proxy.outcomes() == {}
    assert not lines(capsysbinary)


async def test_receipt_and_log_tell_the_same(capsysbinary: Capture) -> None:
    """The receipt's request id and layers are those of the log line, and the upstream's own id stays."""
    async with rigged() as told:
        answer = await told.proxy.post(chat_body(), headers={"x-strata-conversation": "c1"})
        await told.proxy.settled(1)
        await asyncio.sleep(0.1)
        [line] = lines(capsysbinary)
    assert answer.headers["x-strata-request-id"] == line["request_id"]
    assert answer.headers["x-request-id"] == "req_sim00000001"
    shown = dict(pair.split("=") for pair in answer.headers["x-strata-layers"].split())
    assert {name: f"{tokens}:{digest}" for name, (tokens, digest) in line["layers"].items()} == shown
    assert answer.headers["server-timing"].startswith("strata;dur=")
    assert line["conversation"] != "c1"


@pytest.mark.parametrize("stream", [False, True])
async def test_reported_cached_tokens(rig: Rig, stream: bool) -> None:
    """Cached tokens that the upstream reports appear in the metrics, as many as it charged for."""
    system = {"role": "system", "content": "some stable words " * 700}
    said = {"model": MODEL, "messages": [system, {"role": "user", "content": "hi"}], "stream": stream}
    for _ in range(3):
        await rig.proxy.post(said)
    await rig.proxy.settled(3)
    charged = [entry.charge for entry in rig.entries if entry.charge]
    cached = sum(charge.cached_tokens for charge in charged)
    assert cached > 2_000
    samples = await rig.proxy.samples()
    assert total(samples, "strata_cached_tokens_total", source="reported", model=MODEL) == cached
    assert total(samples, "strata_input_tokens_total", model=MODEL) == sum(each.prompt_tokens for each in charged)
    assert total(samples, "strata_output_tokens_total") == sum(entry.completion_tokens for entry in rig.entries)
    assert total(samples, "strata_usage_missing_total") == 0
    counted = total(samples, "strata_prompt_tokens_total", model=MODEL)
    assert abs(counted - sum(each.prompt_tokens for each in charged)) <= 3 * 8


DIALECTS: dict[str, tuple[bytes, int | None]] = {
    "openai": (b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}', 4),
    "deepseek": (
        b'{"prompt_tokens":9,"completion_tokens":1,"prompt_cache_hit_tokens":4,"prompt_cache_miss_tokens":5}',
        4,
    ),
    "moonshot": (b'{"prompt_tokens":9,"completion_tokens":1,"cached_tokens":4}', 4),
    "none told": (b'{"prompt_tokens":9,"completion_tokens":1}', None),
    "null details": (b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":null}', None),
    "zero": (b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}', 0),
    "nonsense": (b'{"prompt_tokens":9,"completion_tokens":"x","prompt_tokens_details":[1]}', None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
async def test_dialects_of_usage(name: str, stream: bool) -> None:
    """Each provider's way to report cached tokens is read; not reported is not 0."""
    told, cached = DIALECTS[name]
    usage = b'data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":' + told + b"}\n\n"
    whole = b'{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"},'
    whole += b'"finish_reason":"stop"}],"usage":' + told + b"}"

    async def script(wire: Any) -> None:
        await wire.request()
        if not stream:
            await wire.answer(whole)
            return
        await wire.begin_stream()
        for piece in (chunk("a"), chunk(finish="stop"), usage, DONE, b""):
            await wire.send_chunk(piece)

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        await proxy.post(chat_body(stream=stream))
        assert await proxy.settled(1) == {"ok": 1}
        samples = await proxy.samples()
        assert total(samples, "strata_cached_tokens_total", source="reported") == (cached or 0)
        assert (
            total(samples, "strata_input_tokens_total", prompt_cache="unreported" if cached is None else "reported")
            == 9
        )
        assert total(samples, "strata_usage_missing_total") == 0


async def test_the_prediction_is_what_the_upstream_reports(rig: Rig) -> None:
    """Predicted and reported cached tokens agree within 2 %; a client that strips its notes would have got fewer."""
    system = {"role": "system", "content": "some stable words " * 500}
    history: list[dict[str, object]] = []
    for turn in range(6):
        words = {"role": "user", "content": f"Question {turn}."}
        asked = {"role": "user", "content": f"{note(f'n/{turn}.md', f'fact {turn} about it. ')}\n\nQuestion {turn}."}
        said = {"model": MODEL, "messages": [system, *history, asked]}
        answer = await rig.proxy.post(said, headers={"x-strata-conversation": "predicted"})
        history += [words, answer.json()["choices"][0]["message"]]
        await rig.proxy.settled(turn + 1)
        # The receipt names the messages that were put back: the client strips its notes.
        assert answer.headers.get("x-strata-replayed", "0") == str(turn)
    samples = await rig.proxy.samples()
    reported, predicted, as_sent = (
        total(samples, "strata_cached_tokens_total", source=source) for source in ("reported", "predicted", "as_sent")
    )
    assert reported > 5_000
    assert abs(predicted / reported - 1) <= 0.02
    assert as_sent < predicted


@pytest.mark.parametrize("times", [1, 3])
async def test_a_prediction_counts_in_the_upstreams_tokens(times: int) -> None:
    """An upstream whose vocabulary makes three tokens of one is told three times as many cached tokens."""
    said = chat_body("some stable words " * 1_000, stream=True)
    own = 3_010

    async def script(wire: Any) -> None:
        await streaming([chunk("a"), chunk(finish="stop"), usage_chunk(own * times, 0), DONE])(wire)

    async with scripted(script) as upstream, strata(upstream.url) as proxy:
        for count in (1, 2):
            await proxy.post(said)
            await proxy.settled(count)
        predicted = await proxy.total("strata_cached_tokens_total", source="predicted")
    assert abs(predicted / (own * times) - 1) <= 0.05


async def test_usage_in_every_chunk_counts_once() -> None:
    """An upstream that repeats a running usage in every chunk is counted by its last one."""
    running = [chunk("a", usage={"prompt_tokens": 7, "completion_tokens": n}) for n in range(1, 6)]
    pieces = [*running, chunk(finish="stop"), usage_chunk(7, 3), DONE]
    async with scripted(streaming(pieces)) as upstream, strata(upstream.url) as proxy:
        answer = await proxy.post(STREAM)
        assert answer.content == b"".join([*running, chunk(finish="stop"), DONE])
        await proxy.settled(1)
        samples = await proxy.samples()
        assert total(samples, "strata_input_tokens_total") == 7
        assert total(samples, "strata_cached_tokens_total", source="reported") == 3


async def test_junk_adds_few_series(rig: Rig) -> None:
    """1,500 made-up models, paths, conversations and methods add fewer than 50 series."""
    await rig.proxy.post(chat_body(model="first-junk"))
    before = await rig.proxy.samples()

    async def some(start: int) -> None:
        for number in range(start, start + 150):
            await rig.proxy.post(
                chat_body(model=f"junk-{number}", user=f"u{number}"),
                headers={"x-strata-conversation": f"c{number}", "authorization": f"Bearer k{number}"},
            )
            if number % 15 == 0:
                await rig.proxy.http.request(f"JUNK{number}", f"/v1/junk/{number}")

    await asyncio.gather(*(some(start) for start in range(0, 1_500, 150)))
    await rig.proxy.settled(1_501)
    after = await rig.proxy.samples()
    assert len(set(after) - set(before)) < 50
    assert total(after, "strata_requests_total", model="other", tenant="default") == 1_501


SECRETS = (
    "sk-client-secret", "sk-held-secret", "the-prompt-says-secret", "secret-item", "secret-conversation", "secret-user",
    "secret-path", "secret-cookie", "secret-admin", "secret-query", "secret-tool", "secret-model",
)  # fmt: skip


async def test_nothing_secret_is_told(capsysbinary: Capture) -> None:
    """Neither log nor metrics hold content, keys, ids of conversations and users, or a model's name out of the blue."""
    settings = {"UPSTREAM_KEY": "sk-held-secret", "ADMIN_TOKEN": "secret-admin", "LOG_LEVEL": "debug"}
    async with rigged(**settings) as rig:
        item = note("secret-path.md", "secret-item ")
        tools = [{"type": "function", "function": {"name": "secret-tool", "parameters": {"type": "object"}}}]
        headers = {
            "authorization": "Bearer sk-client-secret", "cookie": "a=secret-cookie",
            "x-strata-conversation": "secret-conversation", "x-openwebui-user-id": "secret-user",
        }  # fmt: skip
        said = chat_body(f"{item}\n\nthe-prompt-says-secret", model="secret-model", tools=tools, user="secret-user")
        path = "/v1/chat/completions?api-key=secret-query"
        for text in ("", "status=500", "reset", "cut=1", "html502", "malformed"):
            for stream in (True, False):
                with contextlib.suppress(httpx.RemoteProtocolError):
                    await rig.proxy.post(
                        {**said, "stream": stream}, path=path, headers={**headers, "x-sim-fault": text}
                    )
        odd = [b'{"the-prompt-says-secret":', b'{"strata":{"secret-item":1}}', b'{"messages":"secret-item"}']
        for raw in odd:
            await rig.proxy.post(raw, path=path, headers=headers)
        rig.proxy.http.headers["authorization"] = "Bearer secret-admin"
        await rig.proxy.settled(15)
        metrics = (await rig.proxy.http.get("/metrics")).text
        await asyncio.sleep(0.1)
    told = capsysbinary.readouterr().err.decode()
    assert told.count('"event":"request"') == 15
    assert "Traceback" not in told
    for secret in SECRETS:
        assert secret not in told, secret
        assert secret not in metrics, secret


async def test_log_level_silences_requests(capsysbinary: Capture) -> None:
    """At `warning` only what failed is logged; the metrics count all the same."""
    async with rigged(LOG_LEVEL="warning") as rig:
        await rig.proxy.post(STREAM)
        await rig.proxy.post(STREAM, headers={"x-sim-fault": "cut=1"})
        assert await rig.proxy.settled(2) == {"ok": 1, "upstream_interrupted": 1}
        await asyncio.sleep(0.1)
    assert [line["outcome"] for line in lines(capsysbinary)] == ["upstream_interrupted"]


async def test_open_metrics(rig: Rig) -> None:
    """A scraper that asks for OpenMetrics gets it."""
    await rig.proxy.post(STREAM)
    answer = await rig.proxy.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


async def test_live_streams_are_counted(rig: Rig) -> None:
    """While streams run the gauge shows how many, and none when they have ended."""
    async with dial(rig.proxy.port) as one, dial(rig.proxy.port) as other:
        for wire in (one, other):
            await wire.send(plain_request(orjson.dumps(STREAM), "x-sim-fault: gap=60"))
            await wire.head()
        assert await rig.proxy.total("strata_live_streams") == 2
    await rig.proxy.settled(2)
    assert await rig.proxy.total("strata_live_streams") == 0
