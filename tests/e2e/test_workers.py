"""Several workers are one proxy to whoever scrapes it."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import signal
import socket
import tempfile
from pathlib import Path

import httpx
import orjson
import psutil  # type: ignore[import-untyped,unused-ignore]

from tests.e2e.kit import DONE, HANG, chat_body, dial, parse_metrics, total
from tests.e2e.test_processes import Running, rest, serving, streaming


async def scrape(running: Running) -> dict[str, float]:
    """Read `/metrics` over a new connection: any worker may answer."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return parse_metrics((await http.get(f"http://127.0.0.1:{running.port}/metrics")).text)


async def ask(running: Running, count: int) -> None:
    """Send requests, each over a connection of its own."""

    async def one(number: int) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            body = chat_body(f"Question {number}", model=f"junk-{number}")
            answer = await http.post(f"http://127.0.0.1:{running.port}/v1/chat/completions", content=orjson.dumps(body))
            assert answer.status_code == 200

    for start in range(0, count, 20):
        await asyncio.gather(*(one(number) for number in range(start, min(count, start + 20))))


COUNTED = f"{tempfile.gettempdir()}/strata-metrics-*"


async def settled(running: Running, count: int) -> None:
    """Wait until so many requests are counted."""
    async with asyncio.timeout(HANG):
        while total(await scrape(running), "strata_requests_total") != count:
            await asyncio.sleep(0.02)


async def test_every_scrape_tells_of_all_workers(tmp_path: Path) -> None:
    """Counters never fall, whoever answers; a worker's end loses nothing but its streams; its files go in the end."""
    before = {*glob.glob(COUNTED)}
    async with serving(tmp_path, WORKERS="3") as running:
        await ask(running, 100)
        await settled(running, 100)
        for _ in range(12):
            found = await scrape(running)
            assert total(found, "strata_requests_total", outcome="ok") == 100
            assert total(found, "strata_request_duration_seconds_count") == 100
            assert found["strata_live_streams{}"] == 0
        (directory,) = {*glob.glob(COUNTED)} - before
        children = psutil.Process(running.process.pid).children()
        told = {child: " ".join(child.cmdline()) for child in children}
        workers = [child for child, line in told.items() if "spawn" in line and "resource_tracker" not in line]
        workers[0].send_signal(signal.SIGKILL)
        await asyncio.sleep(1.5)
        assert total(await scrape(running), "strata_requests_total") == 100
        await ask(running, 10)
        await settled(running, 110)
        assert await running.stopped(signal.SIGTERM) == 0
        assert not os.path.exists(directory)


async def test_two_proxies_on_one_machine_count_apart(tmp_path: Path) -> None:
    """Each has a directory of its own."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with serving(tmp_path / "a", WORKERS="2") as one, serving(tmp_path / "b", WORKERS="2") as other:
        await ask(one, 10)
        await settled(one, 10)
        assert total(await scrape(other), "strata_requests_total") == 0


async def test_junk_makes_few_series(tmp_path: Path) -> None:
    """Models, paths and users that nobody has heard of add less than fifty series."""
    async with serving(tmp_path, LOG_LEVEL="error") as running:
        await ask(running, 1)
        await settled(running, 1)
        before = len(await scrape(running))
        await ask(running, 300)
        async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{running.port}") as http:
            for number in range(100):
                await http.get(
                    f"/v1/junk/{number}", headers={"x-user": f"u{number}", "authorization": f"Bearer {number}"}
                )
        await settled(running, 301)
        assert len(await scrape(running)) - before < 50


async def test_workers_end_when_their_parent_is_gone(tmp_path: Path) -> None:
    """A parent that was killed cannot stop them: they let what is under way finish and free the port."""
    async with serving(tmp_path, WORKERS="2") as running, dial(running.port) as wire:
        children = psutil.Process(running.process.pid).children()
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        assert len(workers) == 2
        await streaming(wire, "gap=0.05")
        running.process.kill()
        try:
            assert (await rest(wire)).endswith(DONE)
            async with asyncio.timeout(HANG):
                while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers):
                    await asyncio.sleep(0.02)
            with socket.create_server(("127.0.0.1", running.port)):
                pass
        finally:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
