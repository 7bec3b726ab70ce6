"""L1…L5 of one request: what is sent for each message, and what each layer holds.

Decides on text; makes no bytes. A message that needs no change is only named by its place, so that the client's own
bytes go upstream.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core import shorten
from proxy.core.cut import WHOLE, Cut, left_out
from proxy.core.items import Block, Item
from proxy.core.library import Library
from proxy.core.message import Message, Text
from proxy.core.turn import Shape, Span

SEPARATOR = "\n\n"
NO_LIBRARY = Library()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Put `text` in the place of `start:end` of a message's text, spelled in JSON as it was, where that is known."""

    start: int
    end: int
    text: str
    spelled: bytes = b""

    @property
    def size_bytes(self) -> int:
        """How much is put in, as it is spelled or about that."""
        return len(self.spelled) or len(self.text.encode("utf-8", "surrogatepass"))


def touches(runs: Sequence[Replacement], block: Block) -> bool:
    """Whether some of a block is replaced; `runs` are in order."""
    at = bisect.bisect_right(runs, block.start, key=lambda run: run.end)
    return at < len(runs) and runs[at].start < block.end


Replaced = Mapping[tuple[int, int], tuple[Replacement, ...]]
"""What is replaced in a message, by where the text stands in it."""
NONE_REPLACED: Replaced = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done to one message: text put before, text put behind, what is replaced in its texts."""

    before: str = ""
    behind: str = ""
    replaced: Replaced = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class L1:
    """What is done to the leading system messages: by index, lines replaced; what joins the last one, behind L2.

    `digest` is that of L1 as it is forwarded, L2 left out.
    """

    replaced: Mapping[int, Replaced] = field(default_factory=dict)
    behind: str = ""
    digest: bytes = b""


AS_SENT = L1()


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The current values as they are told: which slots, and the text, in L3 or (`last`) at the prompt's very end.

    There it has the `role` that L1 has: some models take `developer` only.
    """

    told: tuple[tuple[int, str], ...] = ()
    text: str = ""
    last: str = ""
    role: str = "system"


NO_VALUES = Values()


@dataclass(frozen=True, slots=True)
class Slot:
    """A message to be arranged: the client's own, or in another form (`raw`). What is `fixed` stands as it is.

    Where there are `spelled` items, by their content's digest, its blocks only stand in for them.
    """

    message: Message
    raw: bytes | None = None
    fixed: bool = False
    spelled: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt arranged but not rendered. `referenced` are the items of whose content a reference stands instead.

    `forms` are the messages that are not taken from the request, before their change is made. `before` are the items
    that stand in front of the newest turn. `inserted` is the text of a user message put in front, for what has no user
    message that could take it. `tools` is the array of tools where it stands in another order than sent.
    `values` are the current values that are told; `l1` digests L1 where it is not as sent; `cut` is what the limit
    took.
    """

    leading: int
    newest: Span
    forms: Mapping[int, bytes] = field(default_factory=dict)
    changes: dict[int, Change] = field(default_factory=dict)
    library: Library
    library_index: int | None = None
    before: tuple[Item, ...] = ()
    referenced: tuple[Item, ...] = ()
    context: str = ""
    inserted: str = ""
    tools: bytes = b""
    values: Values = NO_VALUES
    l1: bytes = b""
    cut: Cut = WHOLE

    @property
    def dropped(self) -> tuple[Span, ...]:
        """The runs of messages that are not sent."""
        return self.cut.dropped

    def keeps(self, index: int) -> bool:
        """Whether the message at this place is sent."""
        return not self.cut.drops(index)

    def runs(self, index: int) -> list[Replacement]:
        """What is replaced in a message."""
        return [run for runs in self.changes[index].replaced.values() for run in runs] if index in self.changes else []


@dataclass(slots=True)
class _Seen:
    """What stands so far in the prompt being arranged: by item, its newest version and whether that is in L2."""

    newest: dict[tuple[str, str], tuple[bytes, bool]] = field(default_factory=dict)
    tags: dict[str, set[str]] = field(default_factory=dict)
    unnamed: dict[tuple[str, str], set[bytes]] = field(default_factory=dict)
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    whole: set[bytes] = field(default_factory=set)
    referenced: list[Item] = field(default_factory=list)

    def place(self, item: Item, *, in_library: bool = False) -> None:
        if item.partial:
            # It does not stand: its outline does.
            self.newest[item.key] = (b"", False)
            return
        self.whole.add(item.sha256)
        if not item.named:
            self.unnamed.setdefault((item.tag, item.label), set()).add(item.sha256)
        in_library = in_library or self.newest.get(item.key) == (item.sha256, True)
        self.newest[item.key] = (item.sha256, in_library)
        self.items[item.key] = item
        self.tags.setdefault(item.label, set()).add(item.tag)

    def doubt(self, message: Message, before: Mapping[tuple[str, str], tuple[bytes, bool]]) -> None:
        """Refer to nothing that stands only here: it is the client's to take away. `before` is what stood earlier."""
        for text in message.texts:
            for block in text.blocks:
                if block.item and before.get(block.item.key, (b"", False))[0] != block.item.sha256:
                    self.newest[block.item.key] = (b"", False)

    def holds(self, item: Item) -> bool:
        """Whether a reference would say what is meant: this very content, its newest version, and no other by its name.

        Blocks that name themselves nowhere are told by their first words; where two begin alike, neither is referenced.
        """
        known = item.referable and self.newest.get(item.key, (b"", False))[0] == item.sha256
        return known and (item.named or len(self.unnamed[item.tag, item.label]) == 1)

    def refer(self, item: Item) -> tuple[str, bool]:
        """Return the line that names an item which stands, and whether it stands in L2."""
        self.referenced.append(item)
        tag = f" ({item.tag})" if len(self.tags[item.label]) > 1 else ""
        return f"- {item.label}{tag}", self.newest[item.key][1]


def _reference(named: Sequence[tuple[str, bool]]) -> str:
    """Say where items stand, in the seed's own words."""
    where = "in the Context Library above." if all(library for _, library in named) else "above in this conversation."
    return "\n".join(["Context attached:", *(line for line, _ in named), f"Find them {where}"])


def arrange(
    slots: Sequence[Slot],
    shape: Shape,
    *,
    library: Library = NO_LIBRARY,
    lasting: bool = False,
    context: Sequence[Item] = (),
    cut: Cut = WHOLE,
    summary: str = "",
    l1: L1 = AS_SENT,
    values: Values = NO_VALUES,
) -> Draft:
    """Arrange a prompt: L2 behind L1, references for repeats, context and current values before the user's words.

    A message that is fixed holds its half of the library already, and the line that says what was left out before it;
    one that is not gets them again. `summary` stands in the place of what the cut drops. `lasting` is for what will be
    replayed: it refers to nothing that the client may yet take away.
    """
    seen = _Seen()
    draft = Draft(leading=shape.leading, newest=shape.newest, cut=cut, library=library, values=values, l1=l1.digest)
    place = max((index for index in range(shape.leading) if slots[index].message.form != "none"), default=None)
    behind, head = _halves(library, place)
    note = "" if cut.quiet else SEPARATOR.join(filter(None, [left_out(cut.dropped), summary if cut.dropped else ""]))
    changes = _lead(slots[: shape.leading], seen, l1, behind=behind, place=place)
    for item in library.items:
        seen.place(item, in_library=True)
    taken = _takes(slots[shape.newest.start].message) if shape.turns else False
    brought, left = "", "" if taken else _bring(context, seen, pack=cut.packed)
    before_newest: tuple[Item, ...] = ()
    for index in range(shape.leading, len(slots)):
        slot = slots[index]
        if index == shape.newest.start:
            before_newest = tuple(seen.items.values())
            brought = _bring(context, seen, pack=cut.packed) if taken else ""
        if not draft.keeps(index):
            continue
        if slot.message.role != "user" or (slot.fixed and index != shape.newest.start):
            _note(slot.message, seen)
            # A frozen message holds what once stood at its head.
            head, note = ("", "") if _takes(slot.message) else (head, note)
            continue
        doubted = lasting and not slot.message.freezes
        before = dict(seen.newest) if doubted else {}
        texts = () if slot.fixed else slot.message.texts
        replaced: Replaced = {text.where: runs for text in texts if (runs := _replace(text, seen, slot.spelled))}
        if doubted:
            seen.doubt(slot.message, before)
        takes = _takes(slot.message)
        here = brought if index == shape.newest.start else ""
        front = SEPARATOR.join(filter(None, [*((head, note) if takes else ()), here]))
        if index == shape.newest.start:
            front, replaced = _tell(values.text, slot.message, front, replaced)
        if front or replaced:
            changes[index] = Change(before=front, replaced=replaced)
        head, note = ("", "") if takes else (head, note)
    return dataclasses.replace(
        draft,
        forms={index: slot.raw for index, slot in enumerate(slots) if slot.raw is not None},
        changes=changes,
        library_index=place,
        before=before_newest,
        referenced=tuple(seen.referenced),
        context=brought,
        inserted=SEPARATOR.join(filter(None, [head, left])),
    )


def _lead(slots: Sequence[Slot], seen: _Seen, l1: L1, *, behind: str, place: int | None) -> dict[int, Change]:
    """Arrange the leading system messages: what is replaced in them, and what joins the one at `place`."""
    changes: dict[int, Change] = {}
    for index, slot in enumerate(slots):
        replaced = NONE_REPLACED if slot.fixed else l1.replaced.get(index, NONE_REPLACED)
        joined = SEPARATOR.join(filter(None, [behind, l1.behind])) if index == place and not slot.fixed else ""
        _note(slot.message, seen, replaced)
        if replaced or joined:
            changes[index] = Change(replaced=replaced, behind=joined)
    return changes


def _takes(message: Message) -> bool:
    return message.role == "user" and message.form != "none"


def _halves(library: Library, place: int | None) -> tuple[str, str]:
    """Return what joins L1, and what stands at the head of the first user message kept."""
    trusted, untrusted = library.text(trusted=True), library.text(trusted=False)
    if place is None:
        return "", SEPARATOR.join(filter(None, [trusted, untrusted]))
    return trusted, untrusted


def _tell(told: str, message: Message, front: str, replaced: Replaced) -> tuple[str, Replaced]:
    """Put the current values behind what the client attached, before the user's words."""
    first = message.texts[0] if told and message.texts else None
    at = _attached(first) if first else 0
    if first is None or not at:
        return SEPARATOR.join(filter(None, [front, told])), replaced
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


def _note(message: Message, seen: _Seen, replaced: Replaced = NONE_REPLACED) -> None:
    """Note what stands; a block of which some was replaced by another text does not."""
    for text in message.texts:
        taken = [run for run in replaced.get(text.where, ()) if run.text]
        for block in text.blocks:
            if block.item and not touches(taken, block):
                seen.place(block.item)


def _bring(context: Sequence[Item], seen: _Seen, *, pack: bool) -> str:
    """Render the request's own context: references to what stands before it, then what is new, each once."""
    stands = {item: seen.holds(item) for item in context}
    named = [seen.refer(item) for item, held in stands.items() if held]
    blocks = [_reference(named)] if named else []
    fresh = tuple(item for item, held in stands.items() if not held)
    for item in shorten.packed(fresh) if pack else fresh:
        seen.place(item)
        blocks.append(item.content)
    return SEPARATOR.join(blocks)


def _replace(text: Text, seen: _Seen, spelled: Mapping[bytes, bytes]) -> tuple[Replacement, ...]:
    """Find the runs of neighbouring blocks that all stand earlier; what is new stands from here on."""
    runs: list[tuple[int, int, list[tuple[str, bool]]]] = []
    whole: list[Replacement] = []
    open_run = False
    for block in text.blocks:
        if block.item is None or not seen.holds(block.item):
            open_run = False
            if block.item and spelled:
                # What stood whole and cannot be referred to stands once: the newest turn has it again anyway.
                once = block.item.sha256 not in seen.whole
                text_of = (block.item.content, spelled[block.item.sha256]) if once else ("", b"")
                whole.append(Replacement(block.start, block.end, *text_of))
            if block.item:
                seen.place(block.item)
            continue
        if open_run and not text.value[runs[-1][1] : block.start].strip():
            start, _, named = runs.pop()
        else:
            start, named = block.start, []
        runs.append((start, block.end, [*named, seen.refer(block.item)]))
        open_run = True
    references = [
        Replacement(start, end, _alone(text.value, start, end, _reference(named))) for start, end, named in runs
    ]
    return tuple(sorted([*references, *whole], key=lambda run: run.start) if whole else references)


def _alone(text: str, start: int, end: int, reference: str) -> str:
    """Give a reference lines of its own: what stands beside it on the line is still a block when it is read again."""
    before = "\n" if start and text[start - 1] != "\n" else ""
    behind = "\n" if end < len(text) and text[end] != "\n" else ""
    return f"{before}{reference}{behind}"
