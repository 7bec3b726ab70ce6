"""Draft → bytes: the only maker of what is forwarded.

Everything outside a change is spliced from the client's own body, spelling and white space included.
"""

from __future__ import annotations

import orjson

from proxy.core.body import Edit, add, elements, remove, splice, split
from proxy.core.layers import SEPARATOR, Change, Draft
from proxy.core.message import Text
from proxy.core.request import OWN, Request


def body(request: Request, draft: Draft, *, ask_usage: bool) -> bytes:
    """Return the body to forward; the client's own object where nothing changed.

    `ask_usage` adds `"stream_options": {"include_usage": true}` on the proxy's own account.
    """
    edits = remove(request.members.values(), {OWN})
    for index, change in draft.changes.items():
        placed = request.placed[index]
        edits.append(Edit(placed.start, placed.end, message(request.raw(index), change)))
    for span in draft.dropped:
        edits.append(Edit(request.placed[span.start].start, request.placed[span.end].start, b""))
    if draft.inserted:
        edits.append(_insert(request, draft))
    if ask_usage and request.wants_usage is False:
        edits.append(_usage(request))
    return splice(request.body, edits)


def message(raw: bytes, change: Change) -> bytes:
    """Return one message with its change made."""
    content = split(raw)["content"]
    edits = [Edit(text.start, text.end, _replaced(text, change)) for text, _ in change.replaced]
    if raw[content.value : content.value + 1] != b"[":
        raw = splice(raw, edits)
        content = split(raw)["content"]
        start, end = content.value + 1, content.end - 1
        empty = start >= end
        gap = "" if empty else SEPARATOR
        before = _quoted(change.before + gap) if change.before else b""
        behind = _quoted(gap + change.behind) if change.behind else b""
        return splice(raw, [Edit(start, start, before), Edit(end, end, behind)])
    parts = elements(raw, content.value, content.end)
    if change.before:
        edits.append(Edit(content.value + 1, content.value + 1, _part(change.before + SEPARATOR) + b"," * bool(parts)))
    if change.behind:
        at = parts[-1][1] if parts else content.value + 1
        edits.append(Edit(at, at, b"," * bool(parts) + _part(SEPARATOR + change.behind)))
    return splice(raw, edits)


def _replaced(text: Text, change: Change) -> bytes:
    runs = next(runs for changed, runs in change.replaced if changed is text)
    pieces, at = [], 0
    for run in runs:
        pieces += [text.value[at : run.start], run.text]
        at = run.end
    return orjson.dumps("".join([*pieces, text.value[at:]]))


def _quoted(text: str) -> bytes:
    return orjson.dumps(text)[1:-1]


def _part(text: str) -> bytes:
    return b'{"type":"text","text":' + orjson.dumps(text) + b"}"


def _insert(request: Request, draft: Draft) -> Edit:
    own = b'{"role":"user","content":' + orjson.dumps(draft.inserted) + b"}"
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
