"""Memory shared by replicas: Redis, with this process's own copy behind it.

One conversation's keys share a hash tag, so that they are one cluster slot. One round trip a recall, 50 ms at most;
after three failures in a row Redis is left alone until a probe of ours, not a client's request, finds it again.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from typing_extensions import override

from proxy.core.items import Item
from proxy.core.lineage import NOTHING, Epoch, Frozen, Link, Place, Reason, Recalled
from proxy.core.template import Standing, Template
from proxy.core.tools import Order
from proxy.memory.learned import MOST_STANDING, pack_form, pack_template, since, unpack_form, unpack_template
from proxy.memory.local import MOST_SETS, LocalStore
from proxy.memory.store import NO_LINKS, Answer, Entry, Learned, Lesson, Store, Tally, Unavailable, View, Writing

RECALL_SECONDS = 0.05
WRITE_SECONDS = 1.0
PROBE_SECONDS = 0.5
LEARNED_SECONDS = 1.0
"""So old may be what this process knows of an owner's templates."""
_FAILURES = 3
_FLUSH_SECONDS = 1.0
_MOST_WRITTEN = 10_000
_SHA256_BYTES = 32
_ROOT = "strata:3"
_UNLINKED = ("log", "contents", "view", "stats")

_RECALL = """
local log = redis.call('HGETALL', KEYS[1])
local missing, contents = {}, {}
if #log > 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[1])
  redis.call('EXPIRE', KEYS[2], ARGV[1])
  local known = {}
  for i = 2, #ARGV do known[ARGV[i]] = true end
  for _, digest in ipairs(redis.call('HKEYS', KEYS[2])) do
    if not known[digest] then
      missing[#missing + 1] = digest
      contents[#contents + 1] = redis.call('HGET', KEYS[2], digest)
    end
  end
end
return {log, missing, contents, redis.call('GET', KEYS[3])}
"""
"""KEYS: log, contents, gone (when it was deleted). ARGV: time to live in seconds, digests of what the caller has."""

_STAND = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 or redis.call('HLEN', KEYS[1]) <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
"""
"""KEYS: how prompts stood at a place. ARGV: one lineage, its values, how many lineages (one more), seconds."""

T = TypeVar("T")


class _Item(msgspec.Struct, array_like=True):
    tag: str
    label: str
    named: bool
    content: bytes
    trusted: bool
    promotable: bool
    referable: bool


class _Epoch(msgspec.Struct, array_like=True):
    number: int
    started: float
    reason: Reason
    leading: list[bytes]
    l1: bytes
    tools: bytes
    library: list[_Item]
    dropped: list[tuple[bytes, bytes]]
    rewritten: bool


class _Stood(msgspec.Struct, array_like=True, frozen=True, order=True):
    form: bytes
    shelf: tuple[bytes, ...]
    brought: tuple[bytes, ...]
    calm: int
    keys: bytes


class _View(msgspec.Struct):
    at: float
    turns: int
    layers: list[list[Any]]
    library: list[list[Any]]


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What Redis holds of an owner's prompts: for each place its lineages and their values, forms, and the rest."""

    stood: Sequence[Mapping[_Stood, bytes]]
    forms: Mapping[bytes, bytes | None]
    templates: Sequence[bytes]
    recurring: Mapping[bytes, bytes]
    keys: Sequence[bytes | None]


_stood = msgspec.msgpack.Decoder(_Stood)
_digests = msgspec.msgpack.Decoder(tuple[bytes, ...])


class RedisStore(Store):
    """`on_error` is told which operation failed; `on_state` is told when Redis goes and comes."""

    def __init__(
        self,
        url: str,
        *,
        copy: LocalStore,
        ttl_seconds: int,
        on_error: Callable[[str], None],
        on_state: Callable[[bool], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        pool = redis.BlockingConnectionPool.from_url(
            url, max_connections=64, timeout=RECALL_SECONDS, socket_connect_timeout=PROBE_SECONDS, protocol=2,
            retry=Retry(NoBackoff(), 0), socket_keepalive=True,
        )  # fmt: skip
        self._redis: redis.Redis = redis.Redis(connection_pool=pool)
        self._recall = self._redis.register_script(_RECALL)
        self._copy = copy
        self._ttl_seconds = ttl_seconds
        self._on_error = on_error
        self._on_state = on_state
        self._now = now
        self._failures = 0
        self._open = False
        self._probing: asyncio.Task[None] | None = None
        self._writing: collections.Counter[str] = collections.Counter()
        self._restoring: set[asyncio.Future[None]] = set()
        self._tallies: dict[str, Tally] = {}
        self._counting: asyncio.Task[None] | None = None
        self._closed = False
        self._written_at: dict[tuple[object, ...], float] = {}

    @property
    @override
    def degraded(self) -> bool:
        return self._open

    async def secret(self) -> bytes | None:
        """Return the secret all replicas share, made by whoever came first; None when Redis does not answer."""
        name = f"{_ROOT}:secret"

        async def work() -> bytes:
            await self._redis.set(name, secrets.token_hex(32), nx=True)
            shared = await self._redis.get(name)
            assert isinstance(shared, bytes)
            return shared

        return await self._bounded("recall", work(), WRITE_SECONDS)

    @override
    async def recall(self, conversation: str) -> Answer:
        if self._open:
            return Answer(self._copy.copy(conversation), degraded=True)
        known = self._known(conversation)
        keys = [_key(conversation, part) for part in ("log", "contents", "gone")]
        arguments = [str(self._ttl_seconds), *(digest.hex() for digest in known)]
        found = await self._bounded("recall", self._recall(keys=keys, args=arguments), RECALL_SECONDS)
        if found is None:
            return Answer(self._copy.copy(conversation), degraded=True)
        try:
            recalled = _decode(found[:3], known)
            gone_at = float(found[3] or 0)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError, UnicodeDecodeError):
            self._on_error("recall")
            return Answer(self._copy.copy(conversation), degraded=True)
        merged = self._copy.merge(conversation, recalled, gone_at=gone_at)
        missing = _missing(merged, recalled)
        if missing and not self._writing.get(conversation):
            # Redis came back with less than it had, or was away when this was forwarded.
            self._restoring.add(task := asyncio.ensure_future(self._restore(conversation, missing)))
            task.add_done_callback(self._restoring.discard)
        return Answer(merged)

    @override
    def remember(
        self, conversation: str, entries: Sequence[Entry], epoch: Epoch | None, links: Mapping[Place, Link] = NO_LINKS
    ) -> Writing:
        taken = self._copy.put(conversation, entries, epoch, links)
        return self._remember(conversation, taken, (epoch,) if epoch else (), links)

    async def _remember(
        self, conversation: str, entries: Sequence[Entry], epochs: Sequence[Epoch], links: Mapping[Place, Link]
    ) -> None:
        log, contents = _key(conversation, "log"), _key(conversation, "contents")

        def write(pipe: Any) -> None:
            for entry in entries:
                pipe.hsetnx(
                    log, f"m:{_field(entry)}", msgspec.msgpack.encode((entry.started, entry.brought, entry.values))
                )
                pipe.hsetnx(contents, entry.attempt.hex(), entry.raw)
                for reply in entry.replies:
                    pipe.hset(log, f"r:{_field(entry)}:{reply.hex()}", "")
                pipe.hset(log, "seen", repr(entry.started))
            for epoch in epochs:
                pipe.hsetnx(log, f"e:{epoch.place.hex()}", _pack(epoch))
                for raw in (*epoch.leading, *(item.content.encode() for item in epoch.library)):
                    pipe.hsetnx(contents, hashlib.sha256(raw).hexdigest(), raw)
            for place, link in links.items():
                digest = hashlib.sha256(link.raw)
                pipe.hsetnx(log, f"l:{place.hex()}", link.before + digest.digest())
                pipe.hsetnx(contents, digest.hexdigest(), link.raw)
            self._expire(pipe, conversation, "log", "contents")

        self._writing[conversation] += 1
        try:
            await self._write("remember", write)
        finally:
            self._writing[conversation] -= 1
            if not self._writing[conversation]:
                del self._writing[conversation]

    async def _restore(self, conversation: str, missing: Recalled) -> None:
        entries = [
            Entry(
                epoch=epoch,
                place=place,
                started=frozen.started,
                raw=frozen.raw,
                replies=tuple(frozen.replies),
                brought=frozen.brought,
                values=frozen.values,
            )
            for (epoch, place), attempts in missing.log.items()
            for frozen in attempts
        ]
        await self._remember(conversation, entries, tuple(missing.epochs.values()), missing.links)

    @override
    def answered(self, conversation: str, entry: Entry, replies: Sequence[bytes]) -> Writing:
        self._copy.answer(conversation, entry, replies)
        return self._answered(conversation, entry, replies)

    async def _answered(self, conversation: str, entry: Entry, replies: Sequence[bytes]) -> None:
        def write(pipe: Any) -> None:
            for reply in replies:
                pipe.hset(_key(conversation, "log"), f"r:{_field(entry)}:{reply.hex()}", "")
            self._expire(pipe, conversation, "log")

        await self._write("remember", write)

    @override
    async def orders(self, partition: str, tools: Order) -> tuple[Order, ...]:
        known = self._copy.known_orders(partition)
        if self._open or len(known) >= MOST_SETS or any(set(order) == set(tools) for order in known):
            return known
        found = await self._bounded("recall", self._redis.hvals(_tools_key(partition)), RECALL_SECONDS)
        for packed in found or ():
            self._take(partition, packed)
        return self._copy.known_orders(partition)

    @override
    def order(self, partition: str, order: Order) -> Writing:
        if not self._copy.put_order(partition, order):
            return self._copy.order(partition, order)
        return self._order(partition, order)

    async def _order(self, partition: str, order: Order) -> None:
        if self._open:
            return
        key, name = _tools_key(partition), hashlib.sha256(b"".join(sorted(set(order)))).hexdigest()

        async def work() -> bytes | str | None:
            # Tools that say the time are another set in every request.
            if await self._redis.hlen(key) < MOST_SETS:
                await self._redis.hsetnx(key, name, msgspec.msgpack.encode(list(order)))
                await self._redis.expire(key, self._ttl_seconds)
            return await self._redis.hget(key, name)

        stands = await self._bounded("remember", work(), WRITE_SECONDS)
        if stands is not None:
            # Another replica may have been first; from the next request on its order stands here too.
            self._take(partition, stands)

    def _take(self, partition: str, packed: bytes | str) -> None:
        try:
            order = _unpack_order(packed)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self._on_error("recall")
        else:
            self._copy.put_order(partition, order, wins=True)

    @override
    async def learned(self, partition: str, places: Sequence[Place], here: Place) -> Learned:
        book, asked = self._copy.book, (*places, here)
        known = book.learned(partition, asked)
        if self._open or (places[0] in known.standing if places else not self._is_due((partition,), LEARNED_SECONDS)):
            return known
        found = await self._bounded("recall", self._fetch(partition, asked), RECALL_SECONDS)
        if found is None:
            return known
        try:
            self._take_learned(partition, asked, found)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError):
            self._on_error("recall")
        return book.learned(partition, asked)

    async def _fetch(self, partition: str, places: Sequence[Place]) -> _Fetched:
        pipe = self._redis.pipeline(transaction=False)
        for place in places:
            pipe.hgetall(_lines_key(partition, "at", place))
        pipe.hvals(_lines_key(partition, "templates"))
        pipe.hgetall(_lines_key(partition, "recurring"))
        *found, templates, recurring = await pipe.execute()
        stood = [{_stood.decode(field): values for field, values in each.items()} for each in found]
        digests = sorted({each.form for every in stood for each in every})
        keys = sorted({each.keys for every in stood for each in every if each.keys})
        pipe = self._redis.pipeline(transaction=False)
        for what, named in (("form", digests), ("keys", keys)):
            for digest in named:
                pipe.get(_lines_key(partition, what, digest))
        contents = await pipe.execute()
        forms = dict(zip(digests, contents[: len(digests)], strict=True))
        return _Fetched(stood, forms, templates, recurring, contents[len(digests) :])

    def _take_learned(self, partition: str, places: Sequence[Place], found: _Fetched) -> None:
        """Add what Redis says to what is known here. Raises what reading raises."""
        book = self._copy.book
        forms = {digest: unpack_form(form) for digest, form in found.forms.items() if form is not None}
        for place, lineages in zip(places, found.stood, strict=True):
            known = [
                Standing(forms[each.form], _digests.decode(values), each.shelf, each.brought, each.calm, each.keys)
                for each, values in sorted(lineages.items(), key=lambda pair: pair[0])
                if each.form in forms
            ]
            book.put(place, known)
        for template in found.templates:
            book.take(partition, unpack_template(template))
        for keys in filter(None, found.keys):
            book.spell(tuple(keys[at : at + 8] for at in range(0, len(keys), 8)))
        book.note(partition, {digest: float(at) for digest, at in found.recurring.items()})

    @override
    def learn(self, partition: str, place: Place, standing: Standing, lesson: Lesson) -> Writing:
        template = self._copy.note_learned(partition, place, standing, lesson)
        return self._learn(partition, place, standing, lesson, template)

    async def _learn(
        self, partition: str, place: Place, standing: Standing, lesson: Lesson, template: Template | None
    ) -> None:
        packed, digest = pack_form(standing.form)

        def write(pipe: Any) -> None:
            templates, recurring = _lines_key(partition, "templates"), _lines_key(partition, "recurring")
            field = msgspec.msgpack.encode(
                _Stood(digest, standing.shelf, standing.brought, standing.calm, standing.keys)
            )
            values = msgspec.msgpack.encode(standing.values)
            pipe.eval(_STAND, 1, _lines_key(partition, "at", place), field, values, MOST_STANDING, self._ttl_seconds)
            if self._is_due((partition, digest), self._ttl_seconds / 4):
                pipe.set(_lines_key(partition, "form", digest), packed, ex=self._ttl_seconds)
            if template is not None and self._is_due((partition, *learned_so_far(template)), LEARNED_SECONDS):
                pipe.hset(templates, template.id.hex(), pack_template(template))
                pipe.expire(templates, self._ttl_seconds)
            if lesson.keys and self._is_due((partition, standing.keys), self._ttl_seconds / 4):
                joined = b"".join(lesson.keys)
                pipe.set(_lines_key(partition, "keys", standing.keys), joined, ex=self._ttl_seconds)
            for item, since_when in since(lesson).items():
                pipe.hsetnx(recurring, item, repr(since_when))
                pipe.expire(recurring, self._ttl_seconds)

        await self._write("remember", write)

    def _is_due(self, what: tuple[object, ...], seconds: float) -> bool:
        """Whether this was not written a moment ago; many requests bring the same."""
        if len(self._written_at) > _MOST_WRITTEN:
            self._written_at.clear()
        due = self._now() >= self._written_at.get(what, 0.0) + seconds
        if due:
            self._written_at[what] = self._now()
        return due

    @override
    async def seen(self, conversation: str, view: View, tally: Tally) -> None:
        self._copy.note(conversation, view, tally)
        packed = msgspec.json.encode(
            _View(view.at, view.turns, [list(layer) for layer in view.layers], [list(item) for item in view.library])
        )

        def write(pipe: Any) -> None:
            pipe.set(_key(conversation, "view"), packed, ex=self._ttl_seconds)
            _count(pipe, _key(conversation, "stats"), tally)
            self._expire(pipe, conversation, "stats")

        await self._write("view", write)

    @override
    def count(self, partition: str, tally: Tally) -> None:
        self._tallies[partition] = self._tallies.get(partition, Tally(requests=0)).plus(tally)
        if self._counting is None or self._counting.done():
            self._counting = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        """Write what a second has brought in one go."""
        await asyncio.sleep(_FLUSH_SECONDS)
        tallies, self._tallies = self._tallies, {}

        def write(pipe: Any) -> None:
            for partition, tally in tallies.items():
                _count(pipe, f"{_ROOT}:tenant:{partition}", tally)

        await self._write("view", write)

    @override
    async def view(self, conversation: str) -> View | None:
        async def work() -> tuple[bytes | None, dict[bytes, bytes]]:
            pipe = self._redis.pipeline(transaction=False)
            pipe.get(_key(conversation, "view"))
            pipe.hgetall(_key(conversation, "stats"))
            packed, stats = await pipe.execute()
            return packed, stats

        found = None if self._open else await self._bounded("view", work(), WRITE_SECONDS)
        if found is None:
            return await self._copy.view(conversation)
        packed, stats = found
        if packed is None:
            return None
        try:
            return _decode_view(packed, stats)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError):
            self._on_error("view")
            return await self._copy.view(conversation)

    @override
    async def forget(self, conversation: str) -> bool:
        await self._copy.forget(conversation)

        async def work() -> int:
            pipe = self._redis.pipeline(transaction=False)
            pipe.unlink(*(_key(conversation, part) for part in _UNLINKED))
            # Other replicas hold copies; this tells them, for as long as a copy may live.
            pipe.set(_key(conversation, "gone"), repr(self._now()), ex=self._ttl_seconds)
            gone, _ = await pipe.execute()
            return int(gone)

        gone = None if self._open else await self._bounded("forget", work(), WRITE_SECONDS)
        if gone is None:
            raise Unavailable("Redis does not answer; the conversation may still be stored there")
        return gone > 0

    @override
    async def close(self) -> None:
        self._closed = True
        for task in (self._probing, self._counting):
            if task is not None:
                task.cancel()
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _write(self, operation: str, fill: Callable[[Any], None]) -> None:
        if self._open:
            return
        pipe = self._redis.pipeline(transaction=False)
        fill(pipe)
        await self._bounded(operation, pipe.execute(), WRITE_SECONDS)

    async def _bounded(self, operation: str, work: Awaitable[T], seconds: float) -> T | None:
        """Await a call of Redis for so long and no longer; None when it failed."""
        try:
            async with asyncio.timeout(seconds):
                result = await work
        except (RedisError, OSError, TimeoutError):
            self._on_error(operation)
            self._failures += 1
            if self._failures >= _FAILURES:
                self._trip()
            return None
        self._failures = 0
        return result

    def _trip(self) -> None:
        if not self._open and not self._closed:
            self._open = True
            self._on_state(True)  # noqa: FBT003 -- the state is the message
            self._probing = asyncio.ensure_future(self._probe())

    async def _probe(self) -> None:
        """Look for Redis until it is back; only then do requests ask it again."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._redis.ping()
            except (RedisError, OSError, TimeoutError):
                continue
            self._failures, self._open = 0, False
            self._on_state(False)  # noqa: FBT003 -- the state is the message
            return

    def _known(self, conversation: str) -> dict[bytes, bytes]:
        """Return the contents this process holds, so that Redis need not send them again."""
        copy = self._copy.copy(conversation)
        raws = [frozen.raw for attempts in copy.log.values() for frozen in attempts]
        raws += [link.raw for link in copy.links.values()]
        for epoch in copy.epochs.values():
            raws += [*epoch.leading, *(item.content.encode() for item in epoch.library)]
        return {hashlib.sha256(raw).digest(): raw for raw in raws}

    def _expire(self, pipe: Any, conversation: str, *parts: str) -> None:
        for part in parts:
            pipe.expire(_key(conversation, part), self._ttl_seconds)


def _lines_key(partition: str, what: str, of: bytes = b"") -> str:
    return f"{_ROOT}:lines:{{{partition}}}:{what}" + (f":{of.hex()}" if of else "")


def learned_so_far(template: Template) -> tuple[object, ...]:
    """Tell a template of which more is known from what it was."""
    lessons = template.lessons
    return template.id, len(lessons.gaps), len(lessons.words), len(lessons.edits)


def _unpack_order(packed: bytes | str) -> Order:
    assert isinstance(packed, bytes)
    return tuple(msgspec.msgpack.decode(packed, type=list[bytes]))


def _tools_key(partition: str) -> str:
    return f"{_ROOT}:tools:{partition}"


def _key(conversation: str, part: str) -> str:
    return f"{_ROOT}:{{{conversation}}}:{part}"


def _field(entry: Entry) -> str:
    return f"{entry.epoch.hex()}:{entry.place.hex()}:{entry.attempt.hex()}"


def _pack(epoch: Epoch) -> bytes:
    library = [
        _Item(item.tag, item.label, item.named, item.sha256, item.trusted, item.promotable, item.referable)
        for item in epoch.library
    ]
    leading = [hashlib.sha256(raw).digest() for raw in epoch.leading]
    return msgspec.msgpack.encode(
        _Epoch(
            epoch.number, epoch.started, epoch.reason, leading, epoch.l1, epoch.tools, library, list(epoch.dropped),
            epoch.rewritten,
        )
    )  # fmt: skip


def _count(pipe: Any, key: str, tally: Tally) -> None:
    for name in ("requests", "prompt_tokens", "cached_tokens"):
        if amount := getattr(tally, name):
            pipe.hincrby(key, name, amount)


def _decode(found: Sequence[Sequence[bytes]], known: dict[bytes, bytes]) -> Recalled:
    """Read a recall's answer; what refers to a content that is missing or not what its digest says is left out."""
    fields, digests, contents = found
    held = dict(known)
    for digest, content in zip(digests, contents, strict=True):
        if hashlib.sha256(content).hexdigest().encode() == digest:
            held[bytes.fromhex(digest.decode())] = content
    by_kind: dict[str, list[tuple[list[bytes], bytes]]] = {"m": [], "r": [], "e": [], "l": [], "seen": []}
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        kind, *rest = name.decode().split(":")
        by_kind.setdefault(kind, []).append(([bytes.fromhex(part) for part in rest], value))
    replies: dict[tuple[bytes, ...], set[bytes]] = {}
    for (*where, reply), _ in by_kind["r"]:
        replies.setdefault(tuple(where), set()).add(reply)
    log: dict[tuple[Place, Place], tuple[Frozen, ...]] = {}
    for (epoch, place, attempt), at in by_kind["m"]:
        if attempt in held:
            told = frozenset(replies.get((epoch, place, attempt), ()))
            started, brought, values = msgspec.msgpack.decode(at, type=tuple[float, str, tuple[tuple[int, str], ...]])
            frozen = Frozen(started=started, raw=held[attempt], replies=told, brought=brought, values=values)
            log[epoch, place] = (*log.get((epoch, place), ()), frozen)
    read = [_unpack(place, value, held) for (place,), value in by_kind["e"]]
    epochs = {epoch.place: epoch for epoch in read if epoch is not None}
    seen = next((float(value) for _, value in by_kind["seen"]), None)
    links = {
        place: Link(packed[:-_SHA256_BYTES], held[packed[-_SHA256_BYTES:]])
        for (place,), packed in by_kind["l"]
        if packed[-_SHA256_BYTES:] in held
    }
    return Recalled(epochs=epochs, log=log, links=links, seen_at=seen) if epochs or log or links else NOTHING


def _unpack(place: Place, packed: bytes, held: Mapping[bytes, bytes]) -> Epoch | None:
    try:
        read = msgspec.msgpack.decode(packed, type=_Epoch)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    if not held.keys() >= {*read.leading, *(item.content for item in read.library)}:
        return None
    return Epoch(
        place=place,
        number=read.number,
        started=read.started,
        reason=read.reason,
        leading=tuple(held[digest] for digest in read.leading),
        l1=read.l1,
        tools=read.tools,
        library=tuple(_item(item, held[item.content].decode()) for item in read.library),
        dropped=tuple(read.dropped),
        rewritten=read.rewritten,
    )


def _decode_view(packed: bytes, stats: dict[bytes, bytes]) -> View:
    read = msgspec.json.decode(packed, type=_View)
    return View(
        at=read.at,
        turns=read.turns,
        layers=read.layers,
        library=read.library,
        requests=int(stats.get(b"requests", 0)),
        prompt_tokens=int(stats.get(b"prompt_tokens", 0)),
        cached_tokens=int(stats.get(b"cached_tokens", 0)),
    )


def _item(item: _Item, content: str) -> Item:
    return Item(
        tag=item.tag, label=item.label, named=item.named, sha256=item.content, content=content,
        trusted=item.trusted, promotable=item.promotable, referable=item.referable,
    )  # fmt: skip


def _holds(stored: Sequence[Frozen], frozen: Frozen) -> bool:
    return any(other.raw == frozen.raw and other.replies >= frozen.replies for other in stored)


def _missing(merged: Recalled, stored: Recalled) -> Recalled | None:
    """Return what this process knows and Redis does not; None where there is nothing."""
    log = {
        where: left
        for where, attempts in merged.log.items()
        if (left := tuple(frozen for frozen in attempts if not _holds(stored.log.get(where, ()), frozen)))
    }
    epochs = {place: epoch for place, epoch in merged.epochs.items() if place not in stored.epochs}
    links = {place: link for place, link in merged.links.items() if place not in stored.links}
    return Recalled(epochs=epochs, log=log, links=links) if log or epochs or links else None
