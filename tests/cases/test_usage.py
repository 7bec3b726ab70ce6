"""Field failures of kind E: usage and its accounting."""

import asyncio
from collections.abc import Sequence

import orjson
import pytest

from proxy.core.usage import Usage, parse
from tests.cases.conftest import (
    DONE,
    GUARD_SECONDS,
    STREAM_ANSWER,
    Answer,
    Measured,
    Seen,
    Start,
    Upstream,
    Wire,
    chat,
    delta,
    until,
    usage_chunk,
    user,
    words,
)

ASK = chat(user("When is high tide?"))
STREAM = {**ASK, "stream": True}
MISSING = object()


def read(usage: object) -> Usage | None:
    """Read a usage as it stands in an answer."""
    return parse(orjson.dumps({"id": "c1", "usage": usage}))


def answer_with(usage: object) -> bytes:
    """Return a plain chat answer with this usage, or without one."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
    return orjson.dumps({"id": "c1", "choices": [choice], **({} if usage is MISSING else {"usage": usage})})


def script(*, plain: bytes = b"", events: Sequence[bytes] = ()) -> Answer:
    """Return a script that answers every request with these."""

    async def answer(seen: Seen, wire: Wire) -> None:
        if seen.json.get("stream"):
            await wire.events(*events)
        else:
            await wire.whole(plain)

    return answer


def figures(measured: Measured) -> tuple[float, float, float, float, float]:
    """Return input (where the cached part is known, and where not), cached, output, and answers without usage."""
    return (
        measured.total("strata_input_tokens_total", prompt_cache="reported"),
        measured.total("strata_input_tokens_total", prompt_cache="unreported"),
        measured.total("strata_cached_tokens_total", source="reported"),
        measured.total("strata_output_tokens_total"),
        measured.total("strata_usage_missing_total"),
    )


OPENAI = {"prompt_tokens": 1_000, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 800}}
ANTHROPIC = {
    "input_tokens": 200,
    "output_tokens": 9,
    "cache_read_input_tokens": 800,
    "cache_creation_input_tokens": 0,
}


@pytest.mark.parametrize(
    "usage",
    [
        OPENAI,
        ANTHROPIC,
        {**ANTHROPIC, **OPENAI},
        {**ANTHROPIC, **OPENAI, "cache_read_input_tokens": 900, "cached_tokens": 700},
        {"input_tokens": 1_000, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 800}},
    ],
    ids=["openai", "anthropic", "both", "both-disagree", "responses"],
)
def test_c51_cached_tokens_count_once(usage: dict[str, object]) -> None:
    """Whichever dialect says it, and where both do OpenAI's nested value: 1,000 in all, 800 of them cached."""
    found = read(usage)
    assert found is not None
    assert (found.input_tokens, found.cache_read_tokens, found.output_tokens) == (1_000, 800, 9)


def test_c51_written_tokens_are_input_too() -> None:
    """In Anthropic's dialect tokens read and tokens written stand beside the rest: the input is their sum."""
    found = read({**ANTHROPIC, "cache_creation_input_tokens": 50})
    assert found is not None
    assert (found.input_tokens, found.cache_read_tokens, found.cache_write_tokens) == (1_050, 800, 50)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}},
        {"prompt_tokens": 100, "cache_read_input_tokens": 400},
        {"prompt_tokens": 100, "prompt_cache_hit_tokens": 400},
        {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 4}},
    ],
)
def test_c51_no_more_is_cached_than_was_sent(usage: dict[str, object]) -> None:
    """The cached share is never above 1, whatever an upstream says."""
    found = read(usage)
    assert found is not None
    assert found.cache_read_tokens is not None
    assert found.cache_read_tokens <= found.input_tokens


@pytest.mark.parametrize("usage", [OPENAI, ANTHROPIC, {**ANTHROPIC, **OPENAI}], ids=["openai", "anthropic", "both"])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c51_every_dialect_reaches_the_counters(
    start: Start, upstream: Upstream, usage: object, body: object
) -> None:
    """Both dialects give the same counters, from a plain answer and from a stream."""
    upstream.answer = script(plain=answer_with(usage), events=[*STREAM_ANSWER, usage_chunk(usage), DONE])
    strata = await start()
    await strata.post(body)
    assert figures(await strata.metrics()) == (1_000, 0, 800, 9, 0)


@pytest.mark.parametrize("asked", [False, True])
async def test_c52_usage_on_every_chunk_counts_once(start: Start, upstream: Upstream, asked: bool) -> None:
    """Running totals on each chunk are not summed: the last one counts, and every chunk with words is passed on."""
    running = [
        delta("tide ", usage={"prompt_tokens": 64, "completion_tokens": done, "total_tokens": 64 + done})
        for done in range(1, 6)
    ]
    last = usage_chunk({"prompt_tokens": 64, "completion_tokens": 5, "total_tokens": 69})
    upstream.answer = script(events=[*running, delta(finish="stop"), last, DONE])
    strata = await start()
    got = await strata.post({**STREAM, "stream_options": {"include_usage": True}} if asked else STREAM)
    assert got.content == b"".join([*running, delta(finish="stop"), *([last] if asked else []), DONE])
    assert figures(await strata.metrics()) == (0, 64, 0, 5, 0)


NOTHING_SAID = [MISSING, None, {}, [], "none", {"prompt_tokens": None}, {"prompt_tokens": "12"}, {"prompt_tokens": -5}]
CACHE_NOT_SAID = [
    {"prompt_tokens": 5, "prompt_tokens_details": None},
    {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": None}},
    {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": "12"}},
    {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -3}},
    {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1.5}},
    {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": True}},
    {"prompt_tokens": 5, "prompt_tokens_details": [1]},
]


@pytest.mark.parametrize("usage", NOTHING_SAID, ids=str)
async def test_c53_a_missing_usage_is_counted_as_missing(start: Start, upstream: Upstream, usage: object) -> None:
    """An answer whose usage says nothing reaches the client whole, and counts as missing, not as 0."""
    plain = answer_with(usage)
    events = [*STREAM_ANSWER, *([] if usage is MISSING else [usage_chunk(usage)]), DONE]
    upstream.answer = script(plain=plain, events=events)
    strata = await start()
    assert (await strata.post(ASK)).content == plain
    assert figures(await strata.metrics()) == (0, 0, 0, 0, 1)
    streamed = await strata.post({**STREAM, "stream_options": {"include_usage": True}})
    assert streamed.content == b"".join(events)
    measured = await strata.metrics()
    assert figures(measured) == (0, 0, 0, 0, 2)
    assert measured.total("strata_requests_total", outcome="ok") == 2


@pytest.mark.parametrize("usage", CACHE_NOT_SAID, ids=str)
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c53_an_unknown_cached_part_is_no_zero(
    start: Start, upstream: Upstream, usage: object, body: object
) -> None:
    """Where the cached part is not told, or is no count, the input is known and stays out of the hit ratio."""
    upstream.answer = script(plain=answer_with(usage), events=[*STREAM_ANSWER, usage_chunk(usage), DONE])
    strata = await start()
    assert (await strata.post(body)).status_code == 200
    assert figures(await strata.metrics()) == (0, 5, 0, 0, 0)


async def test_c53_a_reported_zero_is_known(start: Start, upstream: Upstream) -> None:
    """Zero cached tokens that the upstream reports do count in the hit ratio."""
    upstream.answer = script(
        plain=answer_with({"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}})
    )
    strata = await start()
    await strata.post(ASK)
    assert figures(await strata.metrics()) == (5, 0, 0, 1, 0)


DEEPSEEK = {
    "prompt_tokens": 100,
    "completion_tokens": 3,
    "prompt_cache_hit_tokens": 80,
    "prompt_cache_miss_tokens": 20,
}


def test_c54_hits_are_read_and_misses_are_not_writes() -> None:
    """DeepSeek's hits are cached tokens; its misses are the rest, nothing written; OpenAI's field has precedence."""
    found = read(DEEPSEEK)
    assert found is not None
    assert (found.input_tokens, found.cache_read_tokens, found.cache_write_tokens or 0) == (100, 80, 0)
    both = read({**DEEPSEEK, "prompt_tokens_details": {"cached_tokens": 64}})
    assert both is not None
    assert both.cache_read_tokens == 64
    zero = read({**DEEPSEEK, "prompt_tokens_details": {"cached_tokens": 0}})
    assert zero is not None
    assert zero.cache_read_tokens == 0


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c54_hits_reach_the_counters(start: Start, upstream: Upstream, body: object) -> None:
    """DeepSeek's fields count from a plain answer and from the last chunk of a stream, whose choices are empty."""
    upstream.answer = script(plain=answer_with(DEEPSEEK), events=[*STREAM_ANSWER, usage_chunk(DEEPSEEK), DONE])
    strata = await start()
    await strata.post(body)
    measured = await strata.metrics()
    assert figures(measured) == (100, 0, 80, 3, 0)
    assert measured.total("strata_cache_write_tokens_total") == 0


async def test_c54_hits_on_the_chunk_that_finishes(start: Start, upstream: Upstream) -> None:
    """Usage on the chunk that carries the finish reason is read, and that chunk is passed on."""
    last = delta(finish="stop", usage=DEEPSEEK)
    upstream.answer = script(events=[delta("Do"), last, DONE])
    strata = await start()
    got = await strata.post(STREAM)
    assert got.content == delta("Do") + last + DONE
    assert figures(await strata.metrics()) == (100, 0, 80, 3, 0)


async def test_c55_a_stream_the_client_left_is_recorded(
    start: Start, upstream: Upstream, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client that stops after five chunks leaves one record, with prompt, output so far and first token in it."""
    left = asyncio.Event()

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.begin_events()
        try:
            for number in range(100_000):
                await wire.chunk(delta(f"word {number} "))
                await asyncio.sleep(0.01)
        except ConnectionError:
            left.set()
            raise

    upstream.answer = answer
    strata = await start()
    body = {**chat(user(words(300))), "stream": True}
    async with strata.http.stream("POST", "/v1/chat/completions", json=body) as got:
        chunks = 0
        async for piece in got.aiter_raw():
            chunks += piece.count(b"data: ")
            if chunks >= 5:
                break

    async def recorded() -> bool:
        return (await strata.metrics()).total("strata_requests_total", outcome="client_closed") == 1

    await until(recorded)
    async with asyncio.timeout(GUARD_SECONDS):
        await left.wait()
    measured = await strata.metrics()
    assert measured.total("strata_requests_total") == 1
    assert measured.total("strata_prompt_tokens_total") > 290
    assert measured.total("strata_time_to_first_token_seconds_count") == 1
    assert measured.total("strata_request_duration_seconds_count") == 1
    assert measured.total("strata_usage_missing_total") == 0
    assert measured.total("strata_live_streams") == 0
    lines: list[dict[str, object]] = []

    def logged() -> bool:
        lines.extend(orjson.loads(line) for line in capfd.readouterr().err.splitlines() if '"request"' in line)
        return bool(lines)

    await until(logged)
    assert [line["outcome"] for line in lines] == ["client_closed"]
    assert int(str(lines[0]["output_events"])) >= 1
    assert "first_token_seconds" in lines[0]


async def test_c55_a_client_that_leaves_before_the_answer_is_recorded(start: Start, upstream: Upstream) -> None:
    """A client that leaves before the first byte is one record, no failure of the upstream, and ends the call."""
    gone = asyncio.Event()
    arrived = asyncio.Event()

    async def answer(_: Seen, wire: Wire) -> None:
        arrived.set()
        try:
            while True:
                await asyncio.sleep(0.02)
                await wire.raw(b"HTTP/1.1 103 Early\r\n\r\n")
        except ConnectionError:
            gone.set()
            raise

    upstream.answer = answer
    strata = await start()
    asking = asyncio.ensure_future(strata.post(STREAM))
    async with asyncio.timeout(GUARD_SECONDS):
        await arrived.wait()
        asking.cancel()
        await gone.wait()

    async def recorded() -> bool:
        return (await strata.metrics()).total("strata_requests_total", outcome="client_closed") == 1

    await until(recorded)
    assert (await strata.metrics()).total("strata_requests_total") == 1
