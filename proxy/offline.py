"""The product on recorded traffic: reads, plans and remembers as the pipeline does, on the traffic's own clock.

Nothing is forwarded; replay and the benchmark say what was answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.core import chain, items, lineage, plan, prefix, window
from proxy.core.chain import Place
from proxy.core.known import Lesson, known
from proxy.core.lineage import NOTHING
from proxy.core.lines import Line
from proxy.core.models import NO_WINDOWS, describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.prefix import Step
from proxy.core.reply import of_answer
from proxy.core.request import Request, read
from proxy.memo import Analyst, TokenScale, count
from proxy.memory.local import LocalStore
from proxy.memory.store import Entry
from proxy.recall import log_entries
from proxy.traces import ROOT

_OWNER = "offline"
_MOST_WAITING = 10_000
_MOST_TURNS = 16
"""Of a conversation wait for their answers: its side requests and forks go between a turn and the next."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, how it would be forwarded, and the steps of that and of the client's own bytes."""

    sent: Request
    request: Request
    plan: Plan
    steps: tuple[Step, ...]
    own: tuple[Step, ...]
    here: Place
    earlier: tuple[Place, ...]
    root: bytes


class Offline:
    """One owner's traffic at one upstream. Its memory is bounded by `max_bytes`; `windows` are models' own."""

    def __init__(
        self,
        policy: Policy,
        scale: TokenScale,
        *,
        max_bytes: int,
        tags: items.Tags = items.BUILTIN,
        windows: Mapping[str, int] = NO_WINDOWS,
    ) -> None:
        self._policy = policy
        self._windows = windows
        self._now = 0.0
        self._store = LocalStore(max_bytes=max_bytes, ttl_seconds=10**9, clock=lambda: self._now)
        self._analyst = Analyst(tags, max_bytes=max_bytes)
        self._scale = scale
        self._waiting: dict[str, dict[Place, Entry]] = {}

    def plan(self, body: bytes, *, at: float, name: str | None, reply: object = None) -> Planned:
        """Plan a request and remember it; `reply` is the message that answered it, where it is known by now.

        Where it is not, the next request of the conversation says it. Raises StrataError or Odd as reading does.
        """
        self._now = at
        sent = request = read(body, self._analyst.analyse, count, self._analyst.tags)
        if name:
            self._hear(name, request)
        recalled = self._store.copy(name) if name else NOTHING
        front = window.left_out(
            request,
            recalled.links,
            weigh=self._weigh,
            look=self._analyst.analyse,
            profile=self._policy.profile,
            idle_seconds=at - (recalled.seen_at or at),
        ) if self._policy.windowed else ()  # fmt: skip
        if front:
            request = read(window.completed(request, front), self._analyst.analyse, count, self._analyst.tags)
        parts = request.parts
        places = [_placed(name, place) for place in request.places]
        earlier = [_placed(name, place) for place in lineage.earlier(request)]
        answers = self._answers(request, earlier) if name is None else ()
        made = plan.make(
            request,
            recalled,
            model=describe(request.model, self._windows),
            policy=self._policy,
            named=name is not None,
            scale=self._scale,
            look=self._analyst.analyse,
            now=at,
            given=self._analyst.tools(request.member("tools")),
            orders=self._store.known_orders(_OWNER),
            known=known(
                earlier,
                places[-1] if places else b"",
                self._store.book.learned(_OWNER, (*answers, *earlier, *places[-1:])),
                answers=answers,
                key=_OWNER.encode(),
                lines=self._lines(request),
            ),
        )
        self._remember(request, made, at=at, name=name, places=places, reply=reply)
        steps = prefix.forwarded(request, made.draft, self._scale, self._analyst.chunks)
        chunks = self._analyst.chunks
        own = prefix.as_sent(request, made.draft, self._scale, chunks, sent=sent if sent is not request else None)
        here = places[-1] if places else b""
        root = places[parts.leading] + ROOT if parts.turns else b""
        return Planned(sent, request, made, steps, own or steps, here, tuple(earlier), root)

    def _lines(self, request: Request) -> tuple[Line, ...]:
        leading = request.messages[: request.parts.leading] if self._policy.current_values else ()
        return self._analyst.lines(leading, _OWNER.encode())

    def _remember(
        self, request: Request, made: Plan, *, at: float, name: str | None, places: Sequence[Place], reply: object
    ) -> None:
        if made.teaches and places:
            self._store.note_learned(_OWNER, places[-1], made.standing, made.lesson(at))
        if made.order:
            self._store.put_order(_OWNER, made.order)
        if name is None and made.recurring.log and reply is not None:
            for said in of_answer(_whole(reply)):
                place = _placed(None, chain.after(request.places[-1], said))
                self._store.note_learned(_OWNER, place, made.standing, Lesson(at))
        if name is None or not made.places:
            return
        entries = log_entries(request, made, at=at)
        links = window.links(request) if self._policy.windowed else {}
        self._store.put(name, tuple(entries.values()), made.epoch if made.began else None, links)
        newest = entries.get(made.draft.newest.start)
        if newest is None:
            return
        if reply is not None:
            self._store.answer(name, newest, of_answer(_whole(reply)))
        else:
            waiting = self._waiting.setdefault(name, {})
            waiting[newest.place] = newest
            _shorten(waiting, _MOST_TURNS)
            _shorten(self._waiting, _MOST_WAITING)

    def _answers(self, request: Request, earlier: Sequence[Place]) -> Sequence[Place]:
        """Return the place of the latest answer; where nobody told it before, the request that goes on from it does."""
        found = lineage.answer(request)
        if not found:
            return ()
        place = _placed(None, found)
        known = self._store.book.learned(_OWNER, (place, *earlier[:1])).standing
        if place not in known and earlier:
            self._store.book.put(place, known.get(earlier[0], ()))
        return (place,)

    def _hear(self, name: str, request: Request) -> None:
        """Learn from a request how those before it were answered."""
        waiting = self._waiting.get(name)
        if not waiting:
            return
        entry: Entry | None = None
        for message, place in zip(request.messages, request.places, strict=True):
            if entry is not None and message.role == "assistant":
                self._store.answer(name, entry, [message.said])
                del waiting[entry.place]
                entry = None
            entry = waiting.get(place, entry)

    def _weigh(self, raw: bytes) -> int:
        return self._scale.message(raw, hashlib.sha256(raw).digest())


def _whole(reply: object) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "message": reply}]})


def _shorten(waiting: dict[Any, Any], most: int) -> None:
    while len(waiting) > most:
        waiting.pop(next(iter(waiting)))


def _placed(name: str | None, place: Place) -> Place:
    """Keep named lineages apart, as the product does."""
    return hashlib.blake2b((name or "").encode("utf-8", "surrogatepass") + place, digest_size=16).digest()
