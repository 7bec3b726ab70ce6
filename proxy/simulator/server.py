"""Serves an ASGI app on a real socket, in this event loop or in a thread of its own, and can reset connections.

uvicorn has no call for a reset, so its protocol is extended by one function in the request's scope.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.simulator.exchange import ABORT

_STARTUP_SECONDS = 30.0
_SHUTDOWN_SECONDS = 2.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class AbortableProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, offering `ABORT` to the app; writes no access log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False

    @override
    def on_message_begin(self) -> None:
        """Put the reset into the new request's scope."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"reset": self.reset}}

    def reset(self) -> None:
        """Drop the connection with a TCP reset instead of an orderly end."""
        peer = self.transport.get_extra_info("socket")
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()


class Serving:
    """A server that runs while a ``with`` (thread) or ``async with`` (current loop) block runs."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, protocol: type[HttpToolsProtocol]) -> None:
        self.host = host
        self.port = port
        self._config = Config(
            app,
            host=host,
            port=port,
            http=protocol,
            ws="none",
            log_config=None,
            timeout_keep_alive=75,
            date_header=False,
            server_header=False,
        )
        self._server: Server | None = None
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def origin(self) -> str:
        """``http://127.0.0.1:PORT``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT/v1``, as OpenAI clients want it."""
        return f"{self.origin}/v1"

    async def __aenter__(self) -> "Serving":
        self._listener = self._bind()
        self._config.load()
        server = self._server = Server(self._config)
        server.lifespan = self._config.lifespan_class(self._config)
        try:
            await server.startup(sockets=[self._listener])
        except SystemExit as error:
            self._listener.close()
            raise RuntimeError("the app's lifespan failed to start") from error
        return self

    async def __aexit__(self, *_error: object) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await _end(set(server.server_state.tasks))
        await server.lifespan.shutdown()
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> "Serving":
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="simulator", daemon=True)
        self._thread.start()
        ready.result(_STARTUP_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(_STARTUP_SECONDS)

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sends small writes at once (TCP_NODELAY) only on sockets that name their protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        self.port = listener.getsockname()[1]
        return listener

    def _run(self, ready: "Future[None]") -> None:
        factory: Callable[[], asyncio.AbstractEventLoop] | None = self._config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._live(ready))

    async def _live(self, ready: "Future[None]") -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self.__aenter__()
        except Exception as error:  # noqa: BLE001  # whatever it is, the starting thread raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            await self._stop.wait()
        finally:
            await self.__aexit__()


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Give the requests of dropped connections a moment to notice, then cancel them."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=_SHUTDOWN_SECONDS)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


def serve(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, *, protocol: type[HttpToolsProtocol] = AbortableProtocol
) -> Serving:
    """Prepare to serve an app: ``async with serve(app) as server`` or ``with serve(app) as server``.

    Port 0 takes a free one. Any ASGI app will do; its lifespan runs. Leaving the block drops open connections.
    """
    return Serving(app, host, port, protocol=protocol)


def run(app: ASGIApp, host: str = "127.0.0.1", port: int = 8001) -> None:
    """Serve an app until interrupted."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with serve(app, host, port) as server, contextlib.suppress(KeyboardInterrupt):
        logging.getLogger(__name__).info("serving on %s", server.origin)
        threading.Event().wait()
