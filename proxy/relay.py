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

_REFUSED = 300
_BEGINNING_BYTES = 8
_MOST_KEPT = 2_097_152
"""An answer longer than this is passed on whole, but not read for usage or replies."""
_INFLATABLE = (b"gzip", b"deflate")
_RATE = b"x-ratelimit-"
_RATES = frozenset(
    _RATE + what + of for what in (b"limit-", b"remaining-", b"reset-") for of in (b"requests", b"tokens")
)

Clock = Callable[[], float]
Inflate = Callable[[bytes], bytes]
Heard = Callable[[tuple[bytes, ...]], None]
"""Told digests of the answers as soon as they are whole."""
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
    refusal: bytes = field(default=b"", repr=False)
    """The error in band, where there is one."""
    kept: list[bytes] = field(default_factory=list, repr=False)
    kept_bytes: int = 0
    heard_bytes: int = 0

    def keep(self, data: bytes) -> None:
        """Keep a copy to read at the end, of an answer that is not too long."""
        self.kept_bytes += len(data)
        if self.kept_bytes > _MOST_KEPT:
            self.kept.clear()
        else:
            self.kept.append(data)

    def kept_whole(self) -> bytes:
        """Return what was kept: all or nothing."""
        return b"".join(self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """One answer on its way: to whom, what it shows, and whether what was said is to be remembered."""

    client: Downstream
    told: Told
    clock: Clock
    heard: Heard | None

    async def on(self, data: bytes, *, more: bool = True) -> None:
        """Pass a piece on."""
        if data:
            self.told.first_at = self.told.first_at or self.clock()
            self.told.pieces += 1
        await self.client.send(data, more=more)

    def listen(self, read: Callable[[bytes], tuple[bytes, ...]], whole: bytes) -> None:
        """Tell the answer's words before the client sees its end: its next request may come at once."""
        if self.heard is not None and len(whole) > self.told.heard_bytes:
            self.told.heard_bytes, self.told.replies = len(whole), read(whole)
            self.heard(self.told.replies)


async def stream(answer: Answer, passing: Passing, receipt: Raw, *, strip_usage: bool, choices: int) -> None:
    """Pass an event stream on. One that breaks off ends in one error event in band, never in an invented finish."""
    client, told = passing.client, passing.told
    tap = sse.Stream(strip_usage=strip_usage, choices=choices)
    inflate = _inflater(answer)
    drop = _ours(receipt) | {b"content-length"} | ({b"content-encoding"} if inflate else set())
    await client.begin(answer.status, [*_unbuffered(downstream(answer.headers, drop=drop)), *receipt])
    told.why = "no finish reason and no [DONE]"
    try:
        await _pump(answer, tap, passing, inflate)
    except Truncated as error:
        told.why = str(error)
    except Interrupted:
        if not tap.complete:
            return
        # Many clients leave at `[DONE]`.
    except asyncio.CancelledError:
        # uvicorn's deadline for a graceful shutdown has passed.
        told.end = "shutdown"
        await client.send((b"\n\n" if tap.torn else b"") + _broken(told), more=False)
        raise
    finally:
        told.failed = tap.error
        told.usage = parse(sse.data(tap.usage_event)) if tap.usage_event else None
    told.end = "whole" if tap.complete else "interrupted"
    end = b"" if tap.complete else (b"\n\n" if tap.torn else b"") + _broken(told)
    await client.send(end, more=False)


async def _pump(answer: Answer, tap: sse.Stream, passing: Passing, inflate: Inflate | None) -> None:
    ended = done = False
    while not ended:
        data = await answer.read()
        ended = not data
        passed = tap.end() if ended else tap.feed(inflate(data) if inflate else data)
        if tap.error and not passing.told.refusal:
            passing.told.refusal = _beside_choices(passed)
        if passed and passing.heard is not None:
            passing.told.keep(passed)
        # Some clients leave at the first finish reason; some upstreams give one with every piece.
        if tap.complete and (ended or done != tap.done or not passing.told.heard_bytes):
            done = tap.done
            passing.listen(reply.of_stream, passing.told.kept_whole())
        if passed:
            await passing.on(passed)


def _beside_choices(passed: bytes) -> bytes:
    """Return the events that are no part of an answer's words."""
    found = ((event, sse.payload(event)) for event in sse.events(passed))
    return b"".join(event for event, chunk in found if chunk is None or not chunk.choices)


async def body(answer: Answer, passing: Passing, receipt: Raw) -> None:
    """Pass any other answer on, byte for byte with its own framing; JSON is read for its usage as well."""
    client, told = passing.client, passing.told
    await client.begin(answer.status, [*downstream(answer.headers, drop=_ours(receipt)), *receipt])
    reads = answer.status < _REFUSED
    last = False
    try:
        while not last:
            data = await answer.read()
            last = not data or answer.whole
            if reads:
                told.keep(data)
            if reads and last:
                whole = plain(told.kept_whole(), answer.header(b"content-encoding"))
                told.usage, told.failed = parse(whole), reply.fails(whole)
                passing.listen(reply.of_answer, whole)
            await passing.on(data, more=not last)
    except Truncated as error:
        told.end, told.why = "interrupted", str(error)
    except Interrupted:
        return
    else:
        told.end = "whole"


def _ours(receipt: Raw) -> frozenset[bytes]:
    """Return the upstream's headers in whose place ours stand: the rates of a tenant are not the upstream key's."""
    # Timings are a list, of which each hop adds its own.
    told = frozenset(name for name, _ in receipt if name != b"server-timing")
    return told | _RATES if any(name.startswith(_RATE) for name in told) else told


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


def _inflater(answer: Answer) -> Inflate | None:
    """An upstream that compresses an event stream unasked is decoded, so that each event leaves at once."""
    encoding = answer.header(b"content-encoding")
    if encoding not in _INFLATABLE:
        return None
    decoder = zlib.decompressobj(47)

    def inflate(data: bytes) -> bytes:
        nonlocal decoder
        passed = b""
        try:
            while data:
                # Gzip may come in several members, one behind the other.
                decoder = zlib.decompressobj(47) if decoder.eof else decoder
                passed += decoder.decompress(data)
                data = decoder.unused_data
        except zlib.error as error:
            raise Truncated(f"what it sent is no {encoding.decode()}") from error
        return passed

    return inflate


async def readable(answer: Answer, *, asked: bool) -> bool:
    """Whether an answer is an event stream whose events can be told apart here; a refusal is none, whatever it says.

    Where a stream was `asked` for, some upstreams call it something else: then it is known by how it begins.
    """
    if answer.status >= _REFUSED:
        return False
    encoding = answer.header(b"content-encoding")
    if answer.header(b"content-type").startswith(b"text/event-stream"):
        return encoding in {b"", b"identity", *_INFLATABLE}
    return asked and encoding in {b"", b"identity"} and sse.begins(await answer.peek(_BEGINNING_BYTES))


def plain(raw: bytes, encoding: bytes) -> bytes:
    """Undo an answer's encoding, of its beginning too; empty where it is not what it says."""
    if encoding not in _INFLATABLE:
        return raw
    try:
        return zlib.decompressobj(47).decompress(raw, 4 * _MOST_KEPT)
    except zlib.error:
        return b""
