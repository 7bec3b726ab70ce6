"""Where a prompt first differs from the one before it in its lineage, and what kind of thing it is that differs.

Keeps nothing; whoever calls holds the trace of the prompt before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec
import orjson

from proxy.core import render
from proxy.core.body import elements
from proxy.core.cut import WHOLE, Cut
from proxy.core.draft import SEPARATOR, Draft
from proxy.core.epoch import Reason
from proxy.core.kind import Kind, local
from proxy.core.measure import Name, Scale
from proxy.core.message import texts
from proxy.core.request import Request
from proxy.errors import Odd, StrataError

Place = Literal["parameters", "tools", "L1", "L2", "L3", "L4", "L5"]
PLACES: tuple[Place, ...] = get_args(Place)

KEYED = (
    "model", "parallel_tool_calls", "reasoning_effort", "reasoning", "verbosity", "service_tier", "prompt_cache_key",
    "thinking", "cache_salt",
)  # fmt: skip
"""Members of a body besides the prompt that a provider keys its prompt cache by (PROVIDERS 1)."""
_ENDED: Mapping[Reason, Kind] = {"limit": "epoch_end", "dead_weight": "epoch_end", "cold": "epoch_end"}
_EXCERPT = 40


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: the tools, or a message; `index` is its place in the client's body.

    `own` is the message as the client wrote it, where it was forwarded in another form.
    """

    layer: Name
    index: int | None
    raw: bytes
    tokens: int
    own: bytes = b""


@dataclass(frozen=True, slots=True)
class Trace:
    """A prompt as it was forwarded at a moment, and what else its cache is keyed by.

    `sent` are digests of the client's messages behind L1, `cut` is what the limit took of them; both by index.
    """

    at: float
    keyed: tuple[tuple[str, bytes], ...]
    pieces: tuple[Piece, ...]
    sent: tuple[bytes, ...] = ()
    cut: Cut = WHOLE

    @property
    def tokens(self) -> int:
        """The tokens of the whole prompt."""
        return sum(piece.tokens for piece in self.pieces)

    def begins_as(self, other: Trace) -> bool:
        """Whether two prompts have the same L1: then the one may have been the other before its history was edited."""
        mine, theirs = ([piece.raw for piece in each.pieces if piece.layer == "L1"] for each in (self, other))
        return mine == theirs

    @property
    def size(self) -> int:
        """Bytes it takes to keep."""
        keyed = sum(len(value) + 150 for _, value in self.keyed)
        told = 100 * (len(self.sent) + len(self.cut.shortened) + len(self.cut.gone))
        return 500 + keyed + told + sum(len(piece.raw) + len(piece.own) + 150 for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The first difference from the prompt before: where it is, what kind of thing it is, and both sides of it.

    `message` is the index in the client's body, `character` the place in its text; None where that says nothing.
    `shared_tokens` are those in front of it.
    """

    layer: Place
    kind: Kind
    message: int | None = None
    character: int | None = None
    was: str = ""
    now: str = ""
    shared_tokens: int = 0


def trace(request: Request, draft: Draft, scale: Scale, *, at: float) -> Trace:
    """Return the trace of what is forwarded."""
    keyed = tuple((name, request.member(name)) for name in KEYED if name in request.members)
    pieces = []
    tools = [draft.tools or request.member("tools"), request.member("functions"), request.member("response_format")]
    if any(tools):
        pieces.append(Piece("tools", None, b"\0".join(tools), sum(scale.schema(raw) for raw in tools if raw)))
    for each in render.prompt(request, draft):
        tokens = scale.message(each.raw, each.digest)
        pieces.append(Piece(_layer(draft, each.index), each.index, each.raw, tokens, each.own))
    sent = tuple(b"" if index < draft.leading else each.digest for index, each in enumerate(request.messages))
    return Trace(at, keyed, tuple(pieces), sent, draft.cut)


def _layer(draft: Draft, index: int | None) -> Name:
    if index is None:
        return "L3"
    return "L1" if index < draft.leading else "L5" if index == draft.newest.start else "L4"


def divergence(before: Trace, now: Trace, began: Reason | None = None) -> Break | None:
    """Return the first difference that is no growth at the end; None where the prompt before is its beginning.

    `began` says why an epoch began with this prompt, if one did.
    """
    if before.keyed != now.keyed:
        name = next(name for name in KEYED if dict(before.keyed).get(name) != dict(now.keyed).get(name))
        was, is_now = (_shown(name, dict(each.keyed).get(name, b"")) for each in (before, now))
        return Break(layer="parameters", kind="parameter", was=was, now=is_now)
    shared = 0
    for place, old in enumerate(before.pieces):
        new = now.pieces[place] if place < len(now.pieces) else None
        if new is not None and new.raw == old.raw:
            shared += new.tokens
            continue
        ours = _ENDED.get(began) if began else "limit" if _limited(before, now, old, new) else None
        return _between(before.pieces[place:], now.pieces[place:], shared, ours)
    return None


def _limited(before: Trace, now: Trace, was: Piece, new: Piece | None) -> bool:
    """Whether the limit took something else here, or in front, of messages that the client sends as it did."""
    one, other = before.cut, now.cut
    places = {each.index for each in (was, new) if each and each.index is not None}
    same = min(max(places, default=-1) + 1, len(before.sent), len(now.sent))
    if before.sent[:same] != now.sent[:same]:
        return False
    if "L1" in (layers := {was.layer, new.layer if new else None}):
        return (one.dropped, one.outlined) != (other.dropped, other.outlined)
    return (
        one.dropped != other.dropped
        or any((place in one.shortened) != (place in other.shortened) for place in places)
        or (layers == {"L5"} and one.packed != other.packed)
    )


def _shown(name: str, value: bytes) -> str:
    return f"{name}: {value.decode('utf-8', 'replace') or '(absent)'}"[: 2 * _EXCERPT]


def _between(old: Sequence[Piece], new: Sequence[Piece], shared: int, ours: Kind | None) -> Break:
    was, now = old[0], new[0] if new else None
    if now is None:
        gone: Kind = "limit" if ours == "limit" else "history_cut"
        return Break(layer=was.layer, kind=gone, message=was.index, shared_tokens=shared)
    if len(old) == 1 and was.layer == "L3" and was.index is None and now.index is not None:
        # The values it ended with were never a part of the conversation.
        return Break(layer="L3", kind="turn_context", was=_said(was.raw)[:_EXCERPT], shared_tokens=shared)
    if "tools" in {was.layer, now.layer}:
        return _tools(was, now, shared)
    text_was, text_now = _said(was.raw), _said(now.raw)
    at = _first(text_was, text_now)
    front = _share(now.tokens, at, len(text_now))
    kind = ours if now.layer != "L1" else None
    layer: Place = now.layer
    if now.layer == "L1" and (_library(text_now, at) or (ours == "limit" and _library(text_was, at))):
        layer, kind = "L2", ours or "library_grew"
    elif was.own or now.own:
        old, new = _as_written(old), _as_written(new)
        if old[0].raw == new[0].raw:
            kind = kind or ("current_values" if now.layer == "L1" else "turn_context")
        else:
            text_was, text_now = _said(old[0].raw), _said(new[0].raw)
            at = _first(text_was, text_now)
    if kind is None:
        kind = _kind(old, new, text_was, text_now, at)
    return Break(
        layer=layer,
        kind=kind,
        message=now.index,
        character=at,
        was=_excerpt(text_was, at),
        now=_excerpt(text_now, at),
        shared_tokens=shared + front,
    )


def _as_written(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces as the client wrote them."""
    return [replace(piece, raw=piece.own or piece.raw, own=b"") for piece in pieces]


def _kind(old: Sequence[Piece], new: Sequence[Piece], was: str, now: str, at: int) -> Kind:
    first, later = new[0], {piece.raw for piece in old[1:]}
    if first.layer != "L1" and first.raw in later:
        return "history_cut"
    if (
        first.layer != "L1"
        and len(new) > 1
        and new[1].raw in later
        and _role(first.raw) == "user"
        and was != now
        and (len(old) > 1 and new[1].raw != old[1].raw)
    ):
        # What is kept begins with a line that says what went.
        return "history_cut"
    if was == now:
        if _addresses(old[0].raw) != _addresses(first.raw):
            return "image_url"
        return "whitespace" if _values(old[0].raw) == _values(first.raw) else "history_edited"
    if _role(old[0].raw) != _role(first.raw):
        return "history_edited" if first.layer != "L1" else "other"
    if "".join(was.split()) == "".join(now.split()):
        return "whitespace"
    kind = local(was, now, at)
    if kind == "other" and first.layer != "L1":
        return "history_edited"
    return kind


def _library(now: str, at: int) -> bool:
    """Whether a system message differs behind L1, where L2 stands."""
    frame = now.find("<context_library>")
    return frame >= 0 and at >= frame - len(SEPARATOR)


def _tools(was: Piece, now: Piece, shared: int) -> Break:
    if was.layer != now.layer:
        return Break(layer="tools", kind="tool_set", shared_tokens=shared)
    (old, *old_others), (new, *new_others) = was.raw.split(b"\0"), now.raw.split(b"\0")
    if old == new and old_others[0] == new_others[0]:
        return Break(
            layer="tools", kind="response_format", shared_tokens=shared + _share(now.tokens, len(new), len(now.raw))
        )
    before, after = (_named(first) + _named(others[0]) for first, others in ((old, old_others), (new, new_others)))
    kind: Kind = "tool_schema"
    if sorted(before) != sorted(after):
        kind = "tool_set"
    elif before != after:
        kind = "tool_order"
    at = _first(old.decode("utf-8", "replace"), new.decode("utf-8", "replace"))
    return Break(
        layer="tools",
        kind=kind,
        character=at,
        was=_excerpt(old.decode("utf-8", "replace"), at),
        now=_excerpt(new.decode("utf-8", "replace"), at),
        shared_tokens=shared + _share(now.tokens, at, len(new)),
    )


def _named(array: bytes) -> list[str]:
    """Return tools' names, in order."""
    try:
        spans = elements(array, 0, len(array)) if array else ()
        found = [orjson.loads(array[start:end]) for start, end in spans]
    except (Odd, StrataError, orjson.JSONDecodeError):
        return []
    tools = [each.get("function", each) if isinstance(each, dict) else {} for each in found]
    return [str(each.get("name", each.get("type", ""))) if isinstance(each, dict) else "" for each in tools]


def _said(raw: bytes) -> str:
    try:
        return "\n".join(value for _, _, value in texts(raw)[1])
    except (Odd, StrataError, msgspec.DecodeError, msgspec.ValidationError):
        return raw.decode("utf-8", "replace")


class _Who(msgspec.Struct):
    role: str = ""


def _role(raw: bytes) -> str:
    try:
        return msgspec.json.decode(raw, type=_Who).role
    except (msgspec.DecodeError, msgspec.ValidationError):
        return ""


def _addresses(raw: bytes) -> list[bytes]:
    return re.findall(rb'"(?:url|image_url|data|file_id|file_data)"\s*:\s*"([^"]*)"', raw)


def _values(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw


def _first(one: str, other: str) -> int:
    """Return the first character in which two texts differ."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _share(tokens: int, at: int, length: int) -> int:
    return tokens * at // length if length else 0


def _excerpt(text: str, at: int) -> str:
    return text[max(0, at - _EXCERPT // 2) : at + _EXCERPT]
