"""Prediction: how much of a prompt the upstream's prompt cache holds, from what was forwarded before.

A prompt is a chain of steps: the tools, then each message. What was forwarded lives for the prompt cache's lifetime,
refreshed by use; the first step that differs is compared in chunks. `Ledger` takes `now` and keeps no clock.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from proxy.core import render
from proxy.core.draft import Draft
from proxy.core.measure import Scale
from proxy.core.profile import Profile
from proxy.core.request import Request

CHUNK_BYTES = 256
_BRANCHES = 64
"""How many different continuations of one prefix are remembered: an edit, a retry, other users of one system prompt."""

_DIGEST_BYTES = 8
_NODE_BYTES, _BRANCH_BYTES = 400, 250
"""What a prefix and what follows one take, its chunks apart; about."""

Chunks = bytes
"""A digest of 8 bytes for each chunk, one behind the other."""
Chunk = Callable[[bytes, bytes], Chunks]
"""Digests a step's chunks, given its bytes and their digest; whoever implements it remembers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of a prompt, in tokens."""

    digest: bytes
    tokens: int
    chunks: Chunks


def chunks(raw: bytes) -> Chunks:
    """Digest a step's bytes chunk by chunk."""
    pieces = (raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES))
    return b"".join(hashlib.blake2b(piece, digest_size=_DIGEST_BYTES).digest() for piece in pieces)


def forwarded(request: Request, draft: Draft, scale: Scale, chunk: Chunk) -> tuple[Step, ...]:
    """Return the steps of a prompt as it is forwarded."""
    messages = (_step(each.raw, each.digest, scale, chunk) for each in render.prompt(request, draft))
    return (_tools(request, draft.tools, scale, chunk), *messages)


def as_sent(
    request: Request, draft: Draft, scale: Scale, chunk: Chunk, *, sent: Request | None = None
) -> tuple[Step, ...] | None:
    """Return the steps of a prompt as the client sent it; None where that is how it is forwarded.

    `sent` is the client's own request where the one that is forwarded holds more.
    """
    if sent is not None:
        return (_tools(sent, b"", scale, chunk), *_own(sent, scale, chunk))
    if not (draft.forms or draft.changes or draft.dropped or draft.inserted or draft.tools or draft.values.last):
        return None
    return (_tools(request, b"", scale, chunk), *_own(request, scale, chunk))


def _own(request: Request, scale: Scale, chunk: Chunk) -> Iterator[Step]:
    for index, placed in enumerate(request.placed):
        yield _step(request.raw(index), placed.message.digest, scale, chunk)


def _step(raw: bytes, digest: bytes, scale: Scale, chunk: Chunk) -> Step:
    return Step(digest, scale.message(raw, digest), chunk(raw, digest))


_NO_TOOLS = Step(b"", 0, b"")


def _tools(request: Request, reordered: bytes, scale: Scale, chunk: Chunk) -> Step:
    if not request.members.keys() & {"tools", "functions", "response_format"}:
        return _NO_TOOLS
    parts = [reordered or request.member("tools"), request.member("functions"), request.member("response_format")]
    raw = b"\0".join(parts)
    digest = hashlib.sha256(raw).digest()
    return Step(digest, sum(scale.schema(part) for part in parts if part), chunk(raw, digest))


class Ledger:
    """The prefixes forwarded to one upstream, by owner and model, in two generations of together `max_bytes`."""

    def __init__(self, *, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._size = 0
        self._young: dict[int, _Node] = {}
        self._old: dict[int, _Node] = {}

    def cached(self, start: int, steps: Sequence[Step], *, now: float, profile: Profile) -> int:
        """Return how many tokens of a prompt stand in the cache, by its minimum, blocks and lifetime."""
        at, tokens, since = start, 0.0, now - profile.lifetime_seconds
        for step in steps:
            after = hash((at, step.digest))
            node = self._node(after)
            if node is None or node.seen_at < since:
                before = self._node(at)
                tokens += step.tokens * _shared(before, step.chunks, since) if before else 0
                break
            tokens, at = tokens + step.tokens, after
        # The last token is always evaluated.
        most = sum(step.tokens for step in steps) - 1
        held = int(min(tokens, most)) // profile.block_tokens * profile.block_tokens
        return held if held >= profile.minimum_tokens else 0

    def forward(self, start: int, steps: Sequence[Step], *, now: float) -> None:
        """Note a prompt that the upstream has read."""
        if self._size > self._half:
            self._young, self._old, self._size = {}, self._young, 0
        at = start
        node = self._make(at)
        for step in steps:
            self._size += 0 if step.digest in node.next else _BRANCH_BYTES + len(step.chunks)
            node.next[step.digest] = (now, step.chunks)
            if len(node.next) > _BRANCHES:
                oldest = min(node.next, key=lambda digest, known=node.next: known[digest][0])  # type: ignore[misc]
                self._size -= _BRANCH_BYTES + len(node.next.pop(oldest)[1])
            at = hash((at, step.digest))
            node = self._make(at)
            node.seen_at = now

    def _node(self, at: int) -> _Node | None:
        return self._young.get(at) or self._old.get(at)

    def _make(self, at: int) -> _Node:
        node = self._young.get(at)
        if node is None:
            node = self._young[at] = self._old.get(at) or _Node()
            self._size += _NODE_BYTES + sum(_BRANCH_BYTES + len(known) for _, known in node.next.values())
        return node


@dataclass(slots=True)
class _Node:
    """A prefix: when it was last read, and what followed it, in chunks, when."""

    seen_at: float = float("-inf")
    next: dict[bytes, tuple[float, Chunks]] = field(default_factory=dict)


def _shared(node: _Node, mine: Chunks, since: float) -> float:
    """Return which share of a step stands at the start of another that followed the same prefix."""
    if not mine:
        return 0.0
    first = mine[:_DIGEST_BYTES]
    # Most branches, other users' questions, differ from the first chunk on.
    alike = (theirs for seen_at, theirs in node.next.values() if theirs.startswith(first) and seen_at >= since)
    return max((_common(mine, theirs) for theirs in alike), default=0) * _DIGEST_BYTES / len(mine)


def _common(mine: Chunks, theirs: Chunks) -> int:
    """Return how many chunks two steps begin with."""
    counts = range(min(len(mine), len(theirs)) // _DIGEST_BYTES)

    def differ(count: int) -> bool:
        end = (count + 1) * _DIGEST_BYTES
        return mine[:end] != theirs[:end]

    return bisect.bisect_left(counts, x=True, key=differ)
