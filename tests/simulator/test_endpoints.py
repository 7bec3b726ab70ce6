"""The provider through the real OpenAI SDK."""

from decimal import Decimal
from hashlib import sha256
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from starlette.applications import Starlette

from proxy.simulator.accounting import VLLM, Charge, cost
from proxy.simulator.app import Options, Simulator, create
from proxy.simulator.audio import speech_bytes
from proxy.simulator.server import Serving, serve

SYSTEM: ChatCompletionMessageParam = {"role": "system", "content": "some stable words " * 500}
ASKED: ChatCompletionMessageParam = {"role": "user", "content": "hi"}
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


async def test_chat(client: AsyncOpenAI, simulator: Simulator) -> None:
    """A repeated chat gives the same text, and cached tokens in whole steps."""
    first = await client.chat.completions.create(model="gpt-5.1", messages=[SYSTEM, ASKED])
    again = await client.chat.completions.create(model="gpt-5.1", messages=[SYSTEM, ASKED])
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].finish_reason == "stop"
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert 1024 <= cached == (first.usage.prompt_tokens - 1) // 128 * 128
    assert simulator.requests[-1].charge == Charge(prompt_tokens=again.usage.prompt_tokens, cached_tokens=cached)
    assert simulator.totals.usd == sum(
        (
            cost(
                simulator.options.rules,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=hit,
                completion_tokens=usage.completion_tokens,
            )
            for usage, hit in ((first.usage, 0), (again.usage, cached))
        ),
        Decimal(0),
    )
    assert simulator.totals.cached_share == cached / (2 * first.usage.prompt_tokens)


async def test_keys_and_models_have_their_own_cache(client: AsyncOpenAI) -> None:
    """Another key or another model shares no cached token."""
    await client.chat.completions.create(model="gpt-5.1", messages=[SYSTEM, ASKED])
    for other in (client.with_options(api_key="key-two"), client):
        reply = await other.chat.completions.create(model="gpt-4.1", messages=[SYSTEM, ASKED])
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 0


async def test_stream(client: AsyncOpenAI, simulator: Simulator) -> None:
    """A stream says the same as a plain reply, role first, usage last and only when asked for."""
    plain = await client.chat.completions.create(model="gpt-5.1", messages=[ASKED])
    stream = await client.chat.completions.create(
        model="gpt-5.1", messages=[ASKED], stream=True, stream_options={"include_usage": True}
    )
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    spoken = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert spoken == plain.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert simulator.requests[-1].outcome == "complete"
    unasked = await client.chat.completions.create(model="gpt-5.1", messages=[ASKED], stream=True)
    assert not any(["usage" in chunk.model_fields_set async for chunk in unasked])


async def test_streamed_choices(client: AsyncOpenAI) -> None:
    """``n`` choices are interleaved and each ends with its own finish reason."""
    stream = await client.chat.completions.create(model="gpt-5.1", messages=[ASKED], stream=True, n=2, max_tokens=5)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    assert [choice.index for choice in choices] == [0, 1] * (len(choices) // 2)
    assert [choice.finish_reason for choice in choices[-2:]] == ["length", "length"]


async def test_parallel_tools(client: AsyncOpenAI) -> None:
    """Parallel calls arrive whole, their results are accepted, and the next reply is text."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "[call:weather,clock]"}]
    reply = await client.chat.completions.create(model="gpt-5.1", messages=messages, tools=TOOLS)
    calls = reply.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls if call.type == "function"] == ["weather", "clock"]
    assert reply.choices[0].message.content is None
    messages.append(reply.choices[0].message.to_dict())  # type: ignore[arg-type]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls]
    final = await client.chat.completions.create(model="gpt-5.1", messages=messages, tools=TOOLS)
    assert final.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="did not have response messages"):
        await client.chat.completions.create(model="gpt-5.1", messages=messages[:-1], tools=TOOLS)


async def test_streamed_tools(client: AsyncOpenAI) -> None:
    """The SDK's stream helper assembles parallel calls from their pieces."""
    async with client.chat.completions.stream(
        model="gpt-5.1", messages=[{"role": "user", "content": "[call:weather,clock]"}], tools=TOOLS
    ) as stream:
        whole = await stream.get_final_completion()
    calls = whole.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather", "clock"]
    assert all(call.function.arguments.startswith('{"city":"') for call in calls)
    assert whole.choices[0].finish_reason == "tool_calls"


class Trip(BaseModel):
    """A nested structured output."""

    class Stop(BaseModel):
        """One of its places."""

        name: str
        nights: int

    first: Stop
    others: list[Stop]
    note: str | None


async def test_parse(client: AsyncOpenAI) -> None:
    """``.parse()`` gets an instance of the model it asked for."""
    reply = await client.chat.completions.parse(model="gpt-5.1", messages=[ASKED], response_format=Trip)
    assert isinstance(reply.choices[0].message.parsed, Trip)


async def test_completions(client: AsyncOpenAI) -> None:
    """Legacy completions answer every prompt, plain and as a stream."""
    reply = await client.completions.create(model="gpt-5.1", prompt=["one", "two"], n=2, max_tokens=6)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 24)
    stream = await client.completions.create(
        model="gpt-5.1", prompt="one", max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == reply.choices[0].text
    assert chunks[-1].usage is not None


async def test_embeddings(client: AsyncOpenAI) -> None:
    """Vectors are unit vectors, the same in float and base64, and different for different texts."""
    packed = await client.embeddings.create(model="text-embedding-3-small", input=["one", "two"])
    plain = await client.embeddings.create(model="text-embedding-3-small", input="one", encoding_format="float")
    small = await client.embeddings.create(model="text-embedding-3-large", input=[1, 2, 3], dimensions=8)
    assert len(packed.data[0].embedding) == 1536
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding)
    assert packed.data[0].embedding != packed.data[1].embedding
    assert sum(value * value for value in small.data[0].embedding) == pytest.approx(1)
    assert (packed.usage.prompt_tokens, small.usage.prompt_tokens, len(small.data[0].embedding)) == (2, 3, 8)


async def test_models(client: AsyncOpenAI, server: Serving) -> None:
    """Models are listed and found by name, with a slash or an encoded one; others are 404."""
    listed = [model.id async for model in client.models.list()]
    assert listed[0] == "gpt-5.1"
    assert (await client.models.retrieve("openai/gpt-oss-120b")).owned_by == "openai"
    async with httpx.AsyncClient(trust_env=False) as http:
        found = await http.get(f"{server.base_url}/models/openai%2Fgpt-oss-120b")
        assert found.json()["id"] == "openai/gpt-oss-120b"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.models.retrieve("gpt-0")


async def test_encoded_slash_is_recorded(client: AsyncOpenAI, simulator: Simulator) -> None:
    """The entry keeps the path as it was sent, and the query."""
    await client.get("/models/openai%2Fgpt-oss-120b?a=%20b", cast_to=httpx.Response)
    entry = simulator.requests[-1]
    assert entry.raw_path == "/v1/models/openai%2Fgpt-oss-120b"
    assert entry.path == "/v1/models/openai/gpt-oss-120b"
    assert entry.query == "a=%20b"


async def test_files(client: AsyncOpenAI, simulator: Simulator) -> None:
    """A file comes back byte for byte, is listed and can be deleted."""
    content = bytes(range(256)) + b"\r\n--not the boundary\r\n"
    stored = await client.files.create(file=("a b.bin", content), purpose="user_data")
    assert (stored.filename, stored.bytes, stored.purpose) == ("a b.bin", len(content), "user_data")
    assert (await client.files.content(stored.id)).content == content
    assert [file.id async for file in client.files.list()] == [stored.id]
    assert (await client.files.retrieve(stored.id)).id == stored.id
    assert simulator.files[stored.id].raw == simulator.requests[0].body
    assert (await client.files.delete(stored.id)).deleted
    with pytest.raises(openai.NotFoundError, match="No such File"):
        await client.files.content(stored.id)


async def test_audio(client: AsyncOpenAI, simulator: Simulator) -> None:
    """A transcription reports the digest of what arrived; speech is deterministic binary."""
    sound = bytes(range(256)) * 40
    heard = await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound, "audio/wav"))
    assert heard.text
    assert heard.model_extra is not None
    assert heard.model_extra["file_sha256"] == sha256(sound).hexdigest()
    assert heard.model_extra["sha256"] == sha256(simulator.requests[-1].body).hexdigest()
    assert heard.model_extra["bytes"] == len(simulator.requests[-1].body)
    plain = await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound), response_format="text")
    assert str(plain).strip() == heard.text
    spoken = await client.audio.speech.create(model="tts-1", voice="alloy", input="hello " * 100)
    assert spoken.content == speech_bytes("hello " * 100, "alloy")
    assert spoken.response.headers["content-type"] == "audio/mpeg"


async def test_bad_form_is_refused(server: Serving) -> None:
    """A form without a boundary or without its file is a bad request."""
    async with httpx.AsyncClient(trust_env=False) as http:
        plain = await http.post(f"{server.base_url}/files", content=b"x", headers={"content-type": "text/plain"})
        empty = await http.post(f"{server.base_url}/files", files={"other": b"x"})
    assert "multipart" in plain.json()["error"]["message"]
    assert empty.json()["error"]["param"] == "file"


async def test_moderations(client: AsyncOpenAI) -> None:
    """Every input is judged, and harmless."""
    judged = await client.moderations.create(input=["one", "two"])
    assert [result.flagged for result in judged.results] == [False, False]
    assert len((await client.moderations.create(input="one")).results) == 1


async def test_responses(client: AsyncOpenAI) -> None:
    """Responses answer like chat, plain and as a stream, and continue a previous response."""
    first = await client.responses.create(model="gpt-5.1", instructions=str(SYSTEM["content"]), input="hi")
    chat = await client.chat.completions.create(model="gpt-5.1", messages=[SYSTEM, ASKED])
    assert first.output_text == chat.choices[0].message.content
    assert first.usage is not None
    assert chat.usage is not None
    assert first.usage.input_tokens == chat.usage.prompt_tokens
    stream = await client.responses.create(
        model="gpt-5.1",
        instructions=str(SYSTEM["content"]),
        input="more",
        previous_response_id=first.id,
        stream=True,
        max_output_tokens=4,
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ended = events[-1]
    assert ended.type == "response.incomplete"
    assert ended.response.usage is not None
    assert ended.response.usage.input_tokens > first.usage.input_tokens
    assert ended.response.usage.input_tokens_details.cached_tokens >= 1024
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    with pytest.raises(openai.BadRequestError, match="not found"):
        await client.responses.create(model="gpt-5.1", input="x", previous_response_id="resp_none")


async def test_response_tools(client: AsyncOpenAI) -> None:
    """A function call of the responses endpoint and its output are read back."""
    tools: Any = [
        {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}, "strict": False}
    ]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "[call]"}]}]
    async with client.responses.stream(model="gpt-5.1", input=items, tools=tools) as stream:
        called = await stream.get_final_response()
    (call,) = called.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("find", "{}")
    items += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "here"}]
    forced = await client.responses.create(
        model="gpt-5.1", input=items, tools=tools, tool_choice={"type": "function", "name": "find"}
    )
    assert forced.output[0].type == "function_call"
    text = await client.responses.create(model="gpt-5.1", input=items, tools=tools)
    assert text.output_text


async def test_response_parse(client: AsyncOpenAI) -> None:
    """``responses.parse()`` gets an instance of the model it asked for."""
    reply = await client.responses.parse(model="gpt-5.1", input="hi", text_format=Trip)
    assert isinstance(reply.output_parsed, Trip)


async def test_every_response_is_numbered(client: AsyncOpenAI) -> None:
    """Successes and errors carry a request id and the processing time."""
    plain = await client.chat.completions.with_raw_response.create(model="gpt-5.1", messages=[ASKED])
    assert plain.headers["x-request-id"] == "req_sim00000001"
    assert plain.headers["openai-processing-ms"].isdigit()
    with pytest.raises(openai.APIStatusError) as caught:
        await client.get("/nothing", cast_to=httpx.Response)
    assert caught.value.request_id == "req_sim00000002"
    assert "Invalid URL (GET /v1/nothing)" in caught.value.message


async def test_summary_counts_without_being_counted(client: AsyncOpenAI, server: Serving) -> None:
    """``/sim/requests`` shows totals and requests, no key, and does not count itself."""
    await client.chat.completions.create(model="gpt-5.1", messages=[ASKED])
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(2):
            shown = await http.get(f"{server.origin}/sim/requests")
    assert shown.json()["totals"]["requests"] == 1
    assert shown.json()["requests"][0]["outcome"] == "complete"
    assert "key-one" not in shown.text


async def test_reset_state(client: AsyncOpenAI, simulator: Simulator) -> None:
    """A reset provider has no requests, no totals and an empty cache."""
    await client.chat.completions.create(model="gpt-5.1", messages=[SYSTEM, ASKED])
    simulator.reset()
    assert (len(simulator.requests), len(simulator.cache), simulator.totals.prompt_tokens) == (0, 0, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a":"\xff"}', b'{"a":"\\ud800"}'])
async def test_what_is_no_json_object_is_refused(server: Serving, content: bytes) -> None:
    """A body that is no JSON object is a bad request in OpenAI's words."""
    async with httpx.AsyncClient(trust_env=False) as http:
        refused = await http.post(f"{server.base_url}/chat/completions", content=content)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("We could not parse the JSON body")


def served(**options: object) -> Starlette:
    return create(Options(**options))  # type: ignore[arg-type]


async def test_keys_are_checked() -> None:
    """With a key list every other key is 401, and none at all too."""
    async with serve(served(keys=frozenset({"good"}))) as server:
        good = AsyncOpenAI(base_url=server.base_url, api_key="good", max_retries=0)
        assert await good.models.list()
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            await good.with_options(api_key="a-very-bad-key").models.list()
        await good.close()
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{server.base_url}/models")).status_code == 401
            allowed = await http.get(f"{server.base_url}/models", headers={"api-key": "good"})
            assert allowed.status_code == 200


async def test_context_window_is_enforced() -> None:
    """A prompt beyond the window is refused before it is charged."""
    app = served(max_context_tokens=1000)
    async with serve(app) as server, AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="gpt-5.1", messages=[SYSTEM, ASKED])
        assert caught.value.code == "context_length_exceeded"
        assert app.state.simulator.totals.prompt_tokens == 0
        await client.chat.completions.create(model="gpt-5.1", messages=[ASKED])


async def test_strict_and_vllm_options() -> None:
    """Strictness and rules come from the options; ``cache_salt`` separates caches."""
    app = served(rules=VLLM, strict=True, keep_bodies=False, clock=lambda: 0.0)
    async with serve(app) as server, AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: cache_salt"):
            await client.chat.completions.create(model="gpt-5.1", messages=[ASKED], extra_body={"cache_salt": "x"})
        await client.responses.create(model="gpt-5.1", input="w " * 40, extra_body={"cache_salt": "x"})
        cached = [
            (await client.responses.create(model="gpt-5.1", input="w " * 40, extra_body={"cache_salt": salt})).usage
            for salt in ("y", "x")
        ]
        hits = [usage.input_tokens_details.cached_tokens for usage in cached if usage]
        assert hits == [0, 32]
        entry = app.state.simulator.requests[-1]
        assert entry.body == b""
        assert entry.body_bytes > 80


async def test_time_to_first_token_grows_with_uncached_tokens() -> None:
    """A cached prompt is answered sooner than a new one."""
    app = served(seconds_per_uncached_token=0.0002)
    async with serve(app) as server, httpx.AsyncClient(trust_env=False, base_url=server.base_url) as http:
        body = {"model": "gpt-5.1", "messages": [SYSTEM, ASKED]}
        cold, warm = [(await http.post("/chat/completions", json=body)).elapsed.total_seconds() for _ in range(2)]
    assert cold >= 0.3
    assert warm < cold / 2
