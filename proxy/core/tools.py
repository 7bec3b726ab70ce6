"""Whole tools in a stable order: the tenant's first-seen order for the set, new ones at the end.

Tool servers that reconnect list their tools in another order, and tools stand at the very front of the prompt. Inside a
tool nothing is touched: models write fields in schema order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from proxy.core.body import elements
from proxy.core.message import MARKS
from proxy.errors import Odd

Order = tuple[bytes, ...]
"""Identities of the tools of one set, as they stood when the set was first seen."""

_RELATED = 0.5
"""Sets that share less than half are no versions of one another."""


@dataclass(frozen=True, slots=True)
class Toolset:
    """A request's tools: each as it stands in the body, and who it is (key order apart).

    `marked` are tools among which the client placed its own cache marks: what stands before a mark is its to say.
    """

    raws: tuple[bytes, ...] = ()
    identities: Order = ()
    marked: bool = False


NONE = Toolset()


def read(array: bytes) -> Toolset:
    """Read the value of `"tools": […]`; nothing where it is no list."""
    try:
        raws = tuple(array[start:end] for start, end in elements(array, 0, len(array))) if array else ()
    except Odd:
        return NONE
    return Toolset(raws, tuple(_identity(raw) for raw in raws), any(mark in array for mark in MARKS))


def arrange(tools: Toolset, known: Iterable[Order]) -> tuple[int, ...]:
    """Return the places of the tools in the order they are to stand.

    The order of the same set where it was seen; else of the set that shares most with this one, what is new behind it.
    """
    asked = range(len(tools.raws))
    if tools.marked:
        return tuple(asked)
    present = set(tools.identities)
    # Replicas hold the sets in different orders: the last word is the order's own.
    related = max(
        known, key=lambda order: (set(order) == present, len(present & set(order)), -len(order), order), default=()
    )
    if len(present & set(related)) < _RELATED * len(present | set(related)):
        return tuple(asked)
    rank = {identity: place for place, identity in enumerate(related)}
    return tuple(sorted(asked, key=lambda place: (rank.get(tools.identities[place], len(rank)), place)))


def spliced(tools: Toolset, places: Sequence[int]) -> bytes:
    """Return the array in another order, each tool in its own bytes; empty where it stands as it was sent."""
    if list(places) == sorted(places):
        return b""
    return b"[" + b",".join(tools.raws[place] for place in places) + b"]"


def _identity(raw: bytes) -> bytes:
    try:
        same = msgspec.json.encode(msgspec.json.decode(raw), order="deterministic")
    except (msgspec.DecodeError, ValueError, RecursionError):
        same = raw
    return hashlib.blake2b(same, digest_size=16).digest()
