"""A named conversation's prompt as a log: frozen messages replayed, or compacted once at an epoch's end."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from proxy.core import layers, library, lineage, render, shorten, summary
from proxy.core.chain import Place
from proxy.core.cut import Cut
from proxy.core.draft import L1, Change, Draft, Slot, Values
from proxy.core.epoch import NO_EPOCH, Epoch, Reason
from proxy.core.items import Item
from proxy.core.library import Library
from proxy.core.lineage import Frozen, Recalled
from proxy.core.message import Look, Message
from proxy.core.request import Request
from proxy.core.turn import Span

_NOTHING: tuple[object, ...] = (None, [], {}, "")
_members = msgspec.json.Decoder(dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a request extends: the epoch it continues, and how earlier messages were forwarded.

    `slots` are the request's messages, those among them that stand again as they were forwarded. `begun` are the
    current values that were told when the newest turn began, by slot.
    """

    epoch: Epoch | None
    frozen: Mapping[int, Frozen]
    slots: tuple[Slot, ...]
    begun: Mapping[int, str]
    l1: bytes
    tools: bytes
    summaries: Mapping[bytes, str]

    def told(self, place: Place) -> str:
        """Return a summary in its frame; empty where there is none."""
        return summary.frame(self.summaries[place]) if place in self.summaries else ""


def past(request: Request, recalled: Recalled, order: Iterable[bytes], l1: L1, look: Look) -> Past:
    """Find what a request extends; `order` are its tools as they are to stand, `l1` is its L1."""
    messages, parts = request.messages, request.parts
    epoch = lineage.current(request.places[parts.leading :], recalled)
    l1_digest = l1.digest or _digest(messages[index].meaning for index in range(parts.leading))
    frozen: dict[int, Frozen] = {}
    slots: list[Slot] = []
    if epoch is not None:
        matched = lineage.match(request, recalled, epoch.place)
        frozen = {index: one for index, each in matched.items() if (one := _replayed(request, index, each, look))}
        # What they name may have been lost.
        slots, cut = _slots(request, epoch, l1_digest, frozen, look), _cut(request, epoch)
        while missing := _missing(request, slots, epoch, cut):
            for index in missing:
                slots[index] = Slot(messages[index])
                frozen.pop(index, None)
    begun = lineage.attempt(request, parts.newest, recalled, epoch.place) if epoch and parts.turns else None
    return Past(
        epoch=epoch,
        frozen=frozen,
        slots=tuple(slots),
        begun=dict(begun.values) if begun else {},
        l1=l1_digest,
        tools=_digest([*order, request.member("functions")]),
        summaries=recalled.summaries,
    )


def told(found: Past) -> dict[int, str]:
    """Return the current values that stand in earlier turns, by slot, the newest of each."""
    return dict(pair for index in sorted(found.frozen) for pair in found.frozen[index].values)


def outdated(found: Past, slots: Sequence[str]) -> Iterator[str]:
    """Return the values told in earlier turns that hold no longer."""
    told = [pair for index in sorted(found.frozen) for pair in found.frozen[index].values]
    newest = {slot: place for place, (slot, _) in enumerate(told)}
    for place, (slot, text) in enumerate(told):
        if newest[slot] != place or slot >= len(slots) or slots[slot] != text:
            yield text


def resume(request: Request, epoch: Epoch, found: Past, look: Look, *, values: Values, cut: Cut | None = None) -> Draft:
    """Arrange the request as its epoch has it: what was forwarded stands, what is new comes at the end.

    Context the client sends in an older turn and that stands nowhere is brought by the newest turn.
    """
    slots = list(found.slots)
    while cut and (missing := _missing(request, slots, epoch, cut)):
        # What they name was dropped: signed reasoning is accepted back only behind what it was made from.
        cut = dataclasses.replace(cut, dropped=_through(request, cut, missing[-1]))
        for index in missing:
            slots[index] = Slot(request.messages[index])
    cut = cut or _cut(request, epoch)
    shorten_slots(slots, request, cut.shortened - found.frozen.keys(), look)
    late = _late(request, slots, epoch, cut)
    shelf = Library(epoch.library)
    return layers.arrange(
        slots,
        request.parts,
        library=library.outlined(shelf, (), {}) if cut.outlined else shelf,
        lasting=True,
        context=(*late, *request.hints.context),
        cut=cut,
        summary=found.told(epoch.summary),
        values=values,
    )


def _replayed(request: Request, index: int, frozen: Frozen, look: Look) -> Frozen | None:
    """Return what of a frozen message stands again; None where the client's own message does."""
    message = request.messages[index]
    if not message.freezes or _differ(request.raw(index), frozen.raw):
        # The client's own, and what it once brought beside it.
        own = render.message(request.raw(index), Change(before=frozen.brought))
        frozen = dataclasses.replace(frozen, raw=own, values=())
        if not frozen.brought:
            return None
    came = _outputs(message)
    # A tool's output that came back belongs to its turn: no other can bring it.
    return None if came and came - _outputs(look(frozen.raw)) else frozen


def _slots(request: Request, epoch: Epoch, l1: bytes, frozen: Mapping[int, Frozen], look: Look) -> list[Slot]:
    """Return a request's messages, L1 and those that stand again as they were forwarded."""
    slots = [Slot(message) for message in request.messages]
    if l1 == epoch.l1 and len(epoch.leading) == request.parts.leading:
        for index, raw in enumerate(epoch.leading):
            own = look(raw).meaning == request.messages[index].meaning
            slots[index] = Slot(request.messages[index], fixed=True) if own else _as_frozen(request, index, raw, look)
    for index, each in frozen.items():
        slots[index] = _as_frozen(request, index, each.raw, look)
    return slots


def _missing(request: Request, slots: Sequence[Slot], epoch: Epoch, cut: Cut) -> list[int]:
    """Find the frozen messages kept that name what stands nowhere in front of them."""
    lead = any(message.form != "none" for message in request.messages[: request.parts.leading])
    labels = {item.label for item in epoch.library if lead and item.trusted}
    head = {item.label for item in epoch.library} - labels
    missing: list[int] = []
    for index, slot in enumerate(slots):
        if cut.drops(index):
            continue
        if slot.message.role == "user" and slot.message.form != "none":
            # A frozen message holds what stood at its head.
            labels, head = labels if slot.fixed else labels | head, set()
        labels |= {item.label for item in library.items(slot.message)}
        # What the client says itself in such words is no reference.
        names = {*slot.message.names} - {*request.messages[index].names} if slot.fixed else set()
        if not all(name in labels or name.rpartition(" (")[0] in labels for name in names):
            missing.append(index)
    return missing


def _through(request: Request, cut: Cut, index: int) -> tuple[Span, ...]:
    """Drop all turns up to the one that holds a message: signed reasoning stands behind what it was made from."""
    older = request.parts.turns[:-1]
    return tuple(turn for turn in older if turn in cut.dropped or turn.start <= index)


def _differ(sent: bytes, frozen: bytes) -> bool:
    """Whether a message comes with other members than it had, its words apart: replay only fills in context."""
    try:
        return sent != frozen and _beside_words(sent) != _beside_words(frozen)
    except (msgspec.DecodeError, RecursionError):
        return True


def _beside_words(raw: bytes) -> dict[str, object]:
    # A client's storage may leave out, or add, members that hold nothing.
    return {name: value for name, value in _members.decode(raw).items() if name != "content" and value not in _NOTHING}


def _outputs(message: Message) -> set[str]:
    """Return the tools' outputs that stand among a message's blocks."""
    return {text.value[block.start : block.end] for text in message.texts for block in text.blocks if not block.item}


def shorten_slots(slots: list[Slot], request: Request, places: Iterable[int], look: Look) -> None:
    """Let messages keep the head and tail of their long texts."""
    for index in places:
        raw = slots[index].raw or request.raw(index)
        short = shorten.message(raw, slots[index].message)
        if short is not raw:
            slots[index] = Slot(look(short), short, fixed=slots[index].fixed)


def _as_frozen(request: Request, index: int, raw: bytes, look: Look) -> Slot:
    if raw == request.raw(index):
        return Slot(request.messages[index], fixed=True)
    return Slot(look(raw), raw, fixed=True)


def compact(request: Request, found: Past, look: Look, before: Draft, *, values: Values) -> Callable[[Cut], Draft]:
    """Return how to arrange a new epoch: L1 afresh, items in use in L2, history as bare turns.

    Where turns go and a summary of them is known, it stands in their place.
    """
    told = found.told(latest_summary(request, found))
    messages, parts, context = request.messages, request.parts, request.hints.context
    history = [index for index in range(parts.leading, parts.newest.start) if messages[index].role == "user"]
    # Of an item whose newest version may not move all versions stay where they are.
    newest = {item.key: item for index in history for item in library.items(messages[index])}
    gone = {key for key, item in newest.items() if item.promotable and item.referable}
    slots = [Slot(message) for message in messages]
    for index in history:
        # What is not frozen is arranged anew each time, from the client's own: bare now would not be bare then.
        if messages[index].freezes and any(item.key in gone for item in library.items(messages[index])):
            raw = render.bare(request.raw(index), messages[index], gone)
            slots[index] = Slot(look(raw), raw)

    def arrange(cut: Cut) -> Draft:
        kept = [messages[index] for index in history if not cut.drops(index)]
        arriving = library.arriving(request)
        shelf = library.in_use(before.before, kept, arriving)
        shelf = library.outlined(shelf, arriving, found.summaries) if cut.outlined else shelf
        mine = list(slots)
        shorten_slots(mine, request, cut.shortened, look)
        return layers.arrange(
            mine, parts, library=shelf, lasting=True, context=context, cut=cut, summary=told, values=values
        )

    return arrange


def latest_summary(request: Request, found: Past) -> Place:
    """Return the place of the latest summary of this lineage that tells of nothing in the newest turn."""
    before = request.places[request.parts.leading : request.parts.newest.start]
    return next((place for place in reversed(before) if place in found.summaries), b"")


def begin(request: Request, draft: Draft, found: Past, *, reason: Reason, now: float) -> Epoch:
    """Return the epoch that begins with this request, to be stored beside what is forwarded."""
    leading = tuple(render.sent(request, draft, index) for index in range(draft.leading))
    return Epoch(
        place=request.places[-1] if request.places else NO_EPOCH,
        number=found.epoch.number + 1 if found.epoch else 0,
        started=now,
        reason=reason,
        leading=leading,
        l1=found.l1,
        tools=found.tools,
        library=draft.library.items,
        dropped=tuple((request.places[span.start], request.places[span.end - 1]) for span in draft.dropped),
        shortened=frozenset(request.places[index] for index in draft.cut.shortened),
        packed=draft.cut.packed,
        summary=latest_summary(request, found) if draft.dropped and not draft.cut.quiet else b"",
        rewritten=rewritten(request, draft),
    )


def rewritten(request: Request, draft: Draft) -> bool:
    """Whether anything forwarded is not the client's own bytes, or something is left out."""
    return bool(draft.dropped or draft.inserted or draft.values.last) or any(
        render.sent(request, draft, index) != request.raw(index) for index in {*draft.forms, *draft.changes}
    )


def _cut(request: Request, epoch: Epoch) -> Cut:
    """Return what the limit took when the epoch began; what it made of the turn's own context holds for that turn."""
    at = {place: index for index, place in enumerate(request.places)}
    return Cut(
        dropped=tuple(Span(at[first], at[last] + 1) for first, last in epoch.dropped if first in at and last in at),
        shortened=frozenset(at[place] for place in epoch.shortened if place in at),
        packed=epoch.packed if at.get(epoch.place, -1) >= request.parts.newest.start else 0,
    )


def _late(request: Request, slots: Sequence[Slot], epoch: Epoch, cut: Cut) -> tuple[Item, ...]:
    """Find context the client sends in older turns that is nowhere in what was forwarded, nor in the newest turn.

    Of each item only the newest version it sends there, and only where no version stands that came later.
    """
    messages, parts, attached = request.messages, request.parts, library.attached(request)
    stands = {item.sha256 for item in (*epoch.library, *attached)}
    latest = {item.key: len(slots) for item in attached}
    for index, slot in enumerate(slots[: parts.newest.start]):
        for item in library.items(slot.message):
            stands.add(item.sha256)
            latest[item.key] = max(index, latest.get(item.key, -1))
    late: dict[tuple[str, str], Item | None] = {}
    for index in range(parts.leading, parts.newest.start):
        out = not slots[index].fixed or cut.drops(index)
        for item in library.items(messages[index]):
            known = out or item.sha256 in stands or latest.get(item.key, -1) > index
            late[item.key] = None if known else item
    return tuple(item for item in late.values() if item is not None)


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def written(request: Request, draft: Draft, *, at: float) -> dict[int, Frozen]:
    """Return what is frozen of what is forwarded, by index, a turn's first message with the answers that follow it.

    Of a message that is the client's to spell, only what was brought beside it in `strata.context`.
    """
    messages, parts = request.messages, request.parts
    frozen: dict[int, Frozen] = {}
    for turn in parts.turns:
        newest = turn.start == parts.newest.start
        said = frozenset(each.said for each in messages[turn.start : turn.end] if each.role == "assistant")
        for index in turn.indexes:
            first = newest and index == turn.start
            brought = draft.context if first else ""
            if draft.keeps(index) and (messages[index].freezes or brought):
                replies = said if index == turn.start else frozenset()
                told = draft.values.told if first and messages[index].freezes else ()
                raw = render.sent(request, draft, index)
                frozen[index] = Frozen(started=at, raw=raw, replies=replies, brought=brought, values=told)
    return frozen
