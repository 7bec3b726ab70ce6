"""Bytes of an event stream → whole events, however the network cut them; a chat stream's own facts on top.

`data: {"choices":[…]}\\n\\n`. Events are passed on as they came; only those that say something for us are looked into.
"""

from __future__ import annotations

import re

import msgspec

BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST_END = 4
_USAGE = re.compile(rb'"(?:usage|timings)"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
_DONE = re.compile(rb"(?:\A|[\r\n])data:\s*\[DONE\]")
_ERROR = re.compile(rb'(?:\A|[\r\n])(?:event:\s*error\s*(?:[\r\n]|\Z)|data:\s*\{\s*"error"\s*:\s*[{"])')
_DATA = re.compile(rb"(?:\A|(?<=[\r\n]))data:[ ]?([^\r\n]*)")

LARGEST_HELD = 65_536
"""An unfinished event longer than this is passed on as it grows: no usage chunk is that long."""


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    timings: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_chunk = msgspec.json.Decoder(_Chunk)


class Stream:
    """One chat stream as it passes. `feed` returns what goes on now: whole events, less a usage chunk nobody wants.

    An event the network has cut is held until it is whole; should the upstream break off there, it is dropped, so that
    what follows it can be read.
    """

    __slots__ = ("_held", "_held_bytes", "_letting", "_tail", "choices", "done", "error", "finished", "strip_usage",
                 "usage_event")  # fmt: skip

    def __init__(self, *, strip_usage: bool, choices: int = 1) -> None:
        self.strip_usage = strip_usage
        self.choices = choices
        self.usage_event: bytes = b""
        self.finished = 0
        self.done = False
        self.error = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._tail = b""
        self._letting = False

    @property
    def complete(self) -> bool:
        """Whether the upstream said that it had finished: `[DONE]`, an error of its own, or all finish reasons."""
        return self.done or self.error or self.finished >= self.choices

    @property
    def torn(self) -> bool:
        """Whether part of an event was passed on whose end never came."""
        return self._letting

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come; return the bytes to pass on."""
        if self._held or self._letting or not data.endswith(_ENDS):
            data = self._gather(data)
        return self._look(data) if data else b""

    def end(self) -> bytes:
        """Return what is still held when the upstream closed in good order: an end without a blank line."""
        held, self._held = b"".join(self._held), []
        return self._look(held) if held else b""

    def _gather(self, data: bytes) -> bytes:
        """Hold what is no whole event yet. Looks at each byte once, however small the pieces are."""
        seam = self._tail + data
        offset = len(data) - len(seam)
        ends = [found.end() + offset for found in BOUNDARY.finditer(seam) if found.end() + offset > 0]
        self._tail = seam[1 - _LONGEST_END :]
        if ends:
            whole = b"".join([*self._held, data[: ends[-1]]])
            self._letting = False
            self._held, self._held_bytes = [], 0
            data = data[ends[-1] :]
            if not data:
                self._tail = b""
        else:
            whole = b""
        if self._letting or self._held_bytes + len(data) > LARGEST_HELD:
            self._letting = bool(data)
            whole = b"".join([whole, *self._held, data])
            self._held, self._held_bytes = [], 0
        elif data:
            self._held.append(data)
            self._held_bytes += len(data)
        return whole

    def _look(self, data: bytes) -> bytes:
        """Note what events say of the stream itself."""
        if _FINISH.search(data):
            self.finished += len(_FINISH.findall(data))
        if b"[DONE]" in data and _DONE.search(data):
            self.done = True
        if b"error" in data and _ERROR.search(data):
            self.error = True
        return self._without_usage(data) if _USAGE.search(data) else data

    def _without_usage(self, data: bytes) -> bytes:
        kept = []
        for event in events(data):
            if not _USAGE.search(event):
                kept.append(event)
                continue
            chunk = payload(event)
            if chunk is None:
                kept.append(event)
                continue
            self.usage_event = event
            if not (self.strip_usage and chunk.choices == [] and chunk.usage is not msgspec.UNSET):
                kept.append(event)
        return b"".join(kept)


def events(data: bytes) -> list[bytes]:
    """Cut bytes at blank lines, each event with its own; the last may have none."""
    found, at = [], 0
    for boundary in BOUNDARY.finditer(data):
        found.append(data[at : boundary.end()])
        at = boundary.end()
    return [*found, data[at:]] if at < len(data) else found


def payload(event: bytes) -> _Chunk | None:
    """Return an event's data as a chat chunk; None when it is none."""
    try:
        return _chunk.decode(data(event))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def data(event: bytes) -> bytes:
    """Return an event's data, its lines joined."""
    return b"\n".join(_DATA.findall(event))
