"""`strata demo --keep`: what it says to open is there; its planted break is found by page, receipt and explain."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.e2e.kit import HANG
from tests.e2e.test_processes import ROOT, clean_environment, run


@pytest.fixture(scope="module", params=[signal.SIGINT, signal.SIGTERM], ids=["wide", "narrow"])
def told(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the demo and return what it printed, while it stays up; a signal ends it, and its files go."""
    columns = {signal.SIGINT: "130", signal.SIGTERM: "80"}[request.param]
    # A shell's background jobs, and what they start, are born deaf to Ctrl-C.
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", "demo", "--keep"],
        env=clean_environment() | {"PYTHONUNBUFFERED": "1", "COLUMNS": columns},
        cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    hung = threading.Timer(4 * HANG, process.kill)
    hung.start()
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "strata explain" in line:
                break
        hung.cancel()
        assert "strata explain" in lines[-1], "".join(lines)
        yield "".join(lines)
    finally:
        hung.cancel()
        process.send_signal(request.param)
        status = process.wait(timeout=4 * HANG)
    assert status == 0
    assert not Path(shlex.split(lines[-1])[5]).exists()


def address(told: str, title: str) -> str:
    """Return the URL in the line that begins with a title."""
    found = re.search(rf"^  {title} .*?(http://\S+)", told, re.MULTILINE)
    assert found is not None, title
    return found.group(1)


def test_the_demo_saves_and_says_so(told: str) -> None:
    """Both ways side by side; less money, a greater share from the prompt cache."""
    assert "Both ways, side by side" in told
    saved = re.search(r"these conversations cost\s+(\d+)%\s+less", told)
    assert saved is not None
    assert int(saved.group(1)) > 30


def test_no_name_is_cut_at_80_columns(told: str) -> None:
    """Both tables call the two ways the same, and conversations by whole names."""
    assert "…" not in told
    assert "straight" not in told
    assert all(f"{name} " in told for name in ("notes chat", "attachments", "research", "clock agent", "agent"))


def test_without_its_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the repository: the package is on no index."""
    for name in [name for name in sys.modules if name.startswith("proxy.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openai", None)
    ended = CliRunner().invoke(main, ["demo"])
    assert (ended.exit_code, "pip install '.[demo]'" in ended.output) == (2, True)


async def test_everything_it_says_to_open_is_there(told: str) -> None:
    """With the key that it says."""
    async with httpx.AsyncClient(trust_env=False, timeout=HANG, headers={"authorization": "Bearer demo"}) as http:
        for title in ("live page", "metrics", "a conversation's layers", "what the provider received", "its receipt"):
            assert (await http.get(address(told, title))).status_code == 200, title
        models = await http.get(address(told, "base_url for an OpenAI SDK") + "/models")
        assert models.status_code == 200


async def test_its_planted_break_is_found_three_ways(told: str) -> None:
    """A trace id in the system prompt: named on the page, in the receipt with both sides, healed in what comes next."""
    async with httpx.AsyncClient(trust_env=False, timeout=HANG, headers={"authorization": "Bearer demo"}) as http:
        state = (await http.get(address(told, "live page") + "state")).json()
        assert state["newest"][-1]["break"][:2] == ["L1", "nonce"]
        receipt = (await http.get(address(told, "its receipt"))).json()
    assert (receipt["divergence"]["layer"], receipt["divergence"]["kind"]) == ("L1", "nonce")
    assert "7f3a9c51" in receipt["excerpts"]["was"]
    assert "b20e64d8" in receipt["excerpts"]["now"]
    assert receipt["causes"]["changed"] > 900
    command = shlex.split(told[told.index("strata explain") :].splitlines()[0])
    status, out, err = await run(*command[1:], "--json")
    assert status == 0, err
    explained = orjson.loads(out)
    assert explained["divergence"] is None
    assert explained["prediction"]["cached_tokens"] > 900
    assert Path(command[2]).name == "next.json"
