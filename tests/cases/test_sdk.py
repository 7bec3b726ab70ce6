"""Field failures of kind H: what OpenAI's SDKs send and expect."""

import asyncio
from collections.abc import Mapping

import openai
import orjson
import pytest
from openai import AsyncOpenAI

from proxy.simulator.app import Options
from tests.cases.conftest import (
    CHAT_ANSWER,
    DONE,
    STREAM_ANSWER,
    Seen,
    Start,
    StartProvider,
    Upstream,
    Wire,
    chat,
    chat_answer,
    delta,
    event,
    note,
    system,
    user,
    without_usage_wish,
    words,
)

ASK = chat(user("When is high tide?"))
STREAM = {**ASK, "stream": True}


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/", "/v1//"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "/chat/completions//",
    ],
)
async def test_c69_one_version_segment_whatever_was_written(
    start: Start, upstream: Upstream, base: str, path: str
) -> None:
    """Every spelling of base and path reaches the one upstream path, at once, its query kept."""
    strata = await start(upstream_url=upstream.origin + base)
    # httpx reads a path that begins with two slashes as another host.
    answer = await strata.http.post(f"{strata.origin}{path}?trace=1&b=%20", json=ASK)
    assert answer.status_code == 200
    assert [seen.target for seen in upstream.seen] == ["/v1/chat/completions?trace=1&b=%20"]
    assert "x-strata-layers" in answer.headers


@pytest.mark.parametrize("base", ["", "/v1", "/v1/"])
@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/responses", "/v1/responses"),
        ("/v1/responses", "/v1/responses"),
        ("/models", "/v1/models"),
        ("/embeddings?x=1", "/v1/embeddings?x=1"),
    ],
)
async def test_c69_other_routes_get_one_version_segment_too(
    start: Start, upstream: Upstream, base: str, path: str, target: str
) -> None:
    """The same holds for every other route of the API."""
    strata = await start(upstream_url=upstream.origin + base)
    await strata.http.post(path, json={"model": "m", "input": "x"})
    assert [seen.target for seen in upstream.seen] == [target]


async def test_c69_a_base_with_its_own_version_is_taken_as_it_is(start: Start, upstream: Upstream) -> None:
    """A base that names another version gets no `/v1` beside it."""
    strata = await start(upstream_url=upstream.origin + "/v1beta/openai/")
    await strata.post(ASK)
    assert upstream.seen[0].target == "/v1beta/openai/chat/completions"


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/v1/models", b""),
        ("GET", "/v1/models/a%2Fb", b""),
        ("GET", "/v1/models/ft%3Agpt%20x?b=%2F&a=1&a=2", b""),
        ("DELETE", "/v1/files/f1", b""),
        ("POST", "/v1/embeddings", b'{"model": "m",  "input": [1e0, "\\u00e9"]}'),
        ("OPTIONS", "/v1/chat/completions", b""),
        ("PATCH", "/v1/things/1", b"\x00\xff"),
        ("PUT", "/v1/uploads/u1/parts", b"x" * 200_000),
        ("GET", "/v1/chat/completions?limit=3", b""),
    ],
)
async def test_c70_everything_else_passes_through(
    start: Start, upstream: Upstream, method: str, target: str, body: bytes
) -> None:
    """Method, path with its escapes, query, body, status, headers and answer pass unchanged."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.whole(b'{"ok": 1e0}', "application/json", status=203, headers=[("x-thing", "7"), ("allow", "GET")])

    upstream.answer = answer
    strata = await start()
    got = await strata.http.request(method, strata.origin + target, content=body, headers={"x-own": "1"})
    seen = upstream.seen[0]
    assert (seen.method, seen.target, seen.body, seen.header("x-own")) == (method, target, body, "1")
    assert (got.status_code, got.content, got.headers["x-thing"], got.headers["allow"]) == (
        203,
        b'{"ok": 1e0}',
        "7",
        "GET",
    )


async def test_c70_a_head_request_has_an_answer_without_a_body(start: Start, upstream: Upstream) -> None:
    """HEAD passes, and the length it tells stays."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.head([("content-length", "1234")])

    upstream.answer = answer
    strata = await start()
    got = await strata.http.head("/v1/models")
    assert (got.status_code, got.headers["content-length"], got.content) == (200, "1234", b"")


async def test_c70_the_sdk_finds_models_files_and_embeddings(start: Start, provide: StartProvider) -> None:
    """What an SDK asks for at its start works as it does straight at the provider."""
    provider = await provide(Options())
    strata = await start(upstream_url=provider.url)
    for base in (provider.url, strata.origin + "/v1"):
        async with AsyncOpenAI(base_url=base, api_key="k", max_retries=0) as client:
            assert [model.id async for model in client.models.list()]
            assert (await client.models.retrieve("openai/gpt-oss-120b")).id == "openai/gpt-oss-120b"
            assert (await client.embeddings.create(model="text-embedding-3-small", input="tide")).data
            kept = await client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
            assert (await client.files.delete(kept.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("nobody/knows")


TOLD = [
    ("x-request-id", "req_1"),
    ("x-ratelimit-remaining-tokens", "149"),
    ("openai-processing-ms", "12"),
    ("retry-after", "7"),
    ("retry-after-ms", "7000"),
    ("x-should-retry", "false"),
    ("set-cookie", "a=1"),
    ("set-cookie", "b=2"),
    ("date", "Mon, 03 Mar 2031 10:00:00 GMT"),
    ("server", "pier/1"),
    ("x-never-seen", "1"),
]


@pytest.mark.parametrize("mode", ["plain", "stream", "error", "error-to-stream", "other-route"])
async def test_c71_every_header_of_the_answer_arrives_once(start: Start, upstream: Upstream, mode: str) -> None:
    """All end-to-end headers arrive as often as they were sent, in streams and errors too; those of the hop do not."""

    async def answer(_: Seen, wire: Wire) -> None:
        headers = [*TOLD, ("connection", "keep-alive, x-hop"), ("x-hop", "1"), ("keep-alive", "timeout=5")]
        if mode == "stream":
            await wire.events(*STREAM_ANSWER, DONE, headers=headers)
        else:
            await wire.whole(CHAT_ANSWER, status=429 if mode.startswith("error") else 200, headers=headers)

    upstream.answer = answer
    strata = await start()
    body = STREAM if "stream" in mode else ASK
    got = await strata.post(body, path="/v1/embeddings" if mode == "other-route" else "/v1/chat/completions")
    assert got.status_code == (429 if mode.startswith("error") else 200)
    headers = [(name.decode().lower(), value.decode()) for name, value in got.headers.raw]
    for name in {name for name, _ in TOLD}:
        assert [value for found, value in headers if found == name] == [value for told, value in TOLD if told == name]
    names = [name for name, _ in headers]
    assert not {"x-hop", "keep-alive"} & set(names)
    assert len([name for name in names if name in {"content-length", "transfer-encoding"}]) == 1


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 429, 500, 502, 503, 504])
async def test_c72_one_call_whatever_the_status(start: Start, upstream: Upstream, body: object, status: int) -> None:
    """An error status reaches the client after exactly one upstream call: retries are the SDK's."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.whole(b'{"error":{"message":"no"}}', status=status)

    upstream.answer = answer
    strata = await start()
    for calls in (1, 2):
        assert (await strata.post(body)).status_code == status
        assert len(upstream.seen) == calls


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["plain", "stream"])
async def test_c72_silence_is_no_reason_to_repeat(start: Start, upstream: Upstream, body: object) -> None:
    """An upstream that never answers is called once, on a kept connection too: the request may be under way there."""
    silent = False

    async def answer(seen: Seen, wire: Wire) -> None:
        if silent:
            await asyncio.Event().wait()
        await chat_answer(seen, wire)

    upstream.answer = answer
    strata = await start(first_byte_timeout_seconds=0.3)
    assert (await strata.post(body)).status_code == 200
    silent = True
    assert (await strata.post(body)).status_code == 504
    assert len(upstream.seen) == 2


async def test_c72_a_cut_answer_is_not_repeated(start: Start, upstream: Upstream) -> None:
    """An answer that breaks off is not fetched again."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.begin_events()
        await wire.chunk(delta("Do"))
        wire.hang_up()

    upstream.answer = answer
    strata = await start()
    await strata.post(STREAM)
    assert len(upstream.seen) == 1


async def test_c72_the_sdk_retries_as_often_as_without_a_proxy(start: Start, provide: StartProvider) -> None:
    """An SDK with two retries makes three upstream calls, not more."""
    provider = await provide(Options())
    for _ in range(3):
        provider.simulator.faults.append("status=429; retry_after=0.01")
    strata = await start(upstream_url=provider.url)
    async with AsyncOpenAI(base_url=strata.origin + "/v1", api_key="k", max_retries=2) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="gpt-5.1", messages=[{"role": "user", "content": "hi"}])
    assert len(provider.simulator.requests) == 3


VENDOR = (
    b'{ "model":"m", "messages":[{"role":"user","content":"hi","x_part":{"b":1,"a":2.0}}],\n'
    b' "prompt_cache_key":"k" ,"reasoning_effort":"low","x_vendor":{"a":[1,null,1e2]},"x_\\u00e9":-0.0 }'
)


@pytest.mark.parametrize("named", [{}, {"x-strata-conversation": "c73"}], ids=["anonymous", "named"])
async def test_c73_unknown_fields_pass_and_nothing_is_added(
    start: Start, upstream: Upstream, named: Mapping[str, str]
) -> None:
    """Fields nobody knows pass with their spelling; the proxy's own headers stay here and it adds no field."""
    strata = await start(budget_tokens=100_000)
    answer = await strata.post(VENDOR, {**named, "x-strata-anything": "1", "x-own": "2"})
    assert answer.status_code == 200
    assert upstream.bodies == [VENDOR]
    names = {name.lower() for name, _ in upstream.seen[0].headers}
    assert "x-own" in names
    assert not [name for name in names if name.startswith("x-strata")]
    assert not names & {"x-forwarded-for", "forwarded", "via"}


@pytest.mark.parametrize("mode", ["layered", "observe"])
@pytest.mark.parametrize(
    ("sent", "forwarded"),
    [
        (b'{"strata":{"conversation":"c"},"model":"m","messages":[]}', b'{"model":"m","messages":[]}'),
        (b'{"model":"m","strata" : {},"messages":[]}', b'{"model":"m","messages":[]}'),
        (b'{"model":"m","messages":[], "strata":{"context":[]} }', b'{"model":"m","messages":[] }'),
    ],
)
async def test_c73_the_proxys_own_member_stays_here(
    start: Start, upstream: Upstream, mode: str, sent: bytes, forwarded: bytes
) -> None:
    """The `strata` member, wherever it stands, is taken out and the rest is as it came, in every mode."""
    strata = await start(mode=mode)
    assert (await strata.post(sent)).status_code == 200
    assert upstream.bodies == [forwarded]


async def test_c74_odd_chunks_pass_and_none_is_added(start: Start, upstream: Upstream) -> None:
    """Vendor keys, a trailer without choices, comments and absent usage pass byte for byte; no event is added."""
    odd = [
        b": keep-alive\n\n",
        delta("Do", x_vendor={"took": 0.1}, error=None),
        event({"warning": "slow"}),
        b"event: ping\r\ndata: {}\r\n\r\n",
        event({"id": "c1", "choices": None, "x": 1}),
        delta(finish="stop"),
        event({"id": "c1", "choices": [], "prompt_filter_results": []}),
        b"id: 7\nretry: 10\ndata: " + orjson.dumps({"choices": [], "obfuscation": "x"}) + b"\n\n",
        DONE,
    ]

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.events(*odd)

    upstream.answer = answer
    strata = await start()
    for more in ({}, {"stream_options": {"include_usage": True}}):
        got = await strata.post({**STREAM, **more})
        assert got.content == b"".join(odd)
    assert (await strata.metrics()).total("strata_requests_total", outcome="ok") == 2


async def test_c74_a_stream_without_done_gets_none(start: Start, upstream: Upstream) -> None:
    """A stream that ends behind its finish reason is complete; no `[DONE]` is invented."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.events(*STREAM_ANSWER)

    upstream.answer = answer
    strata = await start()
    assert (await strata.post(STREAM)).content == b"".join(STREAM_ANSWER)
    assert (await strata.metrics()).total("strata_requests_total", outcome="ok") == 1


SECRETS = {
    "authorization": "Bearer sk-client-SECRET-1",
    "api-key": "azure-SECRET-2",
    "openai-organization": "org-SECRET-3",
    "openai-project": "proj-SECRET-4",
    "cookie": "session=SECRET-5",
}
AZURE = "/openai/deployments/d1/chat/completions?api-version=2031-01-01"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", AZURE])
async def test_c75_without_a_key_of_its_own_credentials_pass_unchanged(
    start: Start, upstream: Upstream, path: str
) -> None:
    """In pass-through mode every credential of the client goes to the configured host as it came."""
    strata = await start()
    answer = await strata.post(ASK, SECRETS, path=path)
    assert answer.status_code == 200
    assert {name: upstream.seen[0].header(name) for name in SECRETS} == SECRETS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", AZURE])
@pytest.mark.parametrize("tenants", [False, True])
async def test_c75_with_a_held_key_no_credential_of_the_client_leaves(
    start: Start, upstream: Upstream, path: str, tenants: bool
) -> None:
    """Where the proxy holds the key, no credential and no organisation of the client goes upstream."""
    given = {"tenants__acme__keys": "sk-client-SECRET-1"} if tenants else {}
    strata = await start(upstream_key="sk-held-KEY", **given)
    answer = await strata.post(ASK, SECRETS, path=path)
    assert answer.status_code == 200
    seen = upstream.seen[0]
    assert seen.header("authorization") == "Bearer sk-held-KEY"
    assert "SECRET" not in str(seen)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_c75_a_redirect_is_the_clients_to_follow(start: Start, upstream: Upstream, path: str) -> None:
    """A redirect to another host is relayed, never followed with the client's credentials."""
    async with Upstream() as other:

        async def answer(_: Seen, wire: Wire) -> None:
            await wire.whole(b"", "text/plain", status=307, headers=[("location", other.url + "/chat/completions")])

        upstream.answer = answer
        strata = await start()
        got = await strata.post(ASK, SECRETS, path=path)
        assert (got.status_code, got.headers["location"]) == (307, other.url + "/chat/completions")
        assert other.seen == []


async def test_c75_azures_route_is_layered_like_chat(start: Start, upstream: Upstream) -> None:
    """Azure's path and query pass as they are, and the request is layered: a repeated item becomes a reference."""
    strata = await start(upstream_url=upstream.origin)
    block = note("log.md")
    sent = chat(system("Be brief."), user(f"{block}\n\nSum it up."), user(f"{block}\n\nAgain."))
    answer = await strata.post(sent, {"authorization": "", "api-key": "azure-SECRET-2"}, path=AZURE)
    assert upstream.seen[0].target == AZURE
    assert upstream.seen[0].header("api-key") == "azure-SECRET-2"
    assert answer.headers["x-strata-references"] == "1"
    assert upstream.bodies[0].count(b"log.md report 3") == 1


async def test_c75_no_key_is_told(start: Start, upstream: Upstream, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither errors, nor logs, nor metrics, nor answer headers hold a key or what is made of one."""
    given = {"tenants__acme__keys": "sk-acme-KEY", "tenants__acme__upstream_key": "sk-held-KEY"}
    strata = await start(log_level="debug", **given)
    refused = await strata.post(ASK, SECRETS)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    served = await strata.post(ASK, {"authorization": "Bearer sk-acme-KEY", "x-strata-conversation": "c75"})
    assert served.status_code == 200
    await upstream.__aexit__()
    broken = await strata.post(ASK, {"authorization": "Bearer sk-acme-KEY"})
    assert broken.status_code == 502
    scraped = (await strata.http.get("/metrics")).text
    await asyncio.sleep(0.1)
    logged = capfd.readouterr()
    told = "".join(
        [scraped, logged.out, logged.err, *(f"{got.headers}{got.text}" for got in (refused, served, broken))]
    )
    assert '"outcome":"ok"' in told
    for secret in ("SECRET", "sk-acme", "sk-held", "sk-client"):
        assert secret not in told


AWKWARD = {
    "lone-surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud800 tail"}]}',
    "lone-surrogate-in-parts": (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\\udfff"}]}]}'
    ),
    "lone-surrogate-in-call": (
        b'{"model":"m","messages":[{"role":"assistant","tool_calls":[{"id":"c","type":"function",'
        b'"function":{"name":"f","arguments":"{\\"a\\":\\"\\ud800\\"}"}}]}]}'
    ),
    "nul": b'{"model":"m","messages":[{"role":"user","content":"a\\u0000b"}]}',
    "line-separator": '{"model":"m","messages":[{"role":"user","content":"a\u2028b\\u2028"}]}'.encode(),
    "escapes": b'{"model":"m","messages":[{"role":"user","content":"\\u00e9\\/\\u0041\\ud83d\\ude00"}]}',
    "big-integer": b'{"model":"m","seed":9007199254740993,"x":123456789012345678901234567890,"messages":[]}',
    "floats": b'{"model":"m","temperature":1.0,"top_p":1e-7,"x":1E+2,"y":-0.0,"messages":[]}',
    "huge-float": b'{"model":"m","x":1e400,"messages":[]}',
    "duplicate-key": b'{"model":"a","messages":[],"model":"b","messages":[{"role":"user","content":"x"}]}',
    "duplicate-key-inside": b'{"model":"m","messages":[{"role":"user","content":"x","role":"user"}]}',
    "bom": b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"x"}]}',
    "white-space": b' \r\n\t{ "model" : "m" ,\n"messages" : [ { "role" : "user" , "content" : "x" } ] } \n',
    "no-messages": b'{"model":"m"}',
    "messages-of-another-kind": b'{"model":"m","messages":{"role":"user"}}',
    "an-array": b'[{"role":"user"}]',
    "deep": b'{"model":"m","messages":[],"x":' + b"[" * 400 + b"]" * 400 + b"}",
    "very-deep": b'{"model":"m","messages":[],"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("given", [{}, {"budget_tokens": 5_000, "output_reserve_tokens": 100}], ids=["free", "budget"])
async def test_c76_awkward_json_is_forwarded_as_it_is(
    start: Start, upstream: Upstream, name: str, given: dict[str, object]
) -> None:
    """Valid JSON, however odd, is forwarded with every string, number and space as the client spelled it."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.whole(CHAT_ANSWER)

    upstream.answer = answer
    strata = await start(**given)
    got = await strata.post(AWKWARD[name], {"x-strata-conversation": "c76"})
    assert got.status_code == 200
    assert upstream.bodies == [AWKWARD[name]]
    again = await strata.post(AWKWARD[name], {"x-strata-conversation": "c76"})
    assert (again.status_code, upstream.bodies[1]) == (200, AWKWARD[name])


@pytest.mark.parametrize("mode", ["layered", "observe"])
@pytest.mark.parametrize("name", [name for name, body in AWKWARD.items() if body.strip()[-1:] == b"}"])
async def test_c76_the_proxys_own_member_stays_here_whatever_is_beside_it(
    start: Start, upstream: Upstream, name: str, mode: str
) -> None:
    """In a body that is awkward the `strata` member is taken out all the same, and nothing else."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.whole(CHAT_ANSWER)

    upstream.answer = answer
    strata = await start(mode=mode)
    body = AWKWARD[name].rstrip()
    sent = body[:-1] + b',"strata":{"conversation":"c76"}}'
    assert (await strata.post(sent)).status_code == 200
    assert b"strata" not in upstream.bodies[0]
    assert upstream.bodies[0].rstrip() == body or upstream.bodies[0].replace(b" ", b"") == body.replace(b" ", b"")


async def test_c76_spelling_survives_beside_a_change(start: Start, upstream: Upstream) -> None:
    """Where one block is replaced and history is cut, all else keeps its spelling: escapes, numbers, spaces."""
    block = orjson.dumps(note("log.md"))[1:-1]
    kept = b'{ "role":"user" , "content":"\\u00e9 \\/\\n' + block + b'", "x":1.0e2 }'
    old = b'{"role":"user","content":' + orjson.dumps(words(900)) + b'},{"role":"assistant","content":"\\u0041"},'
    sent = (
        b'{"seed":9007199254740993,"messages":[' + old * 3 + kept + b', {"role":"assistant","content":"\\u0042"} ,'
        b'{"role":"user","content":"' + block + b'\\n\\nWhy?"}],"model":"gpt-4o","top_p":1e-7}'
    )
    strata = await start(budget_tokens=2_000, output_reserve_tokens=100)
    answer = await strata.post(sent)
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert answer.headers["x-strata-references"] == "1"
    forwarded = upstream.bodies[0]
    assert forwarded.startswith(b'{"seed":9007199254740993,"messages":[')
    assert kept + b', {"role":"assistant","content":"\\u0042"} ,' in forwarded
    assert forwarded.endswith(b'Why?"}],"model":"gpt-4o","top_p":1e-7}')
    assert orjson.loads(forwarded)["messages"][-1]["content"].startswith("Context attached:\n- log.md\n")


@pytest.mark.parametrize("body", [b"", b"{", b'{"model":"m",}', b"{'model':1}", b'{"model":"m"} x', b"nonsense"])
async def test_c76_what_is_no_json_is_a_400(start: Start, upstream: Upstream, body: bytes) -> None:
    """Invalid JSON is a 400 in the OpenAI shape, never a 500."""
    strata = await start()
    answer = await strata.post(body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert upstream.seen == []


@pytest.mark.parametrize("field", [b'"model":"\xff","messages":[]', b'"messages":[{"role":"user","content":"\xc3("}]'])
async def test_c76_what_is_no_utf8_is_no_crash(start: Start, upstream: Upstream, field: bytes) -> None:
    """Text that is no UTF-8 is either forwarded as it is or a 400 in the OpenAI shape."""

    async def answer(_: Seen, wire: Wire) -> None:
        await wire.whole(CHAT_ANSWER)

    upstream.answer = answer
    strata = await start(budget_tokens=1_000, output_reserve_tokens=100)
    got = await strata.post(b"{" + field + b"}")
    if got.status_code == 200:
        assert upstream.bodies == [b"{" + field + b"}"]
    else:
        assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("name", ["escapes", "white-space", "floats", "nul"])
async def test_c76_spelling_survives_a_stream(start: Start, upstream: Upstream, name: str) -> None:
    """Asking for usage in a stream changes nothing else of an awkward body."""
    body = AWKWARD[name].rstrip()[:-1] + b',"stream":true}'
    strata = await start()
    assert (await strata.post(body)).status_code == 200
    assert without_usage_wish(upstream.bodies[0]) == body
