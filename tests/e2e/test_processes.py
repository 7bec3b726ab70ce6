"""`python -m proxy` as a process: it starts, stops in good order with streams under way, and refuses bad settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import psutil  # type: ignore[import-untyped,unused-ignore]
import pytest

from proxy.simulator.app import Options, Simulator, create
from proxy.simulator.server import serve
from tests.conftest import redis_command
from tests.e2e.kit import DONE, HANG, MODEL, Proxy, Wire, chat_body, dial, error_events, events, plain_request

ROOT = Path(__file__).resolve().parents[2]
STREAM = orjson.dumps(chat_body(stream=True))


def clean_environment(**settings: str) -> dict[str, str]:
    """Return this environment with no settings but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    return kept | {f"STRATA_{name}": value for name, value in settings.items()}


async def run(*arguments: str, **settings: str) -> tuple[int, str, str]:
    """Run a command to its end; return its status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, env=clean_environment(**settings), cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(2 * HANG):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@dataclass
class Running:
    """A `strata serve` under way."""

    process: asyncio.subprocess.Process
    port: int
    told: Path
    simulator: Simulator

    async def stopped(self, sent: signal.Signals | None = None) -> int:
        """Send a signal, if any, wait for the end and return the status."""
        if sent is not None:
            self.process.send_signal(sent)
        async with asyncio.timeout(2 * HANG):
            return await self.process.wait()

    def lines(self) -> list[str]:
        """Return what it has said."""
        return self.told.read_text().splitlines()

    async def refuses(self) -> None:
        """Wait until new connections are refused."""
        async with asyncio.timeout(HANG):
            while True:
                try:
                    async with dial(self.port) as wire:
                        await wire.send(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
                        await wire.head()
                except (ConnectionError, asyncio.IncompleteReadError):
                    return
                await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def serving(directory: Path, *, options: Options | None = None, **settings: str) -> AsyncIterator[Running]:
    """Run `python -m proxy serve` before a fresh provider until it answers."""
    async with starting(directory, options=options, **settings) as running:
        await alive(running)
        yield running


@contextlib.asynccontextmanager
async def starting(directory: Path, *, options: Options | None = None, **settings: str) -> AsyncIterator[Running]:
    """Start `python -m proxy serve` before a fresh provider, and wait for nothing."""
    provider, port, told = create(options), free_port(), directory / "stderr"
    async with serve(provider) as upstream:
        with told.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "proxy", "serve", "--port", str(port), "--upstream", upstream.base_url,
                env=clean_environment(**settings), cwd=ROOT, stderr=err, stdout=err,
            )  # fmt: skip
        running = Running(process, port, told, provider.state.simulator)
        try:
            yield running
        finally:
            if process.returncode is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()
                await process.wait()


async def alive(running: Running) -> None:
    """Wait until it answers."""
    async with asyncio.timeout(2 * HANG), httpx.AsyncClient(trust_env=False) as http:
        while True:
            assert running.process.returncode is None, running.lines()
            with contextlib.suppress(httpx.TransportError):
                answer = await http.get(f"http://127.0.0.1:{running.port}/livez")
                assert answer.text == "ok\n"
                return
            await asyncio.sleep(0.05)


async def rest(wire: Wire) -> bytes:
    """Read a chunked body to its end."""
    pieces = []
    async with asyncio.timeout(2 * HANG):
        while piece := await wire.chunk():
            pieces.append(piece)
    return b"".join(pieces)


async def streaming(wire: Wire, fault: str) -> None:
    """Start a stream and read its first event."""
    await wire.send(plain_request(STREAM, f"x-sim-fault: {fault}"))
    await wire.head()
    await wire.chunk()


async def test_serves_and_stops(tmp_path: Path) -> None:
    """It says where it listens, answers the SDK, and ends with status 0 on SIGTERM."""
    async with serving(tmp_path) as running:
        assert f"http://127.0.0.1:{running.port}/v1" in running.lines()[0]
        proxy = Proxy(serve(create(), port=running.port), httpx.AsyncClient())
        async with proxy.openai() as client:
            made = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
            )
            assert [item async for item in made][-1].choices[0].finish_reason == "stop"
        await proxy.http.aclose()
        status = await running.stopped(signal.SIGTERM)
        assert [line for line in running.lines() if '"event":"request"' in line]
        assert not [line for line in running.lines() if "Traceback" in line]
        assert status == 0


@pytest.mark.parametrize("path", ["/strata/capture?seconds=600", "/strata/events"])
async def test_whoever_watches_does_not_hold_it(path: str, tmp_path: Path) -> None:
    """A capture and a live page end with it, at once and in good order."""
    async with (
        serving(tmp_path, ADMIN_TOKEN="t-1") as running,
        httpx.AsyncClient(trust_env=False, timeout=HANG, headers={"authorization": "Bearer t-1"}) as http,
        http.stream("GET", f"http://127.0.0.1:{running.port}{path}") as stream,
    ):
        assert stream.status_code == 200
        running.process.send_signal(signal.SIGTERM)
        told = [line async for line in stream.aiter_lines()]
        if "capture" in path:
            assert told == ['{"left_out": 0}']
        assert await running.stopped() == 0
        assert not [line for line in running.lines() if "Traceback" in line]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=("SIGTERM", "Ctrl-C"))
async def test_a_live_stream_may_finish(tmp_path: Path, sent: signal.Signals) -> None:
    """On a signal it stops accepting, lets a live stream finish before the deadline, and ends with status 0."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="30") as running, dial(running.port) as wire:
        await streaming(wire, "gap=0.05")
        running.process.send_signal(sent)
        await running.refuses()
        raw = await rest(wire)
        assert raw.endswith(DONE)
        assert not error_events(raw)
        status = await running.stopped()
        told = [orjson.loads(line) for line in running.lines() if '"event":"request"' in line]
        assert [line["outcome"] for line in told] == ["ok"]
        assert not [line for line in running.lines() if "Traceback" in line]
        assert status == 0


async def test_a_live_plain_request_may_finish(tmp_path: Path) -> None:
    """A request whose answer has not begun is answered before the end."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="30") as running, dial(running.port) as wire:
        await wire.send(plain_request(orjson.dumps(chat_body()), "x-sim-fault: delay=1"))
        await asyncio.sleep(0.2)
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG):
            status, _, _ = await wire.response()
        assert status == 200
        assert await running.stopped() == 0


async def test_an_idle_connection_does_not_hold_it(tmp_path: Path) -> None:
    """Kept connections without a request do not delay the end."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="300") as running, dial(running.port) as wire, dial(running.port):
        await wire.send(plain_request(orjson.dumps(chat_body())))
        await wire.response()
        assert await running.stopped(signal.SIGTERM) == 0


@pytest.mark.parametrize("fault", ["gap=600", "first_token_delay=600"])
async def test_the_deadline_ends_a_stream_with_an_error_event(tmp_path: Path, fault: str) -> None:
    """At the deadline a live stream ends in one error event, is recorded, leaves the upstream; the status is 0."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="1") as running, dial(running.port) as wire:
        await wire.send(plain_request(STREAM, f"x-sim-fault: {fault}"))
        await wire.head()
        if fault == "gap=600":
            await wire.chunk()
        running.process.send_signal(signal.SIGTERM)
        raw = await rest(wire)
        assert [error["code"] for error in error_events(raw)] == ["proxy_shutting_down"]
        assert len(events(raw)) == 1
        status = await running.stopped()
        told = [orjson.loads(line) for line in running.lines() if '"event":"request"' in line]
        assert [(line["outcome"], line.get("cause")) for line in told] == [("shutdown", None)]
        assert told[0]["level"] == "warning"
        async with asyncio.timeout(HANG):
            while running.simulator.requests[-1].outcome == "pending":
                await asyncio.sleep(0.01)
        assert running.simulator.requests[-1].outcome == "client_gone"
        assert status == 0


async def test_the_deadline_ends_waiting_requests(tmp_path: Path) -> None:
    """At the deadline a client that still waits for its answer is told or let go, and one record says so."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="1") as running, dial(running.port) as wire:
        await wire.send(plain_request(STREAM, "x-sim-fault: delay=600"))
        await asyncio.sleep(0.3)
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG):
            raw = await wire.reader.read()
        status = await running.stopped()
        told = [orjson.loads(line) for line in running.lines() if '"event":"request"' in line]
        assert [(line["outcome"], line["level"]) for line in told] == [("shutdown", "warning")]
        assert not raw or (raw.startswith(b"HTTP/1.1 503") and b'"code":"proxy_shutting_down"' in raw)
        assert status == 0


async def test_standard_error_is_json_lines(tmp_path: Path) -> None:
    """What the server itself says too: a WebSocket attempt, bytes that are no HTTP, streams cut at the deadline."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="1") as running:
        upgrade = (
            b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a\r\nsec-websocket-version: 13\r\n\r\n"
        )
        async with dial(running.port) as wire:
            await wire.send(b"GET /v1/realtime HTTP/1.1\r\nhost: a\r\n" + upgrade)
            assert (await wire.response())[0] == 400
        async with dial(running.port) as wire:
            await wire.send(b"\x16\x03\x01")
            await wire.reader.read()
        async with dial(running.port) as wire:
            await streaming(wire, "gap=600")
            assert await running.stopped(signal.SIGTERM) == 0
    told = [orjson.loads(line) for line in running.lines()]
    assert all({"level", "event", "at"} <= line.keys() for line in told)
    said = [line["message"] for line in told if line["event"] == "server"]
    assert len(said) == 3
    assert not any("pip install" in message for message in said)


async def test_a_client_that_does_not_read_does_not_hold_it(tmp_path: Path) -> None:
    """At the deadline a stream whose client has stopped reading is dropped, and the process ends."""
    options = Options(reply_words=200_000)
    async with serving(tmp_path, options=options, SHUTDOWN_SECONDS="1") as running, dial(running.port) as wire:
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await wire.send(plain_request(STREAM))
        await asyncio.sleep(2)
        assert await running.stopped(signal.SIGTERM) == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Ctrl-C twice does not wait for live streams."""
    async with serving(tmp_path, SHUTDOWN_SECONDS="300") as running, dial(running.port) as wire:
        await streaming(wire, "gap=600")
        running.process.send_signal(signal.SIGINT)
        await running.refuses()
        await running.stopped(signal.SIGINT)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_hangup_while_it_starts_is_heard_when_it_has_started(tmp_path: Path, workers: str) -> None:
    """From the line that says where it listens on, SIGHUP ends neither it nor a worker, and none is for nothing."""
    async with starting(tmp_path, WORKERS=workers) as running:
        async with asyncio.timeout(HANG):
            while not running.lines():
                await asyncio.sleep(0.001)
        seen: set[int] = set()

        async def hangups() -> None:
            while True:
                running.process.send_signal(signal.SIGHUP)
                children = psutil.Process(running.process.pid).children()
                seen.update(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))
                await asyncio.sleep(0.02)

        sending = asyncio.ensure_future(hangups())
        await alive(running)
        await asyncio.sleep(1)
        sending.cancel()
        assert running.process.returncode is None
        assert len(seen) == (2 if workers == "2" else 0), "a worker was replaced"
        async with asyncio.timeout(HANG):
            while not [line for line in running.lines() if '"event":"reloaded"' in line]:
                await asyncio.sleep(0.02)
        assert await running.stopped(signal.SIGTERM) == 0


async def test_a_redis_that_hangs_up_on_everybody(tmp_path: Path) -> None:
    """A load balancer with nothing behind it: the proxy starts, every request is served, a good Redis is found."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with (
        serving(tmp_path, REDIS_URL=f"redis://127.0.0.1:{port}/0", TOKENS_PER_DAY="1000000") as running,
        httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{running.port}", timeout=HANG) as http,
    ):

        async def ask(number: int) -> int:
            headers = {"x-strata-conversation": f"c{number}"}
            return (await http.post("/v1/chat/completions", json=chat_body(), headers=headers)).status_code

        for _ in range(6):
            assert set(await asyncio.gather(*map(ask, range(20)))) == {200}
            await asyncio.sleep(0.5)
        assert (await http.get("/readyz")).json()["store"] == "degraded"
        [told] = [orjson.loads(line) for line in running.lines() if "store_degraded" in line]
        assert told["error"]
        listener.close()
        await listener.wait_closed()
        good = subprocess.Popen(redis_command(port, str(tmp_path)), stdout=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(HANG):
                while (await http.get("/readyz")).json()["store"] != "ok":
                    await asyncio.sleep(0.05)
        finally:
            good.kill()
            good.wait()
        assert not [line for line in running.lines() if "Traceback" in line]


async def test_the_port_is_taken() -> None:
    """A port in use ends it with a status other than 0 and a message that names the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = await run("serve", "--port", str(port))
    assert status not in {0, -signal.SIGTERM}
    assert str(port) in err
    assert "address already in use" in err
    assert "Traceback" not in err


async def test_port_0(tmp_path: Path) -> None:
    """With `--port 0` it says which port it took."""
    told = tmp_path / "stderr"
    with told.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "serve", "--port", "0", env=clean_environment(), cwd=ROOT, stderr=err
        )
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(HANG):
            while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", told.read_text())):
                await asyncio.sleep(0.05)
        port = int(found.group(1))
        listening = {each.laddr.port for each in psutil.Process(process.pid).net_connections("inet")}
        assert port != 0, "it announces port 0"
        async with asyncio.timeout(HANG):
            while port not in listening:
                await asyncio.sleep(0.05)
                listening = {each.laddr.port for each in psutil.Process(process.pid).net_connections("inet")}
    finally:
        process.kill()
        await process.wait()


BAD: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "port": ({"PORT": "eighty"}, ("STRATA_PORT", "eighty", "integer")),
    "port too high": ({"PORT": "70000"}, ("STRATA_PORT", "70000", "65535")),
    "mode": ({"MODE": "layerd"}, ("STRATA_MODE", "layerd", "layered", "observe")),
    "url": ({"UPSTREAM_URL": "api.openai.com"}, ("STRATA_UPSTREAM_URL", "api.openai.com", "http://")),
    "redis": ({"REDIS_URL": "localhost:6379"}, ("STRATA_REDIS_URL", "redis://")),
    "redis option": ({"REDIS_URL": "redis://u:hunter2@h:6379?foo=hunter3"}, ("STRATA_REDIS_URL", "query", "db")),
    "budget": ({"BUDGET_TOKENS": "-1"}, ("STRATA_BUDGET_TOKENS", "-1", "greater than 0")),
    "boolean": ({"REMEMBER_CONTENT": "maybe"}, ("STRATA_REMEMBER_CONTENT", "maybe")),
    "timeout": ({"IDLE_TIMEOUT_SECONDS": "0"}, ("STRATA_IDLE_TIMEOUT_SECONDS", "greater than 0")),
    "unknown": ({"UPSTREM_URL": "http://a"}, ("STRATA_UPSTREM_URL", "STRATA_UPSTREAM_URL")),
    "tenant without keys": ({"TENANTS__ACME__KEYS": " , "}, ("STRATA_TENANTS__ACME__KEYS", "at least one key")),
    "tenant's field": ({"TENANTS__ACME__KEY": "a"}, ("STRATA_TENANTS__ACME__KEY", "KEYS")),
    "tenant's budget": (
        {"TENANTS__ACME__KEYS": "a", "TENANTS__ACME__BUDGET_TOKENS": "lots"},
        ("STRATA_TENANTS__ACME__BUDGET_TOKENS", "lots"),
    ),
    "tenant without its keys": ({"TENANTS__ACME__MODE": "observe"}, ("STRATA_TENANTS__ACME__KEYS",)),
    "shared key": ({"TENANTS__A__KEYS": "one", "TENANTS__B__KEYS": "one"}, ("STRATA_TENANTS__B__KEYS",)),
    "open": ({"HOST": "0.0.0.0", "UPSTREAM_KEY": "sk-a"}, ("STRATA_HOST", "0.0.0.0", "STRATA_ALLOW_OPEN")),
    "tag": ({"CONTEXT_TAGS": "a b"}, ("STRATA_CONTEXT_TAGS", "a b")),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_settings(name: str) -> None:
    """A setting that cannot be ends it with status 2 and one line: the variable, its value and what is allowed."""
    settings, words = BAD[name]
    status, _, err = await run("serve", **settings)
    assert status == 2
    assert err.count("\n") == 1
    for word in words:
        assert word.lower() in err.lower()
    assert "sk-a" not in err
    assert "hunter" not in err


async def test_all_bad_settings_at_once() -> None:
    """Every wrong setting is named, not only the first."""
    status, _, err = await run("serve", PORT="x", MODE="y", WORKERS="0")
    assert status == 2
    assert all(f"STRATA_{name}" in err for name in ("PORT", "MODE", "WORKERS"))


async def test_options_win_over_the_environment() -> None:
    """An option of the command line is checked like its variable, and wins over it."""
    status, _, err = await run("serve", "--port", "no", PORT="8080")
    assert status == 2
    assert "STRATA_PORT" in err
    assert "no" in err


async def test_config_masks_secrets() -> None:
    """`strata config` shows every setting with its source, and no secret."""
    secrets = {
        "UPSTREAM_KEY": "sk-secret-a", "REDIS_URL": "redis://:secret-b@localhost/0", "SECRET": "secret-c",
        "ADMIN_TOKEN": "secret-d", "TENANTS__ACME__KEYS": "secret-e,secret-f",
        "TENANTS__ACME__UPSTREAM_KEY": "secret-g",
    }  # fmt: skip
    status, out, err = await run("config", **secrets, BUDGET_TOKENS="12345", TENANTS__ACME__BUDGET_TOKENS="7777")
    assert (status, err) == (0, "")
    assert "secret-" not in out
    rows = {row.split()[0]: row.split()[1:] for row in out.splitlines() if row.startswith("STRATA_")}
    assert rows["STRATA_BUDGET_TOKENS"] == ["12345", "environment"]
    assert rows["STRATA_TENANTS__ACME__BUDGET_TOKENS"] == ["7777", "environment"]
    assert rows["STRATA_UPSTREAM_KEY"] == ["********", "environment"]
    assert rows["STRATA_PORT"] == ["8080", "default"]


async def test_config_refuses_bad_settings() -> None:
    """`strata config` names what is wrong just as `serve` does."""
    status, _, err = await run("config", PORT="x")
    assert status == 2
    assert "STRATA_PORT" in err


async def test_two_workers(tmp_path: Path) -> None:
    """Two workers serve side by side, and stop cleanly with a live stream that may finish."""
    async with serving(tmp_path, WORKERS="2", SHUTDOWN_SECONDS="30") as running:
        async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{running.port}") as http:
            answers = await asyncio.gather(
                *(http.post("/v1/chat/completions", content=STREAM, timeout=HANG) for _ in range(40))
            )
            assert all(answer.content.endswith(DONE) for answer in answers)
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert len(children) >= 2
        async with dial(running.port) as wire:
            await streaming(wire, "gap=0.05")
            running.process.send_signal(signal.SIGTERM)
            raw = await rest(wire)
            assert raw.endswith(DONE)
            assert await running.stopped() == 0
        _, left = await asyncio.to_thread(psutil.wait_procs, children, HANG)
        assert not left
        assert not [line for line in running.lines() if "Traceback" in line]


async def test_workers_deadline(tmp_path: Path) -> None:
    """With two workers the deadline ends a live stream in its error event, too."""
    async with serving(tmp_path, WORKERS="2", SHUTDOWN_SECONDS="1") as running, dial(running.port) as wire:
        await streaming(wire, "gap=600")
        running.process.send_signal(signal.SIGTERM)
        raw = await rest(wire)
        assert [error["code"] for error in error_events(raw)] == ["proxy_shutting_down"]
        assert await running.stopped() == 0


async def test_help_and_version() -> None:
    """`--help` names the commands, `--version` the version."""
    status, out, _ = await run("--help")
    assert status == 0
    assert all(command in out for command in ("serve", "demo", "config"))
    status, out, _ = await run("--version")
    assert status == 0
    assert out.startswith("strata")
