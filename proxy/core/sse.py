"""Bytes of an event stream → whole events, however the network cut them; a chat stream's own facts on top.

`data: {"choices":[…]}\\n\\n`. Events are passed on as they came; only those that say something for us are looked into.
"""

from __future__ import annotations

import re

import msgspec

BOUNDARY = re.compile(rb"(?>\r\n|\n|\r){2}")
_ENDS = (b"\n\n", b"\n\r\n", b"\r\r", b"\r\r\n")
_CUT = (b"\r\n\r", b"\n\r")
"""What may yet become a longer blank line."""
_LONGEST_END = 4
_USAGE = re.compile(rb'"(?:usage|timings)"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
_DONE = re.compile(rb"(?:\A|[\r\n])data:\s*\[DONE\]")
_ERROR_EVENT = re.compile(rb"(?:\A|[\r\n])event:\s*error\s*(?:[\r\n]|\Z)")
_MAYBE_ERROR = re.compile(rb'"error"\s*:\s*[{"]|"(?:type|object|finish_reason)"\s*:\s*"error"')
_DATA = re.compile(rb"(?:\A|(?<=[\r\n]))data:[ ]?([^\r\n]*)")
_FIELDS = (b"event:", b"id:", b"retry:")
_BEGINS = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry)?:")
_BESIDE_USAGE = frozenset({"choices", "usage", "timings", "x_groq", "stats", "metrics", "perf_metrics"})
"""Members that are no content: a chunk of usage may have them."""
_ABOUT = frozenset(
    {"id", "object", "created", "model", "system_fingerprint", "service_tier", "provider", "obfuscation"}
)
"""Members that say of which answer a chunk is."""

LARGEST_HELD = 65_536
"""An unfinished event longer than this is passed on as it grows: no usage chunk is that long."""


class _Choice(msgspec.Struct):
    finish_reason: object = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: object = None
    type: object = None
    kind: object = msgspec.field(name="object", default=None)

    @property
    def fails(self) -> bool:
        """Whether it says that the answer has failed, in one of the dialects in which upstreams do."""
        told = bool(self.error) or "error" in (self.type, self.kind)
        return told or any(choice.finish_reason == "error" for choice in self.choices or ())


_chunk = msgspec.json.Decoder(_Chunk)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Stream:
    """One chat stream as it passes. `feed` returns what goes on now: all that came, less a usage chunk nobody wants.

    What is held is the line that the network has cut, and an event that may yet be that chunk; should the upstream
    break off there, it is dropped, so that what follows it can be read.
    """

    __slots__ = ("_held", "_last", "_letting", "_stays", "choices", "done", "error", "finished", "strip_usage",
                 "usage_event")  # fmt: skip

    def __init__(self, *, strip_usage: bool, choices: int = 1) -> None:
        self.strip_usage = strip_usage
        self.choices = choices
        self.usage_event: bytes = b""
        self.finished = 0
        self.done = False
        self.error = False
        self._held = bytearray()
        self._stays = False
        self._letting = False
        self._last = b""

    @property
    def complete(self) -> bool:
        """Whether the upstream said that it had finished: `[DONE]`, an error of its own, or all finish reasons."""
        return self.done or self.error or self.finished >= self.choices

    @property
    def torn(self) -> bool:
        """Whether part of an event was passed on whose end never came."""
        return bool(self._last) and not self._last.endswith(_ENDS)

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come; return the bytes to pass on."""
        if self._held or self.torn or not data.endswith(_ENDS):
            data = self._gather(data)
            self._last = (self._last + data[-_LONGEST_END:])[-_LONGEST_END:]
        return self._look(data) if data else b""

    def end(self) -> bytes:
        """Return what is still held when the upstream closed in good order: an end without a blank line."""
        held = bytes(self._held)
        self._held.clear()
        return self._look(held) if held else b""

    def _gather(self, data: bytes) -> bytes:
        """Hold what may not go on yet. Looks at each byte once or twice, however small the pieces are."""
        passed = b""
        if self._letting:
            end = next((at for at in map(self._in_new, BOUNDARY.finditer(self._last + data)) if at > 0), None)
            self._letting = end is None
            passed, data = (data, b"") if end is None else (data[:end], data[end:])
        held, seen = self._held, max(0, len(self._held) - _LONGEST_END + 1)
        held += data
        ends = (
            found.end() for found in BOUNDARY.finditer(held, seen) if found[0] not in _CUT or found.end() < len(held)
        )
        end = max(ends, default=0)
        self._stays = self._stays and not end
        if not self._stays and (b"\n" in data or b"\r" in data):
            lines = max(end, held.rfind(b"\n") + 1, held.rfind(b"\r") + 1)
            if all(map(_goes_on, bytes(held[end:lines]).splitlines())):
                end = lines
            else:
                self._stays = True
        if len(held) - end > LARGEST_HELD:
            self._letting, self._stays, end = True, False, len(held)
        passed += held[:end]
        del held[:end]
        return passed

    def _in_new(self, found: re.Match[bytes]) -> int:
        """Say where in the new bytes a boundary ends that was found in the last ones and these."""
        return found.end() - len(self._last)

    def _look(self, data: bytes) -> bytes:
        """Note what events say of the stream itself."""
        if _FINISH.search(data):
            self.finished += len(_FINISH.findall(data))
        if b"[DONE]" in data and _DONE.search(data):
            self.done = True
        if b"error" in data and (_ERROR_EVENT.search(data) or (_MAYBE_ERROR.search(data) and _any_fails(data))):
            self.error = True
        return self._without_usage(data) if _USAGE.search(data) else data

    def _without_usage(self, data: bytes) -> bytes:
        kept = []
        for event in events(data):
            chunk = payload(event) if _USAGE.search(event) else None
            if chunk is None:
                kept.append(event)
                continue
            self.usage_event = event
            takes = self.strip_usage and not chunk.choices and chunk.usage is not msgspec.UNSET
            takes = takes and _only_usage(event, strict=chunk.choices is None)
            kept.append(_before(event) if takes else event)
        return b"".join(kept)


def _goes_on(line: bytes) -> bool:
    """Whether a line may go on before its event is whole: no usage chunk comes of it, and its data end with it."""
    found = _DATA.match(line)
    if found is None:
        return not line.startswith(_FIELDS)
    value = found[1].strip()
    whole = value.count(b"{") == value.count(b"}") and value.count(b"[") == value.count(b"]")
    return whole and value.endswith((b"}", b"]")) and not _USAGE.search(line)


def _any_fails(data: bytes) -> bool:
    return any(chunk.fails for chunk in map(payload, events(data)) if chunk is not None)


def _only_usage(event: bytes, *, strict: bool) -> bool:
    """Whether nothing is lost with a chunk of usage: what stands beside it is about the answer, no part of it.

    Where it is not said that there are no choices (`strict`), only what is known to be about it may stand there.
    """
    try:
        members = {name: bytes(value) for name, value in _members.decode(data(event)).items()}
    except (msgspec.DecodeError, RecursionError):
        return False
    more = {name: value for name, value in members.items() if name not in _BESIDE_USAGE}
    if strict:
        return more.keys() <= _ABOUT
    return "error" not in more and not any(value[:1] in b"{[" and value[1:-1].strip() for value in more.values())


def _before(event: bytes) -> bytes:
    """Return what in front of an event's data is not its own: comments, and the blank line that ends the one before."""
    found = _DATA.search(event)
    lines = event[: found.start()].splitlines(keepends=True) if found else []
    return b"".join(line for line in lines if line.startswith(b":") or not line.strip())


def begins(data: bytes) -> bool:
    """Whether bytes are the beginning of an event stream."""
    return _BEGINS.match(data) is not None


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
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None


def data(event: bytes) -> bytes:
    """Return an event's data, its lines joined."""
    return b"\n".join(_DATA.findall(event))
