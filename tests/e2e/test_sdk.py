"""The OpenAI SDK through Strata: the same results, and the same bytes at the provider, as straight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel

from proxy.simulator.app import Simulator, create
from proxy.simulator.record import Entry
from proxy.simulator.server import serve
from tests.e2e.kit import MODEL, USAGE_ASKED, Rig, Wire, rigged, scripted, strata

SYSTEM = {"role": "system", "content": 'Answer briefly. Ünïcödé \u2028 and "quotes".\n' * 20}
ASKED = {"role": "user", "content": "What is the weather?"}
MESSAGES: Any = [SYSTEM, ASKED]
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "clock")
]
FIXED = {"content-type": "multipart/form-data; boundary=a-fixed-boundary"}


class Forecast(BaseModel):
    """What `.parse()` is asked for."""

    city: str
    degrees: float
    rainy: bool


Operation = Callable[[AsyncOpenAI], Awaitable[object]]


def _dump(value: Any) -> object:
    return value.model_dump(exclude={"_request_id"})


async def chat(client: AsyncOpenAI) -> object:
    return _dump(await client.chat.completions.create(model=MODEL, messages=MESSAGES))


async def chat_with_everything(client: AsyncOpenAI) -> object:
    return _dump(
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=1e-7, top_p=1.0, seed=2**53 + 1, stop=["\u00a0", "x"],
            logit_bias={"50256": -100}, user="u", n=2, max_completion_tokens=77, prompt_cache_key="k",
            metadata={"a": "b"}, extra_body={"x_unknown": {"b": 1, "a": [1.0, None]}}, extra_query={"q": "1 2"},
        )
    )  # fmt: skip


async def conversation(client: AsyncOpenAI) -> object:
    messages: Any = list(MESSAGES)
    found = []
    for turn in range(4):
        reply = await client.chat.completions.create(model=MODEL, messages=messages)
        found.append(_dump(reply))
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": f"And then? {turn}"}]
    return found


async def tools(client: AsyncOpenAI) -> object:
    return _dump(
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS[:1], tool_choice="required")
    )


async def parallel_tools(client: AsyncOpenAI) -> object:
    messages: Any = [*MESSAGES, {"role": "user", "content": "call weather and clock in parallel"}]
    reply = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=True
    )
    message = reply.choices[0].message
    calls = message.tool_calls or []
    assert calls
    messages.append(message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    after = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    return [_dump(reply), _dump(after)]


async def parse(client: AsyncOpenAI) -> object:
    reply = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Forecast)
    assert isinstance(reply.choices[0].message.parsed, Forecast)
    return reply.choices[0].message.parsed, reply.choices[0].message.content


async def raw_response(client: AsyncOpenAI) -> object:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
    names = ("x-request-id", "openai-version", "content-type", "content-length")
    return raw.status_code, raw.content, {name: raw.headers.get(name) for name in names}


async def embeddings(client: AsyncOpenAI) -> object:
    return _dump(await client.embeddings.create(model="text-embedding-3-small", input=["a", "b"], dimensions=16))


async def models(client: AsyncOpenAI) -> object:
    return [_dump(model) async for model in await client.models.list()]


async def model_with_a_slash(client: AsyncOpenAI) -> object:
    return _dump(await client.models.retrieve("openai/gpt-oss-120b"))


async def files(client: AsyncOpenAI) -> object:
    data = bytes(range(256)) * 300
    made = await client.files.create(file=("ä b.bin", data), purpose="batch", extra_headers=FIXED)
    listed = [_dump(each) async for each in await client.files.list(extra_query={"purpose": "batch"})]
    read = await client.files.content(made.id)
    assert read.content == data
    one = await client.files.retrieve(made.id)
    return [_dump(made), listed, read.content, _dump(one), _dump(await client.files.delete(made.id))]


async def transcription(client: AsyncOpenAI) -> object:
    reply = await client.audio.transcriptions.create(
        file=("a.wav", b"RIFF\0\xff\r\n--a-fixed\r\n" * 999), model="whisper-1", extra_headers=FIXED
    )
    return _dump(reply)


async def speech(client: AsyncOpenAI) -> object:
    reply = await client.audio.speech.create(model="tts-1", voice="alloy", input="hello there")
    return reply.content


async def moderations(client: AsyncOpenAI) -> object:
    return _dump(await client.moderations.create(input=["a", "b"]))


async def responses(client: AsyncOpenAI) -> object:
    return _dump(await client.responses.create(model=MODEL, input="hello"))


async def responses_stream(client: AsyncOpenAI) -> object:
    return [_dump(event) async for event in await client.responses.create(model=MODEL, input="hello", stream=True)]


async def completions(client: AsyncOpenAI) -> object:
    return _dump(await client.completions.create(model="gpt-3.5-turbo-instruct", prompt="hello"))


async def asked_stream(client: AsyncOpenAI) -> object:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    return [_dump(chunk) async for chunk in stream]


SAME_BYTES: tuple[Operation, ...] = (
    chat, chat_with_everything, conversation, tools, parallel_tools, parse, raw_response, embeddings, models,
    model_with_a_slash, files, transcription, speech, moderations, responses, responses_stream, completions,
    asked_stream,
)  # fmt: skip


async def straight(operation: Operation) -> tuple[object, list[Entry]]:
    provider = create()
    simulator: Simulator = provider.state.simulator
    async with (
        serve(provider) as serving,
        AsyncOpenAI(base_url=serving.base_url, api_key="key-one", max_retries=0) as client,
    ):
        return await operation(client), list(simulator.requests)


async def through(operation: Operation) -> tuple[object, list[Entry]]:
    async with rigged() as rig, rig.proxy.openai() as client:
        return await operation(client), rig.entries


def _route(entry: Entry) -> tuple[str, str, str]:
    return entry.method, entry.raw_path, entry.query


def _own(entry: Entry) -> dict[str, str]:
    """What the client said in headers; the connection's own and what depends on the port are left out."""
    hop = {"host", "connection", "accept-encoding", "content-length"}
    return {name: value for name, value in entry.headers.items() if name not in hop}


@pytest.mark.parametrize("operation", SAME_BYTES, ids=lambda operation: operation.__name__)
async def test_same_result_and_bytes(operation: Operation) -> None:
    """An operation gives the same result through Strata, and the provider gets the same bytes, paths and headers."""
    expected, there = await straight(operation)
    actual, here = await through(operation)
    assert actual == expected
    assert [_route(entry) for entry in here] == [_route(entry) for entry in there]
    assert [entry.body for entry in here] == [entry.body for entry in there]
    assert [_own(entry) for entry in here] == [_own(entry) for entry in there]


async def stream(client: AsyncOpenAI) -> object:
    made = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    return [_dump(chunk) async for chunk in made]


async def stream_of_two(client: AsyncOpenAI) -> object:
    made = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=2)
    return [_dump(chunk) async for chunk in made]


async def stream_of_tools(client: AsyncOpenAI) -> object:
    made = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, tools=TOOLS, tool_choice="required"
    )
    return [_dump(chunk) async for chunk in made]


async def stream_helper(client: AsyncOpenAI) -> object:
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Forecast) as made:
        kinds = [event.type async for event in made]
        final = await made.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Forecast)
    return kinds, final.choices[0].message.parsed


@pytest.mark.parametrize(
    "operation", [stream, stream_of_two, stream_of_tools, stream_helper], ids=lambda operation: operation.__name__
)
async def test_same_stream(operation: Operation) -> None:
    """A stream says the same, chunk by chunk; only the question for usage is added to what the provider gets."""
    expected, there = await straight(operation)
    actual, here = await through(operation)
    assert actual == expected
    assert [entry.body for entry in here] == [entry.body[:-1] + USAGE_ASKED for entry in there]


async def test_usage_is_kept_from_those_who_did_not_ask(rig: Rig) -> None:
    """The chunk that only the proxy asked for reaches no client; every other byte of the stream does."""
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True}
    unasked = (await rig.proxy.post(body)).content
    asked = (await rig.proxy.post({**body, "stream_options": {"include_usage": True}})).content
    declined = (await rig.proxy.post({**body, "stream_options": {"include_usage": False}})).content
    first, second, third = (
        raw.replace(str(entry.index).zfill(8).encode(), b"N").replace(str(1_750_000_000 + entry.index).encode(), b"T")
        for raw, entry in zip((unasked, asked, declined), rig.entries, strict=True)
    )
    kept = [event for event in second.split(b"\n\n") if b'"choices":[]' not in event]
    assert len(kept) == len(second.split(b"\n\n")) - 1
    assert first == third == b"\n\n".join(kept)


def test_the_sync_client() -> None:
    """The blocking SDK chats, streams and lists models through Strata."""

    async def served() -> None:
        async with rigged() as rig:
            await asyncio.to_thread(use, rig.proxy.base_url)
            assert len(rig.entries) == 3

    def use(base_url: str) -> None:
        with OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content
            made = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in made) == whole
            assert [model.id for model in client.models.list()]

    asyncio.run(served())


async def test_many_at_once(rig: Rig) -> None:
    """Sixty streams and plain requests at once each get their own answer."""

    async def one(client: AsyncOpenAI, number: int) -> None:
        messages: Any = [{"role": "user", "content": f"question {number}"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        made = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in made])
        assert said == whole.choices[0].message.content

    async with rig.proxy.openai() as client:
        await asyncio.gather(*(one(client, number) for number in range(60)))
    assert await rig.proxy.settled(120) == {"ok": 120}


_ANTHROPIC = (
    b'{"id":"msg_1","type":"message","role":"assistant","model":"claude-opus-5","content":[{"type":"text",'
    b'"text":"Hello"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":3,"output_tokens":1}}'
)
_ANTHROPIC_STREAM = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
    b'"model":"claude-opus-5","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":3,'
    b'"output_tokens":1}}}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text",'
    b'"text":""}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    b'"text":"Hel"}}\n\n',
    b'event: ping\ndata: {"type":"ping"}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    b'"text":"lo"}}\n\n',
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
    b'"usage":{"output_tokens":2}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)


@pytest.fixture
async def anthropic() -> AsyncIterator[AsyncAnthropic]:
    """The Anthropic SDK, through Strata, to an upstream that speaks Anthropic's Messages."""

    async def script(wire: Wire) -> None:
        while True:
            got = await wire.request()
            assert got.target == "/v1/messages"
            assert "sk-ant" in got.header("x-api-key") + got.header("authorization")
            assert got.header("anthropic-version")
            if b'"stream":true' not in got.body.replace(b" ", b""):
                await wire.answer(_ANTHROPIC)
                continue
            await wire.begin_stream()
            for event in _ANTHROPIC_STREAM:
                await wire.send_chunk(event)
            await wire.send_chunk(b"")

    async with (
        scripted(script) as upstream,
        strata(upstream.url) as proxy,
        AsyncAnthropic(base_url=proxy.origin, api_key="sk-ant", max_retries=0) as client,
    ):
        yield client


async def test_anthropic_messages(anthropic: AsyncAnthropic) -> None:
    """Anthropic's SDK passes through, plain and streamed, its key and version headers with it."""
    asked: Any = {"model": "claude-opus-5", "max_tokens": 9, "messages": [ASKED]}
    reply = await anthropic.messages.create(**asked)
    assert reply.content[0].model_dump()["text"] == "Hello"
    async with anthropic.messages.stream(**asked) as made:
        assert "".join([text async for text in made.text_stream]) == "Hello"
