"""What this process knows of prompts: digests only, bounded in bytes; least recently used goes first."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from proxy.core import tools
from proxy.core.chain import Place
from proxy.core.form import Form
from proxy.core.known import Learned, Lesson, Standing
from proxy.core.recipe import Piece, Recipe, Words
from proxy.core.template import Template
from proxy.core.tools import Keys

MOST_KEPT = 16
"""So many lineages that began with the same words are told apart."""
MOST_TEMPLATES = 16
MOST_RECURRING = 512
_MOST_OWNERS = 1_000
_MOST_PATHS = 50_000
_ENTRY_BYTES = 300
_LINE_BYTES = 60
_SEEN_BYTES = 280
_DIGEST_BYTES = 50
_RECIPE_BYTES = 300
_PIECE_BYTES = 100


class Book:
    """This process's own knowledge, half of it lineages, half templates; least recently used goes first."""

    def __init__(self, *, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._size = self._lines = 0
        self._standing: collections.OrderedDict[Place, dict[Standing, None]] = collections.OrderedDict()
        self._forms: dict[Form, int] = {}
        self._templates: collections.OrderedDict[str, dict[bytes, Template]] = collections.OrderedDict()
        self._paths = 0
        self._keys: collections.OrderedDict[bytes, Keys] = collections.OrderedDict()
        self._recurring: collections.OrderedDict[str, dict[bytes, float]] = collections.OrderedDict()

    def learned(self, partition: str, places: Sequence[Place]) -> Learned:
        """Return what this process knows."""
        held = {place: tuple(self._standing[place]) for place in places if place in self._standing}
        for place in held:
            self._standing.move_to_end(place)
        recurring = self._recurring.get(partition, {})
        order = sorted(recurring, key=lambda digest: (recurring[digest], digest))
        keys = {
            each.keys: self._keys[each.keys] for stood in held.values() for each in stood if each.keys in self._keys
        }
        return Learned(held, tuple(self._templates.get(partition, {}).values()), tuple(order), keys)

    def spell(self, keys: Keys) -> None:
        """Add an order of keys inside tools."""
        if keys:
            name = tools.digest(keys)
            self._paths += 0 if name in self._keys else len(keys)
            self._keys[name] = keys
            self._keys.move_to_end(name)
        while self._paths > _MOST_PATHS:
            self._paths -= len(self._keys.popitem(last=False)[1])

    def put(self, place: Place, standing: Sequence[Standing]) -> None:
        """Add how a prompt stood at a place."""
        for each in standing:
            known = self._standing.setdefault(place, {})
            if each not in known and len(known) < MOST_KEPT:
                self._count(each, 1)
                known[each] = None
        while self._size > self._half:
            _, oldest = self._standing.popitem(last=False)
            for each in oldest:
                self._count(each, -1)

    def take(self, partition: str, template: Template) -> Template:
        """Put a template in the place of what was known of it; what was learned of its lines stays learned."""
        known = self._templates.setdefault(partition, {})
        self._templates.move_to_end(partition)
        before = known.pop(template.id, None)
        self._lines -= len(before.lines) if before else 0
        joined = _joined(before, template) if before else template
        known[template.id] = joined
        self._lines += len(joined.lines)
        if len(known) > MOST_TEMPLATES:
            self._drop_oldest(partition)
        while len(self._templates) > _MOST_OWNERS or self._lines * _SEEN_BYTES > self._half:
            self._drop_oldest(next(iter(self._templates)))
        return joined

    def _drop_oldest(self, partition: str) -> None:
        known = self._templates[partition]
        self._lines -= len(known.pop(next(iter(known))).lines)
        if not known:
            del self._templates[partition]

    def note(self, partition: str, recurring: Mapping[bytes, float]) -> None:
        """Add items that clients sent again, and when they first did."""
        if not recurring:
            return
        known = self._recurring.setdefault(partition, {})
        self._recurring.move_to_end(partition)
        for digest, at in recurring.items():
            if digest in known or len(known) < MOST_RECURRING:
                known[digest] = min(at, known.get(digest, at))
        while len(self._recurring) > _MOST_OWNERS:
            self._recurring.popitem(last=False)

    def _count(self, standing: Standing, one: int) -> None:
        form = standing.form
        times = self._forms.get(form, 0) + one
        digests = _DIGEST_BYTES * (len(standing.shelf) + len(standing.brought))
        self._size += one * (_ENTRY_BYTES + digests + sum(map(_weight, standing.log)))
        if times == (one > 0):
            self._size += one * len(form.lines) * _LINE_BYTES
        if times:
            self._forms[form] = times
        else:
            del self._forms[form]


def _weight(recipe: Recipe) -> int:
    pieces = [piece for text in recipe.texts for piece in text]
    return _RECIPE_BYTES + sum(_PIECE_BYTES + 4 * _spaces(piece) for piece in pieces)


def _spaces(piece: Piece) -> int:
    return len(piece.before) + len(piece.behind) if isinstance(piece, Words) else 0


def since(lesson: Lesson) -> dict[bytes, float]:
    """Return recurring items with when they first were, in the order they stood."""
    return {digest: lesson.at + place / 1e6 for place, digest in enumerate(lesson.recurring)}


def _joined(known: Template, newer: Template) -> Template:
    return dataclasses.replace(newer, lessons=known.lessons.also(newer.lessons))
