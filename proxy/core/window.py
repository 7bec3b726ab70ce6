"""Windowed clients: who sends only the last messages is completed from what was sent before, then planned as always.

Only in a named conversation, and only where the window's own messages, from its first on, stand in what is stored: two
whole turns with their answers at least. So the prompt stays a prefix until the limit cuts it on the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proxy.core import chain
from proxy.core.body import Edit, splice
from proxy.core.chain import Place
from proxy.core.lineage import Link
from proxy.core.message import Look, Message
from proxy.core.profile import Profile
from proxy.core.request import Request

LEAST_TURNS = 2
MOST_PLACES = 8
"""A window that stands in more places is made of words that say nothing."""
MOST_BYTES = 2_000_000
"""Of a longer conversation nothing is stored: no recall may take so long."""

Weigh = Callable[[bytes], int]
"""Weighs a raw message in tokens."""


def left_out(
    request: Request,
    links: Mapping[Place, Link],
    *,
    weigh: Weigh,
    look: Look,
    profile: Profile,
    idle_seconds: float,
) -> tuple[bytes, ...]:
    """Return the messages that stood in front of the client's window, oldest first; nothing where it is not sure.

    Nor where the prompt cache has gone cold, or reading them from it costs more than reading the window anew; nor what
    may have expired since (media), or of which a request may hold only a few (cache marks).
    """
    messages, parts = request.messages, request.parts
    window = messages[parts.leading :]
    if not window or window[0].result or idle_seconds > profile.lifetime_seconds:
        return ()
    stored = {link.raw for link in links.values()}
    if any(request.raw(index) in stored for index in range(1, parts.leading)):
        # A system message from the middle of the conversation is no L1.
        return ()
    ends = [turn.end - parts.leading for turn in parts.turns if _answered(messages[turn.start : turn.end])]
    found: list[_Place] = []
    for place, link in links.items():
        if chain.after(link.before, window[0].said) != place:
            continue
        matched = min(_matched(window, place, links), len(window) - 1)
        sure = sum(end <= matched for end in ends) >= LEAST_TURNS
        found.append(_Place(sure, matched, _front(link.before, links, look)))
        if len(found) > MOST_PLACES:
            return ()
    front = _surest(found)
    if not front or any(_expires(look(raw)) for raw in front) or not _whole(front, look):
        return ()
    worth = sum(weigh(request.raw(index)) for index in range(parts.leading, len(messages)))
    return front if sum(map(weigh, front)) * profile.read <= worth else ()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a window's first message stands: whether enough of it does, how much, and what stood in front."""

    sure: bool
    matched: int
    front: tuple[bytes, ...] | None


def _surest(found: Sequence[_Place]) -> tuple[bytes, ...]:
    """Return the front of the place that holds most of the window, the shortest of equals.

    A front may be the end of another: the conversation was cut there once, and what was given up stays so. Fronts that
    differ belong to different branches, and nobody can say which is meant; also where only one holds enough.
    """
    fronts = [place.front for place in found if place.front is not None]
    sure = [place for place in found if place.sure]
    if len(fronts) < len(found) or not sure:
        return ()
    longest = max(fronts, key=len)
    if any(front and longest[-len(front) :] != front for front in fronts):
        return ()
    best = max(sure, key=lambda place: (place.matched, -len(place.front or ())))
    front = best.front or ()
    # What stands less far, behind less, is where the conversation began anew: what was taken away stays away.
    anew = any(place.matched < best.matched and len(place.front or ()) < len(front) for place in found)
    return () if anew else front


def _whole(front: Sequence[bytes], look: Look) -> bool:
    """Whether calls have their results and results their calls: the same words may have had other ids."""
    due: set[str] = set()
    for raw in front:
        message = look(raw)
        if message.result:
            if message.answers not in due:
                return False
            due.discard(message.answers)
        elif due:
            return False
        else:
            due = {*message.calls}
    return not due


def _expires(message: Message) -> bool:
    return bool(message.media) or message.marked


def completed(request: Request, front: Sequence[bytes]) -> bytes:
    """Return the body with messages put in front of the client's window."""
    at = request.placed[request.parts.leading].start
    return splice(request.body, [Edit(at, at, b"".join(raw + b"," for raw in front))])


def links(request: Request) -> dict[Place, Link]:
    """Return what is to be stored of a request, by place; nothing of one that could not be put in front again."""
    places, leading = request.places, request.parts.leading
    messages = request.messages[leading:]
    if not messages or messages[0].result or any(map(_expires, messages)):
        return {}
    if sum(message.size_bytes for message in messages) > MOST_BYTES:
        return {}
    return {
        places[index]: Link(places[index - 1] if index > leading else b"", request.raw(index))
        for index in range(leading, len(places))
    }


def _answered(turn: Sequence[Message]) -> bool:
    return turn[0].role == "user" and any(message.role == "assistant" for message in turn)


def _matched(window: Sequence[Message], place: Place, links: Mapping[Place, Link]) -> int:
    """Return how many of the window's messages stand one behind the other from this place on."""
    for count, message in enumerate(window[1:], start=1):
        place = chain.after(place, message.said)
        if place not in links:
            return count
    return len(window)


def _front(place: Place, links: Mapping[Place, Link], look: Look) -> tuple[bytes, ...] | None:
    """Return all up to a place from the conversation's start on; None where a link is missing, or lies."""
    raws: list[bytes] = []
    while place:
        link = links.get(place)
        if link is None or len(raws) > len(links) or chain.after(link.before, look(link.raw).said) != place:
            return None
        raws.append(link.raw)
        place = link.before
    return tuple(reversed(raws))
