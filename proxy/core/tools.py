"""Whole tools in a stable order: the tenant's first-seen order for the set, new ones at the end.

Tool servers that reconnect list their tools in another order, and tools stand at the very front of the prompt. Inside a
tool keys are never sorted: models write fields in schema order. But a tool whose keys come back in another order within
one lineage is sent in that lineage's first order; a new lineage takes the order it comes with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from proxy.core.body import Edit, elements, splice, split
from proxy.core.message import MARKS
from proxy.errors import Odd

Order = tuple[bytes, ...]
"""Identities of the tools of one set, as they stood when the set was first seen."""

_MOST_KEYS = 4_096
"""Tools with more are left in the order they come in."""
_DEEPEST = 32
_RELATED = 0.5
"""Sets that share less than half are no versions of one another."""


Keys = tuple[bytes, ...]
"""Digests of the paths of all keys inside tools, as they stand: `name`, `parameters`, `parameters/properties`, …"""


@dataclass(frozen=True, slots=True)
class Toolset:
    """A request's tools: each as it stands in the body, and who it is (key order apart).

    `keys` is the order of keys inside; `respelled` says that it is not as sent. `marked` are tools among which the
    client placed its own cache marks: what stands before a mark is its to say.
    """

    raws: tuple[bytes, ...] = ()
    identities: Order = ()
    marked: bool = False
    keys: Keys = ()
    respelled: bool = False


NONE = Toolset()


def read(array: bytes) -> Toolset:
    """Read the value of `"tools": […]`; nothing where it is no list."""
    try:
        raws = tuple(array[start:end] for start, end in elements(array, 0, len(array))) if array else ()
    except Odd:
        return NONE
    identities = tuple(_identity(raw) for raw in raws)
    paths = (path for raw, identity in zip(raws, identities, strict=True) for path in _paths(raw, identity, 0))
    keys = tuple(itertools.islice(paths, _MOST_KEYS + 1))
    return Toolset(raws, identities, any(mark in array for mark in MARKS), keys if len(keys) <= _MOST_KEYS else ())


def respell(tools: Toolset, keys: Keys) -> Toolset:
    """Return the tools with their keys in another order, values spelled as they were; the same where nothing moves."""
    if keys == tools.keys or tools.marked or not tools.keys:
        return tools
    rank = {path: place for place, path in reversed(list(enumerate(keys)))}
    pairs = zip(tools.raws, tools.identities, strict=True)
    raws = tuple(_respelled(raw, identity, rank, 0) for raw, identity in pairs)
    return tools if raws == tools.raws else dataclasses.replace(tools, raws=raws, respelled=True)


def digest(keys: Keys) -> bytes:
    """Digest an order of keys; empty where there are none."""
    return hashlib.blake2b(b"".join(keys), digest_size=16).digest() if keys else b""


def as_first(tools: Toolset, first: Keys) -> tuple[Toolset, Keys]:
    """Return the tools with their keys as the lineage first had them, and the order it is to go on with."""
    keys = joined(first, tools.keys)
    return respell(tools, keys), keys


def joined(first: Keys, now: Keys) -> Keys:
    """Return a lineage's order of the keys there are now: as it first had them, and behind them what is new."""
    known, here = {*first}, {*now}
    return (*(path for path in first if path in here), *(path for path in now if path not in known))


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
    """Return the array in another order; empty where it stands as it was sent."""
    if list(places) == sorted(places) and not tools.respelled:
        return b""
    return b"[" + b",".join(tools.raws[place] for place in places) + b"]"


def _identity(raw: bytes) -> bytes:
    try:
        same = msgspec.json.encode(msgspec.json.decode(raw), order="deterministic")
    except (msgspec.DecodeError, ValueError, RecursionError):
        same = raw
    return hashlib.blake2b(same, digest_size=16).digest()


def _path(above: bytes, key: str) -> bytes:
    return hashlib.blake2b(above + key.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _paths(raw: bytes, above: bytes, depth: int) -> Iterator[bytes]:
    """Walk the keys inside a value, as they stand."""
    for path, start, end in _inside(raw, above) if depth < _DEEPEST else ():
        yield path
        yield from _paths(raw[start:end], path, depth + 1)


def _inside(raw: bytes, above: bytes) -> list[tuple[bytes, int, int]]:
    """Return the path of each member or element of a value, and where its value stands; nothing where it has none."""
    try:
        if raw.startswith(b"{"):
            return [(_path(above, key), member.value, member.end) for key, member in split(raw).items()]
        if raw.startswith(b"["):
            return [(_path(above, f"[{at}]"), *span) for at, span in enumerate(elements(raw, 0, len(raw)))]
    except Odd:
        pass
    return []


def _respelled(raw: bytes, above: bytes, rank: Mapping[bytes, int], depth: int) -> bytes:
    inside = _inside(raw, above) if depth < _DEEPEST else []
    values = [_respelled(raw[start:end], path, rank, depth + 1) for path, start, end in inside]
    if raw.startswith(b"["):
        return splice(raw, [Edit(start, end, value) for (_, start, end), value in zip(inside, values, strict=True)])
    if not inside:
        return raw
    # Members change places; what stands between them stays.
    members = list(split(raw).values())
    spelled = [raw[member.start : member.value] + value for member, value in zip(members, values, strict=True)]
    order = sorted(range(len(members)), key=lambda at: (rank.get(inside[at][0], len(rank)), at))
    moved = zip(members, order, strict=True)
    return splice(raw, [Edit(member.start, member.end, spelled[at]) for member, at in moved])
