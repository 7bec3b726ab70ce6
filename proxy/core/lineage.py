"""Which stored turns a request of a named conversation continues: chains of digests of what was said.

A turn's key is the chain of everything said before it and of its user's words, context blocks left out. What was stored
under it counts only if the request also holds, word for word, the replies that followed. So edits, retries and side
requests fork by themselves: where nothing matches, nothing stored is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.items import Item
from proxy.core.message import Message
from proxy.core.turn import Shape


@dataclass(frozen=True, slots=True)
class Link:
    """One turn of a request in its chain; `replies` are the assistant's messages in it."""

    key: bytes
    replies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What was forwarded for a turn: its items, and digests of each answer to it. `started` orders attempts."""

    started: float
    items: tuple[Item, ...]
    replies: frozenset[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What memory holds for the turns of one request, by the turn's key."""

    turns: Mapping[bytes, tuple[Stored, ...]]


NOTHING = Recalled(turns={})


def chain(messages: Sequence[Message], shape: Shape) -> tuple[Link, ...]:
    """Return one link a turn."""
    links, said = [], b""
    for turn in shape.turns:
        said = _next(said, messages[turn.start].said)
        key, replies = said, []
        for message in messages[turn.start + 1 : turn.end]:
            said = _next(said, message.said)
            if message.role == "assistant":
                replies.append(message.said)
        links.append(Link(key, tuple(replies)))
    return tuple(links)


def match(links: Sequence[Link], recalled: Recalled) -> tuple[Stored | None, ...]:
    """Return what was stored for each turn before the newest, the latest attempt whose answers the request holds."""
    return tuple(
        max(
            (
                stored
                for stored in recalled.turns.get(link.key, ())
                if link.replies and stored.replies.issuperset(link.replies)
            ),
            key=lambda stored: stored.started,
            default=None,
        )
        for link in links[:-1]
    )


def _next(chain: bytes, said: bytes) -> bytes:
    return hashlib.blake2b(chain + said, digest_size=16).digest()
