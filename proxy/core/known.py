"""What is known when a request comes: how the lineage it continues stood before, and what the tenant's others taught.

Digests only. Where several lineages began with the same words, one of them is the request's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core import form
from proxy.core.chain import Place
from proxy.core.form import NO_FORM, NO_LESSONS, Form
from proxy.core.lines import Line
from proxy.core.recipe import Recipe
from proxy.core.template import Template
from proxy.core.tools import Keys

MOST_STANDING = 4
"""Where more lineages than this began with the same words, only those with the very lines of a request may go on."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one request of a lineage stood: L1's form, and digests.

    `shelf` are the items in L2 of an anonymous lineage, `brought` those of its turn, and `calm` is in how many requests
    on end all of them came again. `keys` is the order of keys inside its tools; `log`, how turns can be put back.
    """

    form: Form = NO_FORM
    shelf: tuple[bytes, ...] = ()
    brought: tuple[bytes, ...] = ()
    calm: int = 0
    keys: bytes = b""
    log: tuple[Recipe, ...] = ()

    @property
    def order(self) -> tuple[object, ...]:
        """Tell any two lineages apart, the same in every process; the pieces of a log have no order of their own."""
        form = self.form
        return (form.slots, form.lines, sorted(form.behind), sorted(form.edited), form.template,
                self.shelf, self.brought, self.calm, self.keys, repr(self.log))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one request, at a time, teaches of its owner's prompts: a template, items that recur, an order of keys."""

    at: float
    template: Template | None = None
    recurring: tuple[bytes, ...] = ()
    keys: Keys = ()


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of an owner's prompts: how they stood at each place asked for, and what they taught."""

    standing: Mapping[Place, tuple[Standing, ...]]
    templates: tuple[Template, ...] = ()
    recurring: tuple[bytes, ...] = ()
    keys: Mapping[bytes, Keys] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """What memory holds: how lineages stood that this request may continue, and what the tenant's others taught.

    `key` is the tenant's own, for digests; `lines` are L1's, by it. Where `answered`, those lineages were given the
    answer that this request holds: others may have begun with the same words. `again` are lineages in which this very
    request may have been sent before; `recurring` are the items that clients sent again, in the order they first did;
    `keys` are orders of keys inside tools, by their digest.
    """

    key: bytes
    lines: tuple[Line, ...] = ()
    standing: tuple[Standing, ...] = ()
    answered: bool = False
    again: tuple[Standing, ...] = ()
    templates: tuple[Template, ...] = ()
    recurring: tuple[bytes, ...] = ()
    keys: Mapping[bytes, Keys] = field(default_factory=dict)


NOTHING_KNOWN = Known(b"")


def known(
    earlier: Sequence[Place],
    here: Place,
    learned: Learned,
    *,
    answers: Sequence[Place] = (),
    key: bytes,
    lines: tuple[Line, ...],
) -> Known:
    """Return what a plan needs of what was learned: the lineages at the latest place known, where they are few.

    Those that were given the very answer come first: `answers` is its place, where the request holds one.
    """
    told = next((learned.standing[place] for place in answers if place in learned.standing), ())
    answered = 0 < len(told) <= MOST_STANDING
    stood = told if answered else next((learned.standing[place] for place in earlier if place in learned.standing), ())
    if len(stood) > MOST_STANDING:
        # Many began like this: only those whose lines all stand here may continue.
        here_now = {line.key for line in lines}
        stood = tuple(each for each in stood if each.form.lines and here_now.issuperset(each.form.lines))
    return Known(
        key=key,
        lines=lines,
        standing=stood,
        answered=answered,
        again=learned.standing.get(here, ()),
        templates=learned.templates,
        recurring=learned.recurring,
        keys=learned.keys,
    )


def continued(known: Known, brought: Iterable[bytes], held: Iterable[bytes]) -> tuple[Standing | None, bool]:
    """Return the lineage a request continues, and whether this very request was sent in it before."""
    again = repeated(known, brought)
    return again or nearest(known, held), again is not None


def repeated(known: Known, brought: Iterable[bytes]) -> Standing | None:
    """Return how this very request stood when it was sent before: with these lines, and these items in its turn."""
    items, keys = {*brought}, tuple(line.key for line in known.lines)
    for stood in sorted(known.again, key=lambda stood: stood.order):
        if not stood.form.slots and stood.form.lines != keys:
            continue
        followed = form.follow(known.lines, stood.form, NO_LESSONS)
        if followed is not None and followed.broke is None and items == {*stood.brought}:
            return stood
    return None


def nearest(known: Known, items: Iterable[bytes]) -> Standing | None:
    """Return the lineage this request continues: of those that began with the same words, the one most like it."""
    if len(known.standing) < 2:
        return known.standing[0] if known.standing else None
    lines, held = [line.key for line in known.lines], {*items}

    def unlike(stood: Standing) -> tuple[int, int, tuple[object, ...]]:
        missing = len({*stood.form.lines} - {*lines}) + len({*stood.shelf, *stood.brought} - held)
        return missing, len({*lines} - {*stood.form.lines}), stood.order

    return min(known.standing, key=unlike)
