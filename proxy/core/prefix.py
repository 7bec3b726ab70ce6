"""Prediction: how much of a prompt the upstream's prompt cache holds, from what was forwarded before.

A prompt is a chain of steps: the tools, then each message. What was forwarded lives for the prompt cache's lifetime,
refreshed by use; the first step that differs is compared in chunks. `Ledger` takes `now` and keeps no clock.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proxy.core import render
from proxy.core.epoch import Profile
from proxy.core.layers import Draft
from proxy.core.measure import Scale
from proxy.core.request import Request

CHUNK_BYTES = 256
_BRANCHES = 64
"""How many different continuations of one prefix are remembered: an edit, a retry, other users of one system prompt."""

Chunks = tuple[bytes, ...]
Chunk = Callable[[bytes, bytes], Chunks]
"""Digests a step's chunks, given its bytes and their digest; whoever implements it remembers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of a prompt, in tokens."""

    digest: bytes
    tokens: int
    chunks: Chunks


def chunks(raw: bytes, _: bytes = b"") -> Chunks:
    """Digest a step's bytes chunk by chunk."""
    return tuple(
        hashlib.blake2b(raw[at : at + CHUNK_BYTES], digest_size=8).digest() for at in range(0, len(raw), CHUNK_BYTES)
    )


def forwarded(request: Request, draft: Draft, scale: Scale, chunk: Chunk) -> tuple[Step, ...]:
    """Return the steps of a prompt as it is forwarded."""
    steps = [_tools(request, draft.tools, scale, chunk)]
    if draft.inserted:
        raw = draft.inserted.encode()
        steps.append(Step(hashlib.sha256(raw).digest(), scale.text(draft.inserted), chunks(raw)))
    for index, placed in enumerate(request.placed):
        if draft.keeps(index):
            changed = index in draft.forms or index in draft.changes
            raw = render.sent(request, draft, index) if changed else request.raw(index)
            digest = hashlib.sha256(raw).digest() if changed else placed.message.digest
            steps.append(Step(digest, scale.message(raw, digest), chunk(raw, digest)))
    return tuple(steps)


def as_sent(request: Request, scale: Scale, chunk: Chunk) -> tuple[Step, ...]:
    """Return the steps of a prompt as the client sent it."""
    return (_tools(request, b"", scale, chunk), *_own(request, scale, chunk))


def _own(request: Request, scale: Scale, chunk: Chunk) -> Iterator[Step]:
    for index, placed in enumerate(request.placed):
        raw, digest = request.raw(index), placed.message.digest
        yield Step(digest, scale.message(raw, digest), chunk(raw, digest))


def _tools(request: Request, reordered: bytes, scale: Scale, chunk: Chunk) -> Step:
    parts = [reordered or request.member("tools"), request.member("functions"), request.member("response_format")]
    raw = b"\0".join(parts)
    digest = hashlib.sha256(raw).digest()
    return Step(digest, sum(scale.schema(part) for part in parts if part), chunk(raw, digest))


class Ledger:
    """The prefixes forwarded to one upstream, by owner and model. Bounded; the least recently used go first."""

    def __init__(self, *, most: int = 200_000) -> None:
        self._most = most
        self._seen: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        self._next: collections.OrderedDict[bytes, dict[bytes, tuple[float, Chunks]]] = collections.OrderedDict()

    def cached(self, start: bytes, steps: Sequence[Step], *, now: float, profile: Profile) -> int:
        """Return how many tokens of a prompt stand in the cache, by its minimum, blocks and lifetime."""
        at, tokens, total = start, 0.0, sum(step.tokens for step in steps)
        for step in steps:
            after = _after(at, step.digest)
            if now - self._seen.get(after, -1e18) > profile.lifetime_seconds:
                tokens += step.tokens * self._shared(at, step.chunks, now - profile.lifetime_seconds)
                break
            tokens, at = tokens + step.tokens, after
        # The last token is always evaluated.
        held = int(min(tokens, total - 1)) // profile.block_tokens * profile.block_tokens
        return held if held >= profile.minimum_tokens else 0

    def forward(self, start: bytes, steps: Sequence[Step], *, now: float) -> None:
        """Note a prompt that the upstream has read."""
        at = start
        for step in steps:
            branches = self._next.setdefault(at, {})
            branches.pop(step.digest, None)
            branches[step.digest] = (now, step.chunks)
            if len(branches) > _BRANCHES:
                del branches[next(iter(branches))]
            self._next.move_to_end(at)
            at = _after(at, step.digest)
            self._seen[at] = now
            self._seen.move_to_end(at)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        while len(self._next) > self._most:
            self._next.popitem(last=False)

    def _shared(self, at: bytes, mine: Chunks, since: float) -> float:
        """Return which share of a step stands at the start of another that followed the same prefix."""
        shares = [_common(mine, theirs) for seen_at, theirs in self._next.get(at, {}).values() if seen_at >= since]
        return max(shares, default=0) / len(mine) if mine else 0.0


def _common(mine: Chunks, theirs: Chunks) -> int:
    pairs = zip(mine, theirs, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(mine), len(theirs)))


def _after(at: bytes, digest: bytes) -> bytes:
    return hashlib.blake2b(at + digest, digest_size=16).digest()
