"""Fault texts, and what each fault does to a real connection."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import openai
import orjson
import pytest
from openai import AsyncOpenAI

from proxy.simulator.app import Simulator
from proxy.simulator.faults import NONE, FaultQueue, Faults, FaultTextError, parse
from proxy.simulator.server import Serving

CHAT = {"model": "gpt-5.1", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", NONE),
        (" ; ", NONE),
        ("status=429", Faults(status=429)),
        ("status=429; retry_after=2", Faults(status=429, retry_after=2.0)),
        ("delay=0.5;first_token_delay=1", Faults(delay=0.5, first_token_delay=1.0)),
        ("reset", Faults(reset=True)),
        ("reset_mid = 3 ; gap=.1", Faults(reset_mid=3, gap=0.1)),
        ("cut=0", Faults(cut=0)),
        ("no_done; malformed; no_usage", Faults(no_done=True, malformed=True, no_usage=True)),
        ("html502", Faults(html502=True)),
        ("in_band_error=2", Faults(in_band_error=2)),
    ],
)
def test_fault_text_is_read(text: str, faults: Faults) -> None:
    """Every fault can be written down, alone or with others."""
    assert parse(text) == faults


@pytest.mark.parametrize(
    "text", ["explode", "status", "status=", "status=x", "cut=1.5", "reset=1", "cut=-1", "cut=1;;x"]
)
def test_bad_fault_text_is_named(text: str) -> None:
    """An unknown fault, a missing or an unreadable number is an error that names the offender."""
    with pytest.raises(FaultTextError, match=text.rpartition(";")[2]):
        parse(text)


def test_queue_gives_one_fault_per_request() -> None:
    """Queued faults are taken in order; bad ones are refused when queued."""
    queue = FaultQueue()
    queue.append("reset")
    queue.append("")
    queue.append("cut=1")
    with pytest.raises(FaultTextError):
        queue.append("nonsense")
    assert [queue.take() for _ in range(4)] == ["reset", "", "cut=1", ""]
    queue.append("reset")
    queue.clear()
    assert len(queue) == 0


@pytest.fixture
async def http(server: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.base_url, trust_env=False) as connected:
        yield connected


async def post(http: httpx.AsyncClient, body: object, fault: str) -> httpx.Response:
    return await http.post("/chat/completions", json=body, headers={"x-sim-fault": fault})


async def events(http: httpx.AsyncClient, fault: str) -> list[str]:
    return [line.removeprefix("data: ") for line in (await post(http, STREAM, fault)).text.split("\n\n") if line]


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limit_exceeded"), (500, None), (503, None), (404, "model_not_found"), (418, None)]
)
async def test_status(http: httpx.AsyncClient, simulator: Simulator, status: int, code: str | None) -> None:
    """``status`` answers an OpenAI-shaped error before anything is charged."""
    response = await post(http, CHAT, f"status={status}")
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "retry-after" not in response.headers
    entry = simulator.requests[-1]
    assert (entry.status, entry.outcome, entry.charge, entry.fault) == (status, "fault", None, f"status={status}")


async def test_retry_after(http: httpx.AsyncClient) -> None:
    """``retry_after`` adds the header to the error."""
    response = await post(http, CHAT, "status=429; retry_after=0.5")
    assert response.headers["retry-after"] == "0.5"


async def test_html502(http: httpx.AsyncClient) -> None:
    """``html502`` answers as a gateway does, without JSON."""
    response = await post(http, CHAT, "html502")
    assert response.status_code == 502
    assert response.headers["content-type"] == "text/html"
    assert "<h1>502 Bad Gateway</h1>" in response.text


async def test_bad_fault_is_a_bad_request(http: httpx.AsyncClient) -> None:
    """A fault text that cannot be read is answered 400 and named."""
    response = await post(http, CHAT, "explode=1")
    assert response.status_code == 400
    assert "explode=1" in response.json()["error"]["message"]


async def test_queued_fault_is_used_up(http: httpx.AsyncClient, simulator: Simulator) -> None:
    """A queued fault hits the next request and only that one."""
    simulator.faults.append("status=500")
    assert (await http.post("/chat/completions", json=CHAT)).status_code == 500
    assert (await http.post("/chat/completions", json=CHAT)).status_code == 200


async def test_delay_comes_before_the_headers(http: httpx.AsyncClient) -> None:
    """``delay`` holds the headers back."""
    started = time.perf_counter()
    async with http.stream("POST", "/chat/completions", json=STREAM, headers={"x-sim-fault": "delay=0.2"}):
        assert time.perf_counter() - started >= 0.2


async def test_first_token_delay_comes_after_the_headers(http: httpx.AsyncClient) -> None:
    """``first_token_delay`` sends the headers at once and the first event late."""
    started = time.perf_counter()
    headers = {"x-sim-fault": "first_token_delay=0.3"}
    async with http.stream("POST", "/chat/completions", json=STREAM, headers=headers) as response:
        assert time.perf_counter() - started < 0.25
        await anext(response.aiter_raw())
        assert time.perf_counter() - started >= 0.3


async def test_gap_spreads_the_events(http: httpx.AsyncClient) -> None:
    """``gap`` waits between the events."""
    started = time.perf_counter()
    count = len(await events(http, "gap=0.005"))
    assert time.perf_counter() - started >= 0.005 * (count - 1)


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_reset(http: httpx.AsyncClient, simulator: Simulator, body: object) -> None:
    """``reset`` drops the connection before any byte."""
    with pytest.raises(httpx.ReadError):
        await post(http, body, "reset")
    entry = simulator.requests[-1]
    assert (entry.outcome, entry.status, entry.charge) == ("fault", None, None)
    assert (await http.post("/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(("limit", "sent"), [(0, 0), (3, 3), (10_000, None)])
async def test_reset_mid(http: httpx.AsyncClient, simulator: Simulator, limit: int, sent: int | None) -> None:
    """``reset_mid`` drops the connection after so many events, at the latest before the finish reason."""
    got = bytearray()
    with pytest.raises(httpx.ReadError):
        await _stream_into(got, http, f"reset_mid={limit}")
    entry = simulator.requests[-1]
    assert got.count(b"data: ") == entry.events
    assert sent is None or entry.events == sent
    assert b'"finish_reason":"stop"' not in got
    assert entry.outcome == "fault"
    assert entry.charge is not None


async def _stream_into(got: bytearray, http: httpx.AsyncClient, fault: str) -> None:
    async with http.stream("POST", "/chat/completions", json=STREAM, headers={"x-sim-fault": fault}) as response:
        async for chunk in response.aiter_raw():
            got += chunk


async def test_reset_mid_of_a_plain_reply(http: httpx.AsyncClient) -> None:
    """``reset_mid`` drops a plain reply in the middle of its body."""
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await post(http, CHAT, "reset_mid=1")


@pytest.mark.parametrize("limit", [0, 4, 10_000])
async def test_cut(http: httpx.AsyncClient, simulator: Simulator, limit: int) -> None:
    """``cut`` ends the stream cleanly without finish reason, usage and ``[DONE]``."""
    got = await events(http, f"cut={limit}")
    assert len(got) == simulator.requests[-1].events == min(limit, len(got))
    assert "[DONE]" not in got
    assert all(orjson.loads(event)["choices"][0]["finish_reason"] is None for event in got)
    assert simulator.requests[-1].outcome == "fault"
    assert simulator.requests[-1].completion_tokens <= len(got)


async def test_cut_reply_is_half_a_body(http: httpx.AsyncClient) -> None:
    """``cut`` and ``malformed`` break a plain reply's JSON under status 200."""
    for fault in ("cut=1", "malformed"):
        response = await post(http, CHAT, fault)
        assert response.status_code == 200
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(response.content)


async def test_no_done(http: httpx.AsyncClient) -> None:
    """``no_done`` leaves only ``[DONE]`` out."""
    got = await events(http, "no_done")
    assert orjson.loads(got[-2])["choices"][0]["finish_reason"] == "stop"
    assert orjson.loads(got[-1])["usage"]["prompt_tokens"] > 0


async def test_malformed(http: httpx.AsyncClient) -> None:
    """``malformed`` puts one broken event into the middle of an otherwise whole stream."""
    whole, got = await events(http, ""), await events(http, "malformed")
    broken = [event for event in got[:-1] if not event.endswith("}")]
    assert len(broken) == 1
    assert len(got) == len(whole) + 1
    assert got.index(broken[0]) not in (0, len(got) - 1)
    assert got[-1] == "[DONE]"


async def test_no_usage(http: httpx.AsyncClient) -> None:
    """``no_usage`` leaves the usage out of streams and plain replies."""
    assert not any("usage" in event for event in await events(http, "no_usage"))
    assert "usage" not in (await post(http, CHAT, "no_usage")).json()


async def test_in_band_error(http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    """``in_band_error`` ends the stream with an error event, which the SDK raises."""
    got = await events(http, "in_band_error=2")
    assert len(got) == 3
    assert orjson.loads(got[-1])["error"]["type"] == "server_error"
    assert (await post(http, CHAT, "in_band_error=0")).json()["error"]["type"] == "server_error"
    stream = await client.chat.completions.create(
        model="gpt-5.1",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        extra_headers={"x-sim-fault": "in_band_error=2"},
    )
    with pytest.raises(openai.APIError, match="had an error"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_leaving_client_stops_generation(http: httpx.AsyncClient, simulator: Simulator, body: object) -> None:
    """A client that gives up ends the request at once, and the entry says so."""
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/chat/completions", json=body, headers={"x-sim-fault": "gap=0.3"}, timeout=0.2)
    async with asyncio.timeout(1):
        while simulator.requests[-1].outcome == "pending":
            await asyncio.sleep(0.01)
    entry = simulator.requests[-1]
    assert entry.outcome == "client_gone"
    assert entry.events <= 1
    assert entry.completion_tokens <= 1
