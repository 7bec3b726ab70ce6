"""How memory is packed for Redis, and read back: what is missing, or not what its digest says, is left out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.core.chain import Place
from proxy.core.epoch import Epoch, Reason
from proxy.core.form import Form, Lessons
from proxy.core.items import Item
from proxy.core.lineage import NOTHING, Frozen, Link, Recalled
from proxy.core.lines import KEY_BYTES
from proxy.core.shorten import PACKED
from proxy.core.template import Seen, Template
from proxy.memory.store import Entry, View

_SHA256_BYTES = 32


class _Item(msgspec.Struct, array_like=True):
    tag: str
    label: str
    named: bool
    content: bytes
    trusted: bool
    promotable: bool
    referable: bool
    sha256: bytes
    partial: bool


class _Epoch(msgspec.Struct, array_like=True):
    number: int
    started: float
    reason: Reason
    leading: list[bytes]
    l1: bytes
    tools: bytes
    library: list[_Item]
    dropped: list[tuple[bytes, bytes]]
    shortened: list[bytes]
    packed: bool
    summary: bytes
    rewritten: bool
    model: str = ""
    kept: int = 0


class _View(msgspec.Struct):
    at: float
    turns: int
    layers: list[list[Any]]
    library: list[list[Any]]


def pack_entry(entry: Entry) -> bytes:
    """Return what stands beside a message's content."""
    return msgspec.msgpack.encode((entry.frozen.started, entry.frozen.brought, entry.frozen.values))


def pack_link(link: Link) -> bytes:
    """Return a link without its content."""
    return link.before + hashlib.sha256(link.raw).digest()


def pack_epoch(epoch: Epoch) -> bytes:
    """Return an epoch without the contents it names."""
    library = [
        _Item(
            item.tag,
            item.label,
            item.named,
            digest(item),
            item.trusted,
            item.promotable,
            item.referable,
            item.sha256,
            item.partial,
        )
        for item in epoch.library
    ]
    leading = [hashlib.sha256(raw).digest() for raw in epoch.leading]
    return msgspec.msgpack.encode(
        _Epoch(
            epoch.number, epoch.started, epoch.reason, leading, epoch.l1, epoch.tools, library, list(epoch.dropped),
            sorted(epoch.shortened), epoch.packed > 0, epoch.summary, epoch.rewritten, epoch.model, epoch.packed,
        )
    )  # fmt: skip


def digest(item: Item) -> bytes:
    """Return the digest an item's content is stored under: of an outline its own."""
    return hashlib.sha256(item.content.encode("utf-8", "surrogatepass")).digest() if item.partial else item.sha256


def pack_view(view: View) -> bytes:
    """Return how a conversation looks, in JSON."""
    return msgspec.json.encode(
        _View(view.at, view.turns, [list(layer) for layer in view.layers], [list(item) for item in view.library])
    )


def decode_recall(found: Sequence[Sequence[bytes]], known: dict[bytes, bytes]) -> Recalled:
    """Read a recall's answer; what refers to a content that is missing or not what its digest says is left out."""
    fields, digests, contents = found
    held = dict(known)
    for digest, content in zip(digests, contents, strict=True):
        if hashlib.sha256(content).hexdigest().encode() == digest:
            held[bytes.fromhex(digest.decode())] = content
    by_kind: dict[str, list[tuple[list[bytes], bytes]]] = {"m": [], "r": [], "e": [], "l": [], "s": [], "seen": []}
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        kind, *rest = name.decode().split(":")
        by_kind.setdefault(kind, []).append(([bytes.fromhex(part) for part in rest], value))
    replies: dict[tuple[bytes, ...], set[bytes]] = {}
    for (*where, reply), _ in by_kind["r"]:
        replies.setdefault(tuple(where), set()).add(reply)
    log: dict[tuple[Place, Place], tuple[Frozen, ...]] = {}
    for (epoch, place, attempt), at in by_kind["m"]:
        if attempt in held:
            told = frozenset(replies.get((epoch, place, attempt), ()))
            started, brought, values = msgspec.msgpack.decode(at, type=tuple[float, str, tuple[tuple[int, str], ...]])
            frozen = Frozen(started=started, raw=held[attempt], replies=told, brought=brought, values=values)
            log[epoch, place] = (*log.get((epoch, place), ()), frozen)
    read = [_unpack(place, value, held) for (place,), value in by_kind["e"]]
    epochs = {epoch.place: epoch for epoch in read if epoch is not None}
    seen = next((float(value) for _, value in by_kind["seen"]), None)
    links = {
        place: Link(packed[:-_SHA256_BYTES], held[packed[-_SHA256_BYTES:]])
        for (place,), packed in by_kind["l"]
        if packed[-_SHA256_BYTES:] in held
    }
    summaries = {
        key: held[digest].decode("utf-8", "surrogatepass") for (key,), digest in by_kind["s"] if digest in held
    }
    if not (epochs or log or links or summaries):
        return NOTHING
    return Recalled(epochs=epochs, log=log, links=links, summaries=summaries, seen_at=seen)


def _unpack(place: Place, packed: bytes, held: Mapping[bytes, bytes]) -> Epoch | None:
    try:
        read = msgspec.msgpack.decode(packed, type=_Epoch)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    if not held.keys() >= {*read.leading, *(item.content for item in read.library)}:
        return None
    return Epoch(
        place=place,
        number=read.number,
        started=read.started,
        reason=read.reason,
        leading=tuple(held[digest] for digest in read.leading),
        l1=read.l1,
        tools=read.tools,
        library=tuple(_item(item, held[item.content].decode()) for item in read.library),
        dropped=tuple(read.dropped),
        shortened=frozenset(read.shortened),
        # Before it was written how much, it was always this much.
        packed=(read.kept or PACKED) if read.packed else 0,
        summary=read.summary,
        model=read.model,
        rewritten=read.rewritten,
    )


def decode_view(packed: bytes, stats: Mapping[bytes, bytes]) -> View:
    """Read how a conversation looks. Raises what reading raises."""
    read = msgspec.json.decode(packed, type=_View)
    return View(
        at=read.at,
        turns=read.turns,
        layers=read.layers,
        library=read.library,
        requests=int(stats.get(b"requests", 0)),
        prompt_tokens=int(stats.get(b"prompt_tokens", 0)),
        cached_tokens=int(stats.get(b"cached_tokens", 0)),
    )


def _item(item: _Item, content: str) -> Item:
    return Item(
        tag=item.tag, label=item.label, named=item.named, sha256=item.sha256, content=content,
        trusted=item.trusted, promotable=item.promotable, referable=item.referable, partial=item.partial,
    )  # fmt: skip


class _Form(msgspec.Struct, array_like=True):
    lines: bytes
    behind: list[int]
    slots: list[int]
    edited: list[tuple[bytes, bytes]]
    template: bytes


class _Template(msgspec.Struct, array_like=True):
    id: bytes
    count: int
    keys: bytes
    lineages: list[int]
    sizes: list[int]
    gaps: list[tuple[bytes, bytes]]
    words: list[bytes]
    edits: list[tuple[bytes, bytes, bytes]]


_form = msgspec.msgpack.Decoder(_Form)
_template = msgspec.msgpack.Decoder(_Template)


def pack_form(form: Form) -> tuple[bytes, bytes]:
    """Return a form in bytes, and their digest."""
    packed = msgspec.msgpack.encode(
        _Form(b"".join(form.lines), sorted(form.behind), list(form.slots), sorted(form.edited), form.template)
    )
    return packed, hashlib.blake2b(packed, digest_size=16).digest()


def unpack_form(packed: bytes) -> Form:
    """Read a form. Raises msgspec.DecodeError or msgspec.ValidationError."""
    read = _form.decode(packed)
    return Form(_keys(read.lines), frozenset(read.behind), tuple(read.slots), frozenset(read.edited), read.template)


def pack_template(template: Template) -> bytes:
    """Return a template in bytes."""
    return msgspec.msgpack.encode(
        _Template(
            template.id,
            template.count,
            b"".join(seen.key for seen in template.lines),
            [seen.lineages for seen in template.lines],
            [seen.size for seen in template.lines],
            sorted(template.lessons.gaps),
            sorted(template.lessons.words),
            [(*gap, value) for gap, value in template.lessons.edits.items()],
        )
    )


def unpack_template(packed: bytes) -> Template:
    """Read a template. Raises msgspec.DecodeError or msgspec.ValidationError."""
    read = _template.decode(packed)
    return Template(
        id=read.id,
        count=read.count,
        lines=tuple(map(Seen, _keys(read.keys), read.lineages, read.sizes)),
        lessons=Lessons(
            frozenset(read.gaps),
            frozenset(read.words),
            {(before, after): value for before, after, value in read.edits},
        ),
    )


def _keys(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
