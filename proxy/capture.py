"""`GET /strata/capture?seconds=60`: chat requests as they come, a line each, for `strata replay`.

Off without an admin token; ends by itself; words are replaced by others of the same length unless debug mode is on and
the content is asked for. What is not read fast enough is left out; the last line says how much: `{"left_out": 3}`.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from proxy.call import Call
from proxy.core import redact
from proxy.core.usage import Usage
from proxy.downstream import JSON, error_body
from proxy.errors import BAD_VALUE, NOT_ALLOWED, UNKNOWN_KEY, Fault

_LONGEST_SECONDS = 86_400
_MOST_READERS = 4
_MOST_WAITING_BYTES = 64 * 2**20
_OVERHEAD_BYTES = 500
"""Of a request that waits, beside its body."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One request that was served."""

    at: float
    conversation: str | None
    usage: Usage | None
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + _OVERHEAD_BYTES


class _Reader:
    """Who captures: the requests that wait to be written for them, within bounds."""

    def __init__(self) -> None:
        self._waiting: collections.deque[_Seen] = collections.deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self.left_out = 0

    def put(self, seen: _Seen) -> None:
        if self._bytes + seen.size > _MOST_WAITING_BYTES:
            self.left_out += 1
            return
        self._bytes += seen.size
        self._waiting.append(seen)
        self._news.set()

    async def get(self, seconds: float) -> _Seen | None:
        if not self._waiting and seconds > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), seconds)
            except TimeoutError:
                return None
        if not self._waiting:
            return None
        seen = self._waiting.popleft()
        self._bytes -= seen.size
        return seen


class Capture:
    """`take` is called for each request that was served.

    `may` says whether a request bears the admin token, None where none is set; `ending` whether the process is about
    to stop.
    """

    def __init__(self, *, may: Callable[[Request], bool] | None, debug: bool, ending: Callable[[], bool]) -> None:
        self._may = may
        self._debug = debug
        self._ending = ending
        self._readers: set[_Reader] = set()

    def take(self, call: Call) -> None:
        """Hand a request to whoever captures."""
        if self._readers and call.sent is not None:
            seen = _Seen(at=call.at, conversation=call.conversation, usage=call.told.usage, body=call.sent.body)
            for reader in self._readers:
                reader.put(seen)

    async def stream(self, request: Request) -> Response:
        """Stream requests for a while."""
        if self._may is None:
            return _refused(
                NOT_ALLOWED, "Capturing needs an admin token, and this proxy has none: set STRATA_ADMIN_TOKEN."
            )
        if not self._may(request):
            return _refused(
                UNKNOWN_KEY, "Capturing needs the proxy's admin token (STRATA_ADMIN_TOKEN) as bearer token."
            )
        given = request.query_params.get("seconds", "60")
        seconds = int(given) if given.isdecimal() and len(given) < 7 else 0
        if not 0 < seconds <= _LONGEST_SECONDS:
            return _refused(BAD_VALUE, f"seconds: expected a number from 1 to {_LONGEST_SECONDS}, got {given[:80]!r}")
        content = request.query_params.get("content") == "true"
        if content and not self._debug:
            return _refused(NOT_ALLOWED, "Content is captured only where STRATA_DEBUG is true.")
        if len(self._readers) >= _MOST_READERS:
            return _refused(NOT_ALLOWED, f"{_MOST_READERS} captures are under way already.")
        lines = self._lines(request, seconds, content=content)
        return StreamingResponse(lines, media_type="application/jsonl", headers={"x-accel-buffering": "no"})

    async def _lines(self, request: Request, seconds: int, *, content: bool) -> AsyncIterator[bytes]:
        reader, loop = _Reader(), asyncio.get_running_loop()
        key = None if content else secrets.token_bytes(32)
        self._readers.add(reader)
        # At the end nothing more is taken, whether the reader reads or not; what waits is written.
        until = loop.time() + seconds
        end = loop.call_later(seconds, self._readers.discard, reader)
        try:
            while True:
                left = 0.0 if self._ending() else max(0.0, until - loop.time())
                seen = await reader.get(min(_LOOK_SECONDS, left))
                if seen is not None:
                    line = await asyncio.to_thread(_line, seen, key)
                    reader.left_out += not line
                    yield line
                elif left == 0.0:
                    yield b'{"left_out": %d}\n' % reader.left_out
                    return
                elif await request.is_disconnected():
                    return
        finally:
            end.cancel()
            self._readers.discard(reader)


def _line(seen: _Seen, key: bytes | None) -> bytes:
    """Return a request as a line of the file, empty where it cannot be one; without a key as it was."""
    try:
        body = redact.body(seen.body, key) if key else seen.body
    except (ValueError, TypeError):
        return b""
    told = b""
    if seen.usage is not None:
        read = seen.usage.cache_read_tokens
        reported = {
            "prompt_tokens": seen.usage.input_tokens,
            "completion_tokens": seen.usage.output_tokens,
            "prompt_tokens_details": {} if read is None else {"cached_tokens": read},
        }
        told = b',"usage":' + orjson.dumps(reported)
    name = b""
    if seen.conversation:
        name = b',"conversation":' + orjson.dumps(redact.text(seen.conversation, key) if key else seen.conversation)
    return b'{"at":%f' % seen.at + name + told + b',"body":' + body.replace(b"\n", b" ").replace(b"\r", b" ") + b"}\n"


def _refused(fault: Fault, message: str) -> Response:
    return Response(error_body(fault, message), status_code=fault.status, media_type=JSON.decode())
