"""Field failures of kind C: token counting."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import pytest

from proxy.core import budget, tokens
from proxy.core.models import describe
from proxy.memo import count
from proxy.simulator.app import Options
from tests.cases.conftest import (
    GUARD_SECONDS,
    Start,
    StartProvider,
    Upstream,
    assistant,
    call,
    chat,
    provider_tokens,
    result,
    system,
    until,
    user,
    words,
)

SPECIAL = "What do <|endoftext|>, <|fim_prefix|> and <|im_start|> mean?"


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4", "acme-chat-7b"])
@pytest.mark.parametrize("budget_tokens", [100_000, 900])
async def test_c28_special_tokens_are_text(start: Start, upstream: Upstream, model: str, budget_tokens: int) -> None:
    """The spelling of special tokens, in any place, is served, forwarded unchanged and counted as the text it is."""
    strata = await start(budget_tokens=budget_tokens, output_reserve_tokens=100)
    tool = {"type": "function", "function": {"name": "look_up", "description": SPECIAL, "parameters": {}}}
    sent = chat(
        system(SPECIAL),
        user(SPECIAL + words(300)),
        {"role": "assistant", "content": SPECIAL, "tool_calls": [call("c1", arguments=orjson.dumps(SPECIAL).decode())]},
        result("c1", SPECIAL),
        tools=[tool],
        model=model,
    )
    answer = await strata.post(sent)
    assert answer.status_code == 200
    assert upstream.bodies == [orjson.dumps(sent)]
    assert "x-strata-warning" not in answer.headers


def test_c28_a_special_token_costs_what_its_letters_cost() -> None:
    """Ordinary text, not one token: `<|endoftext|>` costs several."""
    assert count("<|endoftext|>") > 3
    raw = orjson.dumps(user("<|endoftext|>"))
    assert tokens.message(raw, count) == tokens.PER_MESSAGE + 1 + count("<|endoftext|>")


def many_tools(number: int) -> list[dict[str, object]]:
    """Return definitions of about 70 tokens each."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"station_{place}",
                "description": f"Reads the gauge of station {place} and says how high the water stands there.",
                "parameters": {
                    "type": "object",
                    "properties": {"from": {"type": "string"}, "to": {"type": "string"}, "step": {"type": "integer"}},
                    "required": ["from"],
                },
            },
        }
        for place in range(number)
    ]


async def test_c31_tool_definitions_count(start: Start, upstream: Upstream) -> None:
    """With tools of 4,000 tokens history is cut until tools, messages and reserve fit; the tools stay as they are."""
    strata = await start(budget_tokens=6_000, output_reserve_tokens=500)
    tools = many_tools(58)
    history = [
        message
        for turn in range(14)
        for message in (user(f"Turn {turn}: {words(110, f't{turn}')}"), assistant(words(140, f"a{turn}")))
    ]
    sent = chat(system("Be brief."), *history, user("And now?"), tools=tools)
    whole, bare = provider_tokens(orjson.dumps(sent)), provider_tokens(orjson.dumps({**sent, "tools": []}))
    assert whole - bare > 3_500
    assert bare > 3_000
    answer = await strata.post(sent)
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert provider_tokens(upstream.bodies[0]) <= 5_500
    assert b'"tools":' + orjson.dumps(tools) in upstream.bodies[0]
    assert upstream.seen[0].json["messages"][-1] == user("And now?")


async def test_c31_call_arguments_count(start: Start, upstream: Upstream) -> None:
    """Large arguments in old calls count as much as text does."""
    strata = await start(budget_tokens=3_000, output_reserve_tokens=500)
    history = []
    for turn in range(10):
        arguments = orjson.dumps({"path": f"log-{turn}.md", "body": words(350, f"log{turn}")}).decode()
        history += [
            user(f"Write log {turn}."),
            {"role": "assistant", "content": None, "tool_calls": [call(f"c{turn}", "write", arguments)]},
            result(f"c{turn}", "written"),
            assistant("It is written."),
        ]
    answer = await strata.post(chat(system("Be brief."), *history, user("And now?")))
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert provider_tokens(upstream.bodies[0]) <= 2_500


async def test_c31_a_response_format_counts(start: Start, upstream: Upstream) -> None:
    """A large answer schema takes its part of the budget, and is never shortened."""
    strata = await start(budget_tokens=4_000, output_reserve_tokens=500)
    fields = {f"gauge_{number}": {"type": "string", "description": words(40)} for number in range(40)}
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "table", "schema": {"type": "object", "properties": fields}},
    }
    talk = [message for turn in range(12) for message in (user(words(150, f"t{turn}")), assistant("Noted."))]
    answer = await strata.post(chat(*talk, user("As a table."), response_format=shape))
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert provider_tokens(upstream.bodies[0]) <= 3_500
    assert b'"response_format":' + orjson.dumps(shape) in upstream.bodies[0]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_c32_the_reply_has_room(start: Start, provide: StartProvider, field: str) -> None:
    """History is cut until prompt and reply fit the model's window; the client's reply allowance is left alone."""
    provider = await provide(Options(max_context_tokens=8_192))
    strata = await start(upstream_url=provider.url)
    history = [
        message
        for turn in range(20)
        for message in (user(f"Turn {turn}: {words(160, f't{turn}')}"), assistant(words(160, f"a{turn}")))
    ]
    sent = chat(system("Be brief."), *history, user("And now?"), model="gpt-4", **{field: 3_000})
    assert 6_000 < provider_tokens(orjson.dumps(sent)) < 8_192
    answer = await strata.post(sent)
    assert answer.status_code == 200
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert orjson.loads(provider.bodies[0])[field] == 3_000
    assert provider_tokens(provider.bodies[0]) <= 8_192 - 3_000


async def test_c32_a_prompt_that_fits_beside_its_reply_is_whole(start: Start, upstream: Upstream) -> None:
    """Under a budget beyond the window a small reply allowance leaves all the rest of the window to the prompt."""
    strata = await start(budget_tokens=100_000)
    sent = chat(*(user(words(350, f"t{turn}")) for turn in range(20)), model="gpt-4", max_tokens=200)
    assert provider_tokens(orjson.dumps(sent)) > 8_192 - 4_096
    await strata.post(sent)
    assert upstream.bodies == [orjson.dumps(sent)]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_c32_an_allowance_beyond_the_window_is_the_upstreams_to_refuse(
    start: Start, provide: StartProvider, field: str
) -> None:
    """A reply allowance larger than the window is forwarded as it is; the client gets the upstream's own clear 400."""
    provider = await provide(Options(max_context_tokens=8_192))
    strata = await start(upstream_url=provider.url, over_budget="reject")
    sent = chat(system("Be brief."), user("And now?"), model="gpt-4", **{field: 9_000})
    answer = await strata.post(sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in answer.json()["error"]["message"]
    assert provider.bodies == [orjson.dumps(sent)]


MISSING = object()
MODELS = ["acme-chat-7b", "o1", "gpt-9.1", "org/Model:Tag", "", "модель-7"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("budget_tokens", [None, 700])
async def test_c33_any_model_name_is_served(
    start: Start, upstream: Upstream, model: str, budget_tokens: int | None
) -> None:
    """An unknown, dotted, tagged or empty model name is counted by a fallback and forwarded exactly as it is."""
    strata = await start(**({"budget_tokens": budget_tokens, "output_reserve_tokens": 100} if budget_tokens else {}))
    sent = chat(system("Be brief."), user(words(280)), model=model)
    answer = await strata.post(sent)
    assert answer.status_code == 200
    assert upstream.bodies == [orjson.dumps(sent)]
    assert "x-strata-warning" not in answer.headers
    label = "o1" if model == "o1" else "other"
    assert (await strata.metrics()).total("strata_requests_total", model=label, outcome="ok") == 1


@pytest.mark.parametrize("model", [None, 7, {"name": "x"}, MISSING], ids=str)
async def test_c33_a_model_that_is_no_name_is_the_upstreams_to_judge(
    start: Start, upstream: Upstream, model: object
) -> None:
    """A model that is no string, or none at all, is forwarded as it is."""
    strata = await start(budget_tokens=700, output_reserve_tokens=100)
    sent = {"messages": [user(words(280))], **({} if model is MISSING else {"model": model})}
    assert (await strata.post(sent)).status_code == 200
    assert upstream.bodies == [orjson.dumps(sent)]


@pytest.mark.parametrize("model", MODELS)
def test_c33_a_guess_keeps_a_margin(model: str) -> None:
    """A count that may be too low is held to a smaller limit; an exact one is not."""
    known = describe(model)
    found = budget.limit(model=known, budget=11_000, reserve=1_000, reply=None)
    assert found is not None
    assert found.tokens == (10_000 if known.exact else 9_090)


async def test_c33_no_window_is_assumed_for_an_unknown_model(start: Start, upstream: Upstream) -> None:
    """Without a budget nothing is cut for a model whose window is unknown."""
    strata = await start()
    sent = chat(*(user(words(9_000, f"t{turn}")) for turn in range(20)), model="acme-chat-7b")
    await strata.post(sent)
    assert upstream.bodies == [orjson.dumps(sent)]


GUARDED = """
import os, sys

allowed, log = int(sys.argv[1]), sys.argv[2]


def local(host):
    return host is None or (host if isinstance(host, str) else host.decode()) in {"127.0.0.1", "localhost", "::1"}


def guard(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host, port = arguments[1][:2]
        good = local(host) and port == allowed
    elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
        good = local(arguments[0])
    else:
        return
    if not good:
        with open(log, "a") as out:
            print(event, arguments[:2], file=out)
        raise OSError("no way out")


sys.addaudithook(guard)
sys.argv = ["proxy", *sys.argv[3:]]
import runpy

runpy.run_module("proxy", run_name="__main__")
"""


@pytest.fixture
async def walled_in(upstream: Upstream, tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """Run `python -m proxy serve` where nothing but the upstream can be reached; yield its origin and the attempts."""
    (tmp_path / "guarded.py").write_text(GUARDED)
    attempts = tmp_path / "attempts"
    attempts.touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nowhere = "http://127.0.0.1:9"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"),
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "ALL_PROXY": nowhere,
        "PYTHONPATH": str(Path(tokens.__file__).parents[2]),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "guarded.py"), upstream.origin.rpartition(":")[2], str(attempts),
        "serve", "--port", str(port), "--upstream", upstream.url,
        env=environment, cwd=tmp_path, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    drained = asyncio.ensure_future(process.stderr.read())
    try:
        yield f"http://127.0.0.1:{port}", attempts
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), GUARD_SECONDS)
        await drained


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4", "acme-chat-7b"])
async def test_c34_starts_and_serves_without_a_way_out(
    walled_in: tuple[str, Path], upstream: Upstream, model: str
) -> None:
    """Where only the upstream can be reached the proxy starts and serves, and tries to reach nothing else."""
    origin, attempts = walled_in
    async with httpx.AsyncClient(base_url=origin, trust_env=False, timeout=GUARD_SECONDS) as http:

        async def ready() -> bool:
            try:
                return (await http.get("/livez")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready)
        sent = chat(system(words(400)), user(words(40_000)), model=model)
        for _ in range(3):
            answer = await http.post("/v1/chat/completions", json=sent)
            assert answer.status_code == 200
            assert "x-strata-layers" in answer.headers
    assert len(upstream.seen) == 3
    assert attempts.read_text() == ""
