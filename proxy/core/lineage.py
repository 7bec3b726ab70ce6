"""Which earlier requests of a named conversation a request extends, and what was forwarded for them.

What is stored under a place counts only where the request holds, word for word, the answers that followed it. So edits,
retries and side requests fork by themselves: where nothing matches, nothing stored is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.chain import Place
from proxy.core.epoch import Epoch
from proxy.core.request import Request
from proxy.core.turn import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A message as it was forwarded, and digests of each answer to it. `started` orders attempts at the same words.

    `brought` is the text that came beside it in `strata.context`, `values` are the current values told with it, by
    slot; both are part of `raw`.
    """

    started: float
    raw: bytes
    replies: frozenset[bytes] = frozenset()
    brought: str = ""
    values: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A message as the client sent it, and the place of the one before; empty at a conversation's start."""

    before: Place
    raw: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What memory holds of a conversation: epochs by where they began, and messages by epoch and place.

    `links` are the client's own messages by place, where it is a windowed one; `summaries` are texts by the place up to
    which they tell, or by the digest of an item.
    """

    epochs: Mapping[Place, Epoch] = field(default_factory=dict)
    log: Mapping[tuple[Place, Place], tuple[Frozen, ...]] = field(default_factory=dict)
    links: Mapping[Place, Link] = field(default_factory=dict)
    summaries: Mapping[bytes, str] = field(default_factory=dict)
    seen_at: float | None = None


NOTHING = Recalled()
_EARLIER = 3
"""A request or two may have failed, or their answers been thrown away."""


MOST_LEFT, MOST_LEFT_BYTES = 2_048, 8_000_000
"""The most messages, and bytes, stored under one name beyond those its newest request holds."""


def outgrown(recalled: Recalled, held: Container[Place]) -> bool:
    """Whether more is stored under a name than one conversation's branches, where a request holds these places.

    Some clients give all their conversations one name.
    """
    log = [attempts for (_, place), attempts in recalled.log.items() if place not in held]
    links = [link.raw for place, link in recalled.links.items() if place not in held]
    raws = [*links, *(frozen.raw for attempts in log for frozen in attempts)]
    raws += [raw for epoch in recalled.epochs.values() for raw in epoch.leading]
    return len(raws) > MOST_LEFT or sum(map(len, raws)) > MOST_LEFT_BYTES


def answer(request: Request) -> Place:
    """Return the place of the latest answer a request holds; empty where there is none. A partial one is none yet."""
    messages, leading = request.messages, request.parts.leading
    asked = (at for at in reversed(range(leading, len(messages))) if messages[at].role != "assistant")
    said = (at for at in reversed(range(leading, next(asked, leading))) if messages[at].role == "assistant")
    return next((request.places[at] for at in said), b"")


def earlier(request: Request) -> tuple[Place, ...]:
    """Return the last places of earlier requests of the same lineage, the latest first: an answer followed each."""
    messages = request.messages
    asked = (
        request.places[at - 1]
        for at in range(len(messages) - 1, request.parts.leading, -1)
        if messages[at].role == "assistant" and messages[at - 1].role != "assistant"
    )
    return tuple(itertools.islice(asked, _EARLIER))


def current(places: Sequence[Place], recalled: Recalled) -> Epoch | None:
    """Return the epoch a request continues: the latest that began at one of its places."""
    return next((recalled.epochs[place] for place in reversed(places) if place in recalled.epochs), None)


def match(request: Request, recalled: Recalled, epoch: Place) -> dict[int, Frozen]:
    """Return what was forwarded for the messages of earlier turns, by index.

    Of a turn's user message, the latest attempt whose answers the request holds; of what followed it, what stands there
    already. The newest turn is rendered from the request alone.
    """
    found: dict[int, Frozen] = {}
    messages, places = request.messages, request.places
    for turn in request.parts.turns[:-1]:
        latest = attempt(request, turn, recalled, epoch)
        if latest is None:
            continue
        if messages[turn.start].freezes or latest.brought:
            found[turn.start] = latest
        for index in range(turn.start + 1, turn.end):
            if messages[index].freezes and (followed := recalled.log.get((epoch, places[index]))):
                found[index] = min(followed, key=_order)
    return found


def attempt(request: Request, turn: Span, recalled: Recalled, epoch: Place) -> Frozen | None:
    """Return the latest attempt at a turn's first message whose answers the request holds."""
    said = {message.said for message in request.messages[turn.start : turn.end] if message.role == "assistant"}
    log = recalled.log.get((epoch, request.places[turn.start]), ())
    return max((frozen for frozen in log if said and frozen.replies >= said), key=_order, default=None)


def _order(frozen: Frozen) -> tuple[float, bytes]:
    # Replicas hold attempts in different orders: what began at one instant is told apart by its bytes.
    return frozen.started, frozen.raw
