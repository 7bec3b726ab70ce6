"""A real Prometheus scrapes a real Strata under traffic: every query of every panel and rule answers with something."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml

from proxy.simulator.app import Options, create
from proxy.simulator.server import serve
from tests.deploy.conftest import NAMES, ROOT
from tests.e2e.kit import HANG, Proxy, chat_body, note, strata

needed = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus (Debian package prometheus) is not installed",
)
FILLED_IN = {"$__rate_interval": "8s", "$__range": "30s", "$tenant": ".*", "$model": ".*"}
RULES = "\n".join(f"Rule {number} stands for every customer and every order." for number in range(120))
PRICES = '{"gpt-5.1": {"input": 1.25, "cached_read": 0.125, "cached_write": 1.5, "output": 10}}'


def queries() -> list[tuple[str, str]]:
    """Return every expression of the dashboards, and of the rules, as Prometheus gets it."""
    found = []
    for name in NAMES:
        dashboard = orjson.loads((ROOT / "grafana" / f"{name}.json").read_bytes())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for variable, value in FILLED_IN.items():
                    expression = expression.replace(variable, value)
                found.append((f"{name}: {panel['title']}", expression))
    for group in yaml.safe_load((ROOT / "deploy" / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            found.append((rule.get("record") or rule["alert"], rule["expr"].replace("[5m]", "[8s]")))
    return found


@needed
def test_promtool_passes_the_rules() -> None:
    """Unit tests of every alert."""
    checked = subprocess.run(
        ["promtool", "test", "rules", "rules.test.yml"],
        cwd=ROOT / "deploy",
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_test() -> None:
    """None is left out of the unit tests."""
    groups = yaml.safe_load((ROOT / "deploy" / "rules.yml").read_text())["groups"]
    tests = yaml.safe_load((ROOT / "deploy" / "rules.test.yml").read_text())["tests"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert alerts == fired


@contextlib.asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Run Prometheus, scraping every second; return its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "strata", "static_configs": [{"targets": [target]}]}],
    }))  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(HANG), httpx.AsyncClient(trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{address}/-/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        yield address
    finally:
        process.terminate()
        await process.wait()


async def traffic(proxy: Proxy, stop: asyncio.Event) -> None:
    """Send of everything a little, until told to stop: clocks, notes, over-budget agents, streams, odd bodies."""
    number = 0
    while not stop.is_set():
        number += 1
        named = {"x-strata-conversation": f"c{number % 3}", "authorization": "Bearer key-one"}
        clock = {"role": "system", "content": f"Time: 10:{number % 60:02}\n{RULES}"}
        talk = [{"role": role, "content": f"{role} {turn} " + "word " * 60} for turn in range(number % 40 + 1)
                for role in ("user", "assistant")]  # fmt: skip
        page = note("a.md", "The plan holds many words. ")
        for body, headers in (
            (chat_body(messages=[clock, *talk[:-1]]), named),
            (chat_body(messages=[clock, *talk[:-1]], stream=True), named),
            (chat_body(messages=[{"role": "user", "content": f"{page}\nWhat?"}, {"role": "assistant", "content": "So."},
                                 {"role": "user", "content": f"{page}\nAnd?"}], stream=True), {}),
            (b'{"model":"gpt-5.1","messages":[{"role":"user","content":"x"}],"messages":[]}', {}),
        ):  # fmt: skip
            await proxy.post(body, headers={"authorization": "Bearer key-one", **headers})
        await asyncio.sleep(0.05)


@needed
async def test_every_query_answers(tmp_path: Path) -> None:
    """None is empty, none fails."""
    options = {
        "TENANTS__ACME__KEYS": "key-one", "TENANTS__ACME__BUDGET_TOKENS": "4000", "OUTPUT_RESERVE_TOKENS": "500",
        "TENANTS__ACME__TOKENS_PER_DAY": "100000000", "TENANTS__ACME__REQUESTS_PER_MINUTE": "5",
        "TENANTS__ACME__QUOTA_MODE": "shadow", "PRICES": PRICES, "LOG_LEVEL": "error",
    }  # fmt: skip
    provider = create(Options())
    failed: dict[str, str] = {}
    async with (
        serve(provider) as upstream,
        strata(upstream.base_url, **options) as proxy,
        prometheus(tmp_path, f"127.0.0.1:{proxy.port}") as address,
        httpx.AsyncClient(trust_env=False, base_url=address, timeout=HANG) as http,
    ):
        stop = asyncio.Event()
        driving = asyncio.ensure_future(traffic(proxy, stop))
        await asyncio.sleep(10)
        for title, expression in queries():
            why = await asked(http, expression)
            # An alert that does not fire has no answer, and records of rules are not made here.
            alert = title.startswith("Strata") or "strata:" in expression
            if why and not (alert and why == "empty"):
                failed[title] = f"{why}: {expression}"
        stop.set()
        await driving
    assert failed == {}


async def asked(http: httpx.AsyncClient, expression: str) -> str:
    """Ask Prometheus; return why the answer is none, else nothing."""
    answer = await http.get(f"/api/v1/query?query={urllib.parse.quote(expression)}")
    told: dict[str, Any] = answer.json()
    if told["status"] != "success":
        return str(told.get("error"))
    return "" if told["data"]["result"] else "empty"
