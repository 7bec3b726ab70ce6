"""What is learned of prompts, shared through Redis: how lineages stood, templates, items that recur, orders of keys.

An owner's keys share a hash tag. A read is one round trip where others have learned nothing since, else three at most.
What many requests bring alike is written now and then only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio as redis

from proxy.core.chain import Place
from proxy.core.known import Lesson, Standing
from proxy.core.recipe import Recipe
from proxy.core.template import Template
from proxy.memory.learned import MOST_KEPT, MOST_RECURRING, MOST_TEMPLATES, Book, since
from proxy.memory.packed import pack_form, pack_template, unpack_form, unpack_template

_FRESH_SECONDS = 1.0
"""So old may be which of the latest lineages had a line; what else is learned is known at once."""
_AGAIN_SECONDS = 60.0
"""So long a Redis that has lost a form or an order of keys may be without it."""
_MOST_WRITTEN = 10_000
_PATH_BYTES = 8

_STAND = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 or redis.call('HLEN', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], ARGV[1], '')
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""
"""KEYS: how prompts stood at a place. ARGV: one lineage, how many lineages, seconds."""
_ADD = """
local fits = redis.call('HLEN', KEYS[1]) < tonumber(ARGV[3])
if fits and redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 1 then redis.call('INCR', KEYS[2]) end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
"""
"""KEYS: items that recur, version. ARGV: one, since when (the first to say so is right), how many at most, seconds."""
_TEACH = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  redis.call('DEL', KEYS[1])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[5] == 'new' then redis.call('INCR', KEYS[2]) end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
"""
"""KEYS: templates, version. ARGV: one's id, itself, how many at most, seconds, `new` where there is news in it.

What is dropped and in use is back in a moment.
"""


class _Stood(msgspec.Struct, array_like=True, frozen=True):
    form: bytes
    shelf: tuple[bytes, ...]
    brought: tuple[bytes, ...]
    calm: int
    keys: bytes
    log: tuple[Recipe, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """What Redis holds of an owner's prompts, as of a version: for each place its lineages, forms, and the rest."""

    version: bytes | None
    stood: Sequence[Sequence[_Stood]]
    forms: Mapping[bytes, bytes | None]
    templates: Sequence[bytes]
    recurring: Mapping[bytes, bytes]
    keys: Sequence[bytes | None]


_stood = msgspec.msgpack.Decoder(_Stood)


class SharedBook:
    """What all replicas know: reads into a process's own book, writes beside it. Whoever calls bounds it in time."""

    def __init__(
        self, client: redis.Redis, book: Book, *, root: str, ttl_seconds: int, now: Callable[[], float]
    ) -> None:
        self._redis = client
        self._book = book
        self._root = root
        self._ttl_seconds = ttl_seconds
        self._now = now
        self._written_at: dict[tuple[object, ...], float] = {}
        self._versions: dict[str, bytes | None] = {}

    def doubt(self) -> None:
        """Take nothing for written or known: Redis failed, and may have lost what it had."""
        self._written_at.clear()
        self._versions.clear()

    def stale(self, partition: str) -> bool:
        """Whether it is time to ask again what others have learned; says so once."""
        return self._is_due((partition,), _FRESH_SECONDS)

    async def any_news(self, partition: str, here: Place) -> bool:
        """Whether Redis holds what is not known here, of its prompts or at a place. Raises what reading raises."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.get(self._key(partition, "version"))
        pipe.exists(self._key(partition, "at", here))
        version, stood = await pipe.execute()
        return bool(stood) or partition not in self._versions or self._versions[partition] != version

    async def fetch(self, partition: str, places: Sequence[Place]) -> Fetched:
        """Return what Redis holds. Raises what reading raises."""
        pipe = self._redis.pipeline(transaction=False)
        # First: what is learned in between is news again.
        pipe.get(self._key(partition, "version"))
        for place in places:
            pipe.hkeys(self._key(partition, "at", place))
        pipe.hvals(self._key(partition, "templates"))
        pipe.hgetall(self._key(partition, "recurring"))
        version, *found, templates, recurring = await pipe.execute()
        stood = [[*_readable(each)] for each in found]
        digests = sorted({each.form for every in stood for each in every})
        keys = sorted({each.keys for every in stood for each in every if each.keys})
        pipe = self._redis.pipeline(transaction=False)
        for what, named in (("form", digests), ("keys", keys)):
            for digest in named:
                pipe.get(self._key(partition, what, digest))
        contents = await pipe.execute()
        forms = dict(zip(digests, contents[: len(digests)], strict=True))
        return Fetched(version, stood, forms, templates, recurring, contents[len(digests) :])

    def take(self, partition: str, places: Sequence[Place], found: Fetched) -> None:
        """Add what Redis says to what is known here. Raises what reading raises."""
        book = self._book
        forms = {digest: unpack_form(form) for digest, form in found.forms.items() if form is not None}
        for place, lineages in zip(places, found.stood, strict=True):
            known = [
                Standing(forms[each.form], each.shelf, each.brought, each.calm, each.keys, each.log)
                for each in lineages
                if each.form in forms
            ]
            book.put(place, known)
        for template in found.templates:
            book.take(partition, unpack_template(template))
        for keys in filter(None, found.keys):
            book.spell(tuple(keys[at : at + _PATH_BYTES] for at in range(0, len(keys), _PATH_BYTES)))
        book.note(partition, {digest: float(at) for digest, at in found.recurring.items()})
        if len(self._versions) > _MOST_WRITTEN:
            self._versions.clear()
        self._versions[partition] = found.version

    def write(self, pipe: Any, partition: str, place: Place, standing: Standing, lesson: Lesson) -> None:
        """Add to a pipeline what one request taught."""
        packed, digest = pack_form(standing.form)
        template = lesson.template
        recurring, version = self._key(partition, "recurring"), self._key(partition, "version")
        stood = _Stood(digest, standing.shelf, standing.brought, standing.calm, standing.keys, standing.log)
        field = msgspec.msgpack.encode(stood)
        pipe.eval(_STAND, 1, self._key(partition, "at", place), field, MOST_KEPT, self._ttl_seconds)
        if self._is_due((partition, digest), _AGAIN_SECONDS):
            pipe.set(self._key(partition, "form", digest), packed, ex=self._ttl_seconds)
        if template is not None:
            self._teach(pipe, partition, template)
        if lesson.keys and self._is_due((partition, standing.keys), _AGAIN_SECONDS):
            joined = b"".join(lesson.keys)
            pipe.set(self._key(partition, "keys", standing.keys), joined, ex=self._ttl_seconds)
        for item, since_when in since(lesson).items():
            pipe.eval(_ADD, 2, recurring, version, item, repr(since_when), MOST_RECURRING, self._ttl_seconds)

    def _teach(self, pipe: Any, partition: str, template: Template) -> None:
        so_far = (partition, *_so_far(template))
        news = "new" if so_far not in self._written_at else ""
        if self._is_due(so_far, _FRESH_SECONDS):
            keys = self._key(partition, "templates"), self._key(partition, "version")
            packed = pack_template(template)
            pipe.eval(_TEACH, 2, *keys, template.id, packed, MOST_TEMPLATES, self._ttl_seconds, news)

    def _is_due(self, what: tuple[object, ...], seconds: float) -> bool:
        """Whether this was not written a moment ago; many requests bring the same."""
        if len(self._written_at) > _MOST_WRITTEN:
            self._written_at.clear()
        due = self._now() >= self._written_at.get(what, 0.0) + seconds
        if due:
            self._written_at[what] = self._now()
        return due

    def _key(self, partition: str, what: str, of: bytes = b"") -> str:
        return f"{self._root}:lines:{{{partition}}}:{what}" + (f":{of.hex()}" if of else "")


def _readable(fields: Iterable[bytes]) -> Iterator[_Stood]:
    """Leave out what another version of this program has written."""
    for field in sorted(fields):
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            yield _stood.decode(field)


def _so_far(template: Template) -> tuple[object, ...]:
    """Tell a template of which more is known from what it was."""
    lessons = template.lessons
    return template.id, template.count, len(lessons.gaps), len(lessons.words), len(lessons.edits)
