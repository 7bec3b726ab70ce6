"""Running the application under uvicorn, in one process or several.

On SIGTERM uvicorn stops accepting and lets what is under way finish; at the deadline it cancels what is left, and a
stream that is cancelled ends with an error event.
"""

from __future__ import annotations

from typing import Any

import uvicorn

from proxy import app
from proxy.settings import Settings

_BACKLOG = 2_048


def options(settings: Settings) -> dict[str, Any]:
    """Return uvicorn's options: no headers of its own, no log line a request, no WebSockets."""
    return {
        "host": settings.host,
        "port": settings.port,
        "http": "httptools",
        "ws": "none",
        "lifespan": "on",
        "log_level": "warning",
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


def run(settings: Settings) -> int:
    """Serve until told to stop; returns the exit status."""
    if settings.workers > 1:
        uvicorn.run("proxy.app:from_environment", factory=True, workers=settings.workers, **options(settings))
        return 0
    server = build(settings)
    server.run()
    return 0 if server.started else 1


def announce(settings: Settings) -> str:
    """Say where the proxy listens and what is behind it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"strata: listening on http://{host}:{settings.port}/v1, upstream {settings.upstream_url}"
