"""Body bytes → Request. Wire dicts die here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
import orjson

from proxy.core import items
from proxy.core.body import Member, elements, judge, split
from proxy.core.message import Message
from proxy.errors import BAD_JSON, BAD_VALUE, Odd, StrataError

OWN = "strata"
"""The member of a body that is for the proxy alone; it never goes upstream."""

T = TypeVar("T")
Analyse = Callable[[bytes], Message]


@dataclass(frozen=True, slots=True)
class Placed:
    """A message and where it stands in the body."""

    start: int
    end: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """The `strata` member: `{"conversation": "c1", "context": [{"id": "a.md", "type": "note", "content": "…"}]}`."""

    conversation: str | None = None
    context: tuple[items.Item, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A chat request: the client's bytes, and what stands where in them."""

    body: bytes
    members: Mapping[str, Member]
    model: str
    stream: bool
    choices: int
    wants_usage: bool
    reply_tokens: int | None
    user: str | None
    metadata: Mapping[str, str]
    placed: tuple[Placed, ...]
    hints: Hints

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages without their places."""
        return tuple(placed.message for placed in self.placed)

    def member(self, key: str) -> bytes:
        """Return a member's value as it stands in the body; empty when absent."""
        found = self.members.get(key)
        return self.body[found.value : found.end] if found else b""

    def raw(self, index: int) -> bytes:
        """Return a message as it stands in the body."""
        return self.body[self.placed[index].start : self.placed[index].end]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def read(body: bytes, analyse: Analyse, count: items.Count) -> Request:
    """Read a chat request.

    Raises:
        StrataError: the body is not JSON, or its `strata` member does not say what it must.
        Odd: it is valid, but not understood well enough to be touched.
    """
    try:
        return _read(body, analyse, count)
    except Odd as odd:
        raise judge(body, odd) from odd


def _read(body: bytes, analyse: Analyse, count: items.Count) -> Request:
    members = split(body)
    if not body.isascii():
        _check_text(body)
    if "messages" not in members:
        raise Odd("no_messages")
    spans = elements(body, members["messages"].value, members["messages"].end)

    def value(key: str) -> bytes:
        return body[members[key].value : members[key].end] if key in members else b""

    options = _soft(value("stream_options"), _StreamOptions)
    return Request(
        body=body,
        members=members,
        model=_soft(value("model"), str) or "",
        stream=_soft(value("stream"), bool) or False,
        choices=_soft(value("n"), int) or 1,
        wants_usage=bool(options and options.include_usage),
        reply_tokens=_soft(value("max_completion_tokens"), int) or _soft(value("max_tokens"), int),
        user=_soft(value("safety_identifier"), str) or _soft(value("user"), str),
        metadata={key: text for key, text in (_soft(value("metadata"), dict[str, object]) or {}).items()
                  if isinstance(text, str)},
        placed=tuple(Placed(start, end, analyse(body[start:end])) for start, end in spans),
        hints=hints(value(OWN), count) if OWN in members else Hints(),
    )  # fmt: skip


def _check_text(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise StrataError(BAD_JSON, f"The request body is not valid JSON: {error}") from error


def _soft(raw: bytes, kind: type[T]) -> T | None:
    """Read a value, or None where it is absent or of another type: judging it is the upstream's part."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


class _Context(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    id: str = ""
    type: str = "document"
    trust: Literal["trusted", "untrusted"] = "trusted"


class _Own(msgspec.Struct, forbid_unknown_fields=True):
    conversation: str | None = None
    context: list[_Context] = []


_TYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def hints(raw: bytes, count: items.Count) -> Hints:
    """Read the `strata` member. Raises StrataError that names the field and the value."""
    try:
        own = msgspec.json.decode(raw, type=_Own)
    except msgspec.ValidationError as error:
        where = re.search(r"at `\$([^`]*)`", str(error))
        path = OWN + (where.group(1) if where else "")
        given = f", got {_at(raw, where.group(1) if where else '')}"
        raise StrataError(BAD_VALUE, f"{path}: {str(error).split(' - at')[0]}{given}", param=path) from error
    for index, context in enumerate(own.context):
        if not _TYPE.fullmatch(context.type):
            path = f"{OWN}.context[{index}].type"
            raise StrataError(
                BAD_VALUE, f"{path}: expected a tag name (letters, digits, _ . -), got {context.type!r}", param=path
            )
    if own.conversation is not None and not 0 < len(own.conversation) <= 512:
        path = f"{OWN}.conversation"
        raise StrataError(BAD_VALUE, f"{path}: expected 1 to 512 characters, got {len(own.conversation)}", param=path)
    return Hints(conversation=own.conversation, context=tuple(_item(context, count) for context in own.context))


def _at(raw: bytes, path: str) -> str:
    """Show the value at a path like `.context[2].id`, cut short."""
    value: object = orjson.loads(raw)
    for key, place in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path):
        if isinstance(value, dict) and key:
            value = value.get(key)
        elif isinstance(value, list) and place.isdigit():
            value = value[int(place)]
        else:
            break
    shown = orjson.dumps(value).decode()
    return shown if len(shown) <= 80 else shown[:77] + "…"


def _item(context: _Context, count: items.Count) -> items.Item:
    attributes = f' id="{context.id}"' if context.id else ""
    inner = context.content.replace(f"</{context.type}", f"<\\/{context.type}")
    block = f"<{context.type}{attributes}>\n{inner}\n</{context.type}>"
    named = "" if '"' in context.id else attributes
    return items.make(context.type, named, block, count, trusted=context.trust == "trusted")
