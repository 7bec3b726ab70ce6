"""Memory shared by replicas: Redis, with this process's own copy behind it.

One conversation's keys share a hash tag, so that they are one cluster slot. One round trip a recall, 50 ms at most.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from typing_extensions import override

from proxy.core.chain import Place
from proxy.core.epoch import Epoch
from proxy.core.known import Learned, Lesson, Standing
from proxy.core.lineage import Frozen, Link, Recalled
from proxy.core.tools import Order
from proxy.memory.breaker import PROBE_SECONDS, Breaker
from proxy.memory.local import MOST_SETS, MOST_TOOLS, LocalStore
from proxy.memory.packed import decode_recall, decode_view, pack_entry, pack_epoch, pack_link, pack_view
from proxy.memory.shared import SharedBook
from proxy.memory.store import NO_LINKS, Answer, Entry, Store, Tally, Unavailable, View, Writing

RECALL_SECONDS = 0.05
WRITE_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
_KEPT_SECONDS = 30 * 86_400
ROOT = "strata:4"
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

_ANEW = """
local kept = {}
local log = redis.call('HGETALL', KEYS[1])
for i = 1, #log, 2 do
  if string.sub(log[i], 1, 2) == 's:' then
    kept[string.gsub(log[i + 1], '.', function(c) return string.format('%02x', string.byte(c)) end)] = true
  else
    redis.call('HDEL', KEYS[1], log[i])
  end
end
for _, digest in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not kept[digest] then redis.call('HDEL', KEYS[2], digest) end
end
redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[2])
"""
"""KEYS: log, contents, gone. ARGV: since when what is stored counts, time to live in seconds. Summaries stay."""

_PROBE = "redis.call('SET', KEYS[1], '', 'EX', 60)"
_PROBES = 16
"""So many keys, in as many cluster slots: a node that holds only some of all serves only some conversations."""

Script = Callable[..., Awaitable[Any]]
"""Called with `keys` and `args`."""


class RedisStore(Store):
    """`on_error` is told which operation failed; `on_state` is told why Redis is gone, and None when it is back."""

    def __init__(
        self,
        url: str,
        *,
        copy: LocalStore,
        ttl_seconds: int,
        on_error: Callable[[str], None],
        on_state: Callable[[str | None], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        pool = redis.BlockingConnectionPool.from_url(
            url, max_connections=64, timeout=RECALL_SECONDS, socket_connect_timeout=PROBE_SECONDS,
            socket_timeout=WRITE_SECONDS, protocol=2,
            retry=Retry(NoBackoff(), 0), **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        )  # fmt: skip
        self._redis: redis.Redis = redis.Redis(connection_pool=pool)
        self._recall = self._redis.register_script(_RECALL)
        self._copy = copy
        self._ttl_seconds = ttl_seconds
        self._on_error = on_error
        self._now = now
        self._writing: collections.Counter[str] = collections.Counter()
        self._restoring: set[asyncio.Future[None]] = set()
        self._tallies: dict[str, Tally] = {}
        self._counting: asyncio.Task[None] | None = None
        self._shared = SharedBook(self._redis, copy.book, root=ROOT, ttl_seconds=ttl_seconds, now=now)
        # Its own connection: in a burst all others are taken, and that is no outage.
        self._pings: redis.Redis = redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0))
        self._breaker = Breaker(self._probe, on_error=self._failed, on_state=on_state)

    @property
    @override
    def degraded(self) -> bool:
        return self._breaker.open

    async def secret(self, known: bytes | None = None) -> bytes | None:
        """Return the secret all replicas share, made by whoever came first; None when Redis does not answer.

        A Redis that has lost it gets the one `known` here. Where it does not answer it is looked for from then on: a
        process that kept a secret of its own would share nothing with the others.
        """
        name = f"{ROOT}:secret"

        async def work() -> bytes:
            await self._redis.set(name, known or secrets.token_hex(32), nx=True)
            shared = await self._redis.get(name)
            assert isinstance(shared, bytes)
            return shared

        found = await self._breaker.bounded("recall", work(), WRITE_SECONDS)
        if found is None:
            self._breaker.suspect()
        return found

    @override
    async def recall(self, conversation: str, *, ttl_seconds: int | None = None) -> Answer:
        if self._breaker.open:
            return Answer(self._copy.copy(conversation), degraded=True)
        known = self._known(conversation)
        keys = [_key(conversation, part) for part in ("log", "contents", "gone")]
        arguments = [str(ttl_seconds or self._ttl_seconds), *(digest.hex() for digest in known)]
        found = await self._breaker.bounded("recall", self._recall(keys=keys, args=arguments), RECALL_SECONDS)
        if found is None:
            return Answer(self._copy.copy(conversation), degraded=True)
        try:
            recalled = decode_recall(found[:3], known)
            gone_at = float(found[3] or 0)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError, UnicodeDecodeError):
            self._on_error("recall")
            return Answer(self._copy.copy(conversation), degraded=True)
        merged = self._copy.merge(conversation, recalled, gone_at=gone_at, ttl_seconds=ttl_seconds)
        missing = _missing(merged, recalled)
        if missing and not self._writing.get(conversation):
            # Redis came back with less than it had, or was away when this was forwarded.
            self._restoring.add(task := asyncio.ensure_future(self._restore(conversation, missing, ttl_seconds)))
            task.add_done_callback(self._restoring.discard)
        return Answer(merged)

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
        taken = self._copy.put(conversation, entries, epoch, links, anew=anew, ttl_seconds=ttl_seconds)
        return self._remember(conversation, taken, (epoch,) if epoch else (), links, ttl_seconds, anew=anew)

    async def _remember(
        self,
        conversation: str,
        entries: Sequence[Entry],
        epochs: Sequence[Epoch],
        links: Mapping[Place, Link],
        ttl_seconds: int | None,
        *,
        anew: bool = False,
    ) -> None:
        log, contents = _key(conversation, "log"), _key(conversation, "contents")

        def write(pipe: Any) -> None:
            if anew:
                # Other replicas hold copies; what began before these entries is to go there too.
                before = math.nextafter(min((entry.frozen.started for entry in entries), default=self._now()), 0.0)
                gone = (_key(conversation, "gone"), repr(before), self._longest(ttl_seconds))
                pipe.eval(_ANEW, 3, log, contents, *gone)
            for entry in entries:
                pipe.hsetnx(log, f"m:{_field(entry)}", pack_entry(entry))
                pipe.hsetnx(contents, entry.attempt.hex(), entry.frozen.raw)
                for reply in entry.frozen.replies:
                    pipe.hset(log, f"r:{_field(entry)}:{reply.hex()}", "")
                pipe.hset(log, "seen", repr(entry.frozen.started))
            for epoch in epochs:
                pipe.hsetnx(log, f"e:{epoch.place.hex()}", pack_epoch(epoch))
                for raw in (*epoch.leading, *(item.content.encode() for item in epoch.library)):
                    pipe.hsetnx(contents, hashlib.sha256(raw).hexdigest(), raw)
            for place, link in links.items():
                pipe.hsetnx(log, f"l:{place.hex()}", pack_link(link))
                pipe.hsetnx(contents, hashlib.sha256(link.raw).hexdigest(), link.raw)
            self._expire(pipe, conversation, ttl_seconds, "log", "contents")

        self._writing[conversation] += 1
        try:
            await self._write("remember", write)
        finally:
            self._writing[conversation] -= 1
            if not self._writing[conversation]:
                del self._writing[conversation]

    async def _restore(self, conversation: str, missing: Recalled, ttl_seconds: int | None) -> None:
        entries = [
            Entry(epoch, place, frozen) for (epoch, place), attempts in missing.log.items() for frozen in attempts
        ]
        await self._remember(conversation, entries, tuple(missing.epochs.values()), missing.links, ttl_seconds)

    @override
    def answered(
        self, conversation: str, entry: Entry, replies: Sequence[bytes], *, ttl_seconds: int | None = None
    ) -> Writing:
        self._copy.answer(conversation, entry, replies)
        return self._answered(conversation, entry, replies, ttl_seconds)

    async def _answered(
        self, conversation: str, entry: Entry, replies: Sequence[bytes], ttl_seconds: int | None
    ) -> None:
        def write(pipe: Any) -> None:
            for reply in replies:
                pipe.hset(_key(conversation, "log"), f"r:{_field(entry)}:{reply.hex()}", "")
            self._expire(pipe, conversation, ttl_seconds, "log")

        await self._write("remember", write)

    @override
    def summarised(self, conversation: str, key: bytes, text: str, *, ttl_seconds: int | None = None) -> Writing:
        self._copy.note_summary(conversation, key, text, ttl_seconds=ttl_seconds)
        return self._summarised(conversation, key, text, ttl_seconds)

    async def _summarised(self, conversation: str, key: bytes, text: str, ttl_seconds: int | None) -> None:
        def write(pipe: Any) -> None:
            raw = text.encode("utf-8", "surrogatepass")
            digest = hashlib.sha256(raw)
            pipe.hsetnx(_key(conversation, "log"), f"s:{key.hex()}", digest.digest())
            pipe.hsetnx(_key(conversation, "contents"), digest.hexdigest(), raw)
            self._expire(pipe, conversation, ttl_seconds, "log", "contents")

        await self._write("remember", write)

    @override
    async def orders(self, partition: str, tools: Order) -> tuple[Order, ...]:
        known = self._copy.known_orders(partition)
        if (
            self._breaker.open
            or len(tools) > MOST_TOOLS
            or len(known) >= MOST_SETS
            or any(set(order) == set(tools) for order in known)
        ):
            return known
        found = await self._breaker.bounded("recall", self._redis.hvals(_tools_key(partition)), RECALL_SECONDS)
        for packed in found or ():
            self._take(partition, packed)
        return self._copy.known_orders(partition)

    @override
    def order(self, partition: str, order: Order) -> Writing:
        if not self._copy.put_order(partition, order):
            return self._copy.order(partition, order)
        return self._order(partition, order)

    async def _order(self, partition: str, order: Order) -> None:
        if self._breaker.open:
            return
        key, name = _tools_key(partition), hashlib.sha256(b"".join(sorted(set(order)))).hexdigest()

        async def work() -> bytes | str | None:
            # Tools that say the time are another set in every request.
            if await self._redis.hlen(key) < MOST_SETS:
                await self._redis.hsetnx(key, name, msgspec.msgpack.encode(list(order)))
                await self._redis.expire(key, self._ttl_seconds)
            return await self._redis.hget(key, name)

        stands = await self._breaker.bounded("remember", work(), WRITE_SECONDS)
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
    async def learned(self, partition: str, places: Sequence[Place], here: Place, *, sure: bool = False) -> Learned:
        book, asked = self._copy.book, (*places, here)
        known = book.learned(partition, asked)
        if self._breaker.open or (places and places[0] in known.standing and not sure):
            return known
        if not places and not self._shared.stale(partition):
            news = await self._breaker.bounded("recall", self._shared.any_news(partition, here), RECALL_SECONDS)
            if not news:
                return known
        found = await self._breaker.bounded("recall", self._shared.fetch(partition, asked), RECALL_SECONDS)
        if found is None:
            return known
        try:
            self._shared.take(partition, asked, found)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError):
            self._on_error("recall")
        return book.learned(partition, asked)

    @override
    def learn(self, partition: str, place: Place, standing: Standing, lesson: Lesson) -> Writing:
        known = self._copy.note_learned(partition, place, standing, lesson)
        return self._learn(partition, place, standing, dataclasses.replace(lesson, template=known))

    async def _learn(self, partition: str, place: Place, standing: Standing, lesson: Lesson) -> None:
        def write(pipe: Any) -> None:
            self._shared.write(pipe, partition, place, standing, lesson)

        await self._write("remember", write)

    @override
    async def seen(self, conversation: str, view: View, tally: Tally, *, ttl_seconds: int | None = None) -> None:
        self._copy.note(conversation, view, tally, ttl_seconds=ttl_seconds)
        packed = pack_view(view)

        def write(pipe: Any) -> None:
            pipe.set(_key(conversation, "view"), packed, ex=ttl_seconds or self._ttl_seconds)
            _count(pipe, _key(conversation, "stats"), tally)
            self._expire(pipe, conversation, ttl_seconds, "stats")

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
                _count(pipe, f"{ROOT}:tenant:{partition}", tally)

        await self._write("view", write)

    @override
    async def view(self, conversation: str) -> View | None:
        async def work() -> tuple[bytes | None, dict[bytes, bytes]]:
            pipe = self._redis.pipeline(transaction=False)
            pipe.get(_key(conversation, "view"))
            pipe.hgetall(_key(conversation, "stats"))
            packed, stats = await pipe.execute()
            return packed, stats

        found = None if self._breaker.open else await self._breaker.bounded("view", work(), WRITE_SECONDS)
        if found is None:
            return await self._copy.view(conversation)
        packed, stats = found
        if packed is None:
            return None
        try:
            return decode_view(packed, stats)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError):
            self._on_error("view")
            return await self._copy.view(conversation)

    @override
    async def forget(self, conversation: str, *, ttl_seconds: int | None = None) -> bool:
        await self._copy.forget(conversation)

        async def work() -> int:
            pipe = self._redis.pipeline(transaction=False)
            pipe.unlink(*(_key(conversation, part) for part in _UNLINKED))
            # Other replicas hold copies; this tells them, for as long as a copy may live.
            pipe.set(_key(conversation, "gone"), repr(self._now()), ex=self._longest(ttl_seconds))
            gone, _ = await pipe.execute()
            return int(gone)

        gone = None if self._breaker.open else await self._breaker.bounded("forget", work(), WRITE_SECONDS)
        if gone is None:
            raise Unavailable("Redis does not answer; the conversation may still be stored there")
        return gone > 0

    @override
    async def close(self) -> None:
        self._breaker.close()
        if self._counting is not None:
            self._counting.cancel()
        for client in (self._redis, self._pings):
            with contextlib.suppress(Exception):
                await client.connection_pool.disconnect()

    def script(self, text: str) -> Script:
        """Return a script to `run`."""
        return self._redis.register_script(text)

    async def run(
        self, operation: str, script: Script, keys: Sequence[str], arguments: Sequence[object], *, seconds: float
    ) -> Any | None:
        """Run a script; None where Redis does not answer in time."""
        if self._breaker.open:
            return None
        return await self._breaker.bounded(operation, script(keys=list(keys), args=list(arguments)), seconds)

    async def push(self, operation: str, key: str, value: str, *, most: int) -> None:
        """Add to a list of the newest so many."""

        def write(pipe: Any) -> None:
            pipe.lpush(key, value)
            pipe.ltrim(key, 0, most - 1)
            pipe.expire(key, _KEPT_SECONDS)

        await self._write(operation, write)

    async def newest(self, operation: str, key: str, *, most: int) -> list[float]:
        """Return a list of numbers, the newest last; empty where Redis does not answer."""
        if self._breaker.open:
            return []
        found = await self._breaker.bounded(operation, self._redis.lrange(key, 0, most - 1), WRITE_SECONDS)
        try:
            return [float(each) for each in reversed(found or [])]
        except ValueError:
            self._on_error(operation)
            return []

    async def each(self, operation: str, text: str, calls: Mapping[str, Sequence[str]]) -> None:
        """Run a script for each key, with its arguments, in one round trip."""

        def write(pipe: Any) -> None:
            for key, arguments in calls.items():
                pipe.eval(text, 1, key, *arguments)

        await self._write(operation, write)

    def _failed(self, operation: str) -> None:
        self._on_error(operation)
        self._shared.doubt()

    async def _probe(self) -> None:
        """Write as requests do, which a replica, a full server or one of some slots does not let one."""
        away = self._breaker.open
        if away:
            await _drop(self._pings)
        pipe = self._pings.pipeline(transaction=False)
        for number in range(_PROBES):
            pipe.eval(_PROBE, 1, f"{ROOT}:probe:{number}")
        # What it would raise repeats the command.
        refused = [each for each in await pipe.execute(raise_on_error=False) if isinstance(each, Exception)]
        if refused:
            raise refused[0]
        if away:
            await _drop(self._redis)

    async def _write(self, operation: str, fill: Callable[[Any], None]) -> None:
        if self._breaker.open:
            return
        pipe = self._redis.pipeline(transaction=False)
        fill(pipe)
        await self._breaker.bounded(operation, pipe.execute(), WRITE_SECONDS)

    def _known(self, conversation: str) -> dict[bytes, bytes]:
        """Return the contents this process holds, so that Redis need not send them again."""
        copy = self._copy.copy(conversation)
        raws = [link.raw for link in copy.links.values()]
        raws += [text.encode("utf-8", "surrogatepass") for text in copy.summaries.values()]
        for epoch in copy.epochs.values():
            raws += [*epoch.leading, *(item.content.encode() for item in epoch.library)]
        return {hashlib.sha256(raw).digest(): raw for raw in raws} | self._copy.messages(conversation)

    def _longest(self, ttl_seconds: int | None) -> int:
        """Return how long a copy may live, in any replica."""
        return max(ttl_seconds or 0, self._ttl_seconds)

    def _expire(self, pipe: Any, conversation: str, ttl_seconds: int | None, *parts: str) -> None:
        for part in parts:
            pipe.expire(_key(conversation, part), ttl_seconds or self._ttl_seconds)


async def _drop(client: redis.Redis) -> None:
    """Close idle connections: the address may have come to name another server than the one they lead to."""
    with contextlib.suppress(Exception):
        await client.connection_pool.disconnect(inuse_connections=False)


def _unpack_order(packed: bytes | str) -> Order:
    assert isinstance(packed, bytes)
    return tuple(msgspec.msgpack.decode(packed, type=list[bytes]))


def _tools_key(partition: str) -> str:
    return f"{ROOT}:tools:{partition}"


def _key(conversation: str, part: str) -> str:
    return f"{ROOT}:{{{conversation}}}:{part}"


def _field(entry: Entry) -> str:
    return f"{entry.epoch.hex()}:{entry.place.hex()}:{entry.attempt.hex()}"


def _count(pipe: Any, key: str, tally: Tally) -> None:
    for name in ("requests", "prompt_tokens", "cached_tokens"):
        if amount := getattr(tally, name):
            pipe.hincrby(key, name, amount)


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
