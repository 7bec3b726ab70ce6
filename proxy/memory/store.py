"""The interface of memory and the values that pass through it. Every key is a keyed digest: no id, no key, no user."""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from proxy.core.chain import Place
from proxy.core.epoch import Epoch
from proxy.core.known import Learned, Lesson, Standing
from proxy.core.lineage import Frozen, Link, Recalled
from proxy.core.tools import Order


@dataclass(frozen=True, slots=True)
class Entry:
    """A message as it is forwarded, in the log of its epoch (`NO_EPOCH` where there are none)."""

    epoch: Place
    place: Place
    frozen: Frozen

    @property
    def attempt(self) -> bytes:
        """Tell attempts at the same words with other context apart; also the digest its content is stored under."""
        return hashlib.sha256(self.frozen.raw).digest()


@dataclass(frozen=True, slots=True)
class Answer:
    """What memory knew. `degraded` when the store that should have known did not answer."""

    recalled: Recalled
    degraded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A named conversation as its last request left it, for `GET /strata/conversations/{id}`.

    `layers` is `[["L1", tokens, "sha256…"], …]`, `library` is `[["a.md", "note_context", "sha256…"], …]`.
    """

    at: float
    turns: int
    layers: Sequence[Sequence[object]]
    library: Sequence[Sequence[object]]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one request adds to its tenant's and conversation's counters."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 1

    def plus(self, other: Tally) -> Tally:
        """Add two."""
        return Tally(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            requests=self.requests + other.requests,
        )


Writing = Coroutine[Any, Any, None]


class _Done(Coroutine[Any, Any, None]):
    """A write that is done: there is nobody else to tell, and nothing to wait for."""

    @override
    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()

    @override
    def send(self, value: Any) -> Any:
        raise StopIteration

    @override
    def throw(self, *error: Any) -> Any:
        raise StopIteration

    @override
    def close(self) -> None:
        """Nothing is open."""


DONE: Writing = _Done()
NO_LINKS: Mapping[Place, Link] = {}
_SHORT = 2_048
"""Characters: whoever sends longer names has them digested each time."""


class Store(Protocol):
    """Memory. No call raises for want of an answer, and none waits longer than its bound."""

    @property
    def degraded(self) -> bool:
        """Whether the store that is configured does not answer now."""
        ...

    async def recall(self, conversation: str, *, ttl_seconds: int | None = None) -> Answer:
        """Return what was stored of a conversation; it lives `ttl_seconds` from now, by default the store's own."""
        ...

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
        """Store what is being forwarded, the epoch that begins with it, and the client's own messages by place.

        The first writer of each wins. `anew`: what was stored of the conversation goes, but for its summaries.

        This process knows it at once; what is returned tells the others.
        """
        ...

    def answered(
        self, conversation: str, entry: Entry, replies: Sequence[bytes], *, ttl_seconds: int | None = None
    ) -> Writing:
        """Store digests of the answers to a message; known here at once."""
        ...

    def summarised(self, conversation: str, key: bytes, text: str, *, ttl_seconds: int | None = None) -> Writing:
        """Store a summary, by the place up to which it tells or its item's digest; known here at once."""
        ...

    async def orders(self, partition: str, tools: Order) -> tuple[Order, ...]:
        """Return the orders in which an owner's sets of tools were first seen; asks others only for a set new here."""
        ...

    def order(self, partition: str, order: Order) -> Writing:
        """Store how a set of tools stands; the first writer of each set wins. An owner has a bounded number of sets."""
        ...

    async def learned(self, partition: str, places: Sequence[Place], here: Place, *, sure: bool = False) -> Learned:
        """Return what is known of an owner's prompts, at the places of earlier requests and `here`; digests only.

        Others are asked only where this process does not know the latest of the places, or for long, or must be `sure`.
        """
        ...

    def learn(self, partition: str, place: Place, standing: Standing, lesson: Lesson) -> Writing:
        """Store how a prompt stands at a place, and what it taught; known here at once."""
        ...

    async def seen(self, conversation: str, view: View, tally: Tally, *, ttl_seconds: int | None = None) -> None:
        """Store how a conversation looks now, and count."""
        ...

    def count(self, partition: str, tally: Tally) -> None:
        """Count for a tenant, soon."""
        ...

    async def view(self, conversation: str) -> View | None:
        """Return how a conversation looks; None when nothing is known of it."""
        ...

    async def forget(self, conversation: str, *, ttl_seconds: int | None = None) -> bool:
        """Delete a conversation everywhere; False when nothing was known of it. Raises Unavailable when it cannot."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class Unavailable(Exception):
    """The store does not answer, and the caller must know: what it asked for has not happened."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Turns names into keyed digests, so that what is stored names nobody."""

    secret: bytes

    def partition(self, credential: Mapping[str, str] | str) -> str:
        """Digest a tenant's name, or a client's whole credential by header."""
        if isinstance(credential, str):
            return self._digest("tenant", credential)
        return self._digest("credential", *(part for pair in sorted(credential.items()) for part in pair))

    def conversation(self, partition: str, name: str, user: str) -> str:
        """Digest a conversation's id; an end user's id separates conversations and never joins them."""
        return self._digest("conversation", partition, name, user)

    def lines(self, partition: str) -> bytes:
        """Return an owner's own key for digests of lines."""
        return bytes.fromhex(self._digest("lines", partition))

    def place(self, partition: str, name: str, user: str, place: Place) -> Place:
        """Digest a place for what is remembered beside no conversation; its name and end user keep lineages apart."""
        key = bytes.fromhex(self._digest("place", partition, name, user))
        return hashlib.blake2b(place, digest_size=16, key=key).digest()

    def _digest(self, *parts: str) -> str:
        return _remembered(self.secret, parts) if sum(map(len, parts)) <= _SHORT else _digest(self.secret, parts)


def _digest(secret: bytes, parts: tuple[str, ...]) -> str:
    mac = hmac.new(secret, digestmod="sha256")
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        mac.update(len(raw).to_bytes(8, "big") + raw)
    return mac.hexdigest()[:32]


_remembered = functools.lru_cache(maxsize=4_096)(_digest)
