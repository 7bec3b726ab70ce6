"""The live page, in a real Chromium where there is one; what it is told, anywhere."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.quota import NEW, Ask, Quotas, admit
from proxy.live.board import Board
from proxy.observe.record import Outcome, Record
from proxy.simulator.app import Options
from tests.e2e.kit import HANG, Rig, chat_body, note, rigged

RULES = "\n".join(f"Rule {number} stands for every customer and every order." for number in range(150))
PRICES = '{"gpt-5.1": {"input": 1.25, "cached_read": 0.125, "output": 10}}'
TENANT = {
    "TENANTS__ACME__KEYS": "key-one",
    "TENANTS__ACME__TOKENS_PER_DAY": "100000",
    "TENANTS__ACME__USD_PER_DAY": "1",
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian package chromium) is not installed")


async def traffic(rig: Rig, turns: int = 6, **mode: Any) -> None:
    """A conversation with a clock in its system prompt and a note that is attached again."""
    talk: list[dict[str, Any]] = []
    page = note("plan.md", "The plan holds many words. ")
    for turn in range(turns):
        clock = {"role": "system", "content": f"{RULES}\nTime: 10:0{turn}"}
        asked = {"role": "user", "content": f"{page}\nQuestion {turn}: what does the secret plan say?"}
        answer = await rig.proxy.post(
            chat_body(messages=[clock, *talk, asked], **mode), headers={"x-strata-conversation": "c1"}
        )
        talk += [asked, answer.json()["choices"][0]["message"]]


async def test_the_board_tells_what_the_records_say() -> None:
    """Today's numbers, the newest requests by layer, causes, conversations, quotas; and no content."""
    async with rigged(None, **TENANT, MODE="observe", PRICES=PRICES) as rig:
        await traffic(rig)
        await rig.proxy.settled(6)
        answer = await rig.proxy.http.get("/strata/state")
        told = answer.json()
        assert (told["requests"], told["failed"], len(told["newest"])) == (6, 0, 6)
        assert told["newest"][-1]["break"][:2] == ["L1", "clock"]
        assert told["breaks"] == {"L1: clock": 5}
        charges = [entry.charge for entry in rig.entries if entry.charge]
        assert sum(told["causes"].values()) == sum(charge.uncached_tokens for charge in charges)
        assert told["cost_usd"] == pytest.approx(await rig.proxy.total("strata_cost_usd_total"))
        assert {row["quota"] for row in told["tenants"]} == {"tokens_per_day", "usd_per_day"}
        assert told["conversations"][0]["requests"] == 6
        for secret in ("secret plan", "key-one", "plan.md", '"c1"'):
            assert secret not in answer.text


def used(board: Board) -> dict[str, int]:
    """Return what the page shows of quotas."""
    rows: Any = board.state()["tenants"]
    return {row["quota"]: row["used"] for row in rows}


def ended(outcome: Outcome) -> Record:
    """A request of acme's that has ended."""
    return Record(
        request_id="r", at=0.0, tenant="acme", model="m", mode="layered", stream=False, outcome=outcome, status=200
    )


def test_quotas_age() -> None:
    """Rates refill, a request that has ended is under way no more, a new day and month begin at nothing."""
    now = 1_796_081_400.0  # 2026-11-30, half an hour before midnight
    quotas = Quotas(limits={"requests_per_minute": 2, "tokens_per_minute": 600, "concurrent_requests": 2,
                            "tokens_per_day": 1_000, "usd_per_month": 10**9})  # fmt: skip
    board = Board(lambda: ("acme",), now=lambda: now)
    account = NEW
    for name in "ab":
        account, verdict = admit(account, quotas, Ask(name, 300, 10**8), int(now * 1000))
        board.quota("acme", quotas, verdict)
    full = {"requests_per_minute": 2, "tokens_per_minute": 600, "concurrent_requests": 2, "tokens_per_day": 600,
            "usd_per_month": 2 * 10**8}  # fmt: skip
    assert used(board) == full
    board.emit(ended("refused"))
    assert used(board) == full
    board.emit(ended("ok"))
    now += 30
    assert used(board) == full | {"requests_per_minute": 1, "tokens_per_minute": 300, "concurrent_requests": 1}
    now += 8 * 60
    assert used(board) == full | {"requests_per_minute": 0, "tokens_per_minute": 0, "concurrent_requests": 0}
    now += 30 * 60
    assert set(used(board).values()) == {0}


async def test_what_is_new_comes_as_events() -> None:
    """Twice a second at most, only what is new; a watcher that goes on is told what it has not seen."""
    async with rigged(None) as rig:
        await rig.proxy.post(chat_body())
        await rig.proxy.settled(1)
        seen: list[dict[str, Any]] = []
        async with asyncio.timeout(HANG), rig.proxy.http.stream("GET", "/strata/events?since=0") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    seen.append(orjson.loads(line[6:]))
                    if len(seen) == 1:
                        await asyncio.gather(*(rig.proxy.post(chat_body(str(number))) for number in range(120)))
                    if seen[-1]["number"] == 121:
                        break
        assert [each["id"] for each in seen[0]["newest"]] != []
        assert len(seen) < 12
        assert all(len(each["newest"]) <= 50 for each in seen)
        async with rig.proxy.http.stream("GET", "/strata/events?since=119") as stream:
            line = await anext(line async for line in stream.aiter_lines() if line.startswith("data: "))
            assert [each["number"] for each in orjson.loads(line[6:])["newest"]] == [120, 121]


async def test_the_admin_token_guards_what_it_tells() -> None:
    """The page itself holds nothing."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        assert (await rig.proxy.http.get("/strata/")).status_code == 200
        for path in ("/strata/state", "/strata/events"):
            assert (await rig.proxy.http.get(path)).status_code == 401
            assert (await rig.proxy.http.get(path, headers={"authorization": "Bearer t-2"})).status_code == 401
        assert (await rig.proxy.http.get("/strata/state", headers={"authorization": "Bearer t-1"})).status_code == 200
        moved = await rig.proxy.http.get("/strata")
        assert moved.headers["location"].endswith("/strata/")


@needs_chromium
@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_in_chromium(width: int, scheme: Any, tmp_path: Path) -> None:
    """It shows what happened, finds the break by keyboard alone, says nothing on the console and loads nothing else."""
    playwright = pytest.importorskip("playwright.async_api")
    async with (
        rigged(Options(), **TENANT, MODE="observe", PRICES=PRICES, ADMIN_TOKEN="t-1") as rig,
        playwright.async_playwright() as p,
    ):
        browser = await p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"{rig.proxy.origin}/strata/")
        await page.locator("#token").fill("t-1")
        await page.keyboard.press("Enter")
        await traffic(rig)
        await playwright.expect(page.locator("#newest tr")).to_have_count(6)
        assert await page.locator("#requests").inner_text() == "6"
        assert "clock in L1" in await page.locator("#newest tr").first.inner_text()
        assert (await page.locator("#breaks tr").first.inner_text()).split() == ["L1:", "clock", "5"]
        assert await page.locator(".strip").first.get_attribute("aria-label")
        assert await page.locator(".strip .mark").count() == 5
        assert "acme" in await page.locator("#tenants").inner_text()
        first = page.locator("#newest .row").first
        await first.focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open]")
        assert '"kind": "clock"' in await page.locator("#receipt").inner_text()
        await page.keyboard.press("Escape")
        assert await page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
        if folder := os.environ.get("STRATA_TEST_PICTURES"):
            await page.screenshot(path=f"{folder}/live-{width}-{scheme}.png", full_page=True)
        await page.screenshot(path=str(tmp_path / "page.png"))
        await browser.close()
        assert [line for line in said if "401" not in line] == []
        assert all(url.startswith(rig.proxy.origin) for url in asked)


@needs_chromium
async def test_a_receipt_is_shown_for_a_key_in_chromium() -> None:
    """A proxy without an admin token asks for the key that made the request, and keeps it in the page's memory only."""
    playwright = pytest.importorskip("playwright.async_api")
    async with rigged(None) as rig, playwright.async_playwright() as p:
        await traffic(rig, 5)
        browser = await p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 800, "height": 900})
        await page.goto(f"{rig.proxy.origin}/strata/")
        rows = page.locator("#newest tr")
        await playwright.expect(rows).to_have_count(5)
        await rows.first.locator(".row").click()
        await playwright.expect(page.locator("#whose")).to_be_focused()
        for key, said in (("key-two", "The key given did not make this request"), ("key-one", '"outcome": "ok"')):
            await page.locator("#whose").fill(key)
            await page.keyboard.press("Enter")
            await playwright.expect(page.locator("#receipt")).to_contain_text(said)
            if folder := os.environ.get("STRATA_TEST_PICTURES"):
                await page.screenshot(path=f"{folder}/receipt-{key}.png")
        await page.keyboard.press("Escape")
        await rows.nth(1).locator(".row").click()
        await playwright.expect(page.locator("#receipt")).to_contain_text('"outcome": "ok"')
        assert not await page.locator("#give").is_visible()
        stored = "() => JSON.stringify({...localStorage, ...sessionStorage}) + document.cookie"
        assert "key-one" not in await page.evaluate(stored)
        await browser.close()


@needs_chromium
async def test_breaks_of_stratas_own_are_grey_in_chromium() -> None:
    """Red is what the client changed; columns keep apart."""
    playwright = pytest.importorskip("playwright.async_api")
    async with rigged(None) as rig, playwright.async_playwright() as p:
        for turn in range(4):
            talk = [
                {"role": role, "content": f"{role} {each}"} for each in range(turn) for role in ("user", "assistant")
            ]
            system = {"role": "system", "content": f"Time: 10:0{turn}\n{RULES}"}
            await rig.proxy.post(chat_body(messages=[system, *talk, {"role": "user", "content": f"user {turn}"}]))
        browser = await p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1200, "height": 900})
        await page.goto(f"{rig.proxy.origin}/strata/")
        rows = page.locator("#newest tr")
        await playwright.expect(rows).to_have_count(4)
        told = [(await rows.nth(place).locator("td").last.inner_text(),
                 await rows.nth(place).locator("td").last.get_attribute("class")) for place in range(3)]  # fmt: skip
        assert told == [("turn_context in L4", "ours"), ("turn_context in L4", "ours"), ("clock in L1", "bad")]
        gap = "() => {const [a, b] = [...document.querySelectorAll('#newest tr:first-child td')].slice(-2); \
            return [getComputedStyle(a).paddingRight, getComputedStyle(b).paddingLeft].map(parseFloat)}"
        assert sum(await page.evaluate(gap)) >= 20
        if folder := os.environ.get("STRATA_TEST_PICTURES"):
            await page.screenshot(path=f"{folder}/ours.png", full_page=True)
        await browser.close()
