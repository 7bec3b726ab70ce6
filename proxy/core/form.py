"""The form of one lineage's L1: which lines stand in place, which behind the others, and where volatile ones stood.

A lineage keeps its form until one of its own lines changes. Such a line was edited, and is taken in place, or is
volatile: from then on its value stands among the current values, and L1 names them in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxy.core import lines as text_lines
from proxy.core.align import Gap, Sides, align, gaps, sides
from proxy.core.lines import Block, Key, Line

Role = Literal["kept", "behind", "volatile"]
MOST_LEARNED = 256
"""A prompt in which more places change is no template."""
LARGEST = 1 / 3
"""What would move more than this share of a prompt is no value in it but another prompt."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a lineage's L1 stands: its stable lines in the client's order, and which of them stand behind the others.

    `slots` are the places of volatile lines, by how many stable lines stand in front. `edited` are gaps whose next
    change is taken for a value: their lines changed once and were taken in place, or hold a value that its words do not
    show. `template` is what it was made from.
    """

    lines: tuple[Key, ...] = ()
    behind: frozenset[int] = frozenset()
    slots: tuple[int, ...] = ()
    edited: frozenset[Sides] = frozenset()
    template: bytes = b""


@dataclass(frozen=True, slots=True)
class Lessons:
    """What is known of a prompt's volatile lines: by the lines beside them, by their words without numbers and dates.

    `edits` is what came in a gap when it changed, so that a second value is known to be another.
    """

    gaps: frozenset[Sides] = frozenset()
    words: frozenset[bytes] = frozenset()
    edits: Mapping[Sides, bytes] = field(default_factory=dict)

    def also(self, other: Lessons) -> Lessons:
        """Add what else was learned, within bounds."""
        gaps, words = self.gaps | other.gaps, self.words | other.words
        if max(len(gaps), len(words)) > MOST_LEARNED:
            gaps, words = self.gaps, self.words
        return Lessons(gaps, words, dict([*self.edits.items(), *other.edits.items()][-MOST_LEARNED:]))


NO_FORM = Form()
NO_LESSONS = Lessons()


@dataclass(slots=True)
class Roles:
    """The part of each line. `empty` are the lines in front of which a slot stands that holds nothing now."""

    lines: tuple[Line, ...]
    each: list[Role]
    empty: set[int]

    @classmethod
    def all_kept(cls, lines: tuple[Line, ...]) -> Roles:
        """Return what a prompt is of which nothing is known."""
        return cls(lines, ["kept"] * len(lines), set())

    def mark(self, places: Collection[int], role: Role) -> None:
        """Give lines a part."""
        for at in places:
            self.each[at] = role

    def kept(self, *, until: int | None = None) -> int:
        """Return the characters of the lines that stay in place."""
        each = zip(self.lines[:until], self.each[:until], strict=True)
        return sum(line.size for line, role in each if role == "kept")

    def form(self, template: bytes, words: Container[bytes], edited: frozenset[Sides] = frozenset()) -> Form:
        """Return the form they make where these `words` tell a value."""
        keys: list[Key] = []
        behind, slots, untold = set[int](), set[int](), set[int]()
        for at, (line, role) in enumerate(zip(self.lines, self.each, strict=True)):
            if role == "volatile" or at in self.empty:
                slots.add(len(keys))
            if role == "volatile" and text_lines.words(line.key) not in words:
                untold.add(len(keys))
            if role != "volatile":
                behind |= {len(keys)} if role == "behind" else set()
                keys.append(line.key)
        slots |= {len(keys)} if len(self.lines) in self.empty else set()
        edited |= {sides(keys, at, at) for at in untold}
        return Form(tuple(keys), frozenset(behind), tuple(sorted(slots)), edited, template)

    def settle(self) -> None:
        """Keep tags balanced and texts filled; where that would take away what is no value, all stays in place."""
        if not self._balanced() or "kept" not in self.each:
            self.each = ["kept"] * len(self.lines)
            self.empty.clear()
        texts = [(line.index, line.text.where) for line in self.lines]
        filled = {text for text, role in zip(texts, self.each, strict=True) if role != "behind"}
        self.mark([at for at, text in enumerate(texts) if text not in filled], "kept")

    def _balanced(self) -> bool:
        """Move a block as a whole where one of its tags moves."""
        moved = [line for line, role in zip(self.lines, self.each, strict=True) if role != "kept"]
        if not any(map(text_lines.may_open, moved)):
            return True
        before = self.kept()
        for block in text_lines.blocks(self.lines):
            ends = {self.each[block.first], self.each[block.last]}
            if block.first < block.last and ends != {"kept"}:
                self.mark(range(block.first, block.last + 1), "volatile" if "volatile" in ends else "behind")
        size = sum(line.size for line in self.lines)
        return before - self.kept() <= LARGEST * size


@dataclass(frozen=True, slots=True)
class Followed:
    """A lineage that goes on: `broke` is the line where its L1 first differs, None where it keeps its form."""

    roles: Roles
    form: Form
    lessons: Lessons = NO_LESSONS
    broke: int | None = None


def follow(
    lines: tuple[Line, ...], form: Form, known: Lessons, shared: Container[Key] = frozenset()
) -> Followed | None:
    """Keep the lineage's form, but where one of its own lines changed; None where it is another prompt.

    `shared` are lines that many lineages have: whoever changes one of those edits the prompt, be it only a number.
    """
    keys = tuple(line.key for line in lines)
    if keys == form.lines and not form.slots and not form.behind:
        return Followed(Roles.all_kept(lines), form)
    match = align(form.lines, keys)
    if sum(at >= 0 for at in match) * 2 < len(form.lines):
        return None
    roles = Roles(lines, ["behind" if at in form.behind else "kept" for at in match], set())
    change = _Change(roles, form, known, shared)
    for gap in gaps(match, len(form.lines), {*form.slots}):
        slot = any(gap.low <= at <= gap.high for at in form.slots)
        if gap.low < gap.high or (gap.new and not (slot and change.is_value(gap))):
            change.take(gap, slot=slot)
        elif slot:
            change.hold(gap)
            roles.mark(gap.new, "volatile")
            roles.empty |= set() if gap.new else {gap.first}
    before = list(roles.each)
    roles.settle()
    if change.broke is None and roles.each == before:
        same = change.edited <= form.edited
        return Followed(roles, form if same else dataclasses.replace(form, edited=form.edited | change.edited))
    became = roles.form(form.template, known.words | change.words, form.edited | change.edited)
    known_slots = {sides(form.lines, at, at) for at in form.slots}
    slots = frozenset(sides(became.lines, at, at) for at in became.slots) - known_slots
    lessons = Lessons(slots, frozenset(change.words), change.edits)
    return Followed(roles, became, lessons, change.broke or 0)


class _Change:
    """Takes the changes of a lineage's own lines: an edit in place, or from now on volatile."""

    def __init__(self, roles: Roles, form: Form, known: Lessons, shared: Container[Key]) -> None:
        self._roles, self._was, self._known, self._shared = roles, form, known, shared
        self._blocks: tuple[Block, ...] | None = None
        self.broke: int | None = None
        self.edited: frozenset[Sides] = frozenset()
        self.edits: dict[Sides, bytes] = {}
        self.words: set[bytes] = set()

    def is_value(self, gap: Gap) -> bool:
        """Whether all that stands in a slot is its value: not where some is known by its words and some is not."""
        recognised = [self._recognised(at) for at in gap.new]
        return all(recognised) or not any(recognised) or sides(self._was.lines, gap.low, gap.high) in self._was.edited

    def hold(self, gap: Gap) -> None:
        """Remember a slot whose lines no lesson recognises: they stay a value, whatever others teach later."""
        if not all(self._recognised(at) for at in gap.new):
            self.edited |= {sides(self._was.lines, gap.low, gap.high)}

    def take(self, gap: Gap, *, slot: bool) -> None:
        """Say what the lines of one gap are."""
        self.broke = gap.first if self.broke is None else self.broke
        new = [self._roles.lines[at].key for at in gap.new]
        gone = self._was.lines[gap.low : gap.high]
        where = sides(self._was.lines, gap.low, gap.high)
        behind = bool(gone) and all(at in self._was.behind for at in range(gap.low, gap.high))
        self._roles.mark(gap.new, "behind" if behind else "kept")
        counted = new and [text_lines.words(key) for key in new] == [text_lines.words(key) for key in gone]
        if counted and not any(key in self._shared for key in gone):
            self.words |= {text_lines.words(key) for key in gone}
            volatile: range | list[int] = gap.new
        elif (block := self._block(gap, gone)) is not None:
            volatile = block
            self._roles.empty |= set() if block else {gap.first}
        elif self._changed_before(where, new, slot=slot):
            volatile = gap.new
        else:
            recognised = [at for at in gap.new if self._recognised(at)]
            volatile = recognised or (gap.new if slot else [])
            self.edited |= {where}
            self.edits[where] = text_lines.digest(new)
        self._roles.mark(volatile, "volatile")

    def _recognised(self, at: int) -> bool:
        return text_lines.words(self._roles.lines[at].key) in self._known.words

    def _changed_before(self, where: Sides, new: Sequence[Key], *, slot: bool) -> bool:
        """Whether this is the second value here: in this lineage, or in another that was given another one."""
        edit = self._known.edits.get(where)
        taught = (not slot and where in self._known.gaps) or (edit is not None and edit != text_lines.digest(new))
        return where in self._was.edited or taught

    def _block(self, gap: Gap, gone: Sequence[Key]) -> range | None:
        """Return the lines of the small block that changed, came or went: data, which is one value as a whole."""
        lines = self._roles.lines
        if text_lines.whole(lines[at].key for at in gap.new) and text_lines.whole(gone):
            inside = gap.new
        else:
            if self._blocks is None:
                spanning = (block for block in text_lines.blocks(lines) if block.first < block.last)
                self._blocks = tuple(dict.fromkeys(spanning))
            around = (block for block in self._blocks if block.first < gap.first and gap.last <= block.last)
            block = next(around, None)
            if block is None:
                return None
            inside = range(block.first + 1, block.last)
        small = sum(lines[at].size for at in inside) < LARGEST * sum(line.size for line in lines)
        return inside if small else None
