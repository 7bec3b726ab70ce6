"""Windowed clients: who sends only the last messages is completed from what was sent before, then planned as always.

Only in a named conversation, and only where the window's own messages, from its first on, stand in what is stored: two
whole turns with their answers at least. So the prompt stays a prefix until the limit cuts it on the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from proxy.core import lineage
from proxy.core.body import Edit, splice
from proxy.core.epoch import Profile
from proxy.core.lineage import Link, Place
from proxy.core.message import Message
from proxy.core.request import Request
from proxy.core.turn import Shape

LEAST_TURNS = 2

Weigh = Callable[[bytes], int]
"""Weighs a raw message in tokens."""


def left_out(
    request: Request, parts: Shape, links: Mapping[Place, Link], weigh: Weigh, profile: Profile, *, idle_seconds: float
) -> tuple[bytes, ...]:
    """Return the messages that stood in front of the client's window, oldest first; nothing where it is not sure.

    Nor where the prompt cache has gone cold, or reading them from it costs more than reading the window anew.
    """
    window = request.messages[parts.leading :]
    if not window or idle_seconds > profile.lifetime_seconds:
        return ()
    ends = [turn.end - parts.leading for turn in parts.turns if _answered(request.messages[turn.start : turn.end])]
    worth = sum(weigh(request.raw(index)) for index in range(parts.leading, len(request.messages)))
    # What holds most of the window was forwarded last: where the front was once given up, it is not taken up again.
    best: tuple[int, int, Place, tuple[bytes, ...]] = (0, 0, b"", ())
    for place, link in links.items():
        if lineage.after(link.before, window[0]) != place:
            continue
        matched = _matched(window, place, links)
        if sum(end <= matched for end in ends) < LEAST_TURNS:
            continue
        front = _front(link.before, links)
        if front is not None and sum(map(weigh, front)) * profile.read <= worth:
            best = max(best, (matched, len(front), place, front))
    return best[-1]


def completed(request: Request, parts: Shape, front: Sequence[bytes]) -> bytes:
    """Return the body with messages put in front of the client's window."""
    at = request.placed[parts.leading].start
    return splice(request.body, [Edit(at, at, b"".join(raw + b"," for raw in front))])


def links(request: Request, parts: Shape, places: Sequence[Place]) -> dict[Place, Link]:
    """Return what is to be stored of a request, by place."""
    return {
        places[index]: Link(places[index - 1] if index > parts.leading else b"", request.raw(index))
        for index in range(parts.leading, len(places))
    }


def _answered(turn: Sequence[Message]) -> bool:
    return turn[0].role == "user" and any(message.role == "assistant" for message in turn)


def _matched(window: Sequence[Message], place: Place, links: Mapping[Place, Link]) -> int:
    """Return how many of the window's messages stand one behind the other from this place on."""
    for count, message in enumerate(window[1:], start=1):
        place = lineage.after(place, message)
        if place not in links:
            return count
    return len(window)


def _front(place: Place, links: Mapping[Place, Link]) -> tuple[bytes, ...] | None:
    """Return all up to a place from the conversation's start on; None where a link is missing."""
    raws: list[bytes] = []
    while place:
        link = links.get(place)
        if link is None:
            return None
        raws.append(link.raw)
        place = link.before
    return tuple(reversed(raws))
