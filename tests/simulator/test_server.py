"""Serving in this loop and in a thread."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest
from openai import OpenAI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from proxy.simulator.app import create
from proxy.simulator.server import serve

CHAT = {"model": "gpt-5.1", "messages": [{"role": "user", "content": "hi"}]}


def test_thread_serves_the_sync_client() -> None:
    """A server in a thread answers the sync SDK, resets connections, and stops quickly with requests in flight."""
    app = create()
    with serve(app) as server:
        with OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
            reply = client.chat.completions.create(
                model="gpt-5.1", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert [chunk.id for chunk in reply]
        with httpx.Client(base_url=server.base_url, trust_env=False) as http:
            with pytest.raises(httpx.ReadError):
                http.post("/chat/completions", json=CHAT, headers={"x-sim-fault": "reset"})
            headers = {"x-sim-fault": "first_token_delay=30"}
            with http.stream("POST", "/chat/completions", json={**CHAT, "stream": True}, headers=headers):
                started = time.perf_counter()
                server.__exit__()
    assert time.perf_counter() - started < 1.5
    assert [entry.outcome for entry in app.state.simulator.requests] == ["complete", "fault", "client_gone"]


async def test_small_events_are_not_held_back() -> None:
    """Consecutive streams on one connection never wait for a delayed acknowledgement (40 ms each)."""
    async with serve(create()) as server, httpx.AsyncClient(trust_env=False) as http:
        await http.post(f"{server.base_url}/chat/completions", json={**CHAT, "stream": True})
        started = time.perf_counter()
        for _ in range(20):
            await http.post(f"{server.base_url}/chat/completions", json={**CHAT, "stream": True})
    assert time.perf_counter() - started < 20 * 0.03


async def test_loop_server_stops_quickly() -> None:
    """A server in the loop drops open connections and frees its port."""
    async with serve(create()) as server, httpx.AsyncClient(trust_env=False) as http:
        await http.get(f"{server.base_url}/models")
        started = time.perf_counter()
        await server.__aexit__()
        assert time.perf_counter() - started < 1
        with pytest.raises(httpx.TransportError):
            await http.get(f"{server.base_url}/models")


async def test_reset_is_a_tcp_reset() -> None:
    """A reset reaches the client as a reset, not as an orderly end, and after the events before it."""
    body = orjson.dumps({**CHAT, "stream": True})
    for fault, events in (("reset", 0), ("reset_mid=3", 3)):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-sim-fault: {fault}\r\n"
        async with serve(create()) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            got = bytearray()
            with pytest.raises(ConnectionResetError):
                await _read_into(got, reader)
            assert got.count(b"data: ") == events
            writer.close()


async def _read_into(got: bytearray, reader: asyncio.StreamReader) -> None:
    while chunk := await reader.read(100):
        got += chunk


async def test_any_app_with_its_lifespan() -> None:
    """Another ASGI app is served too, and its lifespan runs."""
    seen = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        seen.append("up")
        yield
        seen.append("down")

    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("yes"))], lifespan=lifespan)
    async with serve(app) as server, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(server.origin)).text == "yes"
    assert seen == ["up", "down"]


def test_taken_port_is_an_error() -> None:
    """A port in use makes starting fail, in the thread that starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"), serve(create(), port=taken.getsockname()[1]):
            pass


async def test_other_servers_fail_instead_of_resetting() -> None:
    """Without a resettable connection the reset fault fails the request."""
    app = create()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://sim/v1") as http:
        assert (await http.post("/chat/completions", json=CHAT)).status_code == 200
        with pytest.raises(ConnectionResetError):
            await http.post("/chat/completions", json=CHAT, headers={"x-sim-fault": "reset"})
    assert app.state.simulator.requests[-1].outcome == "fault"


async def test_half_sent_request_is_a_gone_client() -> None:
    """A client that leaves while sending its body is recorded as gone."""
    app = create()
    async with serve(app) as server:
        with socket.create_connection((server.host, server.port)) as half:
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.get(f"{server.base_url}/models")
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.get(f"{server.base_url}/models")
    assert app.state.simulator.requests[0].outcome == "client_gone"
