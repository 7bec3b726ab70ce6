"""`/strata/`: the page, what it shows as JSON, and as server-sent events. No content; behind the admin token if any."""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import AsyncIterator, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from proxy.live.board import Board

_EVERY_SECONDS = 0.5
_LONGEST_SECONDS = 10.0
"""A stream ends after so long and the page asks again: a proxy that is told to stop does not wait for watchers."""
_DIGITS = 16
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_HEADERS = {"content-security-policy": _POLICY, "cache-control": "no-store", "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer", "x-frame-options": "DENY"}  # fmt: skip


class Live:
    """Handlers as Starlette wants them. `may` says whether a request bears the admin token, where there is one.

    `ending` says whether the process is about to stop: an open page does not hold it up.
    """

    def __init__(self, board: Board, *, may: Callable[[Request], bool], ending: Callable[[], bool]) -> None:
        self._board = board
        self._may = may
        self._ending = ending
        self._page = (importlib.resources.files("proxy.live") / "page.html").read_bytes()

    async def page(self, _: Request) -> Response:
        """Serve the page; it holds nothing of anybody's."""
        return Response(self._page, media_type="text/html; charset=utf-8", headers=_HEADERS)

    async def state(self, request: Request) -> Response:
        """Tell what the page shows."""
        if not self._may(request):
            return _refused()
        return Response(orjson.dumps(self._board.state()), media_type="application/json", headers=_HEADERS)

    async def events(self, request: Request) -> Response:
        """Tell what is new, twice a second at most, however many requests there are."""
        if not self._may(request):
            return _refused()
        headers = {**_HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(self._told(request), media_type="text/event-stream", headers=headers)

    async def _told(self, request: Request) -> AsyncIterator[bytes]:
        since = request.query_params.get("since", "")
        known = int(since) if since.isdecimal() and len(since) < _DIGITS else 0
        told = -1
        for _ in range(int(_LONGEST_SECONDS / _EVERY_SECONDS)):
            if self._ending() or await request.is_disconnected():
                return
            number = self._board.number
            if number != told:
                # Of another process, or of this one before it began anew.
                known = known if known <= number else 0
                yield b"data: " + orjson.dumps(self._board.state(known)) + b"\n\n"
                told = known = number
            await asyncio.sleep(_EVERY_SECONDS)


def _refused() -> Response:
    return Response(
        orjson.dumps({"error": {"message": "The live page needs the admin token (STRATA_ADMIN_TOKEN).",
                                "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}}),
        status_code=401, media_type="application/json", headers={**_HEADERS, "www-authenticate": "Bearer"},
    )  # fmt: skip
