"""Draft → bytes: the only maker of what is forwarded.

Everything outside a change is spliced from the client's own body, spelling and white space included.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import orjson

from proxy.core.body import Edit, add, elements, remove, splice, split
from proxy.core.draft import SEPARATOR, Change, Draft, Replacement
from proxy.core.items import Block
from proxy.core.message import Message
from proxy.core.request import OWN, Request

_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.")
"""One character in more than one: a surrogate pair, a code, a short form."""
_BLANKS = re.compile(r"\s*")


def body(request: Request, draft: Draft, *, ask_usage: bool) -> bytes:
    """Return the body to forward; the client's own object where nothing changed.

    `ask_usage` adds `"stream_options": {"include_usage": true}` on the proxy's own account.
    """
    edits = remove(request.members.values(), {OWN})
    for index in sorted({*draft.forms, *draft.changes}):
        placed, raw = request.placed[index], sent(request, draft, index)
        if draft.keeps(index) and raw != request.body[placed.start : placed.end]:
            edits.append(Edit(placed.start, placed.end, raw))
    if draft.tools:
        edits.append(Edit(request.members["tools"].value, request.members["tools"].end, draft.tools))
    for span in draft.dropped:
        edits.append(Edit(request.placed[span.start].start, request.placed[span.end].start, b""))
    if draft.inserted:
        edits.append(_insert(request, draft))
    if draft.values.last:
        at = request.placed[-1].end
        edits.append(Edit(at, at, b"," + last(draft)))
    if ask_usage and request.wants_usage is False:
        edits.append(_usage(request))
    return splice(request.body, edits)


def last(draft: Draft) -> bytes:
    """Return the last message where it is ours, `{"role":"system","content":"…"}`."""
    return orjson.dumps({"role": draft.values.role, "content": draft.values.last})


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of a prompt as it is forwarded. `index` is its place in the request, None where it is ours alone.

    `own` are the client's own bytes, where these are others.
    """

    index: int | None
    raw: bytes
    digest: bytes
    own: bytes = b""


def prompt(request: Request, draft: Draft) -> Iterator[Sent]:
    """Return the messages of a prompt in the order in which they are forwarded."""
    for index in range(len(request.placed)):
        if index == draft.leading and draft.inserted:
            yield _ours(_inserted(draft))
        if draft.keeps(index):
            yield whole(request, draft, index)
    if draft.leading >= len(request.placed) and draft.inserted:
        yield _ours(_inserted(draft))
    if draft.values.last:
        yield _ours(last(draft))


def whole(request: Request, draft: Draft, index: int) -> Sent:
    """Return a message of the request as it is forwarded, or would be if it is left out."""
    own = request.raw(index)
    if index not in draft.forms and index not in draft.changes:
        return Sent(index, own, request.messages[index].digest)
    raw = sent(request, draft, index)
    return Sent(index, raw, hashlib.sha256(raw).digest(), own)


def _ours(raw: bytes) -> Sent:
    return Sent(None, raw, hashlib.sha256(raw).digest())


def sent(request: Request, draft: Draft, index: int) -> bytes:
    """Return one message as it is forwarded."""
    raw = draft.forms.get(index) or request.raw(index)
    change = draft.changes.get(index)
    return message(raw, change) if change else raw


def bare(raw: bytes, message: Message, gone: Container[tuple[str, str]]) -> bytes:
    """Return a user message without the blocks of some items (by key), as a client that never attached them has it.

    Where nothing else was said, one line says what had been attached: an empty message is refused by some.
    """
    edits = []
    for text in message.texts:
        blocks = [block for block in text.blocks if block.item and block.item.key in gone]
        if blocks:
            kept = _without(text.value, blocks)
            labels = ", ".join(block.item.label for block in blocks if block.item)
            edits.append(Edit(text.start, text.end, orjson.dumps(kept or f"[attached: {labels}]")))
    return splice(raw, edits)


def _without(text: str, blocks: Sequence[Block]) -> str:
    kept, at = "", 0
    for block in blocks:
        kept += text[at : block.start]
        behind = _BLANKS.match(text, block.end)
        at = behind.end() if behind else block.end
        # What stood beside the block on its line still ends there.
        kept += text[block.end : at] if kept.strip() and not kept[-1].isspace() else ""
    rest = text[at:]
    return kept + rest if rest else kept.rstrip()


def message(raw: bytes, change: Change) -> bytes:
    """Return one message with its change made."""
    content = split(raw)["content"]
    edits = [Edit(start, end, _replaced(raw[start:end], runs)) for (start, end), runs in change.replaced.items()]
    if raw[content.value : content.value + 1] != b"[":
        raw = splice(raw, edits)
        content = split(raw)["content"]
        start, end = content.value + 1, content.end - 1
        empty = start >= end
        gap = "" if empty else SEPARATOR
        before = quoted(change.before + gap) if change.before else b""
        behind = quoted(gap + change.behind) if change.behind else b""
        return splice(raw, [Edit(start, start, before), Edit(end, end, behind)])
    parts = elements(raw, content.value, content.end)
    if change.before:
        edits.append(Edit(content.value + 1, content.value + 1, part(change.before + SEPARATOR) + b"," * bool(parts)))
    if change.behind:
        at = parts[-1][1] if parts else content.value + 1
        edits.append(Edit(at, at, b"," * bool(parts) + part(SEPARATOR + change.behind)))
    return splice(raw, edits)


def _replaced(raw: bytes, runs: Sequence[Replacement]) -> bytes:
    """Return the JSON string with runs replaced; outside of them its own spelling stands."""
    spelled = raw.decode()
    edges = offsets(spelled, [edge for run in runs for edge in (run.start, run.end)])
    pieces, at = [], 0
    for run in runs:
        pieces += [spelled[at : edges[run.start]], (run.spelled or quoted(run.text)).decode()]
        at = edges[run.end]
    return "".join([*pieces, spelled[at:]]).encode()


def offsets(spelled: str, characters: Sequence[int]) -> dict[int, int]:
    """Find where characters of a string stand in its JSON spelling, quote included."""
    found: dict[int, int] = {}
    done, shift = 0, 1
    escapes = [(found.start(), found.end() - found.start()) for found in _ESCAPE.finditer(spelled)]
    for character in sorted(set(characters)):
        while done < len(escapes) and escapes[done][0] < character + shift:
            shift += escapes[done][1] - 1
            done += 1
        found[character] = character + shift
    return found


def quoted(text: str) -> bytes:
    """Spell a text in JSON, without its quotes."""
    return orjson.dumps(text)[1:-1]


def part(text: str) -> bytes:
    """Return `{"type":"text","text":"…"}`."""
    return b'{"type":"text","text":' + orjson.dumps(text) + b"}"


def _inserted(draft: Draft) -> bytes:
    return b'{"role":"user","content":' + orjson.dumps(draft.inserted) + b"}"


def _insert(request: Request, draft: Draft) -> Edit:
    own = _inserted(draft)
    if draft.leading < len(request.placed):
        at = request.placed[draft.leading].start
        return Edit(at, at, own + b",")
    at = request.placed[-1].end if request.placed else request.members["messages"].value + 1
    return Edit(at, at, b"," * bool(request.placed) + own)


def _usage(request: Request) -> Edit:
    options = request.members.get("stream_options")
    ask = b'"include_usage":true'
    if options is None:
        return add(request.members, "stream_options", b"{" + ask + b"}")
    raw = request.body[options.value : options.end]
    if not raw.startswith(b"{"):
        return Edit(options.value, options.end, b"{" + ask + b"}")
    inner = split(raw)
    if "include_usage" in inner:
        asked = inner["include_usage"]
        return Edit(options.value + asked.value, options.value + asked.end, b"true")
    at = options.value + 1
    return Edit(at, at, ask + b"," * bool(inner))
