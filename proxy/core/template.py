"""What of a tenant's system prompts is stable, learned from digests of their lines, over lineages.

    lineage 1   The user is Ada. · Time: 10:01 → Time: 10:02 · You help. …    a clock: volatile, told elsewhere
    lineage 2   The user is Bob. · Time: 10:05 · You help. …                   a name: behind what all share
    lineage 3   You help. … · The user is Cleo.                                the core is one prefix for all

What recurs is the core that all share. A lineage that begins takes the form its template says: what was volatile in
others is volatile here; what lineages are known to differ in stands behind the core. Nothing is moved because of what
it looks like, and a prompt that does not change is not touched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from proxy.core import form
from proxy.core import lines as text_lines
from proxy.core.align import align, gaps, sides
from proxy.core.form import NO_LESSONS, Followed, Form, Lessons, Roles
from proxy.core.lines import MOST_LINES, Key, Line, digest, words

BELONGS = 2 / 3
"""A prompt in which less of a template's stable text stands is another prompt."""
WINDOW = 16
"""So many lineages are looked back at."""
MANY = 3
"""What stood in so many lineages is the operator's."""
LEAST_BEHIND = 512
"""Less stable text, in characters, behind a line of one lineage is not worth moving the line."""
_LINEAGES = (1 << WINDOW) - 1
_MOST_SEEN = 2 * MOST_LINES


class Seen(NamedTuple):
    """A line of a template: in which of the latest lineages it stood (a bit each, the latest lowest), and its size."""

    key: Key
    lineages: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Template:
    """What is known of one of a tenant's system prompts, over `count` lineages, at most WINDOW."""

    id: bytes
    count: int
    lines: tuple[Seen, ...]
    lessons: Lessons = NO_LESSONS

    @functools.cached_property
    def keys(self) -> tuple[Key, ...]:
        """Its lines' digests."""
        return tuple(seen.key for seen in self.lines)

    @functools.cached_property
    def stable(self) -> dict[Key, int]:
        """The lines that recur, and their sizes."""
        return {seen.key: seen.size for seen in self.lines if seen.lineages.bit_count() >= BELONGS * self.count}

    @property
    def shared(self) -> Collection[Key]:
        """The lines that many lineages have; with few lineages nobody knows."""
        return self.stable if self.count >= MANY else ()

    @functools.cached_property
    def settled(self) -> bool:
        """Whether all lineages looked back at had these very lines: one more that has them teaches nothing."""
        learned = self.lessons.gaps or self.lessons.words
        return self.count == WINDOW and not learned and all(seen.lineages == _LINEAGES for seen in self.lines)

    @functools.cached_property
    def plain(self) -> Form:
        """The form of a lineage that has these very lines."""
        return Form(lines=self.keys, template=self.id)


@dataclass(frozen=True, slots=True)
class Formed:
    """What part each line of a request's L1 has, and the template with what was learned (None where nothing was)."""

    roles: Roles
    form: Form
    template: Template | None = None

    @property
    def behind(self) -> int:
        """How many lines stand behind the others."""
        return self.roles.each.count("behind")


def formed(lines: tuple[Line, ...], was: Form | None, templates: Sequence[Template]) -> Formed:
    """Say what part each line has: as the lineage `was`, or as a new one. The same in any process."""
    if was is not None:
        template = next((each for each in templates if each.id == was.template), None)
        lessons, shared = (template.lessons, template.shared) if template else (NO_LESSONS, ())
        followed = form.follow(lines, was, lessons, shared)
        if followed is not None:
            return _learned(followed, template)
    return _begin(lines, templates)


def _learned(followed: Followed, template: Template | None) -> Formed:
    """Keep what a lineage's own changes taught; where it breaks anyway, it may take the form the others have."""
    if followed.broke is None or template is None:
        return Formed(followed.roles, followed.form)
    now = dataclasses.replace(template, lessons=template.lessons.also(followed.lessons))
    shared = _share(followed.roles, now, before=followed.broke) if followed.lessons.gaps else None
    roles, became = followed.roles, followed.form
    if shared is not None:
        roles, became = shared, shared.form(template.id, now.lessons.words, became.edited)
    return Formed(roles, became, None if now == template else now)


def _share(roles: Roles, template: Template, *, before: int) -> Roles | None:
    """Return the form other lineages have, if more of it is shared than stands in front of the line that broke."""
    shared = _by_template(roles.lines, template, align(template.keys, [line.key for line in roles.lines]))
    shared.mark([at for at, role in enumerate(roles.each) if role == "volatile"], "volatile")
    shared.empty |= roles.empty
    shared.settle()
    worth = shared.kept() > roles.kept(until=before)
    return shared if worth and "behind" in shared.each else None


def _begin(lines: tuple[Line, ...], templates: Sequence[Template]) -> Formed:
    """Take the form that the tenant's template for this prompt says, and count this lineage in."""
    keys = tuple(line.key for line in lines)
    settled = next((each for each in templates if each.settled and each.keys == keys), None)
    if settled is not None:
        return Formed(Roles.all_kept(lines), settled.plain)
    template, match = _belongs(keys, templates)
    if template is None:
        seen = tuple(Seen(line.key, 1, line.size) for line in lines)
        template = Template(id=digest(keys), count=1, lines=seen)
        return Formed(Roles.all_kept(lines), Form(lines=keys, template=template.id), template)
    roles = _by_template(lines, template, match)
    roles.settle()
    return Formed(roles, roles.form(template.id, template.lessons.words), _counted(template, roles, match))


def _belongs(keys: Sequence[Key], templates: Sequence[Template]) -> tuple[Template | None, list[int]]:
    """Return the template two thirds of whose stable text stands here, in order, and where each line stands in it."""
    best: tuple[float, bytes, Template, list[int]] | None = None
    held = {*keys}
    for template in templates:
        least = BELONGS * sum(template.stable.values())
        if sum(size for key, size in template.stable.items() if key in held) < least:
            continue
        match = align(template.keys, keys)
        share = sum(template.stable.get(key, 0) for key, place in zip(keys, match, strict=True) if place >= 0)
        if share >= least and (best is None or (share, template.id) > best[:2]):
            best = (share, template.id, template, match)
    return (best[2], best[3]) if best else (None, [])


def _by_template(lines: tuple[Line, ...], template: Template, match: Sequence[int]) -> Roles:
    """Say what part each line has by what is known of the tenant's other lineages."""
    here = {*match}
    stable = [place for place, seen in enumerate(template.lines) if _recurs(template, seen, here=place in here)]
    rank = {place: at for at, place in enumerate(stable)}
    keys = [template.lines[place].key for place in stable]
    roles, lessons = Roles.all_kept(lines), template.lessons
    slots = {at for at in range(len(keys) + 1) if sides(keys, at, at) in lessons.gaps} if lessons.gaps else set()
    for gap in gaps([rank.get(place, -1) for place in match], len(stable), slots):
        if any(at in slots for at in range(gap.low, gap.high + 1)):
            recognised = [at for at in gap.new if words(lines[at].key) in lessons.words]
            roles.mark(recognised or gap.new, "volatile")
            roles.empty |= {gap.first} if not gap.new and gap.low == gap.high else set()
        elif gap.new:
            low = stable[gap.low - 1] + 1 if gap.low else 0
            high = stable[gap.high] if gap.high < len(stable) else len(template.lines)
            if _varies([template.lines[place] for place in range(low, high) if place not in rank]):
                roles.mark(gap.new, "behind")
            roles.mark([at for at in gap.new if words(lines[at].key) in lessons.words], "volatile")
    if "volatile" not in roles.each:
        # A prompt that holds no value is forwarded as it came, whatever others' hold.
        roles.empty.clear()
    _enclose(roles)
    _leave(roles)
    return roles


def _enclose(roles: Roles) -> None:
    """Move no line out of its block: the largest small one around it goes with it, or all of it stays.

    Of what encloses a large part of the prompt lines may leave, but not of what is marked as untrusted.
    """
    lines = roles.lines
    if "behind" not in roles.each or not any(map(text_lines.may_open, lines)):
        return
    large = form.LARGEST * sum(line.size for line in lines)
    for block in reversed(text_lines.blocks(lines)):
        inside = range(block.first, block.last + 1)
        if block.first == block.last or "behind" not in roles.each[block.first : block.last + 1]:
            continue
        if sum(lines[at].size for at in inside) <= large:
            roles.mark([at for at in inside if roles.each[at] != "volatile"], "behind")
        elif "untrusted" in lines[block.first].value.lower():
            roles.mark([at for at in inside if roles.each[at] == "behind"], "kept")


def _recurs(template: Template, seen: Seen, *, here: bool) -> bool:
    """Whether a line is stable, this lineage counted in; three in a row are enough for one that is new."""
    share = (seen.lineages.bit_count() + here) / (template.count + 1)
    return share >= BELONGS or (here and seen.lineages & 0b11 == 0b11)


def _varies(between: Sequence[Seen]) -> bool:
    """Whether lineages are known to differ here: two had different lines, neither all of the other's."""
    which = sorted({seen.lineages for seen in between})[:WINDOW]
    return any(one & other == 0 for one in which for other in which)


def _leave(roles: Roles) -> None:
    """Move no line of one lineage where too little stands behind it that others share."""
    after = 0
    for at in reversed(range(len(roles.lines))):
        if roles.each[at] == "behind" and after < LEAST_BEHIND:
            roles.each[at] = "kept"
        elif roles.each[at] == "kept":
            after += roles.lines[at].size


def _counted(template: Template, roles: Roles, match: Sequence[int]) -> Template:
    """Count a lineage in: a bit for each line, new lines where they stood; what stood in none of the latest goes."""
    merged: list[Seen] = []
    at = 0
    for line, role, place in zip(roles.lines, roles.each, match, strict=True):
        if place >= 0:
            merged += [_passed(seen, 0) for seen in template.lines[at:place]]
            merged.append(_passed(template.lines[place], 1))
            at = place + 1
        elif role != "volatile":
            merged.append(Seen(line.key, 1, line.size))
    merged += [_passed(seen, 0) for seen in template.lines[at:]]
    kept = tuple(seen for seen in merged if seen.lineages)
    if len(kept) > _MOST_SEEN:
        kept = tuple(seen for seen in kept if seen.lineages & 1 or seen.lineages.bit_count() > 1)[:_MOST_SEEN]
    return dataclasses.replace(template, count=min(template.count + 1, WINDOW), lines=kept)


def _passed(seen: Seen, here: int) -> Seen:
    return Seen(seen.key, (seen.lineages << 1 | here) & _LINEAGES, seen.size)
