"""`GET /strata/capture` and `strata capture`: live traffic as a file for `strata replay`, without its words."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.policy import Policy
from proxy.core.profile import Profile
from proxy.memo import TokenScale
from proxy.replay import Replay, Report, lines
from tests.e2e.kit import HANG, Rig, Wire, chat_body, rigged, scripted
from tests.e2e.test_live import traffic
from tests.e2e.test_processes import run

TOKEN = {"authorization": "Bearer t-1"}


@contextlib.asynccontextmanager
async def capturing(rig: Rig, query: str = "seconds=4", *, left_out: int = 0) -> AsyncIterator[list[dict[str, Any]]]:
    """Capture while the block runs; its list is filled when it ends."""
    found: list[dict[str, Any]] = []
    begun = asyncio.Event()

    async def take() -> None:
        async with rig.proxy.http.stream("GET", f"/strata/capture?{query}", headers=TOKEN) as stream:
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("application/jsonl")
            begun.set()
            *lines, last = [orjson.loads(line) async for line in stream.aiter_lines()]
            assert last == {"left_out": left_out}
            found.extend(lines)

    async with asyncio.timeout(HANG), asyncio.TaskGroup() as group:
        group.create_task(take())
        await begun.wait()
        yield found


def readers(rig: Rig) -> set[Any]:
    """Return who captures."""
    return rig.proxy.serving._config.app.services.capture._readers  # type: ignore[union-attr, no-any-return]


def replayed(found: list[dict[str, Any]]) -> Report:
    policy = Policy(
        mode="layered", promotion="deferred", budget_tokens=None, reserve_tokens=4_096, over_budget="forward",
        profile=Profile(),
    )  # fmt: skip
    replay = Replay(policy, TokenScale("o200k_base", max_bytes=10**7), price=lambda *_: None, max_bytes=10**7)
    file = io.BytesIO(b"".join(orjson.dumps(line) + b"\n" for line in found))
    return replay.play(lines(file, read=lambda _: None, whole=False, model="", now=0.0))


@pytest.mark.parametrize("stream", [False, True])
async def test_live_traffic_is_captured_without_its_words_and_can_be_replayed(stream: bool) -> None:
    """The replay finds the same breaks as the proxy did; what was reported stands beside it; it ends by itself."""
    async with rigged(None, MODE="observe", ADMIN_TOKEN="t-1") as rig:
        async with capturing(rig) as found:
            await (_streamed(rig) if stream else traffic(rig))
        assert len(found) == 6
        whole = orjson.dumps(found).decode()
        for word in ("secret", "plan", "customer", "Question", '"c1"'):
            assert word not in whole
        assert found[0]["body"]["model"] == "gpt-5.1"
        assert len({line["conversation"] for line in found}) == 1
        assert [line["at"] for line in found] == sorted(line["at"] for line in found)
        charges = [entry.charge for entry in rig.entries if entry.charge]
        assert [line["usage"]["prompt_tokens"] for line in found] == [charge.prompt_tokens for charge in charges]
        report = replayed(found)
        assert (report.requests, dict(report.breaks)) == (6, {("L1", "clock"): 5})
        assert report.recorded.cached_tokens == sum(charge.cached_tokens for charge in charges)


async def _streamed(rig: Rig) -> None:
    """The same conversation, read as a stream."""
    rules = "\n".join(f"Rule {number} stands for every customer and every order." for number in range(150))
    talk: list[dict[str, Any]] = []
    for turn in range(6):
        talk.append({"role": "user", "content": f"Question {turn}: what does the secret plan say?"})
        messages = [{"role": "system", "content": f"{rules}\nTime: 10:0{turn}"}, *talk]
        await rig.proxy.post(
            chat_body(messages=messages, stream=True, stream_options={"include_usage": True}),
            headers={"x-strata-conversation": "c1"},
        )
        talk.append({"role": "assistant", "content": f"Answer {turn}."})


async def test_content_is_captured_only_in_debug_mode_and_only_when_asked() -> None:
    """Then it is the client's own bytes."""
    async with rigged(None, ADMIN_TOKEN="t-1", DEBUG="true") as rig:
        async with capturing(rig, "seconds=2&content=true") as found, capturing(rig) as without:
            await rig.proxy.post(chat_body("the secret plan"))
        assert found[0]["body"] == chat_body("the secret plan")
        assert "secret" not in orjson.dumps(without).decode()
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        answer = await rig.proxy.http.get("/strata/capture?content=true", headers=TOKEN)
        assert answer.status_code == 403
        assert "STRATA_DEBUG" in answer.json()["error"]["message"]


@pytest.mark.parametrize("query", ["seconds=0", "seconds=-1", "seconds=1e3", "seconds=86401", "seconds=²"])
async def test_a_time_that_is_none_is_refused(query: str) -> None:
    """With the field and the value."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        answer = await rig.proxy.http.get(f"/strata/capture?{query}", headers=TOKEN)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("seconds: expected a number from 1 to 86400, got ")


async def test_it_is_closed_without_the_admin_token() -> None:
    """Where none is set nobody may, and it is said to set one; where one is, who has it."""
    async with rigged(None) as rig:
        answer = await rig.proxy.http.get("/strata/capture", headers=TOKEN)
        assert (answer.status_code, "set STRATA_ADMIN_TOKEN" in answer.text) == (403, True)
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        for headers in ({}, {"authorization": "Bearer x"}):
            answer = await rig.proxy.http.get("/strata/capture", headers=headers)
            assert (answer.status_code, "set" in answer.json()["error"]["message"]) == (401, False)


async def test_a_reader_who_leaves_is_let_go() -> None:
    """Nothing is kept for them."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        async with rig.proxy.http.stream("GET", "/strata/capture?seconds=600", headers=TOKEN) as stream:
            assert stream.status_code == 200
            await rig.proxy.post(chat_body())
            assert await anext(stream.aiter_lines())
            assert len(readers(rig)) == 1
        async with asyncio.timeout(HANG):
            while readers(rig):
                await asyncio.sleep(0.05)


async def test_what_is_not_read_fast_enough_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader holds up nobody and costs no memory without bound."""
    monkeypatch.setattr("proxy.capture._MOST_WAITING_BYTES", 10)
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        async with capturing(rig, left_out=3) as found:
            for _ in range(3):
                assert (await rig.proxy.post(chat_body())).status_code == 200
        assert found == []


async def test_what_waits_when_the_time_is_up_is_written() -> None:
    """A burst at the end is not lost; what comes later is not taken, however slowly the reader reads."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        async with rig.proxy.http.stream("GET", "/strata/capture?seconds=5", headers=TOKEN) as stream:
            await asyncio.gather(*(rig.proxy.post(chat_body(f"{number} " * 20_000)) for number in range(10)))
            async with asyncio.timeout(HANG):
                while readers(rig):
                    await asyncio.sleep(0.05)
            await rig.proxy.post(chat_body())
            lines = [orjson.loads(line) async for line in stream.aiter_lines()]
        assert len(lines) == 11
        assert lines[-1] == {"left_out": 0}


async def test_no_more_than_four_capture_at_once() -> None:
    """Each holds memory."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig, contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(rig.proxy.http.stream("GET", "/strata/capture?seconds=60", headers=TOKEN))
        async with asyncio.timeout(HANG):
            while len(readers(rig)) < 4:
                await asyncio.sleep(0.02)
        answer = await rig.proxy.http.get("/strata/capture", headers=TOKEN)
        assert answer.status_code == 403
        assert "under way already" in answer.json()["error"]["message"]


async def test_a_request_of_one_long_word_holds_nobody_up() -> None:
    """Redacting it does not take the interpreter for itself."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        async with capturing(rig, "seconds=12") as found:
            assert (await rig.proxy.post(chat_body("a" * 4_000_000 + "b"))).status_code == 200
            async with asyncio.timeout(2):
                assert (await rig.proxy.http.get("/livez")).status_code == 200
        assert len(found[0]["body"]["messages"][0]["content"]) == 4_000_001


async def test_the_command_writes_a_file(tmp_path: Path) -> None:
    """`strata capture --out FILE`, then `strata replay FILE`; what the proxy refuses is said."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        file = tmp_path / "traffic.jsonl"

        async def talk() -> None:
            while not readers(rig):
                await asyncio.sleep(0.02)
            await traffic(rig)

        url = ("--url", rig.proxy.base_url)
        (code, out, err), _ = await asyncio.gather(
            run("capture", *url, "--token", "t-1", "--seconds", "3", "--out", str(file)), talk()
        )
        assert (code, out) == (0, "")
        assert "6 requests" in err
        code, out, err = await run("replay", str(file))
        assert code == 0, err
        assert "6 requests" in out
        assert "L1: clock" in out
        code, _, err = await run("capture", *url, "--token", "wrong")
        assert code == 1
        assert "admin token" in err


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "cannot be captured from"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{}\n", "ended the capture early|cannot be captured from"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n", "after 1 requests"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n0\r\n\r\n", "ended the capture early"),
        (b"nonsense\r\n\r\n", "cannot be captured from"),
    ],
)
async def test_a_capture_that_ends_early_is_an_error(sent: bytes, why: str) -> None:
    """Whatever became of the proxy: one line that says so."""

    async def script(wire: Wire) -> None:
        await wire.head()
        if sent:
            await wire.send(sent)

    async with scripted(script) as upstream:
        code, _, err = await run("capture", "--url", upstream.url, "--token", "t", "--seconds", "5")
    assert code == 1
    assert re.search(why, err)
    assert err.count("\n") == 1
