"""Passing an answer on as it comes: bytes go downstream first, a copy feeds the readers of usage and replies."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from proxy.core import reply, sse
from proxy.core.usage import Usage, parse
from proxy.downstream import Downstream, error_body
from proxy.errors import INTERRUPTED, SHUTTING_DOWN
from proxy.upstream.client import Answer, Interrupted, Truncated
from proxy.upstream.headers import Raw, downstream

_MOST_KEPT = 4_194_304
"""An answer longer than this is passed on whole, but not read for usage or replies."""
_INFLATABLE = (b"gzip", b"deflate")

Clock = Callable[[], float]
End = Literal["whole", "interrupted", "client_gone", "shutdown"]


@dataclass(slots=True)
class Told:
    """What passing an answer on has shown so far; true at any moment, also when it ends early."""

    end: End = "client_gone"
    usage: Usage | None = None
    replies: tuple[bytes, ...] = ()
    pieces: int = 0
    first_at: float | None = None
    failed: bool = False
    why: str | None = None
    kept: list[bytes] = field(default_factory=list, repr=False)
    kept_bytes: int = 0


async def stream(
    answer: Answer,
    client: Downstream,
    receipt: Raw,
    told: Told,
    *,
    strip_usage: bool,
    choices: int,
    keep: bool,
    clock: Clock,
) -> None:
    """Pass an event stream on. One that breaks off ends in one error event in band, never in an invented finish."""
    tap = sse.Stream(strip_usage=strip_usage, choices=choices)
    inflate = _inflater(answer)
    drop = frozenset({b"content-length"}) | (frozenset({b"content-encoding"}) if inflate else frozenset())
    await client.begin(answer.status, [*_unbuffered(downstream(answer.headers, drop=drop)), *receipt])
    try:
        while data := await answer.read():
            if passed := tap.feed(inflate(data) if inflate else data):
                await _pass(passed, client, told, keep=keep, clock=clock)
        if rest := tap.end():
            await _pass(rest, client, told, keep=keep, clock=clock)
        told.end, told.why = "whole", "no finish reason and no [DONE]"
    except Truncated as error:
        told.end, told.why = "whole", str(error)
    except Interrupted:
        told.end = "client_gone"
    except asyncio.CancelledError:
        # uvicorn's deadline for a graceful shutdown has passed.
        told.end = "shutdown"
        await client.send((b"\n\n" if tap.torn else b"") + _broken(told), more=False)
        raise
    finally:
        told.failed = tap.error
        told.usage = parse(sse.data(tap.usage_event)) if tap.usage_event else None
    if told.end == "whole" and not tap.complete:
        told.end = "interrupted"
        await client.send((b"\n\n" if tap.torn else b"") + _broken(told), more=False)
    elif told.end == "whole":
        told.replies = reply.of_stream(b"".join(told.kept)) if keep and told.kept_bytes < _MOST_KEPT else ()
        await client.send(b"", more=False)


async def _pass(data: bytes, client: Downstream, told: Told, *, keep: bool, clock: Clock) -> None:
    if told.first_at is None:
        told.first_at = clock()
    told.pieces += 1
    await client.send(data, more=True)
    if keep and told.kept_bytes < _MOST_KEPT:
        told.kept_bytes += len(data)
        told.kept.append(data)


async def body(answer: Answer, client: Downstream, receipt: Raw, told: Told, *, keep: bool, clock: Clock) -> None:
    """Pass any other answer on, byte for byte with its own framing; JSON is read for its usage as well."""
    await client.begin(answer.status, [*downstream(answer.headers), *receipt])
    is_json = answer.status < 300 and b"json" in answer.header(b"content-type")
    kept: list[bytes] = []
    size = 0
    try:
        while data := await answer.read():
            told.first_at = told.first_at or clock()
            told.pieces += 1
            last = answer.whole
            await client.send(data, more=not last)
            size += len(data)
            if is_json and size <= _MOST_KEPT:
                kept.append(data)
            if last:
                break
        else:
            await client.send(b"", more=False)
    except Truncated as error:
        told.end, told.why = "interrupted", str(error)
        return
    except Interrupted:
        return
    told.end = "whole"
    if is_json and size <= _MOST_KEPT:
        whole = _plain(b"".join(kept), answer.header(b"content-encoding"))
        told.usage = parse(whole)
        told.replies = reply.of_answer(whole) if keep else ()


def _broken(told: Told) -> bytes:
    if told.end == "shutdown":
        return b"data: " + error_body(SHUTTING_DOWN, "The proxy is shutting down; the answer is not whole.") + b"\n\n"
    message = f"The upstream broke off before its answer was whole: {told.why}."
    return b"data: " + error_body(INTERRUPTED, message) + b"\n\n"


def _unbuffered(headers: Raw) -> Raw:
    """Ask what stands between here and the client not to collect the stream."""
    names = {name for name, _ in headers}
    if b"cache-control" not in names:
        headers.append((b"cache-control", b"no-cache"))
    if b"x-accel-buffering" not in names:
        headers.append((b"x-accel-buffering", b"no"))
    return headers


def _inflater(answer: Answer) -> Callable[[bytes], bytes] | None:
    """An upstream that compresses an event stream unasked is decoded, so that each event leaves at once."""
    encoding = answer.header(b"content-encoding")
    if encoding not in _INFLATABLE:
        return None
    decoder = zlib.decompressobj(47)

    def inflate(data: bytes) -> bytes:
        try:
            return decoder.decompress(data)
        except zlib.error as error:
            raise Truncated(f"what it sent is no {encoding.decode()}") from error

    return inflate


def readable(answer: Answer) -> bool:
    """Whether an answer is an event stream whose events can be told apart here."""
    events = answer.header(b"content-type").startswith(b"text/event-stream")
    return events and answer.header(b"content-encoding") in {b"", b"identity", *_INFLATABLE}


def _plain(raw: bytes, encoding: bytes) -> bytes:
    if encoding not in _INFLATABLE:
        return raw
    try:
        return zlib.decompressobj(47).decompress(raw, 4 * _MOST_KEPT)
    except zlib.error:
        return b""
