"""What of a tenant's system prompts is stable, learned from digests of their lines; and the form of one lineage's L1.

A line that changes within a lineage is volatile: its value stands among the current values (L3), and L1 names them in
its place. A line that only differs between lineages keeps the system role, behind what all share. Nothing is moved
because of what it looks like, and a prompt that does not change is not touched.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxy.core import lines as line_keys
from proxy.core.lines import Block, Key, Line

Role = Literal["kept", "behind", "volatile"]
Gap = tuple[Key, Key]
"""The stable lines on both sides; empty at the prompt's ends."""

BELONGS = 2 / 3
"""A prompt in which less of a template's stable text stands is another prompt."""
WINDOW = 16
"""So many lineages are looked back at."""
LEAST_BEHIND = 512
"""Less stable text, in characters, behind a line of one lineage is not worth moving the line."""
MOST_LEARNED = 256
"""A prompt in which more places change is no template."""
_LARGEST = 1 / 3
"""What would move more than this share of a prompt is no value in it but another prompt."""
_MOST_SEEN = 2 * line_keys.MOST_LINES
_MOST_PAIRS = 200_000
"""Texts in which the same few lines recur without end are not compared."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a lineage's L1 stands: its stable lines in the client's order, and which of them stand behind the others.

    `slots` are the places, by number of stable lines in front, where volatile lines stand; `edited` are the gaps whose
    lines changed once and were taken in place.
    """

    lines: tuple[Key, ...] = ()
    behind: frozenset[int] = frozenset()
    slots: tuple[int, ...] = ()
    edited: frozenset[Gap] = frozenset()
    template: bytes = b""


@dataclass(frozen=True, slots=True)
class Seen:
    """A line of a template: in which of the latest lineages it stood (a bit each, the latest lowest), and its size."""

    key: Key
    lineages: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What is known of one of a tenant's system prompts, over `count` lineages, at most WINDOW.

    `gaps` and `words` tell volatile lines: by the lines beside them, by their words without numbers and dates. `edits`
    is what came in a gap when it changed, so that a second value is known to be another.
    """

    id: bytes
    count: int
    lines: tuple[Seen, ...]
    gaps: frozenset[Gap] = frozenset()
    words: frozenset[bytes] = frozenset()
    edits: Mapping[Gap, bytes] = field(default_factory=dict)

    @property
    def learned(self) -> tuple[int, int, int]:
        """How much is known of its volatile lines."""
        return len(self.gaps), len(self.words), len(self.edits)

    def stable(self, line: Seen) -> bool:
        """Whether it is part of what recurs."""
        return line.lineages.bit_count() >= BELONGS * self.count


@dataclass(frozen=True, slots=True)
class Standing:
    """How one request of a lineage stood: L1's form, and digests.

    `values` are what its slots held, `shelf` the items in L2 of an anonymous lineage, `brought` those of its turn, and
    `calm` in how many requests on end all of them came again.
    """

    form: Form = Form()
    values: tuple[bytes, ...] = ()
    shelf: tuple[bytes, ...] = ()
    brought: tuple[bytes, ...] = ()
    calm: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """What memory holds: how lineages stood that this request may continue, and what the tenant's others taught.

    `key` is the tenant's own, for digests. `begun` digests what each slot held when this turn began; `recurring` are
    the items that clients sent again, in the order they first did.
    """

    key: bytes
    standing: tuple[Standing, ...] = ()
    templates: tuple[Template, ...] = ()
    begun: tuple[bytes, ...] = ()
    recurring: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Formed:
    """The lines of a request's L1, the part each has, and what was learned (None where nothing was).

    `empty` are the lines in front of which a slot stands that holds nothing now; the number of lines at the end.
    """

    lines: tuple[Line, ...]
    roles: tuple[Role, ...]
    empty: frozenset[int]
    form: Form
    template: Template | None

    def count(self, role: Role) -> int:
        """Return how many lines have this part."""
        return self.roles.count(role)


def nearest(known: Known, lines: Sequence[Line], items: Iterable[bytes]) -> Standing | None:
    """Return the lineage this request continues: of those that began with the same words, the one it lacks least of."""
    held = {*(line.key for line in lines), *items}

    def missing(stood: Standing) -> tuple[int, tuple[Key, ...], tuple[bytes, ...]]:
        has = (*stood.form.lines, *stood.shelf, *stood.brought)
        return sum(each not in held for each in has), stood.form.lines, (*stood.shelf, *stood.brought)

    return min(known.standing, key=missing, default=None)


def form(lines: tuple[Line, ...], stood: Standing | None, known: Known) -> Formed:
    """Say what part each line has. The same lines and knowledge give the same answer, in any process."""
    followed = None
    if stood is not None:
        template = next((each for each in known.templates if each.id == stood.form.template), None)
        followed = _follow(lines, stood.form, template)
    return followed or _begin(lines, known)


# A lineage that goes on


def _follow(lines: tuple[Line, ...], form: Form, template: Template | None) -> Formed | None:
    """Keep the lineage's form, but where one of its own lines changed; None where it is another prompt."""
    match = align(form.lines, [line.key for line in lines])
    if match is None or sum(at >= 0 for at in match) * 2 < len(form.lines):
        return None
    roles: list[Role] = ["behind" if at in form.behind else "kept" for at in match]
    empty, change = set[int](), _Change(lines, form, template)
    for gap in _gaps(match, len(form.lines)):
        slot = any(gap.low <= at <= gap.high for at in form.slots)
        if gap.low == gap.high and (slot or gap.first == gap.last):
            roles[gap.first : gap.last] = ["volatile"] * (gap.last - gap.first)
            if slot and gap.first == gap.last:
                empty.add(gap.first)
        else:
            change.take(gap, roles, slot=slot)
    if not change.made:
        return Formed(lines, tuple(roles), frozenset(empty), form, None)
    if not _balance(lines, roles):
        roles = _all_kept(lines)
        empty.clear()
    became = _form(lines, roles, empty, form.template, form.edited | change.edited)
    learned = change.learned(_slots_beside(became, form))
    if became.slots != form.slots or became.behind != form.behind:
        _share(lines, roles, empty, learned or template, before=change.first)
        became = _form(lines, roles, empty, form.template, became.edited)
    return Formed(lines, tuple(roles), frozenset(empty), became, learned)


def _share(
    lines: Sequence[Line], roles: list[Role], empty: set[int], template: Template | None, *, before: int
) -> None:
    """Where L1 breaks anyway, take the form other lineages have, if more of it is shared than stands in front."""
    match = align([seen.key for seen in template.lines], [line.key for line in lines]) if template else None
    if template is None or match is None:
        return
    shared, also_empty = _by_template(lines, template, match)
    for at, role in enumerate(roles):
        shared[at] = "volatile" if role == "volatile" else shared[at]
    if "behind" not in shared or not _balance(lines, shared):
        return
    if _size(lines, shared, "kept") > _size(lines[:before], roles[:before], "kept"):
        roles[:] = shared
        empty |= also_empty


def _size(lines: Sequence[Line], roles: Sequence[Role], of: Role) -> int:
    return sum(line.end - line.start for line, role in zip(lines, roles, strict=True) if role == of)


@dataclass(frozen=True, slots=True)
class _Gap:
    """Between two lines that stand on: stable lines `low:high` are gone, the request's lines `first:last` are new."""

    low: int
    high: int
    first: int
    last: int


class _Change:
    """Takes the changes of a lineage's own lines: an edit in place, or from now on volatile."""

    def __init__(self, lines: Sequence[Line], form: Form, template: Template | None) -> None:
        self._lines, self._was, self._template = lines, form, template
        self._blocks: tuple[Block, ...] | None = None
        self._size = sum(line.end - line.start for line in lines)
        self.made = False
        self.first = 0
        self.edited: frozenset[Gap] = frozenset()
        self._edits: dict[Gap, bytes] = {}
        self._words: set[bytes] = set()

    def take(self, gap: _Gap, roles: list[Role], *, slot: bool) -> None:
        """Say what the lines of one gap are."""
        self.first = gap.first if not self.made else self.first
        self.made = True
        new = self._lines[gap.first : gap.last]
        gone = self._was.lines[gap.low : gap.high]
        beside = _beside(self._was.lines, gap.low, gap.high)
        block = self._block(gap)
        if [line.key[line_keys.WORDS] for line in new] == [key[line_keys.WORDS] for key in gone]:
            self._words |= {key[line_keys.WORDS] for key in gone}
            volatile: Sequence[int] = range(gap.first, gap.last)
        elif block is not None:
            volatile = block
        elif self._changed_before(beside, new):
            volatile = range(gap.first, gap.last)
        else:
            known = [at for at in range(gap.first, gap.last) if self._known(self._lines[at])]
            volatile = known or (range(gap.first, gap.last) if slot else ())
            self.edited |= {beside}
            self._edits[beside] = _digest(new)
        behind = bool(gone) and all(at in self._was.behind for at in range(gap.low, gap.high))
        roles[gap.first : gap.last] = ["behind" if behind else "kept"] * (gap.last - gap.first)
        for at in volatile:
            roles[at] = "volatile"

    def learned(self, gaps: frozenset[Gap]) -> Template | None:
        """Return the template with what these changes say."""
        was = self._template
        if was is None:
            return None
        edits = dict([*was.edits.items(), *self._edits.items()][-MOST_LEARNED:])
        gaps, words = was.gaps | gaps, was.words | self._words
        if max(len(gaps), len(words)) > MOST_LEARNED:
            gaps, words = was.gaps, was.words
        now = dataclasses.replace(was, gaps=gaps, words=words, edits=edits)
        return None if now == was else now

    def _known(self, line: Line) -> bool:
        return self._template is not None and line.key[line_keys.WORDS] in self._template.words

    def _changed_before(self, beside: Gap, new: Sequence[Line]) -> bool:
        """Whether this is the second value here: in this lineage, or in another that was given another one."""
        edit = self._template.edits.get(beside) if self._template else None
        known = self._template is not None and beside in self._template.gaps
        return known or beside in self._was.edited or (edit is not None and edit != _digest(new))

    def _block(self, gap: _Gap) -> Sequence[int] | None:
        """Return the lines of the small tagged block in which this changed: data, which is one value as a whole."""
        if self._blocks is None:
            self._blocks = line_keys.blocks(self._lines)
        for block in self._blocks:
            whole = block.whole and gap.first <= block.first and block.last < gap.last
            if whole and gap.first == block.first and gap.last == block.last + 1:
                inside: Sequence[int] = range(block.first, block.last + 1)
            elif block.first < gap.first and gap.last <= block.last:
                inside = range(block.first + 1, block.last)
            else:
                continue
            size = sum(self._lines[at].end - self._lines[at].start for at in inside)
            return inside if size < _LARGEST * self._size else None
        return None


def _slots_beside(became: Form, was: Form) -> frozenset[Gap]:
    """Return where volatile lines stand that did not before."""
    before = {_beside(was.lines, at, at) for at in was.slots}
    return frozenset(_beside(became.lines, at, at) for at in became.slots) - before


# A lineage that begins


def _begin(lines: tuple[Line, ...], known: Known) -> Formed:
    """Take the form that the tenant's template for this prompt says, and count this lineage in."""
    template, match = _belongs(lines, known.templates)
    if template is None:
        seen = tuple(Seen(line.key, 1, line.end - line.start) for line in lines)
        template = Template(id=_digest(lines), count=1, lines=seen)
        became = Form(lines=tuple(line.key for line in lines), template=template.id)
        return Formed(lines, tuple(_all_kept(lines)), frozenset(), became, template)
    roles, empty = _by_template(lines, template, match)
    if not _balance(lines, roles):
        roles = _all_kept(lines)
        empty.clear()
    became = _form(lines, roles, empty, template.id, frozenset())
    return Formed(lines, tuple(roles), frozenset(empty), became, _counted(template, lines, roles, match))


def _by_template(lines: Sequence[Line], template: Template, match: Sequence[int]) -> tuple[list[Role], set[int]]:
    """Say what part each line has by what is known of the tenant's other lineages; and where a slot stands empty."""
    stable = [place for place, seen in enumerate(template.lines) if _recurs(template, seen, place in set(match))]
    rank = {place: at for at, place in enumerate(stable)}
    roles = _all_kept(lines)
    empty = set[int]()
    keys = [template.lines[place].key for place in stable]
    for gap in _gaps([rank.get(place, -1) for place in match], len(stable)):
        volatile = any(_beside(keys, low, low) in template.gaps for low in range(gap.low, gap.high + 1))
        between = range(stable[gap.low - 1] + 1 if gap.low else 0,
                        stable[gap.high] if gap.high < len(stable) else len(template.lines))  # fmt: skip
        varies = _varies([template.lines[place] for place in between if place not in rank])
        for at in range(gap.first, gap.last):
            known_words = lines[at].key[line_keys.WORDS] in template.words
            roles[at] = "volatile" if volatile or known_words else "behind" if varies else "kept"
        if volatile and gap.first == gap.last and gap.low == gap.high:
            empty.add(gap.first)
    for at, line in enumerate(lines):
        if line.key[line_keys.WORDS] in template.words:
            roles[at] = "volatile"
    _leave(lines, roles)
    return roles, empty


def _belongs(lines: Sequence[Line], templates: Sequence[Template]) -> tuple[Template | None, list[int]]:
    """Return the template two thirds of whose stable text stands here, in order, and where each line stands in it."""
    best: tuple[float, bytes, Template, list[int]] | None = None
    for template in templates:
        match = align([seen.key for seen in template.lines], [line.key for line in lines])
        if match is None:
            continue
        stable = {place: seen.size for place, seen in enumerate(template.lines) if template.stable(seen)}
        share = sum(stable.get(place, 0) for place in match) / (sum(stable.values()) or 1)
        if share >= BELONGS and (best is None or (share, template.id) > best[:2]):
            best = (share, template.id, template, match)
    return (best[2], best[3]) if best else (None, [])


def _recurs(template: Template, seen: Seen, here: bool) -> bool:  # noqa: FBT001 -- whether it stands here as well
    """Whether a line is stable, this lineage counted in; three in a row are enough for one that is new."""
    share = (seen.lineages.bit_count() + here) / (min(template.count, WINDOW) + 1)
    return share >= BELONGS or (here and seen.lineages & 0b11 == 0b11)


def _varies(between: Sequence[Seen]) -> bool:
    """Whether lineages are known to differ here: two had different lines, neither all of the other's."""
    which = sorted({seen.lineages for seen in between})[:WINDOW]
    return any(one & other == 0 for one in which for other in which)


def _leave(lines: Sequence[Line], roles: list[Role]) -> None:
    """Move no line of one lineage where too little stands behind it that others share, and never all of a text."""
    after = 0
    for at in reversed(range(len(lines))):
        if roles[at] == "behind" and after < LEAST_BEHIND:
            roles[at] = "kept"
        elif roles[at] == "kept":
            after += lines[at].end - lines[at].start
    texts = {id(line.text) for line, role in zip(lines, roles, strict=True) if role != "behind"}
    for at, line in enumerate(lines):
        if id(line.text) not in texts:
            roles[at] = "kept"


def _counted(template: Template, lines: Sequence[Line], roles: Sequence[Role], match: Sequence[int]) -> Template:
    """Count a lineage in: a bit for each line, new lines where they stood; what stood in none of the latest goes."""
    merged: list[Seen] = []
    at = 0
    for line, role, place in zip(lines, roles, match, strict=True):
        if place >= 0:
            merged += [_passed(seen, 0) for seen in template.lines[at:place]]
            merged.append(_passed(template.lines[place], 1))
            at = place + 1
        elif role != "volatile":
            merged.append(Seen(line.key, 1, line.end - line.start))
    merged += [_passed(seen, 0) for seen in template.lines[at:]]
    kept = tuple(seen for seen in merged if seen.lineages)
    if len(kept) > _MOST_SEEN:
        kept = tuple(seen for seen in kept if seen.lineages & 1 or seen.lineages.bit_count() > 1)[:_MOST_SEEN]
    return dataclasses.replace(template, count=min(template.count + 1, WINDOW), lines=kept)


def _passed(seen: Seen, here: int) -> Seen:
    return dataclasses.replace(seen, lineages=(seen.lineages << 1 | here) & ((1 << WINDOW) - 1))


# Both


def align(want: Sequence[Key], have: Sequence[Key]) -> list[int] | None:
    """Return for each of `have` where it stands in `want`, or -1; in order. None where comparing costs too much."""
    most = min(len(want), len(have))
    head = next((at for at in range(most) if want[at] != have[at]), most)
    tail = next((at for at in range(most - head) if want[-1 - at] != have[-1 - at]), most - head)
    left, right = want[head : len(want) - tail], have[head : len(have) - tail]
    times = Counter(left)
    if sum(times[key] for key in right) > _MOST_PAIRS:
        return None
    match = [-1] * len(right)
    for start, at, size in difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        match[at : at + size] = range(head + start, head + start + size)
    return [*range(head), *match, *range(len(want) - tail, len(want))]


def _gaps(match: Sequence[int], count: int) -> Iterator[_Gap]:
    """Walk what lies between lines that stand in both; also where nothing does."""
    low = first = 0
    for at, place in enumerate([*match, count]):
        if place >= 0:
            yield _Gap(low, place, first, at)
            low, first = place + 1, at + 1


def _beside(keys: Sequence[Key], low: int, high: int) -> Gap:
    return (keys[low - 1] if low else b"", keys[high] if high < len(keys) else b"")


def _all_kept(lines: Sequence[Line]) -> list[Role]:
    return ["kept"] * len(lines)


def _digest(lines: Sequence[Line]) -> bytes:
    return hashlib.blake2b(b"".join(line.key for line in lines), digest_size=8).digest()


def _form(
    lines: Sequence[Line], roles: Sequence[Role], empty: set[int], template: bytes, edited: frozenset[Gap]
) -> Form:
    keys: list[Key] = []
    behind, slots = set[int](), set[int]()
    for at, (line, role) in enumerate(zip(lines, roles, strict=True)):
        if role == "volatile" or at in empty:
            slots.add(len(keys))
        if role != "volatile":
            behind |= {len(keys)} if role == "behind" else set()
            keys.append(line.key)
    slots |= {len(keys)} if len(lines) in empty else set()
    return Form(tuple(keys), frozenset(behind), tuple(sorted(slots)), edited, template)


def _balance(lines: Sequence[Line], roles: list[Role]) -> bool:
    """Move a block as a whole where one of its tags moves; False where that would take away what is no value."""
    if all(role == "kept" for role in roles):
        return True
    size, moved = sum(line.end - line.start for line in lines), 0
    for block in line_keys.blocks(lines):
        ends = {roles[block.first], roles[block.last]}
        if block.first < block.last and ends != {"kept"}:
            role: Role = "volatile" if "volatile" in ends else "behind"
            for at in range(block.first, block.last + 1):
                moved += lines[at].end - lines[at].start if roles[at] == "kept" else 0
                roles[at] = role
    return moved <= _LARGEST * size and "kept" in roles
