"""The proxy one would write first: Starlette, StreamingResponse and one shared `httpx.AsyncClient`, under uvicorn.

It forwards what it gets, unread and unchanged, and has no features: what it costs is what the usual parts cost.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

_NOT_FORWARDED = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade"}


def _forwarded(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]


def build(upstream: str) -> Starlette:
    """Return the relay to `upstream`, a base URL without a path."""
    # httpx's own limit of 100 connections would hold half of 200 streams back.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=upstream, limits=limits, timeout=None, trust_env=False)

    async def relay(request: Request) -> StreamingResponse:
        outgoing = client.build_request(
            request.method, request.url.path, headers=_forwarded(request.headers.raw), content=await request.body()
        )
        incoming = await client.send(outgoing, stream=True)
        response = StreamingResponse(
            incoming.aiter_raw(), status_code=incoming.status_code, background=BackgroundTask(incoming.aclose)
        )
        response.raw_headers = _forwarded(incoming.headers.raw)
        return response

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="plain httpx relay")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="base URL without a path")
    args = parser.parse_args()
    uvicorn.run(
        build(args.upstream), host="127.0.0.1", port=args.port, loop="uvloop", http="httptools", access_log=False,
        log_level="warning",
    )  # fmt: skip


if __name__ == "__main__":
    main()
