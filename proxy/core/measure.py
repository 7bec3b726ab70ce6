"""What each layer of a forwarded prompt weighs, and its digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from proxy.core import render, shorten, tokens
from proxy.core.draft import Draft, touches
from proxy.core.library import items
from proxy.core.message import Message
from proxy.core.request import Request

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

Name = Literal["tools", "L1", "L2", "L3", "L4", "L5"]
NAMES: tuple[Name, ...] = ("tools", "L1", "L2", "L3", "L4", "L5")


class Scale(Protocol):
    """Weighs in tokens; whoever implements it remembers what it has weighed."""

    def message(self, raw: bytes, digest: bytes) -> int:
        """Weigh one raw message."""
        ...

    def text(self, text: str) -> int:
        """Weigh a piece of text."""
        ...

    def schema(self, raw: bytes) -> int:
        """Weigh a tool list or a response format."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """`sha256` is hexadecimal, the first 16 digits; empty where the layer is."""

    name: Name
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Layers:
    """All six, in the order they stand in the prompt of most models."""

    each: tuple[Layer, ...]

    @property
    def total(self) -> int:
        """The tokens of the whole prompt."""
        return sum(layer.tokens for layer in self.each)


def layers(request: Request, draft: Draft, scale: Scale) -> Layers:
    """Weigh everything that is sent. Untouched messages are weighed by their remembered digests."""
    sums = _Sums()
    for key in ("tools", "functions", "response_format"):
        if raw := (draft.tools if key == "tools" else b"") or request.member(key):
            sums.put("tools", scale.schema(raw), raw)
    for each in render.prompt(request, draft):
        amount = scale.message(each.raw, each.digest)
        if each.index is None:
            sums.put("L3", amount, each.raw)
        elif each.index < draft.leading:
            sums.put("L1", amount, request.messages[each.index].digest)
        elif each.index == draft.newest.start and request.messages[each.index].role == "user":
            _put_newest(sums, scale, request.messages[each.index], draft, amount)
        else:
            sums.put("L4", amount, each.digest)
    _put_library(sums, scale, draft)
    if draft.values.l1.digest:
        sums.content["L1"] = hashlib.sha256(draft.values.l1.digest)
    sums.weight["L5"] += tokens.PRIMING
    return sums.freeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What the limit took from the prompt that is sent: whole messages, and what messages and items were made smaller.

    `shortened_tokens` are those of both.
    """

    dropped_messages: int = 0
    dropped_tokens: int = 0
    shortened_messages: int = 0
    shortened_items: int = 0
    shortened_tokens: int = 0


NO_LOSSES = Losses()


def losses(request: Request, draft: Draft, scale: Scale) -> Losses:
    """Weigh what is not sent."""
    cut, partial = draft.cut, [item for item in draft.library.items if item.partial]
    if not (cut.dropped or cut.shortened or cut.packed or partial):
        return NO_LOSSES
    shortened = [index for index in cut.shortened if draft.keeps(index)]
    whole = {item.key: item.content for message in request.messages for item in items(message)}
    saved = sum(_whole(request, index, scale) - weigh(request, draft, index, scale) for index in shortened)
    saved += sum(scale.text(whole[item.key]) - scale.text(item.content) for item in partial if item.key in whole)
    brought = tuple(item for item in dict.fromkeys(request.hints.context) if item not in draft.referenced)
    packed = shorten.packed(brought, cut.packed) if cut.packed else brought
    saved += sum(scale.text(item.content) for item in brought) - sum(scale.text(item.content) for item in packed)
    return Losses(
        dropped_messages=len(cut.gone),
        dropped_tokens=sum(_whole(request, index, scale) for index in cut.gone),
        shortened_messages=len(shortened),
        shortened_items=len(partial) + len({*brought} - {*packed}),
        shortened_tokens=max(0, saved),
    )


def _whole(request: Request, index: int, scale: Scale) -> int:
    return scale.message(request.raw(index), request.messages[index].digest)


def weigh(request: Request, draft: Draft, index: int, scale: Scale) -> int:
    """Weigh one message as it is forwarded, or would be if it is left out."""
    each = render.whole(request, draft, index)
    return scale.message(each.raw, each.digest)


@dataclass(slots=True)
class _Sums:
    weight: dict[Name, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    content: dict[Name, Hash] = field(default_factory=dict)

    def put(self, name: Name, amount: int, content: bytes) -> None:
        self.weight[name] += amount
        self.content.setdefault(name, hashlib.sha256()).update(content)

    def freeze(self) -> Layers:
        digests = {name: content.hexdigest()[:16] for name, content in self.content.items()}
        return Layers(tuple(Layer(name, self.weight[name], digests.get(name, "")) for name in NAMES))


def _put_library(sums: _Sums, scale: Scale, draft: Draft) -> None:
    """Give L2 what its halves weigh, out of the messages they stand in."""
    for trusted in (True, False):
        text = draft.library.text(trusted=trusted)
        if not text:
            continue
        holder: Name = "L1" if trusted and draft.library_index is not None else "L4" if sums.weight["L4"] else "L5"
        amount = min(scale.text(text), sums.weight[holder])
        sums.weight[holder] -= amount
        sums.put("L2", amount, text.encode())


def _put_newest(sums: _Sums, scale: Scale, message: Message, draft: Draft, amount: int) -> None:
    """Split the newest user message: what was attached or told is L3, the user's own words are L5."""
    attached = [text for text in (draft.context, draft.values.text) if text]
    change = draft.changes.get(draft.newest.start)
    replaced = change.replaced if change else {}
    for text in message.texts:
        runs = replaced.get(text.where, ())
        attached += [run.text for run in runs if run.end > run.start]
        attached += [text.value[block.start : block.end] for block in text.blocks if not touches(runs, block)]
    for piece in attached:
        # Counted apart, pieces can come to a token or two more than where they touch.
        weight = min(scale.text(piece), amount)
        sums.put("L3", weight, piece.encode())
        amount -= weight
    sums.put("L5", amount, message.said if attached else message.digest)
