"""SIGHUP: settings are read again while streams go on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import orjson
import pytest

from tests.e2e.kit import DONE, HANG, chat_body, dial, error_events
from tests.e2e.test_processes import STREAM, Running, rest, serving


async def status(running: Running, key: str) -> int:
    """Ask with a key; return the answer's status."""
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"http://127.0.0.1:{running.port}/v1/chat/completions",
            content=orjson.dumps(chat_body()), headers={"authorization": f"Bearer {key}"},
        )  # fmt: skip
        return answer.status_code


async def becomes(running: Running, key: str, wanted: int, *, times: int = 1) -> None:
    """Wait until a key is answered so, several times in a row: several workers have heard."""
    seen = 0
    async with asyncio.timeout(HANG):
        while seen < times:
            seen = seen + 1 if await status(running, key) == wanted else 0
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_tenants_come_and_go_and_streams_go_on(tmp_path: Path, workers: str) -> None:
    """A file that cannot be read as settings changes nothing and is told of."""
    file = tmp_path / "tenants.env"
    file.write_text("# clients\nSTRATA_TENANTS__ACME__KEYS=acme-1,acme-2\nSTRATA_PORT=1\n")
    async with serving(tmp_path, ENV_FILE=str(file), WORKERS=workers) as running, dial(running.port) as wire:
        assert [await status(running, key) for key in ("acme-1", "acme-2", "beta-$1")] == [200, 200, 401]
        authorised = (b"POST /v1/chat/completions HTTP/1.1", b"host: a", b"authorization: Bearer acme-1",
                      b"x-sim-fault: gap=0.1", b"content-length: %d" % len(STREAM), b"", b"")  # fmt: skip
        await wire.send(b"\r\n".join(authorised) + STREAM)
        await wire.head()
        await wire.chunk()
        file.write_text("STRATA_TENANTS__ACME__KEYS=acme-2\nSTRATA_TENANTS__BETA__KEYS='beta-$1'\nSTRATA_HOST=::1\n")
        running.process.send_signal(signal.SIGHUP)
        await becomes(running, "beta-$1", 200, times=8)
        await becomes(running, "acme-1", 401, times=8)
        raw = await rest(wire)
        assert raw.endswith(DONE)
        assert not error_events(raw)
        told = [line for line in running.lines() if '"event":"reloaded"' in line]
        assert len(told) == int(workers)
        assert '"needs_a_restart":["STRATA_HOST"]' in told[0]

        file.write_text("STRATA_TENANTS__ACME__KEYS=acme-2\nSTRATA_TENANTS__ACME__QUOTA=5\n")
        running.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(HANG):
            while sum("reload_failed" in line for line in running.lines()) < int(workers):
                await asyncio.sleep(0.02)
        assert any("STRATA_TENANTS__ACME__QUOTA: no such setting" in line for line in running.lines())
        assert await status(running, "beta-$1") == 200
        assert await running.stopped(signal.SIGTERM) == 0


async def test_quotas_and_prices_change_too(tmp_path: Path) -> None:
    """What a tenant may use is among what is read again."""
    file = tmp_path / "tenants.env"
    file.write_text("STRATA_TENANTS__ACME__KEYS=acme-1\n")
    async with serving(tmp_path, ENV_FILE=str(file)) as running:
        assert await status(running, "acme-1") == 200
        file.write_text("STRATA_TENANTS__ACME__KEYS=acme-1\nSTRATA_TENANTS__ACME__TOKENS_PER_DAY=1\n")
        running.process.send_signal(signal.SIGHUP)
        await becomes(running, "acme-1", 403)


async def test_a_file_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    """With its name."""
    from tests.e2e.test_processes import run

    status, _, err = await run("serve", ENV_FILE=str(tmp_path / "none.env"))
    assert status == 2
    assert "STRATA_ENV_FILE" in err
    assert "none.env" in err


@pytest.mark.parametrize("text", ["", "# nobody\n", 'STRATA_TENANTS__ACME__KEYS="acme-1\n'])
async def test_a_reload_never_opens_the_proxy(tmp_path: Path, text: str) -> None:
    """A file that an editor has cut short leaves the tenants that were."""
    file = tmp_path / "tenants.env"
    file.write_text("STRATA_TENANTS__ACME__KEYS=acme-1\n")
    async with serving(tmp_path, ENV_FILE=str(file), UPSTREAM_KEY="sk-up") as running:
        file.write_text(text)
        running.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(HANG):
            while not any("reload_failed" in line for line in running.lines()):
                await asyncio.sleep(0.02)
        assert await status(running, "nobody") == 401
        assert await status(running, "acme-1") == 200
