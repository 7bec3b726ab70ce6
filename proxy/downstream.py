"""The client's side of an exchange: reading its body within a limit, answering it, noticing that it left."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from collections.abc import AsyncIterator, Callable

import orjson
import zstandard
from starlette.types import Message, Receive, Scope, Send

from proxy.errors import BAD_ENCODING, BAD_VALUE, TOO_LARGE, Fault, StrataError

_NO_BODY = (204, 304)
_MOST_FRAMES = 16
_INLINE_BYTES = 2_048
"""A longer body is decoded in a thread: it may become a thousand times as long."""


class ClientGone(Exception):
    """The client left before its request was whole, or stopped to read its answer."""


class Downstream:
    """One client connection for one request. Counts what was sent, so that nothing is begun twice."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        self._consumed = asyncio.Event()
        self.begun = False
        self.status = 0
        self.idle_seconds: float | None = None
        """How long a client may take no more of its answer."""
        self._stalled = False

    async def body(self, limit: int) -> bytes:
        """Read and decode the whole body. Raises StrataError (413, 415, 400) and ClientGone."""
        return await self.decoded(await self.raw(limit), limit)

    async def raw(self, limit: int) -> bytes:
        """Read the whole body as it was sent. Raises StrataError (413) and ClientGone."""
        if int(self.headers.get("content-length") or 0) > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def decoded(self, raw: bytes, limit: int) -> bytes:
        """Decode a body that `raw` has read. Raises StrataError (413, 415, 400)."""
        encoding = self.headers.get("content-encoding")
        if encoding and len(raw) > _INLINE_BYTES:
            return await asyncio.to_thread(decode, raw, encoding, limit)
        return decode(raw, encoding, limit)

    def pieces(self) -> AsyncIterator[bytes]:
        """Read the body as it comes. Raises StrataError (400) at once; what it returns raises ClientGone."""
        codings = self.headers.get("transfer-encoding", "chunked")
        if codings.strip().lower() != "chunked":
            raise StrataError(BAD_VALUE, f"transfer-encoding {codings!r} is not supported: only chunked is")
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if data := message.get("body", b""):
                yield data
            more = message.get("more_body", False)
        self._consumed.set()

    async def gone(self) -> None:
        """Return when the client has left; it looks only once the body has been read."""
        await self._consumed.wait()
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await self._receive()

    def bodiless(self) -> bool:
        """Whether the request has no body; then there is none to wait for."""
        if self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers:
            return False
        self._consumed.set()
        return True

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer. Raises ClientGone."""
        if status in _NO_BODY:
            # A 304 may state the length of what it does not send; the server would wait for that.
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        self.begun, self.status = True, status
        await self._pass({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body; returns when the client's side has room for more. Raises ClientGone."""
        await self._pass({"type": "http.response.body", "body": data, "more_body": more})

    async def _pass(self, message: Message) -> None:
        """Hand a message to the server, which waits while the client takes nothing. `asyncio.timeout` costs thrice."""
        if self.idle_seconds is None:
            await self._send(message)
            return
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self.idle_seconds, self._give_up, task)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._stalled and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            timer.cancel()

    def _give_up(self, task: asyncio.Task[object]) -> None:
        self._stalled = True
        task.cancel()

    async def answer(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]], kind: bytes) -> None:
        """Send a whole answer of the proxy's own."""
        length = str(len(body)).encode()
        await self.begin(status, [(b"content-type", kind), (b"content-length", length), *headers])
        await self.send(b"" if self.scope["method"] == "HEAD" else body, more=False)

    async def refuse(self, error: StrataError, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer with an error in the OpenAI shape."""
        body = error_body(error.fault, error.message, error.param)
        await self.answer(error.fault.status, body, [*headers, *error.headers], JSON)


JSON = b"application/json"


def error_body(fault: Fault, message: str, param: str | None = None) -> bytes:
    """Return `{"error": {"message": …, "type": …, "param": …, "code": …}}`."""
    return orjson.dumps({"error": {"message": message, "type": fault.type, "param": param, "code": fault.code}})


def decode(body: bytes, encoding: str | None, limit: int) -> bytes:
    """Undo a request's content-encoding; never makes more than `limit` bytes."""
    name = (encoding or "identity").strip().lower()
    decoders: dict[str, Callable[[bytes, int], bytes]] = {
        "gzip": _gunzip, "x-gzip": _gunzip, "deflate": _inflate, "zstd": _unpack,
    }  # fmt: skip
    if name in {"identity", ""}:
        return body
    if name not in decoders:
        raise StrataError(BAD_ENCODING, f"content-encoding {name!r} is not one of gzip, deflate, zstd", param=None)
    try:
        decoded = decoders[name](body, limit + 1)
    except (zlib.error, zstandard.ZstdError, EOFError, OSError) as error:
        raise StrataError(BAD_VALUE, f"The request body is not valid {name}: {error}") from error
    if len(decoded) > limit:
        raise _too_large(limit)
    return decoded


def _gunzip(body: bytes, limit: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as reader:
        return reader.read(limit)


def _inflate(body: bytes, limit: int) -> bytes:
    """`deflate` is zlib's format (RFC 9110, section 8.4.1.2); some send the bare stream."""
    for kind in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        stream = zlib.decompressobj(kind)
        try:
            decoded = stream.decompress(body, limit)
        except zlib.error:
            if kind < 0:
                raise
            continue
        if not stream.eof and len(decoded) < limit:
            raise EOFError("it is cut short")
        return decoded
    raise AssertionError


def _unpack(body: bytes, limit: int) -> bytes:
    decoder = zstandard.ZstdDecompressor()
    with decoder.stream_reader(body, read_across_frames=True) as reader:
        pieces, size = [], 0
        while size < limit and (piece := reader.read(min(limit - size, 1 << 20))):
            pieces.append(piece)
            size += len(piece)
    if size < limit:
        _check_whole(decoder, body)
    return b"".join(pieces)


def _check_whole(decoder: zstandard.ZstdDecompressor, body: bytes) -> None:
    """The reader ends without a word where a frame is cut short; what has been read says that decoding fits."""
    for _ in range(_MOST_FRAMES):
        frame = decoder.decompressobj()
        frame.decompress(body)
        if not frame.eof:
            raise EOFError("it is cut short")
        body = frame.unused_data
        if not body:
            return
    raise EOFError(f"it holds more than {_MOST_FRAMES} frames")


def _too_large(limit: int) -> StrataError:
    return StrataError(TOO_LARGE, f"The request body is larger than {limit} bytes (STRATA_MAX_BODY_BYTES)")
