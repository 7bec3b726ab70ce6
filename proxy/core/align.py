"""Two runs of lines laid side by side: which stand in both, and what lies in the gaps between those.

    want  a b c d
    have  a x y d      matches [0, -1, -1, 3]: one gap, in which b and c are gone, x and y are new

Knows nothing of what the lines are for.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from proxy.core.lines import Key

Sides = tuple[Key, Key]
"""The lines on both sides of a gap, by which it is known again; empty at the prompt's ends."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two lines that stand in both: `low:high` of those wanted are gone, `first:last` of those here are new."""

    low: int
    high: int
    first: int
    last: int

    @property
    def new(self) -> range:
        """The new lines, by index."""
        return range(self.first, self.last)


def align(want: Sequence[Key], have: Sequence[Key]) -> list[int]:
    """Return for each of `have` where it stands in `want`, or -1; in order.

    Lines that stand once in both are the anchors, the longest run of them in one order (patience); what is alike beside
    an anchor goes with it. Takes n log n.
    """
    most = min(len(want), len(have))
    head = next((at for at in range(most) if want[at] != have[at]), most)
    tail = next((at for at in range(most - head) if want[-1 - at] != have[-1 - at]), most - head)
    match = [*range(head), *([-1] * (len(have) - head - tail)), *range(len(want) - tail, len(want))]
    for place, at in _anchors(want, have, head, tail):
        match[at] = place
    for steps, step in ((range(head, len(have) - tail), 1), (range(len(have) - tail - 1, head - 1, -1), -1)):
        taken = {place for place in match if place >= 0}
        for at in steps:
            near = match[at - step] + step if 0 <= at - step < len(have) and match[at - step] >= 0 else -1
            if match[at] < 0 and 0 <= near < len(want) and near not in taken and want[near] == have[at]:
                match[at] = near
    return match


def _anchors(want: Sequence[Key], have: Sequence[Key], head: int, tail: int) -> list[tuple[int, int]]:
    """Return the longest run of lines that stand once in both, by their places, ascending in each."""
    left, right = want[head : len(want) - tail], have[head : len(have) - tail]
    once = {key for key, times in Counter(left).items() if times == 1}
    once &= {key for key, times in Counter(right).items() if times == 1}
    where = {key: place for place, key in enumerate(left) if key in once}
    pairs = [(where[key], at) for at, key in enumerate(right) if key in once]
    ends: list[int] = []
    piles: list[int] = []
    before: list[int] = []
    for number, (place, _) in enumerate(pairs):
        pile = bisect.bisect_left(ends, place)
        before.append(piles[pile - 1] if pile else -1)
        ends[pile : pile + 1] = [place]
        piles[pile : pile + 1] = [number]
    run: list[tuple[int, int]] = []
    number = piles[-1] if piles else -1
    while number >= 0:
        place, at = pairs[number]
        run.append((place + head, at + head))
        number = before[number]
    return run[::-1]


def gaps(match: Sequence[int], count: int, also: Collection[int] = ()) -> Iterator[Gap]:
    """Walk what lies between lines that stand in both; where nothing does, only at the places `also` names.

    `count` is how many lines were wanted; a place is named by how many of them stand in front.
    """
    low = first = 0
    for at, place in enumerate([*match, count]):
        if place >= 0:
            if low != place or first != at or low in also:
                yield Gap(low, place, first, at)
            low, first = place + 1, at + 1


def sides(keys: Sequence[Key], low: int, high: int) -> Sides:
    """Return the lines on both sides of a gap."""
    return (keys[low - 1] if low else b"", keys[high] if high < len(keys) else b"")
