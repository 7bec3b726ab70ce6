"""Running the application under uvicorn, in one process or several.

On SIGTERM uvicorn stops accepting and lets what is under way finish; at the deadline it cancels what is left, and a
stream that is cancelled ends with an error event.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from typing import Any

import orjson
import uvicorn
from typing_extensions import override
from uvicorn.supervisors import Multiprocess

from proxy import app, environment
from proxy.head import Protocol
from proxy.observe.log import SERVER_LOGGING
from proxy.observe.metrics import MULTIPROCESS_DIR, forget_worker
from proxy.settings import Settings

_BACKLOG = 2_048


def options(settings: Settings) -> dict[str, Any]:
    """Return uvicorn's options: no headers of its own, no log line a request, no WebSockets."""
    return {
        "host": settings.host,
        "port": settings.port,
        "http": Protocol,
        "ws": "none",
        "lifespan": "on",
        "log_level": "error" if settings.log_level == "error" else "warning",
        "log_config": SERVER_LOGGING,
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "backlog": _BACKLOG,
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": settings.shutdown_seconds,
    }


def build(settings: Settings) -> uvicorn.Server:
    """Return a server for this process."""
    return uvicorn.Server(uvicorn.Config(app.create(settings), **options(settings)))


def listen(settings: Settings) -> socket.socket:
    """Bind the address; raises OSError when it is taken or none of this machine's.

    From here on SIGHUP waits until the application, in this process or a worker, hears it.
    """
    app.hold_hup()
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Naming the protocol matters: asyncio sends small pieces at once (TCP_NODELAY) only where it is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    listener.set_inheritable(True)
    return listener


def run(settings: Settings, listener: socket.socket) -> int:
    """Serve until told to stop; returns the exit status."""
    if settings.workers > 1:
        config = uvicorn.Config(
            "proxy.app:from_environment", factory=True, workers=settings.workers, **options(settings)
        )
        with tempfile.TemporaryDirectory(prefix="strata-metrics-") as counted:
            environment.export({MULTIPROCESS_DIR: counted})
            _Workers(config, sockets=[listener]).run()
        return 0
    server = build(settings)
    # uvicorn raises the signal that ended it once more at the end; it has been answered by then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _answered)
    server.run(sockets=[listener])
    return 0 if server.started else 1


class _Workers(Multiprocess):
    """Worker processes that read their settings again on SIGHUP, where uvicorn would restart them."""

    @override
    def keep_subprocess_alive(self) -> None:
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            if pid is not None:
                forget_worker(pid)

    @override
    def handle_signals(self) -> None:
        # Held in this process too: a worker inherits that, and so a signal does not end one that only starts.
        if app.HUP and app.HUP & signal.sigpending():
            signal.sigwait(app.HUP)
            self.handle_hup()
        super().handle_signals()

    @override
    def handle_hup(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGHUP)


def _answered(*_: object) -> None:
    """Take a signal that needs nothing more."""


def announce(settings: Settings, listener: socket.socket) -> str:
    """Return a log line, written whatever the level: where the proxy listens and what is behind it."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    told = {"level": "info", "event": "listening", "at": time.time(), "url": f"http://{shown}:{port}/v1",
            "upstream": settings.upstream_url}  # fmt: skip
    return orjson.dumps(told).decode()
