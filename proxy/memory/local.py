"""Memory of this process alone: bounded in bytes, least recently used goes first. Also Redis's local copy."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from proxy.core.lineage import Recalled, Stored
from proxy.memory.store import Answer, Store, Tally, Turn, View

_OVERHEAD = 400
_MOST_ATTEMPTS = 16


@dataclass(slots=True)
class _Conversation:
    expires: float
    turns: dict[bytes, dict[bytes, Stored]] = field(default_factory=dict)
    view: View | None = None
    size: int = _OVERHEAD


class LocalStore(Store):
    """`clock` returns seconds; `ttl_seconds` slides with each use."""

    def __init__(self, *, max_bytes: int, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._conversations: collections.OrderedDict[str, _Conversation] = collections.OrderedDict()
        self._size = 0

    @property
    @override
    def degraded(self) -> bool:
        return False

    @override
    async def recall(self, conversation: str) -> Answer:
        return Answer(self.copy(conversation))

    def copy(self, conversation: str) -> Recalled:
        """Return what this process knows."""
        found = self._find(conversation)
        return Recalled(turns={key: tuple(tries.values()) for key, tries in found.turns.items()} if found else {})

    def replace(self, conversation: str, recalled: Recalled) -> None:
        """Take over what another store says in the place of what was known."""
        if not recalled.turns and self._find(conversation) is None:
            return
        found = self._open(conversation)
        found.turns = {}
        for key, attempts in recalled.turns.items():
            for stored in attempts:
                turn = Turn(key=key, started=stored.started, items=stored.items)
                found.turns.setdefault(key, {})[turn.attempt] = stored
        self._resize(found)

    @override
    async def remember(self, conversation: str, turn: Turn) -> None:
        self.put(conversation, turn)

    def put(self, conversation: str, turn: Turn) -> None:
        """As `remember`, at once."""
        found = self._open(conversation)
        attempts = found.turns.setdefault(turn.key, {})
        if turn.attempt not in attempts and len(attempts) < _MOST_ATTEMPTS:
            attempts[turn.attempt] = Stored(started=turn.started, items=turn.items, replies=frozenset())
        self._resize(found)

    @override
    async def answered(self, conversation: str, turn: Turn, replies: Sequence[bytes]) -> None:
        self.answer(conversation, turn, replies)

    def answer(self, conversation: str, turn: Turn, replies: Iterable[bytes]) -> None:
        """As `answered`, at once."""
        attempts = self._open(conversation).turns.get(turn.key, {})
        if (stored := attempts.get(turn.attempt)) is not None:
            attempts[turn.attempt] = dataclasses.replace(stored, replies=stored.replies | set(replies))
        self._resize(self._open(conversation))

    @override
    async def seen(self, conversation: str, view: View, tally: Tally) -> None:
        self.note(conversation, view, tally)

    def note(self, conversation: str, view: View, tally: Tally) -> None:
        """As `seen`, at once."""
        found = self._open(conversation)
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
    async def forget(self, conversation: str) -> bool:
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
        found.expires = self._clock() + self._ttl_seconds
        self._conversations.move_to_end(conversation)
        return found

    def _open(self, conversation: str) -> _Conversation:
        found = self._find(conversation)
        if found is None:
            found = self._conversations[conversation] = _Conversation(self._clock() + self._ttl_seconds)
            self._size += found.size
        return found

    def _resize(self, found: _Conversation) -> None:
        contents = {
            item.sha256: len(item.content)
            for tries in found.turns.values() for stored in tries.values() for item in stored.items
        }  # fmt: skip
        replies = sum(len(stored.replies) for tries in found.turns.values() for stored in tries.values())
        view = _OVERHEAD * (1 + len(found.view.library)) if found.view else 0
        size = _OVERHEAD * (1 + len(found.turns)) + sum(contents.values()) + 64 * replies + view
        self._size += size - found.size
        found.size = size
        while self._size > self._max_bytes and self._conversations:
            _, oldest = self._conversations.popitem(last=False)
            self._size -= oldest.size
