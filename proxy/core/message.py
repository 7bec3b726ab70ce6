"""One chat message: what planning needs to know of it, found once per distinct message and remembered by its digest.

`{"role": "user", "content": "<note_context>…</note_context>\\n\\nWhy?"}` → role, what was said, where blocks stand.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.core.body import elements, split
from proxy.core.items import Block, Count, Tags, find
from proxy.errors import Odd

Form = Literal["string", "parts", "none"]
SYSTEM_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})
MARKS = (b'"cache_control"', b'"prompt_cache_breakpoint"')
"""Members in which a client tells a provider where its prompt cache may end."""


@dataclass(frozen=True, slots=True)
class Text:
    """A JSON string of text in a message: it fills `start:end` of the raw message, quotes included."""

    start: int
    end: int
    value: str
    blocks: tuple[Block, ...]

    @property
    def where(self) -> tuple[int, int]:
        """What tells it from the message's other texts, however often the message is analysed."""
        return self.start, self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message without its place. `calls` are the ids of what it calls, and `answers` is that of the call it answers.

    `names` are the lines in which references of ours name items that stand earlier.

    `texts` is kept for L1, and where blocks stand in it; `said` leaves blocks out; `meaning` is known for L1 alone.

    `form` says whether its content can take text; `media` counts parts that weigh more than their bytes; `marked` says
    whether it carries the client's own prompt cache markers.
    """

    digest: bytes
    meaning: bytes
    size_bytes: int
    role: str
    form: Form
    said: bytes
    texts: tuple[Text, ...]
    calls: tuple[str, ...]
    answers: str
    names: tuple[str, ...]
    media: int
    marked: bool
    signed: bool

    @property
    def freezes(self) -> bool:
        """Whether it may be replayed in the form it was forwarded in.

        What people and the model said: clients keep that in forms of their own. Not tool exchanges, which come back as
        they went; not media, whose addresses expire; not what carries markers, of which a request may hold only a few.
        """
        told = self.role == "user" or (self.role == "assistant" and not self.calls)
        return told and not self.media and not self.marked

    @property
    def result(self) -> bool:
        """Whether it is what a tool returned."""
        return self.role in RESULT_ROLES

    @property
    def leads(self) -> bool:
        """Whether it belongs to L1 when it stands in front."""
        return self.role in SYSTEM_ROLES


Look = Callable[[bytes], Message]
"""Analyses a raw message; whoever implements it remembers what it has analysed."""


class Function(msgspec.Struct, frozen=True):
    """`{"name": "find", "arguments": "{\\"q\\": 1}"}`; of some upstreams the arguments are an object."""

    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b"")


class _Custom(msgspec.Struct, frozen=True):
    name: str = ""
    input: str = ""


class _Call(msgspec.Struct):
    id: str = ""
    function: Function | None = None
    custom: _Custom | None = None


class _Wire(msgspec.Struct):
    role: str
    tool_call_id: object = None
    tool_calls: list[_Call] | None = None
    function_call: Function | None = None
    thinking_blocks: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    reasoning_details: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


ATTACHED, IN_LIBRARY, ABOVE = "Context attached:", "in the Context Library above.", "above in this conversation."
"""The words of a reference, the seed's own."""
_REFERENCE = re.compile(rf"^{ATTACHED}\n((?:- .*\n)+)Find them (?:{IN_LIBRARY}|{ABOVE})$", re.MULTILINE)
_SIGNATURE = re.compile(rb'"(?:signature|encrypted_content)"\s*:')
_wire = msgspec.json.Decoder(_Wire)
_string = msgspec.json.Decoder(str)
_json = msgspec.json.Decoder()


def analyse(raw: bytes, *, tags: Tags, count: Count) -> Message:
    """Read one raw message. Raises Odd when it is no message of the chat API."""
    try:
        wire = _wire.decode(raw)
        form, held_texts, media = texts(raw)
        means = meaning(raw) if wire.role in SYSTEM_ROLES else b""
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, Odd) as error:
        raise Odd("odd_message") from error
    held = wire.role == "user" or wire.role in SYSTEM_ROLES
    found = tuple(Text(start, end, text, find(text, tags, count) if held else ()) for start, end, text in held_texts)
    legacy = [_Call(function=wire.function_call)] if wire.function_call else []
    calls = [*(wire.tool_calls or ()), *legacy]
    return Message(
        digest=hashlib.sha256(raw).digest(),
        meaning=means,
        size_bytes=len(raw),
        role=wire.role,
        form=form,
        said=said(wire.role, [_outside(text) for text in found], [_words_of_call(call) for call in calls]),
        texts=found if wire.role in SYSTEM_ROLES or any(text.blocks for text in found) else (),
        calls=tuple(call.id for call in calls),
        answers=_answers(wire),
        names=_names(found) if wire.role == "user" and ATTACHED.encode() in raw else (),
        media=media,
        marked=any(mark in raw for mark in MARKS),
        signed=_signed(raw, wire),
    )


def meaning(raw: bytes) -> bytes:
    """Digest a message whatever its spelling: escapes, blanks between members, the order of these."""
    spelled = msgspec.json.encode(_json.decode(raw), order="deterministic")
    return hashlib.blake2b(spelled, digest_size=16).digest()


def said(role: str, texts: Sequence[str], calls: Sequence[tuple[str, str]] = ()) -> bytes:
    """Digest what was said: role, words and tool calls. White space is how a client stores words, not words."""
    digest = hashlib.blake2b(role.encode(), digest_size=16)
    words = " ".join(filter(None, (" ".join(text.split()) for text in texts)))
    digest.update(b"\0" + words.encode("utf-8", "surrogatepass"))
    for name, arguments in calls:
        digest.update(b"\0" + name.encode("utf-8", "surrogatepass") + b"\0" + "".join(arguments.split()).encode())
    return digest.digest()


def texts(raw: bytes) -> tuple[Form, list[tuple[int, int, str]], int]:
    """Return a message's form, where its texts stand and what they say, and how many parts are no text.

    Raises Odd, msgspec.DecodeError or msgspec.ValidationError.
    """
    content = split(raw).get("content")
    first = raw[content.value : content.value + 1] if content else b""
    if content is None or first not in {b'"', b"["}:
        return "none", [], 0
    if first == b'"':
        return "string", [(content.value, content.end, _string.decode(raw[content.value : content.end]))], 0
    found, media = [], 0
    for start, end in elements(raw, content.value, content.end):
        part = split(raw[start:end])
        text = part.get("text")
        if text is not None and raw[start + text.value : start + text.value + 1] == b'"':
            at, stop = start + text.value, start + text.end
            found.append((at, stop, _string.decode(raw[at:stop])))
        else:
            media += 1
    return "parts", found, media


def _names(texts: Sequence[Text]) -> tuple[str, ...]:
    found = [lines for text in texts for lines in _REFERENCE.findall(_outside(text))]
    return tuple(line.removeprefix("- ") for lines in found for line in lines.splitlines())


def _outside(text: Text) -> str:
    at, kept = 0, []
    for block in text.blocks:
        kept.append(text.value[at : block.start])
        at = block.end
    return " ".join([*kept, text.value[at:]])


def _words_of_call(call: _Call) -> tuple[str, str]:
    if call.custom is not None:
        return call.custom.name, call.custom.input
    return words_of(call.function) if call.function else ("", "")


def _answers(wire: _Wire) -> str:
    """Return the id of the call that a tool's result answers; empty of the older form, whose calls have none."""
    return wire.tool_call_id if isinstance(wire.tool_call_id, str) else ""


def words_of(function: Function) -> tuple[str, str]:
    """Return a function's name, and what it is called with as it is spelled."""
    name, raw = function.name or "", bytes(function.arguments)
    if raw.startswith(b'"'):
        with contextlib.suppress(msgspec.DecodeError):
            # Of an answer's piece a character may have been cut.
            return name, _string.decode(raw)
    return name, "" if raw == b"null" else raw.decode("utf-8", "replace")


def _signed(raw: bytes, wire: _Wire) -> bool:
    """Signed or encrypted reasoning is only accepted back while what stood before it is unchanged."""
    held = (wire.thinking_blocks, wire.reasoning_details)
    if any(value is not msgspec.UNSET and bytes(value) not in {b"null", b"[]"} for value in held):
        return True
    return wire.role == "assistant" and _SIGNATURE.search(raw) is not None
