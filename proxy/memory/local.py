"""Memory of this process alone: bounded in bytes, least recently used goes first. Also Redis's local copy."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from proxy.core.chain import Place
from proxy.core.epoch import Epoch
from proxy.core.known import Learned, Lesson, Standing
from proxy.core.lineage import NOTHING, Frozen, Link, Recalled
from proxy.core.template import Template
from proxy.core.tools import Order
from proxy.memory.learned import Book, since
from proxy.memory.store import DONE, NO_LINKS, Answer, Entry, Store, Tally, View, Writing

_OVERHEAD = 400
_MOST_ATTEMPTS = 16
MOST_SETS, MOST_TOOLS = 64, 512
"""So many sets of an owner are remembered, of so many tools each. No provider takes more in one request."""
_MOST_OWNERS, _MOST_TOOLS_IN_ALL = 2_000, 100_000
_SWEEP_SECONDS = 60.0


@dataclass(slots=True)
class _Conversation:
    expires: float
    ttl_seconds: float
    epochs: dict[Place, Epoch] = field(default_factory=dict)
    log: dict[tuple[Place, Place], dict[bytes, Frozen]] = field(default_factory=dict)
    links: dict[Place, Link] = field(default_factory=dict)
    summaries: dict[bytes, str] = field(default_factory=dict)
    seen_at: float | None = None
    view: View | None = None
    size: int = _OVERHEAD


class LocalStore(Store):
    """`clock` returns seconds; `ttl_seconds` slides with each use; `book_bytes` bounds what is learned of prompts."""

    def __init__(
        self, *, max_bytes: int, ttl_seconds: float, clock: Callable[[], float], book_bytes: int = 8_000_000
    ) -> None:
        self._max_bytes = max_bytes
        self.book = Book(max_bytes=book_bytes)
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._conversations: collections.OrderedDict[str, _Conversation] = collections.OrderedDict()
        self._size = 0
        self._orders: collections.OrderedDict[str, dict[frozenset[bytes], Order]] = collections.OrderedDict()
        self._tools = 0
        self._swept = clock()

    @property
    @override
    def degraded(self) -> bool:
        return False

    @override
    async def recall(self, conversation: str, *, ttl_seconds: int | None = None) -> Answer:
        return Answer(self.copy(conversation))

    def copy(self, conversation: str) -> Recalled:
        """Return what this process knows."""
        found = self._find(conversation)
        if found is None:
            return NOTHING
        return Recalled(
            epochs=dict(found.epochs),
            log={where: tuple(attempts.values()) for where, attempts in found.log.items()},
            links=dict(found.links),
            summaries=dict(found.summaries),
            seen_at=found.seen_at,
        )

    def messages(self, conversation: str) -> dict[bytes, bytes]:
        """Return the messages this process knows, by their digests."""
        found = self._find(conversation)
        tries = found.log.values() if found else ()
        return {digest: frozen.raw for attempts in tries for digest, frozen in attempts.items()}

    def merge(
        self, conversation: str, recalled: Recalled, *, gone_at: float, ttl_seconds: int | None = None
    ) -> Recalled:
        """Add what another store says to what is known here, less what is older than a deletion; return it all."""
        if gone_at and (found := self._find(conversation)) is not None:
            found.epochs = {place: epoch for place, epoch in found.epochs.items() if epoch.started > gone_at}
            left = {
                where: {attempt: frozen for attempt, frozen in attempts.items() if frozen.started > gone_at}
                for where, attempts in found.log.items()
            }
            found.log = {where: attempts for where, attempts in left.items() if attempts}
            found.links.clear()
            found.summaries.clear()
        held = recalled.log or recalled.epochs or recalled.links or recalled.summaries
        if not held and self._find(conversation) is None:
            return NOTHING
        found = self._open(conversation, ttl_seconds)
        found.epochs |= recalled.epochs
        found.links = {**recalled.links, **found.links}
        found.summaries = {**found.summaries, **recalled.summaries}
        found.seen_at = max(filter(None, (found.seen_at, recalled.seen_at)), default=None)
        for where, attempts in recalled.log.items():
            known = found.log.setdefault(where, {})
            for frozen in attempts:
                # What was known already is the very object that is held here: hash no long log again at each request.
                digest = next((digest for digest, held in known.items() if held.raw is frozen.raw), None)
                digest = digest or hashlib.sha256(frozen.raw).digest()
                old = known.get(digest)
                if old == frozen:
                    continue
                started = min(old.started, frozen.started) if old else frozen.started
                replies = frozen.replies | (old.replies if old else frozenset())
                known[digest] = dataclasses.replace(frozen, started=started, replies=replies)
        self._resize(found)
        return self.copy(conversation)

    @override
    def remember(
        self,
        conversation: str,
        entries: Sequence[Entry],
        epoch: Epoch | None,
        links: Mapping[Place, Link] = NO_LINKS,
        *,
        anew: bool = False,
        ttl_seconds: int | None = None,
    ) -> Writing:
        self.put(conversation, entries, epoch, links, anew=anew, ttl_seconds=ttl_seconds)
        return DONE

    def put(
        self,
        conversation: str,
        entries: Sequence[Entry],
        epoch: Epoch | None,
        links: Mapping[Place, Link] = NO_LINKS,
        *,
        anew: bool = False,
        ttl_seconds: int | None = None,
    ) -> tuple[Entry, ...]:
        """As `remember`, with nobody else to tell; return what was taken: attempts at one place are bounded."""
        found = self._open(conversation, ttl_seconds)
        if anew:
            found.epochs, found.log, found.links = {}, {}, {}
        if epoch is not None:
            found.epochs.setdefault(epoch.place, epoch)
        found.links = {**links, **found.links}
        for entry in entries:
            found.seen_at = entry.frozen.started
            attempts = found.log.setdefault((entry.epoch, entry.place), {})
            known = attempts.get(entry.attempt)
            if known is not None:
                attempts[entry.attempt] = dataclasses.replace(known, replies=known.replies | entry.frozen.replies)
            else:
                attempts[entry.attempt] = entry.frozen
                while len(attempts) > _MOST_ATTEMPTS:
                    attempts.pop(next(iter(attempts)))
        self._resize(found)
        return tuple(entry for entry in entries if entry.attempt in found.log[entry.epoch, entry.place])

    @override
    def answered(
        self, conversation: str, entry: Entry, replies: Sequence[bytes], *, ttl_seconds: int | None = None
    ) -> Writing:
        self.answer(conversation, entry, replies)
        return DONE

    def answer(self, conversation: str, entry: Entry, replies: Iterable[bytes]) -> None:
        """As `answered`, with nobody else to tell."""
        found = self._open(conversation)
        attempts = found.log.get((entry.epoch, entry.place), {})
        if (frozen := attempts.get(entry.attempt)) is not None:
            attempts[entry.attempt] = dataclasses.replace(frozen, replies=frozen.replies | set(replies))
        self._resize(found)

    @override
    def summarised(self, conversation: str, key: bytes, text: str, *, ttl_seconds: int | None = None) -> Writing:
        self.note_summary(conversation, key, text, ttl_seconds=ttl_seconds)
        return DONE

    def note_summary(self, conversation: str, key: bytes, text: str, *, ttl_seconds: int | None = None) -> None:
        """As `summarised`, with nobody else to tell."""
        found = self._open(conversation, ttl_seconds)
        found.summaries.setdefault(key, text)
        self._resize(found)

    @override
    async def orders(self, partition: str, tools: Order) -> tuple[Order, ...]:
        return self.known_orders(partition)

    def known_orders(self, partition: str) -> tuple[Order, ...]:
        """Return what this process knows."""
        found = self._orders.get(partition)
        if found is None:
            return ()
        self._orders.move_to_end(partition)
        return tuple(found.values())

    @override
    def order(self, partition: str, order: Order) -> Writing:
        self.put_order(partition, order)
        return DONE

    def put_order(self, partition: str, order: Order, *, wins: bool = False) -> bool:
        """As `order`, with nobody else to tell; with `wins` in the place of what was known of the set.

        Return whether the set is known now. Tools that say the time are another set in every request: there is an end.
        """
        if len(order) > MOST_TOOLS:
            return False
        found = self._orders.setdefault(partition, {})
        self._orders.move_to_end(partition)
        same = frozenset(order)
        if same in found or len(found) < MOST_SETS:
            self._tools += 0 if same in found else len(order)
            found[same] = order if wins else found.get(same, order)
        while len(self._orders) > _MOST_OWNERS or self._tools > _MOST_TOOLS_IN_ALL:
            self._tools -= sum(map(len, self._orders.popitem(last=False)[1].values()))
        return same in self._orders.get(partition, {})

    @override
    async def learned(self, partition: str, places: Sequence[Place], here: Place, *, sure: bool = False) -> Learned:
        return self.book.learned(partition, (*places, here))

    @override
    def learn(self, partition: str, place: Place, standing: Standing, lesson: Lesson) -> Writing:
        self.note_learned(partition, place, standing, lesson)
        return DONE

    def note_learned(self, partition: str, place: Place, standing: Standing, lesson: Lesson) -> Template | None:
        """As `learn`, with nobody else to tell; return the template as it is now known."""
        self.book.put(place, (standing,))
        self.book.note(partition, since(lesson))
        self.book.spell(lesson.keys)
        return self.book.take(partition, lesson.template) if lesson.template is not None else None

    @override
    async def seen(self, conversation: str, view: View, tally: Tally, *, ttl_seconds: int | None = None) -> None:
        self.note(conversation, view, tally, ttl_seconds=ttl_seconds)

    def note(self, conversation: str, view: View, tally: Tally, *, ttl_seconds: int | None = None) -> None:
        """As `seen`, at once."""
        found = self._open(conversation, ttl_seconds)
        before = found.view or View(at=0, turns=0, layers=(), library=())
        found.view = dataclasses.replace(
            view,
            requests=before.requests + tally.requests,
            prompt_tokens=before.prompt_tokens + tally.prompt_tokens,
            cached_tokens=before.cached_tokens + tally.cached_tokens,
        )
        self._resize(found)

    @override
    def count(self, partition: str, tally: Tally) -> None:
        """Count nothing: without Redis a tenant's numbers are this process's metrics."""

    @override
    async def view(self, conversation: str) -> View | None:
        found = self._find(conversation)
        return found.view if found else None

    @override
    async def forget(self, conversation: str, *, ttl_seconds: int | None = None) -> bool:
        found = self._conversations.pop(conversation, None)
        self._size -= found.size if found else 0
        return found is not None

    @override
    async def close(self) -> None:
        self._conversations.clear()

    def _find(self, conversation: str) -> _Conversation | None:
        found = self._conversations.get(conversation)
        if found is None:
            return None
        if found.expires < self._clock():
            del self._conversations[conversation]
            self._size -= found.size
            return None
        found.expires = self._clock() + found.ttl_seconds
        self._conversations.move_to_end(conversation)
        return found

    def _sweep(self) -> None:
        """Let go of what nobody has asked for in time."""
        if self._clock() < self._swept + _SWEEP_SECONDS:
            return
        self._swept = self._clock()
        for conversation in [each for each, held in self._conversations.items() if held.expires < self._swept]:
            self._size -= self._conversations.pop(conversation).size

    def _open(self, conversation: str, ttl_seconds: float | None = None) -> _Conversation:
        self._sweep()
        found = self._find(conversation)
        if found is None:
            found = self._conversations[conversation] = _Conversation(0.0, self._ttl_seconds)
            self._size += found.size
        found.ttl_seconds = ttl_seconds or found.ttl_seconds
        found.expires = self._clock() + found.ttl_seconds
        return found

    def _resize(self, found: _Conversation) -> None:
        contents = {attempt: len(frozen.raw) for tries in found.log.values() for attempt, frozen in tries.items()}
        replies = sum(len(frozen.replies) for tries in found.log.values() for frozen in tries.values())
        heads = sum(len(raw) for epoch in found.epochs.values() for raw in epoch.leading)
        shelves = sum(len(item.content) for epoch in found.epochs.values() for item in epoch.library)
        view = _OVERHEAD * (1 + len(found.view.library)) if found.view else 0
        size = (
            _OVERHEAD * (1 + len(found.log) + len(found.epochs))
            + sum(contents.values())
            + 64 * replies
            + heads
            + sum(_OVERHEAD + len(link.raw) for link in found.links.values())
            + shelves
            + sum(_OVERHEAD + len(text) for text in found.summaries.values())
            + view
        )
        self._size += size - found.size
        found.size = size
        while self._size > self._max_bytes and self._conversations:
            _, oldest = self._conversations.popitem(last=False)
            self._size -= oldest.size
