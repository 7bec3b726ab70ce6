"""What each layer of a forwarded prompt weighs, and its digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

from proxy.core import render, tokens
from proxy.core.layers import Draft
from proxy.core.request import Request

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
    weight: dict[Name, int] = dict.fromkeys(NAMES, 0)
    content = {name: hashlib.sha256() for name in NAMES}
    seen: set[Name] = set()

    def put(name: Name, amount: int, digest: bytes) -> None:
        weight[name] += amount
        content[name].update(digest)
        seen.add(name)

    for key in ("tools", "functions", "response_format"):
        if raw := request.member(key):
            put("tools", scale.schema(raw), raw)
    for index, placed in enumerate(request.placed):
        if not draft.keeps(index):
            continue
        message, change = placed.message, draft.changes.get(index)
        if change is None:
            amount, digest = scale.message(request.raw(index), message.digest), message.digest
        else:
            raw = render.message(request.raw(index), change)
            digest = hashlib.sha256(raw).digest()
            amount = scale.message(raw, digest)
        if index < draft.leading:
            if change is not None:
                amount -= _put_library(put, scale, change.behind)
            put("L1", amount, message.digest)
        elif index == draft.newest.start and message.role == "user":
            _put_newest(put, scale, request, draft, index, amount)
        else:
            if change is not None and draft.library:
                amount -= _put_library(put, scale, change.before)
            put("L4", amount, digest)
    if draft.inserted:
        put("L3", tokens.PER_MESSAGE + 1 + scale.text(draft.inserted), draft.inserted.encode())
    weight["L5"] += tokens.PRIMING
    return Layers(
        tuple(Layer(name, weight[name], content[name].hexdigest()[:16] if name in seen else "") for name in NAMES)
    )


class _Put(Protocol):
    def __call__(self, name: Name, amount: int, digest: bytes) -> None: ...


def _put_library(put: _Put, scale: Scale, text: str) -> int:
    if not text:
        return 0
    amount = scale.text(text)
    put("L2", amount, text.encode())
    return amount


def _put_newest(put: _Put, scale: Scale, request: Request, draft: Draft, index: int, amount: int) -> None:
    """Split the newest user message: what was attached is L3, the user's own words are L5."""
    message, change = request.placed[index].message, draft.changes.get(index)
    before = change.before if change else ""
    if before and before != draft.context:
        head = before.removesuffix(draft.context)
        amount -= _put_library(put, scale, head)
        before = draft.context
    replaced = {id(text): runs for text, runs in change.replaced} if change else {}
    attached = [before] if before else []
    for text in message.texts:
        runs = replaced.get(id(text), ())
        attached += [run.text for run in runs]
        gone = [(run.start, run.end) for run in runs]
        attached += [
            text.value[block.start : block.end]
            for block in text.blocks
            if not any(start <= block.start < end for start, end in gone)
        ]
    for piece in attached:
        weight = scale.text(piece)
        put("L3", weight, piece.encode())
        amount -= weight
    put("L5", amount, message.said if attached else message.digest)
