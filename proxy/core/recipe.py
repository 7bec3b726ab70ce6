"""How an anonymous user message was made of items and words: keyed digests, counts and white space, never content.

A client that strips what it attached and sends it again with the next turn sends all that is needed to put it back
where it stood:

    turn 1    <note_context>…a…</note_context>\\n\\nWhy?     →  item a · "\\n\\n" · 1 word
    turn 2    user  Why?   …   user  <note_context>…a…</note_context>\\n\\nAnd now?
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from proxy.core.chain import Place
from proxy.core.items import Item
from proxy.core.message import Text, texts
from proxy.core.request import Request

_MOST_PIECES = 128
"""Of one message: what holds more is its client's to spell."""
_MOST_IN_ALL = 2_048
"""Pieces of a log: then it begins anew."""
_MOST_TURNS = 64
_MOST_SPACE = 16
_LEFT_OUT = b""
"""An item that no line could refer to: it would stand again in each turn."""


class Words(NamedTuple):
    """So many words outside of items, and the white space around them."""

    before: str
    many: int
    behind: str


Piece = bytes | Words
"""An item, by its digest, or what stands between two."""


class Recipe(NamedTuple):
    """A user message, by its place (keyed): each of its texts in pieces. Only one of the texts holds words."""

    place: Place
    texts: tuple[tuple[Piece, ...], ...]

    @property
    def worded(self) -> int:
        """Which text holds the words."""
        return next(at for at, pieces in enumerate(self.texts) if _words(pieces))


@dataclass(frozen=True, slots=True)
class Here:
    """Where an item stands in a request: which message, which of its texts, from where to where."""

    item: Item
    index: int
    text: Text
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Log:
    """The turns of an anonymous lineage that can be put back, the newest among them, as `recipes`.

    `again` says which earlier messages of this request stand in another form, and `held` where their items are; what
    `strata.context` brings stands in no message.
    """

    recipes: tuple[Recipe, ...] = ()
    again: Mapping[int, Recipe] = field(default_factory=dict)
    held: Mapping[bytes, Here | Item] = field(default_factory=dict)


def digest(item: Item, key: bytes) -> bytes:
    """Digest an item's content; without the key nobody can tell what it is."""
    return hashlib.blake2b(item.sha256, digest_size=8, key=key).digest()


def log(request: Request, before: Sequence[Recipe], context: Sequence[Item], key: bytes, *, goes_on: bool) -> Log:
    """Continue a log: put back what stood `before`, and note this turn, with its own `context`, behind it.

    Where the same turn `goes_on`, it is noted already.
    """
    recipes = tuple(before)
    own = None if goes_on else _newest(request, context, key)
    if own is not None:
        recipes = (*recipes, own)
    if len(recipes) > _MOST_TURNS or sum(len(pieces) for each in recipes for pieces in each.texts) > _MOST_IN_ALL:
        recipes, before = recipes[-1:], ()
    if not before:
        return Log(recipes)
    at = {recipe.place: recipe for recipe in before}
    again = {
        turn.start: at[place]
        for turn in request.parts.turns[:-1]
        if _bare(request, turn.start) and (place := keyed(request.places[turn.start], key)) in at
    }
    return Log(recipes, again, _held(request, key) if again else {})


def keyed(place: Place, key: bytes) -> Place:
    """Digest a place, so that nobody without the key can guess what was said there."""
    return hashlib.blake2b(place, digest_size=8, key=key).digest()


def _bare(request: Request, index: int) -> bool:
    message = request.messages[index]
    return message.role == "user" and message.freezes and not message.texts


def _held(request: Request, key: bytes) -> dict[bytes, Here | Item]:
    found: dict[bytes, Here | Item] = {digest(item, key): item for item in request.hints.context}
    for index in range(request.parts.leading, len(request.messages)):
        for text in request.messages[index].texts if request.messages[index].role == "user" else ():
            found |= {
                digest(block.item, key): Here(block.item, index, text, block.start, block.end)
                for block in text.blocks
                if block.item
            }
    return found


def _newest(request: Request, context: Sequence[Item], key: bytes) -> Recipe | None:
    """Say how this turn's user message is made; None where it holds no items, or what only its client can spell."""
    if not request.parts.turns:
        return None
    start = request.parts.newest.start
    message = request.messages[start]
    if message.role != "user" or not message.freezes or message.form == "none" or not (message.texts or context):
        return None
    found = message.texts or tuple(Text(at, end, value, ()) for at, end, value in texts(request.raw(start))[1])
    if any(block.item is None for text in found for block in text.blocks):
        return None
    names = _Names(request, key)
    held = [tuple(_pieces(text, names)) for text in found]
    front: tuple[Piece, ...] = tuple(chain.from_iterable((names.of(item), Words("\n\n", 0, "")) for item in context))
    if front and message.form == "parts":
        held.insert(0, front)
    elif front:
        held[0] = (*front, *held[0])
    every = [*chain(*held)]
    spaces = [len(each.before) + len(each.behind) for each in every if isinstance(each, Words)]
    if sum(_words(pieces) > 0 for pieces in held) != 1 or max(spaces) > _MOST_SPACE or len(every) > _MOST_PIECES:
        return None
    if all(each == _LEFT_OUT for each in every if isinstance(each, bytes)):
        return None
    return Recipe(keyed(request.places[start], key), tuple(held))


class _Names:
    """Names items by digest. Those no line could refer to are `_LEFT_OUT`.

    They are short ones, several versions of one, and unnamed ones that begin alike.
    """

    def __init__(self, request: Request, key: bytes) -> None:
        self._key = key
        self._contents: dict[object, set[bytes]] = {}
        for item in _all(request):
            alike = item.key if item.named else (item.tag, item.label)
            self._contents.setdefault(alike, set()).add(item.sha256)

    def of(self, item: Item) -> bytes:
        alike = item.key if item.named else (item.tag, item.label)
        refers = item.referable and item.promotable and len(self._contents[alike]) == 1
        return digest(item, self._key) if refers else _LEFT_OUT


def _all(request: Request) -> Iterator[Item]:
    yield from request.hints.context
    for message in request.messages:
        for text in message.texts if message.role == "user" else ():
            yield from (block.item for block in text.blocks if block.item)


def _pieces(text: Text, names: _Names) -> Iterator[Piece]:
    at = 0
    for block in text.blocks:
        if block.item:
            yield from _between(text.value[at : block.start])
            yield names.of(block.item)
            at = block.end
    yield from _between(text.value[at:])


def _between(value: str) -> Iterator[Words]:
    bare = value.strip()
    if bare:
        yield Words(value[: -len(value.lstrip())], len(bare.split()), value[len(value.rstrip()) :])
    elif value:
        yield Words(value, 0, "")


def _words(pieces: Sequence[Piece]) -> int:
    return sum(each.many for each in pieces if isinstance(each, Words))
