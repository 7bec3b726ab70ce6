"""The processes under measurement: how each is started and killed, and what it has used so far (Linux's /proc).

Every server gets a process group of its own, is killed with it, and dies with this process should that be killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
STOP_SECONDS = 3.0

_PR_SET_PDEATHSIG = 1
_CPUCLOCK_SCHED = 2
_KB = 1024

_NGINX_CONF = """\
worker_processes 1;
daemon off;
pid {prefix}/nginx.pid;
error_log stderr warn;
{user}
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_buffer_size 4m;
    keepalive_requests 100000000;
    client_body_temp_path {prefix}/body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    upstream up {{
        server 127.0.0.1:{upstream};
        keepalive 512;
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://up;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


class ServerError(Exception):
    """A server did not start, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """The core of the proxy, and the one of the upstream and the load; None where there is only one."""

    proxy: int | None
    load: int | None

    @classmethod
    def available(cls) -> Cores:
        """Take the first two cores this process may use."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(proxy=cores[0], load=cores[1]) if len(cores) > 1 else cls(proxy=None, load=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident and proportional set size of a process tree, in bytes."""

    rss: int
    pss: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server: its port, its process, and the file with what it printed."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise if it has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise ServerError(f"{self.name} ended with status {self.process.returncode}:\n{tail}")

    def pids(self) -> tuple[int, ...]:
        """Return the processes of its tree that live now."""
        return tuple(_tree(self.process.pid))

    def cpu_seconds(self) -> float:
        """Return the CPU time, user and system, its living processes have used, to the scheduler's precision."""
        total = 0.0
        for pid in self.pids():
            with suppress(OSError):
                total += time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
        return total

    def waited_seconds(self) -> float:
        """Return how long its living threads have been ready to run while something else had their core."""
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
        return total / 1e9

    def memory(self) -> Memory:
        """Return what its tree holds now."""
        rss = pss = 0
        for pid in self.pids():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name == "Rss":
                        rss += int(value.split()[0]) * _KB
                    elif name == "Pss":
                        pss += int(value.split()[0]) * _KB
        return Memory(rss=rss, pss=pss)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _tree(int(child))


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def nginx_path() -> str | None:
    """Return where nginx is, if it is installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")


def nginx_command(path: str, folder: Path, port: int, upstream_port: int) -> list[str]:
    """Write nginx's configuration below `folder` and return the command that uses it."""
    prefix = folder / "nginx"
    prefix.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""
    conf = _NGINX_CONF.format(prefix=prefix, port=port, upstream=upstream_port, user=user)
    (prefix / "nginx.conf").write_text(conf)
    return [path, "-p", str(prefix), "-c", str(prefix / "nginx.conf"), "-e", "stderr"]


def relay_command(port: int, upstream_port: int) -> list[str]:
    """Return the command of the plain relay."""
    upstream = f"http://127.0.0.1:{upstream_port}"
    return [sys.executable, str(BENCH / "relay.py"), "--port", str(port), "--upstream", upstream]


def strata_command(port: int, upstream_port: int) -> list[str]:
    """Return Strata's command, with its default settings."""
    upstream = f"http://127.0.0.1:{upstream_port}/v1"
    serve = ["serve", "--host", "127.0.0.1", "--port", str(port), "--upstream", upstream]
    return [sys.executable, "-m", "proxy", *serve]


def upstream_command(port: int) -> list[str]:
    """Return the command of the mock upstream."""
    return [sys.executable, str(BENCH / "upstream.py"), "--port", str(port)]


def _prepare_child(core: int | None, parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        # SIGTERM, since nginx's master must end its worker; a server that ignores it would outlive only kill -9 on us.
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        if core is not None:
            with suppress(OSError):
                os.sched_setaffinity(0, {core})

    return prepare


@contextmanager
def running(
    name: str, command: Sequence[str], port: int, *, core: int | None, folder: Path, env: Mapping[str, str]
) -> Iterator[Server]:
    """Run a server in `folder`, whose environment holds only `env` and what a program needs, and kill it at the end."""
    log = folder / f"{name}.log"
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV") if key in os.environ}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=kept | {"PYTHONPATH": str(ROOT)} | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare_child(core, os.getpid()),  # noqa: PLW1509 - this process has one thread
        )
    try:
        yield Server(name=name, port=port, process=process, log=log)
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process group: politely, then, whatever is left of it, not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
