"""A JSON body as spans of the client's own bytes, and edits spliced into it.

Parse to decide, splice to send: numbers, escapes, key order and unknown fields outside an edit stay as they came.
Knows JSON; knows nothing of chats.
"""

from __future__ import annotations

import json  # noqa: TID251 -- the most lenient judge of odd but valid JSON (lone surrogates, NaN, a BOM)
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import orjson

from proxy.errors import BAD_JSON, Odd, StrataError

_OPEN = re.compile(rb"[ \t\n\r]*\{[ \t\n\r]*")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"[ \t\n\r]*:[ \t\n\r]*')
_COMMA = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")
_CLOSE = re.compile(rb"[ \t\n\r]*\}[ \t\n\r]*\Z")
_OPEN_LIST = re.compile(rb"[ \t\n\r]*\[[ \t\n\r]*")

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]', re.DOTALL)

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Member:
    """`"key": value` in an object: the key's quote stands at `start`, the value fills `value:end`."""

    key: str
    start: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Put `text` in the place of `start:end`; an insertion where both are equal."""

    start: int
    end: int
    text: bytes


def split(body: bytes) -> dict[str, Member]:
    """Return the members of a JSON object by key, in the order they stand.

    Raises:
        StrataError: `invalid_json`, when no JSON parser would take the body.
        Odd: when it is valid but not for us: not an object, a key twice, a lone surrogate, a BOM, too deep.
    """
    try:
        values = _object.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise judge(body, error) from error
    members: dict[str, Member] = {}
    found = _OPEN.match(body)
    at = found.end() if found else 0
    for key, raw in values.items():
        named = _KEY.match(body, at)
        if named is None:
            raise Odd("duplicate_key")
        members[key] = Member(key, at, named.end(), named.end() + len(memoryview(raw)))
        at = members[key].end
        comma = _COMMA.match(body, at)
        at = comma.end() if comma else at
    if values and not _CLOSE.match(body, at):
        raise Odd("duplicate_key")
    return members


def elements(body: bytes, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the spans of an array's elements; `start:end` holds the array. Raises Odd when it holds no array."""
    try:
        values = _array.decode(memoryview(body)[start:end])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Odd("no_messages") from error
    spans = []
    found = _OPEN_LIST.match(body, start)
    at = found.end() if found else start
    for raw in values:
        spans.append((at, at + len(memoryview(raw))))
        comma = _COMMA.match(body, spans[-1][1])
        at = comma.end() if comma else at
    return tuple(spans)


def splice(body: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the body with edits (which do not overlap) made; the very same object where there are none."""
    pieces: list[bytes] = []
    at = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        pieces += (body[at : edit.start], edit.text)
        at = edit.end
    return b"".join([*pieces, body[at:]]) if pieces else body


def remove(members: Iterable[Member], keys: Collection[str]) -> list[Edit]:
    """Return the edits that take whole members out, a comma with each."""
    edits = []
    ordered = list(members)
    kept: Member | None = None
    for place, member in enumerate(ordered):
        if member.key not in keys:
            kept = member
        elif kept is not None:
            edits.append(Edit(ordered[place - 1].end, member.end, b""))
        else:
            edits.append(Edit(member.start, ordered[place + 1].start if place + 1 < len(ordered) else member.end, b""))
    return edits


def add(members: Mapping[str, Member], key: str, value: bytes) -> Edit:
    """Return the edit that puts a new member behind the last one (of an object that keeps at least one)."""
    at = max(member.end for member in members.values())
    return Edit(at, at, b"," + orjson.dumps(key) + b":" + value)


def lenient(body: bytes) -> tuple[Member, ...]:
    """Return the members of JSON that `split` called odd, a repeated key as often as it stands; `()` if no object.

    Slow, and only for that: it finds the proxy's own member there, so that it stays here. As deep as may be.
    """
    if not body.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return ()
    members: list[Member] = []
    depth, key, value = 0, None, None
    for token in _TOKEN.finditer(body):
        mark = token.group()
        if depth == 1 and key and value and mark in {b",", b"}"}:
            members.append(Member(_name(key.group()), key.start(), *_trimmed(body, value.end(), token.start())))
            key = value = None
        if mark in {b"{", b"["}:
            depth += 1
        elif mark in {b"}", b"]"}:
            depth -= 1
        elif depth == 1 and mark == b":":
            value = value or token
        elif depth == 1 and mark != b",":
            key = key or token
    return tuple(members)


def _trimmed(body: bytes, start: int, end: int) -> tuple[int, int]:
    value = body[start:end]
    return end - len(value.lstrip(b" \t\r\n")), start + len(value.rstrip(b" \t\r\n"))


def _name(key: bytes) -> str:
    """Read a key; one that cannot be read is nobody's."""
    try:
        return str(json.loads(key))
    except ValueError:
        return ""


def judge(body: bytes, error: Exception) -> Exception:
    """Tell a body that no parser would take from one that is only odd."""
    odd = error if isinstance(error, Odd) else Odd("odd_json")
    try:
        json.loads(body)
    except RecursionError:
        return odd
    except ValueError as why:
        return StrataError(BAD_JSON, f"The request body is not valid JSON: {why}")
    return odd
