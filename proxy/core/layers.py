"""L1…L5 of one request: what is sent for each message, and what each layer holds.

    L1, L2    the leading system messages, and the library's trusted half in the last of them
    L4        history, as sent or as frozen; its first user message kept holds the library's other half
    L3, L5    the newest user message: references, new context and current values, then the user's own words

Decides on text; makes no bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.core import shorten
from proxy.core.cut import WHOLE, Cut, left_out
from proxy.core.draft import L1, NO_VALUES, NONE_REPLACED, SEPARATOR, Change, Draft, Replaced, Replacement, Slot, Values
from proxy.core.items import Item
from proxy.core.library import NO_LIBRARY, Library
from proxy.core.message import Message, Text
from proxy.core.reference import Seen, reference, replace
from proxy.core.turn import Shape


def arrange(
    slots: Sequence[Slot],
    shape: Shape,
    *,
    library: Library = NO_LIBRARY,
    lasting: bool = False,
    context: Sequence[Item] = (),
    cut: Cut = WHOLE,
    summary: str = "",
    values: Values = NO_VALUES,
) -> Draft:
    """Arrange a prompt: L2 behind L1, references for repeats, context and current values before the user's words.

    `summary` stands in the place of what the cut drops. `lasting` is for what will be replayed: it refers to nothing
    that the client may yet take away.
    """
    draft = Draft(leading=shape.leading, newest=shape.newest, cut=cut, library=library, values=values)
    place = max((index for index in range(shape.leading) if slots[index].message.form != "none"), default=None)
    behind, head = _halves(library, place)
    note = "" if cut.quiet else _joined(left_out(cut.dropped), summary if cut.dropped else "")
    seen = Seen()
    changes = _lead(slots[: shape.leading], seen, values.l1, behind=behind, place=place)
    takes = bool(shape.turns) and _takes(slots[shape.newest.start].message)
    # What stands at the head of a user message stands from there on.
    waits = [item for item in library.items if takes and (place is None or not item.trusted)]
    for item in library.items:
        if not takes or (place is not None and item.trusted):
            seen.place(item, in_library=True)
    rest = _Rest(seen, changes, lasting=lasting, head=head, note=note, waits=waits)
    # Context that no message of this turn can take stands in front, and can refer to nothing behind it.
    inserted = "" if takes else _bring(context, seen, most=cut.packed)
    for turn in shape.turns[:-1]:
        answered = any(slots[index].message.role == "assistant" for index in turn.indexes)
        for index in turn.indexes:
            if draft.keeps(index):
                rest.put(index, slots[index], lasts=answered)
    if takes:
        rest.place(slots[shape.newest.start])
    before = tuple(seen.items.values())
    brought = _bring(context, seen, most=cut.packed) if takes else ""
    for index in shape.newest.indexes:
        if draft.keeps(index):
            rest.put(index, slots[index], newest=index == shape.newest.start, brought=brought, told=values.text)
    return dataclasses.replace(
        draft,
        forms={index: slot.raw for index, slot in enumerate(slots) if slot.raw is not None},
        changes=changes,
        library_index=place,
        before=before,
        referenced=tuple(seen.referenced),
        context=brought,
        inserted=_joined(rest.head, inserted),
    )


@dataclass(slots=True, kw_only=True)
class _Rest:
    """What stands behind L1. `head` and `note` wait for the first user message that can take them.

    They are the untrusted library, whose items are those that `waits` holds, and the line that says what was left out.
    """

    seen: Seen = field(kw_only=False)
    changes: dict[int, Change] = field(kw_only=False)
    lasting: bool
    head: str
    note: str
    waits: list[Item]

    def put(
        self, index: int, slot: Slot, *, lasts: bool = True, newest: bool = False, brought: str = "", told: str = ""
    ) -> None:
        """Arrange a message; the `newest` turn's first takes what is `brought` and `told`.

        One of a turn that nobody answered (not `lasts`) is not replayed, and neither is what is no user's.
        """
        message, takes = slot.message, _takes(slot.message)
        front, replaced = "", NONE_REPLACED
        replayed = slot.fixed or (lasts and message.role == "user" and message.freezes)
        doubted = self.lasting and not replayed and any(text.blocks for text in message.texts)
        before = dict(self.seen.newest) if doubted else {}
        if takes:
            self.place(slot)
        if message.role != "user" or (slot.fixed and not newest):
            self.seen.note(message)
        else:
            texts = () if slot.fixed else message.texts
            # References stand in the place of what stands already.
            replaced = {text.where: runs for text in texts if (runs := replace(text, self.seen, slot.spelled))}
            front = _joined(*(self.head, self.note) if takes else (), brought if newest else "")
            if newest:
                front, replaced = _tell(told, message, front, replaced)
        if doubted:
            self.seen.doubt(message, before)
        if front or replaced:
            self.changes[index] = Change(before=front, replaced=replaced)
        if takes:
            # It holds what waited for it, now or since it was frozen.
            self.head = self.note = ""

    def place(self, slot: Slot) -> None:
        """Note which items of the library stand at this message's head: those it held when it was frozen, or all."""
        held = {block.item.sha256 for text in slot.message.texts for block in text.blocks if block.item}
        for item in self.waits:
            if not slot.fixed or item.sha256 in held:
                self.seen.place(item, in_library=True)
        self.waits = []


def _joined(*layers: str) -> str:
    return SEPARATOR.join(filter(None, layers))


def _lead(slots: Sequence[Slot], seen: Seen, l1: L1, *, behind: str, place: int | None) -> dict[int, Change]:
    """Arrange the leading system messages: what is replaced in them, and what joins the one at `place`."""
    changes: dict[int, Change] = {}
    for index, slot in enumerate(slots):
        replaced = NONE_REPLACED if slot.fixed else l1.replaced.get(index, NONE_REPLACED)
        joined = _joined(behind, l1.behind) if index == place and not slot.fixed else ""
        seen.note(slot.message, replaced)
        if replaced or joined:
            changes[index] = Change(replaced=replaced, behind=joined)
    return changes


def _takes(message: Message) -> bool:
    return message.role == "user" and message.form != "none"


def _halves(library: Library, place: int | None) -> tuple[str, str]:
    """Return what joins L1, and what stands at the head of the first user message kept."""
    trusted, untrusted = library.text(trusted=True), library.text(trusted=False)
    return ("", _joined(trusted, untrusted)) if place is None else (trusted, untrusted)


def _tell(told: str, message: Message, front: str, replaced: Replaced) -> tuple[str, Replaced]:
    """Put the current values behind what the client attached, before the user's words."""
    first = message.texts[0] if told and message.texts else None
    at = _attached(first) if first else 0
    if first is None or not at:
        return _joined(front, told), replaced
    here = Replacement(at, at, SEPARATOR + told)
    runs = sorted([*replaced.get(first.where, ()), here], key=lambda run: (run.start, run.end))
    return front, {**replaced, first.where: tuple(runs)}


def _attached(text: Text) -> int:
    """Return where the blocks end with which a text begins."""
    at = 0
    for block in text.blocks:
        if text.value[at : block.start].strip():
            break
        at = block.end
    return at


def _bring(context: Sequence[Item], seen: Seen, *, most: int) -> str:
    """Render the request's own context: references to what stands before it, then what is new, each once."""
    stands = {item: seen.holds(item) for item in context}
    named = [seen.refer(item) for item, held in stands.items() if held]
    blocks = [reference(named)] if named else []
    fresh = tuple(item for item, held in stands.items() if not held)
    for item in shorten.packed(fresh, most) if most else fresh:
        seen.place(item)
        blocks.append(item.content)
    return _joined(*blocks)
