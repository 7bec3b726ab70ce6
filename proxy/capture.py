"""`GET /strata/capture?seconds=60`: chat requests as they come, a line each, for `strata replay`.

Off without an admin token; ends by itself; words are replaced by others of the same length unless debug mode is on and
the content is asked for. What is not read fast enough is left out, and a last line says how many: `{"left_out": 3}`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from proxy.admin import Admin
from proxy.call import Call
from proxy.core import redact
from proxy.downstream import JSON, error_body
from proxy.errors import BAD_VALUE, NOT_ALLOWED, Fault

_LONGEST_SECONDS = 86_400
_MOST_WAITING_BYTES = 64 * 2**20


class _Reader:
    """Who captures: the requests that wait to be written for them, within bounds."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Call] = asyncio.Queue()
        self._bytes = 0
        self.left_out = 0

    def put(self, call: Call, size: int) -> None:
        if self._bytes + size > _MOST_WAITING_BYTES:
            self.left_out += 1
            return
        self._bytes += size
        self._waiting.put_nowait(call)

    async def get(self, seconds: float) -> Call | None:
        try:
            call = await asyncio.wait_for(self._waiting.get(), seconds)
        except TimeoutError:
            return None
        self._bytes -= len(call.sent.body) if call.sent else 0
        return call


class Capture:
    """`take` is called for each request that was served."""

    def __init__(self, admin: Admin, *, open_: bool, debug: bool) -> None:
        self._admin = admin
        self._open = open_
        self._debug = debug
        self._readers: set[_Reader] = set()

    def take(self, call: Call) -> None:
        """Hand a request to whoever captures."""
        if call.sent is not None:
            for reader in self._readers:
                reader.put(call, len(call.sent.body))

    async def stream(self, request: Request) -> Response:
        """Stream requests for a while."""
        if not self._open or not self._admin.may(request):
            return _refused(NOT_ALLOWED, "Capturing needs the admin token (STRATA_ADMIN_TOKEN), which must be set.")
        given = request.query_params.get("seconds", "60")
        seconds = int(given) if given.isdecimal() and len(given) < 7 else 0
        if not 0 < seconds <= _LONGEST_SECONDS:
            return _refused(BAD_VALUE, f"seconds: expected a number from 1 to {_LONGEST_SECONDS}, got {given[:80]!r}")
        content = request.query_params.get("content") == "true"
        if content and not self._debug:
            return _refused(NOT_ALLOWED, "Content is captured only where STRATA_DEBUG is true.")
        lines = self._lines(request, seconds, content=content)
        return StreamingResponse(lines, media_type="application/jsonl", headers={"x-accel-buffering": "no"})

    async def _lines(self, request: Request, seconds: int, *, content: bool) -> AsyncIterator[bytes]:
        reader = _Reader()
        key = None if content else secrets.token_bytes(32)
        self._readers.add(reader)
        until = asyncio.get_running_loop().time() + seconds
        try:
            while (left := until - asyncio.get_running_loop().time()) > 0:
                call = await reader.get(min(1.0, left))
                if call is None:
                    if await request.is_disconnected():
                        return
                    continue
                line = await asyncio.to_thread(_line, call, key)
                if line:
                    yield line + b"\n"
            if reader.left_out:
                yield b'{"left_out": %d}\n' % reader.left_out
        finally:
            self._readers.discard(reader)


def _line(call: Call, key: bytes | None) -> bytes:
    """Return a request as a line of the file; without a key as it was."""
    assert call.sent is not None
    try:
        body = redact.body(call.sent.body, key) if key else call.sent.body
    except (ValueError, TypeError):
        return b""
    usage = call.told.usage
    told = b""
    if usage is not None:
        details = {} if usage.cache_read_tokens is None else {"cached_tokens": usage.cache_read_tokens}
        reported = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens,
                    "prompt_tokens_details": details}  # fmt: skip
        told = b',"usage":' + orjson.dumps(reported)
    name = b""
    if call.conversation:
        name = b',"conversation":' + orjson.dumps(redact.text(call.conversation, key) if key else call.conversation)
    return b'{"at":%f' % call.at + name + told + b',"body":' + body.replace(b"\n", b" ").replace(b"\r", b" ") + b"}"


def _refused(fault: Fault, message: str) -> Response:
    return Response(error_body(fault, message), status_code=fault.status, media_type=JSON.decode())
