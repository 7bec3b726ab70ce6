"""Body bytes → Request. Wire dicts die here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
import orjson

from proxy.core import items
from proxy.core.body import Member, elements, judge, split
from proxy.core.chain import Place, chain
from proxy.core.message import Look, Message
from proxy.core.turn import Shape, shape
from proxy.errors import BAD_JSON, BAD_VALUE, Odd, StrataError

OWN = "strata"
"""The member of a body that is for the proxy alone; it never goes upstream."""

T = TypeVar("T")


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
    """A chat request: the client's bytes, and what stands where in them.

    `messages` are those of `placed`, `parts` their turns, `places` what was said up to each. `wants_usage` is None
    where its `stream_options` cannot be read: then nothing is asked for on our account.
    """

    body: bytes
    members: Mapping[str, Member]
    model: str
    stream: bool
    choices: int
    wants_usage: bool | None
    reply_tokens: int | None
    user: str | None
    metadata: Mapping[str, str]
    placed: tuple[Placed, ...]
    messages: tuple[Message, ...]
    parts: Shape
    places: tuple[Place, ...]
    hints: Hints

    @property
    def signed(self) -> bool:
        """Whether it carries signed reasoning: in front of that nothing may change."""
        return any(message.signed for message in self.messages)

    def member(self, key: str) -> bytes:
        """Return a member's value as it stands in the body; empty when absent."""
        found = self.members.get(key)
        return self.body[found.value : found.end] if found else b""

    def raw(self, index: int) -> bytes:
        """Return a message as it stands in the body."""
        return self.body[self.placed[index].start : self.placed[index].end]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def read(body: bytes, look: Look, count: items.Count, tags: items.Tags = items.BUILTIN) -> Request:
    """Read a chat request.

    Raises:
        StrataError: the body is not JSON, or its `strata` member does not say what it must.
        Odd: it is valid, but not understood well enough to be touched.
    """
    try:
        return _read(body, look, count, tags)
    except Odd as odd:
        raise judge(body, odd) from odd


def _read(body: bytes, look: Look, count: items.Count, tags: items.Tags) -> Request:
    members = split(body)
    if not body.isascii():
        _check_text(body)
    if "messages" not in members:
        raise Odd("no_messages")
    spans = elements(body, members["messages"].value, members["messages"].end)

    def value(key: str) -> bytes:
        return body[members[key].value : members[key].end] if key in members else b""

    placed = tuple(Placed(start, end, look(body[start:end])) for start, end in spans)
    messages = tuple(each.message for each in placed)
    parts = shape(messages)
    return Request(
        body=body,
        members=members,
        model=_soft(value("model"), str) or "",
        stream=_soft(value("stream"), bool) or False,
        choices=min(_positive(value("n")) or 1, _MOST_CHOICES),
        wants_usage=_wants_usage(value("stream_options")),
        reply_tokens=_positive(value("max_completion_tokens")) or _positive(value("max_tokens")),
        user=_soft(value("safety_identifier"), str) or _soft(value("user"), str),
        metadata={key: text for key, text in (_soft(value("metadata"), dict[str, object]) or {}).items()
                  if isinstance(text, str)},
        placed=placed,
        messages=messages,
        parts=parts,
        places=chain(messages, parts),
        hints=hints(value(OWN), count, tags) if OWN in members else Hints(),
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


_MOST = 100_000_000
_MOST_CHOICES = 1_000


def _positive(raw: bytes) -> int | None:
    number = _soft(raw, int)
    # What is larger than any model's answer says no more than that.
    return min(number, _MOST) if number is not None and number > 0 else None


def _wants_usage(raw: bytes) -> bool | None:
    if not raw or raw == b"null":
        return False
    try:
        split(raw)
    except (Odd, StrataError):
        return None
    options = _soft(raw, _StreamOptions)
    return bool(options and options.include_usage)


class _Context(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    id: str = ""
    type: str = "document"
    trust: Literal["trusted", "untrusted"] = "trusted"


class _Own(msgspec.Struct, forbid_unknown_fields=True):
    conversation: str | None = None
    context: list[_Context] = []


_LONGEST_NAME = 512
_TYPE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def hints(raw: bytes, count: items.Count, tags: items.Tags = items.BUILTIN) -> Hints:
    """Read the `strata` member. Raises StrataError that names the field and the value."""
    try:
        own = msgspec.json.decode(raw, type=_Own)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        where = re.search(r"at `\$([^`]*)`", str(error))
        inside = where.group(1) if where else ""
        why = str(error).split(" - at")[0]
        raise _wrong(OWN + inside, f"{why}, got {_shown(raw, inside)}") from error
    for index, context in enumerate(own.context):
        if not _TYPE.fullmatch(context.type):
            why = f"expected a tag name (letters, digits, _ . -), got {context.type[:80]!r}"
            raise _wrong(f"{OWN}.context[{index}].type", why)
    if own.conversation is not None and not 0 < len(own.conversation) <= _LONGEST_NAME:
        why = f"expected 1 to {_LONGEST_NAME} characters, got {len(own.conversation)}"
        raise _wrong(f"{OWN}.conversation", why)
    return Hints(conversation=own.conversation, context=tuple(_item(context, count, tags) for context in own.context))


def _wrong(path: str, why: str) -> StrataError:
    return StrataError(BAD_VALUE, f"{path}: {why}", param=path)


def _shown(raw: bytes, path: str) -> str:
    """Show the value at a path like `.context[2].id`, cut short."""
    try:
        value: object = orjson.loads(raw)
        for key, place in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
            value = value[int(place)] if isinstance(value, list) else value[key] if isinstance(value, dict) else value
        shown = orjson.dumps(value).decode()
    except (ValueError, LookupError, TypeError, RecursionError):
        shown = raw.decode("utf-8", "replace")
    return shown if len(shown) <= 80 else shown[:77] + "…"


def _item(context: _Context, count: items.Count, tags: items.Tags) -> items.Item:
    """Frame an explicit item; content cannot close the frame, and the id names it whatever stands inside.

    A type outside the tag table becomes an attribute: so the block is the same item wherever it is read again.
    """
    tag = context.type if context.type in tags.kinds else "document"
    kind = "" if tag == context.type else context.type
    trust = "" if context.trust == "trusted" else context.trust
    facts = (("id", context.id), ("type", kind), ("trust", trust))
    attributes = "".join(f' {name}="{_attribute(value)}"' for name, value in facts if value)
    inner = context.content.replace(f"</{tag}", f"<\\/{tag}")
    block = f"<{tag}{attributes}>\n{inner}\n</{tag}>"
    found = items.find(block, tags, count)
    if len(found) == 1 and found[0].item is not None:
        return found[0].item
    return items.make(tag, block, _attribute(context.id), count, tags, trusted=not trust)


def _attribute(value: str) -> str:
    """An attribute holds one line, and nothing that would end it or its tag."""
    return " ".join(value.translate(_NO_MARKUP).split())[:300]


_NO_MARKUP = str.maketrans({'"': "'", "<": "(", ">": ")"})
