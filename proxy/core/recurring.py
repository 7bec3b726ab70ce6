"""What an anonymous client takes out of its history and sends again: what stands in L2, which turns are put back.

Memory holds digests; all that is forwarded is the request's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.items import Item
from proxy.core.known import Known, Standing
from proxy.core.library import NO_LIBRARY, Library, items
from proxy.core.recipe import Recipe, digest, keyed
from proxy.core.request import Request

_RESTLESS = -2
"""A client that sent only some again must send all again three times before it is believed."""
_MOST_CALM = 100
_SOME = 1 / 2
"""Of the items of a turn: an active note changes, an attachment is taken away."""


@dataclass(frozen=True, slots=True)
class Recurring:
    """L2 of an anonymous request, all of it the request's own items; digests of what is in it and what the turn brings.

    `log` are the earlier turns that may be put back as they stood. `calm` is in how many requests on end all items came
    again; `learned` are those that nobody was known to send again.
    """

    library: Library = NO_LIBRARY
    shelf: tuple[bytes, ...] = ()
    brought: tuple[bytes, ...] = ()
    log: tuple[Recipe, ...] = ()
    calm: int = 0
    learned: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The items of an anonymous request that L2 may hold, by keyed digest: in the history kept, in the newest turn.

    Of each the newest version there; `versions` are all of both. `looping`: the newest turn goes on.
    """

    kept: Mapping[bytes, Item] = field(default_factory=dict)
    brought: Mapping[bytes, Item] = field(default_factory=dict)
    versions: Mapping[bytes, Item] = field(default_factory=dict)
    looping: bool = False

    @property
    def held(self) -> dict[bytes, Item]:
        """All of them."""
        return {**self.kept, **self.brought}


def sent(request: Request, key: bytes) -> Sent:
    """Return the items of a request; what stands in L1 stands already."""
    messages, leading, newest = request.messages, request.parts.leading, request.parts.newest
    l1 = {item.key for message in messages[:leading] for item in items(message)}

    def within(start: int, end: int) -> list[Item]:
        return [item for message in messages[start:end] if message.role == "user" for item in items(message)]

    kept = _movable(within(leading, newest.start), l1)
    brought = _movable([*within(newest.start, newest.end), *request.hints.context], l1)
    return Sent(
        kept=_by_digest(kept, key),
        brought=_by_digest(brought, key),
        versions={digest(item, key): item for item in (*kept, *brought)},
        looping=any(message.result for message in messages[newest.start : newest.end]),
    )


def stands(
    request: Request, found: Sent, stood: Standing | None, known: Known, *, again: bool = False, frozen: bool
) -> Recurring:
    """Say what stands in L2 of an anonymous request, and whether earlier turns are put back.

    A new lineage's shelf holds what clients of this tenant are known to send again, up to the first item the request no
    longer holds. Turns are put back only where this lineage was given the answer that the request holds, where the
    client sends again all it took out, and where that, over as many turns as it has gone on, weighs more than the
    re-read when it ends. The same request sent `again`, and a turn that goes on, stand as they stood. Where `frozen`,
    no shelf begins.
    """
    held, came, calm = found.held, stood.brought if stood else (), 0
    log: tuple[Recipe, ...] = ()
    # Another version in the history would stand behind L2, and be taken for the newer one.
    kept = {item.key for item in found.kept.values()}
    free = [digest for digest, item in found.brought.items() if item.key not in kept]
    if stood is None:
        shelf, stripped = [digest for digest in known.recurring if digest in free and not frozen], []
    else:
        shelf = list(itertools.takewhile(found.versions.__contains__, stood.shelf))
        if again or found.looping:
            log = stood.log if again or known.answered else ()
            return Recurring(
                Library(tuple(found.versions[digest] for digest in shelf)), tuple(shelf), came, log, stood.calm
            )
        calm = _calm(stood, held)
        stripped = [digest for digest in free if digest in came] if calm > 0 else []
        saved = calm * sum(len(held[each].content) for each in stripped)
        if stripped and known.answered and _pays(request, stood.log, saved, known.key):
            log = stood.log
    return Recurring(
        library=Library(tuple(found.versions[digest] for digest in shelf)),
        shelf=tuple(shelf),
        brought=tuple(found.brought),
        log=log,
        calm=calm,
        learned=tuple(digest for digest in stripped if digest not in known.recurring),
    )


def _calm(stood: Standing, held: Container[bytes]) -> int:
    """Count the requests on end in which all items came again.

    Up to half may then go and the count stays; where more go it begins anew. Before the first, any that is missing sets
    it back.
    """
    before = {*stood.shelf, *stood.brought}
    gone = sum(digest not in held for digest in before)
    if not before:
        return 0
    if not gone:
        return min(stood.calm + 1, _MOST_CALM)
    if stood.calm < 1:
        return _RESTLESS
    return stood.calm if gone <= len(before) * _SOME else 0


def context(request: Request, shelf: Recurring, key: bytes) -> list[Item]:
    """Return an anonymous request's own context in the order it is brought in: first what stands already."""
    if not request.hints.context:
        return []
    noted = {each for recipe in shelf.log for pieces in recipe.texts for each in pieces}
    held = {item.key for message in request.messages for item in items(message)}

    def new(item: Item) -> bool:
        name = digest(item, key)
        return name not in noted and name not in shelf.shelf and item.key not in held

    return sorted(dict.fromkeys(request.hints.context), key=new)


def _pays(request: Request, log: Sequence[Recipe], saved: int, key: bytes) -> bool:
    """Whether a log goes on, or as much was saved without it as its end would cost: all behind its first turn."""
    if len(log) != 1:
        return bool(log)
    before = range(request.parts.leading, request.parts.newest.start)
    behind = itertools.dropwhile(lambda at: keyed(request.places[at], key) != log[0].place, before)
    return saved >= sum(request.messages[at].size_bytes for at in behind)


def _movable(found: Iterable[Item], stands: Container[tuple[str, str]]) -> list[Item]:
    """Leave out what is short, may not move or stands already."""
    return [item for item in found if item.promotable and item.referable and item.key not in stands]


def _by_digest(found: Iterable[Item], key: bytes) -> dict[bytes, Item]:
    """Of each item the newest version."""
    newest = {item.key: item for item in found}
    return {digest(item, key): item for item in newest.values()}
