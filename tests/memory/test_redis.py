"""Redis that dies, hangs, forgets or lies; and what of it is shared."""

import asyncio
import hashlib
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis
from redis.crc import key_slot

from proxy.core.epoch import Epoch
from proxy.memory.breaker import Breaker
from proxy.memory.local import MOST_SETS
from proxy.memory.redis import RedisStore
from proxy.memory.store import Entry, Keys, Tally, Unavailable, View

Make = Callable[..., Entry]
Begin = Callable[..., Epoch]
Connect = Callable[..., RedisStore]

HANG = 10
"""Seconds after which a call counts as hanging; each has a bound of its own of a second at most."""
VIEW = View(at=1, turns=1, layers=[], library=[])


async def keys(store: RedisStore, conversation: str = "c") -> tuple[list[bytes], bool]:
    async with asyncio.timeout(HANG):
        answer = await store.recall(conversation)
    return sorted(place for (_, place), tries in answer.recalled.log.items() if tries), answer.degraded


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG):
        while not done():
            await asyncio.sleep(0.02)


async def test_two_stores_see_what_the_other_forwarded(
    redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """An agent's next step may reach another replica."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("c", [entry("k", "a")], epoch("k", "a"))
    await two.answered("c", entry("k", "a"), [b"1"])
    await two.remember("c", [entry("l", "a", b"2")], epoch("l", "a", "b"))
    seen = (await one.recall("c")).recalled
    assert seen == (await two.recall("c")).recalled
    assert sorted(place for _, place in seen.log) == [b"k", b"l"]
    assert seen.log[b"e", b"k"][0].replies == {b"1"}
    assert [frozen.raw for frozen in seen.log[b"e", b"l"]] == [entry("l", "a", b"2").frozen.raw]
    assert seen.log[b"e", b"l"][0].replies == {b"2"}
    assert seen.epochs == {b"k": epoch("k", "a"), b"l": epoch("l", "a", "b")}
    await one.seen("c", VIEW, Tally(prompt_tokens=1))
    await two.seen("c", VIEW, Tally(prompt_tokens=2))
    found = await one.view("c")
    assert found is not None
    assert (found.requests, found.prompt_tokens) == (2, 3)
    assert await two.forget("c") is True
    assert await keys(one) == ([], False)
    await one.close()
    await two.close()


async def test_what_is_being_written_is_known_here(
    redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """The client's next step may come before the write has ended."""
    store = connect(redis_url)
    await store.remember("c", [entry("k", "a")], epoch("k"))
    writing = asyncio.ensure_future(store.remember("c", [entry("l", "b"), entry("k", "a")], epoch("l", "b")))
    await asyncio.sleep(0)
    during = (await store.recall("c")).recalled
    assert sorted(place for _, place in during.log) == [b"k", b"l"]
    assert sorted(during.epochs) == [b"k", b"l"]
    assert len(during.log[b"e", b"k"]) == 1
    await writing
    assert (await store.recall("c")).recalled == during
    await store.close()


async def test_what_is_being_written_does_not_replace_what_another_wrote(
    server: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """The first writer of an epoch wins, also against what waits here."""
    one, two = connect(server.url), connect(server.url)
    await two.remember("c", [entry("k", "two", started=2.0)], epoch("k", "b", started=2.0))
    writing = asyncio.ensure_future(one.remember("c", [entry("k", "one")], epoch("k", "a", started=1.0)))
    await asyncio.sleep(0)
    found = (await one.recall("c")).recalled
    assert found.epochs == {b"k": epoch("k", "b", started=2.0)}
    assert len(found.log[b"e", b"k"]) == 2
    await writing
    there = (await two.recall("c")).recalled
    assert there.epochs == (await one.recall("c")).recalled.epochs == found.epochs
    assert set(there.log[b"e", b"k"]) == set(found.log[b"e", b"k"])
    await one.close()
    await two.close()


async def test_answers_that_come_while_the_message_is_being_written_count(
    redis_url: str, raw: Any, connect: Connect, entry: Make
) -> None:
    """A short answer may end before a slow write does."""
    store = connect(redis_url)
    writing = asyncio.ensure_future(store.remember("c", [entry("k", "a")], None))
    await asyncio.sleep(0)
    await store.answered("c", entry("k", "a"), [b"1"])
    await writing
    assert (await store.recall("c")).recalled.log[b"e", b"k"][0].replies == {b"1"}
    await store.close()


async def test_pending_writes_end_however_the_write_does(
    server: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """A write that failed is not shown for ever as if it would still come: Redis's word is what replicas share."""
    store, other = connect(server.url), connect(server.url)
    await other.remember("c", [entry("k", "a")], epoch("k"))
    server.freeze()
    await store.remember("c", [entry("l", "b")], epoch("l"))
    server.thaw()
    await until(lambda: not store.degraded)
    leaving = asyncio.ensure_future(store.remember("c", [entry("m", "c")], epoch("m")))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    async with asyncio.timeout(HANG):
        while (await store.recall("c")).recalled != (await other.recall("c")).recalled:
            await asyncio.sleep(0.02)
    await store.close()
    await other.close()


async def test_everything_of_a_conversation_expires(redis_url: str, raw: Any, connect: Connect, entry: Make) -> None:
    """Each key has its time to live, which slides with each use."""
    store = connect(redis_url, ttl_seconds=500)
    await store.remember("c", [entry("k", "a")], None)
    await store.answered("c", entry("k", "a"), [b"1"])
    await store.seen("c", VIEW, Tally(prompt_tokens=1))
    stored = raw.keys("*")
    assert len(stored) == 4
    assert all(490 <= raw.ttl(key) <= 500 for key in stored)
    for key in stored:
        raw.expire(key, 100)
    await store.recall("c")
    slid = [key for key in stored if raw.ttl(key) > 490]
    assert sorted(key.rpartition(b":")[2] for key in slid) == [b"contents", b"log"]
    await store.close()


async def test_keys_of_one_conversation_are_one_cluster_slot(
    redis_url: str, raw: Any, connect: Connect, entry: Make
) -> None:
    """They share a hash tag, so that one script and one pipeline may touch them all."""
    store = connect(redis_url)
    await store.remember("c", [entry("k", "a")], None)
    await store.seen("c", VIEW, Tally(prompt_tokens=1))
    await store.remember("d", [entry("k", "a")], None)
    slots = {conversation: {key_slot(key) for key in raw.keys(f"*{{{conversation}}}*")} for conversation in "cd"}
    assert (len(raw.keys("*{c}*")), len(raw.keys("*"))) == (4, 6)
    assert [len(found) for found in slots.values()] == [1, 1]
    assert slots["c"] != slots["d"]
    await store.close()


async def test_no_stored_key_names_anybody(redis_url: str, raw: Any, connect: Connect, entry: Make) -> None:
    """No conversation id, API key, tenant or user stands in a key or in a counter's name."""
    store, digests = connect(redis_url), Keys(b"secret")
    partition = digests.partition({"authorization": "Bearer sk-very-secret"})
    for owner in (partition, digests.partition("acme")):
        conversation = digests.conversation(owner, "chat-with-ann", "ann@example.org")
        await store.remember(conversation, [entry("k", "a")], None)
        await store.seen(conversation, VIEW, Tally(prompt_tokens=1))
        store.count(owner, Tally(prompt_tokens=1, cached_tokens=1))
    await store.secret()
    await until(lambda: len(raw.keys("strata:4:tenant:*")) == 2)
    names = b" ".join([*raw.keys("*"), *(field for key in raw.keys("*:log") for field in raw.hkeys(key))])
    assert len(raw.keys("*")) == 11
    for word in (b"sk-", b"secret-", b"acme", b"chat", b"ann", b"example", b"Bearer"):
        assert word not in names
    await store.close()


async def test_counts_of_a_second_are_written_together(redis_url: str, raw: Any, connect: Connect) -> None:
    """A tenant's counters add up over replicas."""
    one, two = connect(redis_url), connect(redis_url)
    for _ in range(5):
        one.count("p", Tally(prompt_tokens=10, cached_tokens=2))
        two.count("p", Tally(prompt_tokens=1))
    await until(lambda: raw.hget("strata:4:tenant:p", "requests") == b"10")
    assert raw.hgetall("strata:4:tenant:p") == {b"requests": b"10", b"prompt_tokens": b"55", b"cached_tokens": b"10"}
    one.count("p", Tally())
    await until(lambda: raw.hget("strata:4:tenant:p", "requests") == b"11")
    await one.close()
    await two.close()


async def test_replicas_share_one_secret(redis_url: str, raw: Any, connect: Connect) -> None:
    """Whoever comes first makes it."""
    one, two = connect(redis_url), connect(redis_url)
    found = await asyncio.gather(one.secret(), two.secret(), one.secret())
    assert len(set(found)) == 1
    assert found[0] is not None
    assert len(found[0]) == 64
    await one.close()
    await two.close()


async def test_a_killed_redis_costs_nothing_but_its_memory(
    server: Any, connect: Connect, entry: Make, told: Any
) -> None:
    """The local copy answers, degraded; the breaker opens after three failures and closes by itself."""
    store = connect(server.url)
    await store.remember("c", [entry("k", "a")], None)
    assert await keys(store) == ([b"k"], False)
    server.kill()
    for failures in range(1, 4):
        assert store.degraded is False
        assert await keys(store) == ([b"k"], True)
        assert told.errors == ["recall"] * failures
    await until(lambda: store.degraded)
    assert told.states == [True]
    assert await keys(store) == ([b"k"], True)
    assert told.errors == ["recall"] * 3
    async with asyncio.timeout(HANG):
        await store.remember("c", [entry("l", "b")], None)
        await store.answered("c", entry("l", "b"), [b"1"])
        await store.seen("c", VIEW, Tally(prompt_tokens=1))
        store.count("p", Tally())
        assert await store.view("c") is not None
        assert await store.secret() is None
    assert await keys(store) == ([b"k", b"l"], True)
    with pytest.raises(Unavailable):
        await store.forget("c")
    server.start()
    await until(lambda: not store.degraded)
    assert told.states == [True, False]
    await store.remember("c", [entry("m", "c")], None)
    assert await keys(store) == ([b"m"], False)
    await store.close()


async def test_a_conversation_too_large_to_be_read_is_no_outage(
    redis_url: str, raw: Any, connect: Connect, entry: Make, told: Any
) -> None:
    """Its own requests go on without what is stored, and all others with it."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("small", [entry("k", "a")], None)
    await one.remember("large", [entry("k", "a")], None)
    [key] = [key for key in raw.keys("*large*") if key.endswith(b":contents")]
    for number in range(60):
        raw.hset(key, f"{number:064x}", b"x" * 1_000_000)
    for _ in range(6):
        assert (await two.recall("large")).degraded
        await asyncio.sleep(0.2)
    async with asyncio.timeout(HANG):
        while await keys(two, "small") != ([b"k"], False):
            await asyncio.sleep(0.05)
    assert (two.degraded, told.states) == (False, [])
    for store in (one, two):
        await store.close()


async def test_what_is_stored_anew_counts_for_all_replicas(
    redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin, told: Any
) -> None:
    """Copies of what went do not bring it back; summaries stay."""
    one, two = connect(redis_url), connect(redis_url)
    old = [entry(f"{number}", started=1.0) for number in range(5)]
    await one.remember("c", old, epoch("p", "a", started=1.0))
    await one.summarised("c", b"\x00\n%", "What was said.")
    assert len((await two.recall("c")).recalled.log) == 5
    await one.remember("c", [entry("k", started=9.0)], epoch("q", "b", started=1.0), anew=True)
    for store in (two, one, two, connect(redis_url)):
        found = (await store.recall("c")).recalled
        assert [place for _, place in found.log] == [b"k"], told.errors
        assert list(found.epochs) == [b"q"]
        assert found.summaries == {b"\x00\n%": "What was said."}
    [key] = [key for key in raw.keys("*") if key.endswith(b":contents")]
    assert raw.hlen(key) == 4
    for store in (one, two):
        await store.close()


async def test_a_frozen_redis_is_not_waited_for(server: Any, connect: Connect, entry: Make, told: Any) -> None:
    """Recall is bounded, and once thawed no answer belongs to another's question."""
    store = connect(server.url)
    for name in "cd":
        await store.remember(name, [entry(name, name)], None)
    assert await keys(store, "d") == ([b"d"], False)
    server.freeze()
    found = await asyncio.gather(*(keys(store, name) for name in "cdcdcd"))
    assert found == [([b"c"], True), ([b"d"], True)] * 3
    await until(lambda: store.degraded)
    assert told.states == [True]
    with pytest.raises(Unavailable):
        await store.forget("c")
    server.thaw()
    await until(lambda: not store.degraded)
    for _ in range(5):
        found = await asyncio.gather(*(keys(store, name) for name in "cdcdcd"))
        assert found == [([b"c"], False), ([b"d"], False)] * 3
    await store.close()


async def test_one_frozen_moment_opens_nothing(server: Any, connect: Connect, entry: Make, told: Any) -> None:
    """Failures are counted in a row: an answer in between starts anew."""
    store = connect(server.url)
    await store.remember("c", [entry("k", "a")], None)
    for _ in range(4):
        server.freeze()
        assert await keys(store) == ([b"k"], True)
        server.thaw()
        assert await keys(store) == ([b"k"], False)
    assert store.degraded is False
    assert (told.states, told.errors) == ([], ["recall"] * 4)
    await store.close()


async def test_a_write_into_a_frozen_redis_ends(server: Any, connect: Connect, entry: Make, told: Any) -> None:
    """What could not be written is still known here."""
    store = connect(server.url)
    server.freeze()
    async with asyncio.timeout(HANG):
        await store.remember("c", [entry("k", "a")], None)
        with pytest.raises(Unavailable):
            await store.forget("d")
    assert told.errors == ["remember", "forget"]
    assert await keys(store) == ([b"k"], True)
    await store.close()


async def test_a_redis_that_was_never_there(server: Any, connect: Connect, entry: Make, told: Any) -> None:
    """The proxy starts and works without it, and finds it when it comes."""
    server.kill()
    store = connect(server.url)
    assert await store.secret() is None
    await until(lambda: store.degraded)
    server.start()
    await until(lambda: not store.degraded)
    assert await store.secret() is not None
    await store.close()


async def test_who_was_not_told_the_shared_secret_looks_for_it(server: Any, connect: Connect, told: Any) -> None:
    """One that is slow for a moment when a proxy starts must not leave it with a secret of its own for ever."""
    server.freeze()
    store = connect(server.url)
    assert await store.secret() is None
    await until(lambda: store.degraded)
    server.thaw()
    await until(lambda: not store.degraded)
    assert told.states == [True, False]
    assert await store.secret() is not None
    await store.close()


async def test_a_redis_that_lost_the_secret_gets_it_back(redis_url: str, raw: Any, connect: Connect) -> None:
    """What is stored wins over what a replica knows; where nothing is, what it knows is stored."""
    one, two = connect(redis_url), connect(redis_url)
    shared = await one.secret()
    assert shared is not None
    raw.flushall()
    assert await one.secret(shared) == shared
    assert await two.secret() == shared
    assert await two.secret(b"another") == shared
    for store in (one, two):
        await store.close()


async def test_a_long_log_that_is_known_is_not_hashed_again(
    redis_url: str, raw: Any, connect: Connect, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request of a conversation recalls all of it."""
    store = connect(redis_url)
    await store.remember("c", [entry(f"{number}", f"text {number}") for number in range(200)], None)
    hashed, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda raw: hashed.append(raw) or sha256(raw))
    answer = await store.recall("c")
    assert (len(answer.recalled.log), answer.degraded, hashed) == (200, False, [])
    await store.close()


async def test_a_call_ends_in_time_whatever_the_client_does(told: Any) -> None:
    """A client that loses a cancellation waits on by itself, and what it raises in the end is nobody's."""
    late, ended = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(2 * HANG)
        except asyncio.CancelledError:
            await late.wait()
            ended.set()
            raise RuntimeError from None

    breaker = Breaker(stubborn, on_error=told.errors.append, on_state=told.state)
    async with asyncio.timeout(HANG):
        assert await breaker.bounded("recall", stubborn(), 0.05) is None
        late.set()
        await ended.wait()
    await until(lambda: not breaker._late)
    assert told.errors == ["recall"]
    breaker.close()


@pytest.mark.parametrize(
    ("breaks", "mends", "why"),
    [
        ({"maxmemory": 1}, {"maxmemory": 0}, "OutOfMemory|OOM"),
        ({"replicaof": "127.0.0.1 1"}, {"replicaof": "no one"}, "ReadOnly|READONLY"),
        ({"min-replicas-to-write": 1}, {"min-replicas-to-write": 0}, "NOREPLICAS"),
    ],
)
async def test_a_redis_that_takes_no_writes_is_left_alone(
    server: Any, connect: Connect, entry: Make, told: Any, breaks: Any, mends: Any, why: str
) -> None:
    """It answers, reads even with what it has: the operator is told why, and it is taken up when it takes writes."""

    def turn(client: Any, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if name == "replicaof":
                client.replicaof(*value.split())
            else:
                client.config_set(name, value)

    store = connect(server.url)
    await store.remember("c", [entry("k", "a")], None)
    with redis.Redis(port=server.port) as client:
        before = {each["id"] for each in client.client_list()}
        turn(client, breaks)
        for number in range(4):
            await store.remember("c", [entry(f"l{number}", "a")], None)
            await store.view("c")
        await until(lambda: store.degraded)
        assert re.search(why, told.reasons[0])
        await asyncio.sleep(1.2)
        assert told.states == [True]
        turn(client, mends)
        await until(lambda: not store.degraded)
        await store.remember("c", [entry("m", "a")], None)
        after = {each["id"] for each in client.client_list()}
        assert len(before & after) == 1, "the test's own: the address may name another server now"
    await store.close()


@pytest.mark.parametrize(
    ("access", "database", "why"),
    [
        ("lim:right@", 0, "NoPermissionError: "),
        ("lim:wrong@", 0, "AuthenticationError: invalid username-password pair"),
        ("", 0, "AuthenticationError: Authentication required."),
        ("boss:right@", 99, "ResponseError: DB index is out of range"),
    ],
)
async def test_why_redis_cannot_be_used_is_told(
    server: Any, connect: Connect, told: Any, access: str, database: int, why: str
) -> None:
    """And no password with it."""
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "lim", "on", ">right", "~*", "+@all", "-eval")
        client.execute_command("ACL", "SETUSER", "boss", "on", ">right", "~*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "resetpass")
    store = connect(f"redis://{access}127.0.0.1:{server.port}/{database}")
    for _ in range(4):
        await store.run("quota", store.script("return 1"), ["a"], [], seconds=1.0)
        await store.recall("c")
        await store.remember("c", [], None, anew=True)
    await until(lambda: store.degraded)
    assert told.reasons[0].startswith(why)
    assert "right" not in told.reasons[0]
    assert "wrong" not in told.reasons[0]
    await store.close()


async def test_one_node_of_a_cluster_is_no_redis(server: Any, connect: Connect, entry: Make, told: Any) -> None:
    """It serves the conversations of its own slots alone, and is left alone."""
    server.kill()
    while server.port > 55_000:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            server.port = free.getsockname()[1]
    server.start("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    with redis.Redis(port=server.port) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(8_192))
        async with asyncio.timeout(HANG):
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                await asyncio.sleep(0.05)
    store = connect(f"redis://127.0.0.1:{server.port}/0")
    for number in range(20):
        await store.recall(f"c{number}")
    await until(lambda: store.degraded)
    assert told.reasons[0].startswith("ClusterDownError: ")
    await store.close()


async def test_whatever_the_client_raises_is_a_failed_call(told: Any) -> None:
    """And neither ends who looks for Redis nor reaches who asked: an event loop may raise more than the client says."""
    broken = True

    async def ping() -> None:
        if broken:
            raise RuntimeError("the handler is closed")

    breaker = Breaker(ping, on_error=told.errors.append, on_state=told.state)
    for _ in range(3):
        assert await breaker.bounded("recall", ping(), 1.0) is None
    await until(lambda: breaker.open)
    assert told.reasons == ["RuntimeError: the handler is closed"]
    await asyncio.sleep(1.2)
    broken = False
    await until(lambda: not breaker.open)
    assert (told.states, told.errors) == ([True, False], ["recall"] * 3)
    breaker.close()


async def test_a_burst_is_no_outage(redis_url: str, connect: Connect, told: Any) -> None:
    """More requests at once than there are connections: some go without memory, and Redis is not left alone."""
    store = connect(redis_url)
    for _ in range(3):
        await asyncio.gather(*(store.recall(f"{number}") for number in range(400)))
    await asyncio.sleep(0.7)
    assert told.states == []
    await store.close()


async def test_a_deletion_counts_as_long_as_a_copy_may_live(redis_url: str, raw: Any, connect: Connect) -> None:
    """Of a tenant that keeps conversations for longer than others."""
    store = connect(redis_url)
    await store.forget("c", ttl_seconds=5_000)
    [key] = raw.keys("*gone")
    assert raw.ttl(key) > 4_900
    await store.forget("c", ttl_seconds=1)
    assert raw.ttl(key) > 50
    await store.close()


async def test_a_socket_in_the_file_system_is_an_address(connect: Connect) -> None:
    """Nobody need listen there yet."""
    store = connect("unix:///nowhere/redis.sock")
    assert (await store.recall("c")).degraded is True
    await store.close()


async def test_a_store_closed_while_it_looks_for_redis(server: Any, connect: Connect) -> None:
    """Nothing of it goes on."""
    store = connect(server.url)
    server.kill()
    for _ in range(3):
        await keys(store)
    store.count("p", Tally())
    await store.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_flushed_redis_is_told_again(
    redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """What this process knows is still known, and what Redis lost is written back for the others."""
    store, other = connect(redis_url), connect(redis_url)
    await store.remember("c", [entry("k", "a", b"1")], epoch("k", "a"))
    known = (await store.recall("c")).recalled
    raw.flushall()
    assert (await store.recall("c")).recalled == known
    await until(lambda: raw.exists(LOG) and raw.exists(CONTENTS))
    assert (await other.recall("c")).recalled == known
    await store.remember("c", [entry("l", "a")], None)
    raw.execute_command("SCRIPT", "FLUSH")
    assert await keys(store) == await keys(other) == ([b"k", b"l"], False)
    await store.close()
    await other.close()


async def test_what_redis_did_not_hear_is_told_when_it_is_back(
    server: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """Turns forwarded while it was away reach the other replicas with the next request."""
    store, other = connect(server.url), connect(server.url)
    server.kill()
    for _ in range(3):
        await keys(store)
    await store.remember("c", [entry("k", "a", b"1")], epoch("k", "a"))
    await store.answered("c", entry("k", "a"), [b"2"])
    server.start()
    await until(lambda: not store.degraded)
    known = (await store.recall("c")).recalled
    assert known.log[b"e", b"k"][0].replies == {b"1", b"2"}
    async with asyncio.timeout(HANG):
        while (await other.recall("c")).recalled != known:
            await asyncio.sleep(0.02)
    await store.close()
    await other.close()


async def test_a_deleted_conversation_is_gone_from_every_copy(
    redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """Another replica's copy neither answers with it nor brings it back."""
    one, two = connect(redis_url), connect(redis_url)
    now = time.time()
    await one.remember("c", [entry("k", "a", started=now)], epoch("k", "a", started=now))
    assert await keys(two) == ([b"k"], False)
    assert await one.forget("c") is True
    for store in (two, one, two):
        recalled = (await store.recall("c")).recalled
        assert (any(recalled.log.values()), dict(recalled.epochs)) == (False, {})
    await asyncio.sleep(0.1)
    assert not raw.exists(LOG)
    again = time.time()
    await two.remember("c", [entry("l", "b", started=again)], epoch("l", "b", started=again))
    for store in (one, two):
        recalled = (await store.recall("c")).recalled
        assert [place for (_, place), tries in recalled.log.items() if tries] == [b"l"]
        assert list(recalled.epochs) == [b"l"]
    await one.close()
    await two.close()


LOG, CONTENTS = "strata:4:{c}:log", "strata:4:{c}:contents"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({b"": b""}, id="an empty field"),
        pytest.param({b"abc": b"x"}, id="an unknown kind"),
        pytest.param({b"zz:zz": b"x"}, id="no hexadecimal"),
        pytest.param({b"m": b"1.0"}, id="a message without a place"),
        pytest.param({b"m:6b:6b:zz": b"1.0"}, id="a garbage attempt"),
        pytest.param({b"m:6b:6b:6b": b"yesterday"}, id="a garbage time"),
        pytest.param({b"m:6b:6b:6b": b""}, id="no time"),
        pytest.param({b"m:6b:6b:6b:6b": b"1.0"}, id="too many parts"),
        pytest.param({b"m:6b:6c:6b": b"1.0"}, id="a message without content"),
        pytest.param({b"r": b""}, id="a reply to nothing"),
        pytest.param({b"r:6b": b""}, id="a reply without a message"),
        pytest.param({b"r:6b:6b:6b:zz": b""}, id="a garbage reply"),
        pytest.param({b"seen": b"never"}, id="a garbage last time"),
        pytest.param({b"seen:6b": b"1.0"}, id="a last time of something"),
        pytest.param({b"e": b""}, id="an epoch without a place"),
        pytest.param({b"e:6b:6b": b"\x90"}, id="an epoch with two places"),
        pytest.param({b"e:zz": b"\x90"}, id="a garbage place"),
        pytest.param({b"\xff\xfe:\xff": b"x"}, id="no UTF-8"),
    ],
)
async def test_a_redis_that_lies_in_its_log(
    fields: dict[bytes, bytes], redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """Garbage is not believed: it is left out, or at worst the local copy answers, degraded."""
    store = connect(redis_url)
    await store.remember("c", [entry("k", "a")], epoch("p", "a"))
    await store.recall("c")
    raw.hset(LOG, mapping=fields)
    async with asyncio.timeout(HANG):
        found = (await store.recall("c")).recalled
    assert [frozen.raw for frozen in found.log[b"e", b"k"]] == [entry("k", "a").frozen.raw]
    assert (list(found.log), found.epochs) == ([(b"e", b"k")], {b"p": epoch("p", "a")})
    await store.close()


def garbage_epochs() -> list[bytes]:
    good = [0, 1.0, "first", [], b"l1", b"tools", [], [], False]
    wrong = [["0", *good[1:]], [*good[:2], "whim", *good[3:]], [*good[:3], ["no bytes"], *good[4:]], good[:4],
             [*good[:6], [["tag"]], *good[7:]], [*good[:7], [[b"one"]], False], {"place": 1}, 7]  # fmt: skip
    return [b"", b"\xc1garbage", b"\x90", *(msgspec.msgpack.encode(value) for value in wrong)]


@pytest.mark.parametrize("packed", garbage_epochs())
async def test_a_garbage_epoch_is_left_out(
    packed: bytes, redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """The rest is still believed, by every replica: one bad value does not cost a conversation its memory."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("c", [entry("k", "a")], epoch("p", "a"))
    raw.hset(LOG, "e:6b", packed)
    for store in (one, two):
        async with asyncio.timeout(HANG):
            answer = await store.recall("c")
        assert answer.recalled.epochs == {b"p": epoch("p", "a")}
        assert [frozen.raw for frozen in answer.recalled.log[b"e", b"k"]] == [entry("k", "a").frozen.raw]
    await one.close()
    await two.close()


@pytest.mark.parametrize("content", [None, b"another content", b"", b"\xff\xfe"])
@pytest.mark.parametrize("what", ["leading", "library"])
async def test_an_epoch_whose_content_is_missing_is_left_out(
    what: str, content: bytes | None, redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """Nobody's content is ever taken for another's; the other epochs stay, and nothing is degraded."""
    one, two = connect(redis_url), connect(redis_url)
    lied, kept = epoch("p", "a", "b"), epoch("q", "c")
    await one.remember("c", [entry("k", "a")], lied)
    await one.remember("c", [], kept)
    digest = hashlib.sha256(lied.leading[0]).hexdigest() if what == "leading" else lied.library[1].sha256.hex()
    if content is None:
        raw.hdel(CONTENTS, digest)
    else:
        raw.hset(CONTENTS, digest, content)
    answer = await two.recall("c")
    assert (answer.recalled.epochs, answer.degraded) == ({b"q": kept}, False)
    assert [frozen.raw for frozen in answer.recalled.log[b"e", b"k"]] == [entry("k", "a").frozen.raw]
    await one.close()
    await two.close()


@pytest.mark.parametrize("content", [b"another content", b"", b"\xff\xfe"])
async def test_a_content_that_is_not_what_its_digest_says(
    content: bytes, redis_url: str, raw: Any, connect: Connect, entry: Make
) -> None:
    """It is left out: nobody's content is ever taken for another's."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("c", [entry("k", "a"), entry("k", "b")], None)
    raw.hset(CONTENTS, entry("k", "a").attempt.hex(), content)
    found = (await two.recall("c")).recalled.log[b"e", b"k"]
    assert [frozen.raw for frozen in found] == [entry("k", "b").frozen.raw]
    raw.hset(CONTENTS, "zz", content)
    raw.hset(CONTENTS, hashlib.sha256(b"\xff").hexdigest(), b"\xff")
    places, _ = await keys(two)
    assert places == [b"k"]
    await one.close()
    await two.close()


@pytest.mark.parametrize("part", ["log", "contents"])
async def test_a_redis_that_evicted_one_key(
    part: str, redis_url: str, raw: Any, connect: Connect, entry: Make, epoch: Begin
) -> None:
    """What is left is no half of a conversation: who has no copy knows nothing."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("c", [entry("k", "a")], epoch("p", "a"))
    raw.delete(f"strata:4:{{c}}:{part}")
    answer = await two.recall("c")
    assert (dict(answer.recalled.log), dict(answer.recalled.epochs), answer.degraded) == ({}, {}, False)
    await one.close()
    await two.close()


@pytest.mark.parametrize("kind", ["set", "lpush"])
async def test_a_key_of_the_wrong_type(kind: str, redis_url: str, raw: Any, connect: Connect, entry: Make) -> None:
    """Whoever wrote it there, no request fails for it."""
    store = connect(redis_url)
    for part in ("log", "contents", "view", "stats"):
        getattr(raw, kind)(f"strata:4:{{c}}:{part}", "x")
    assert (await keys(store))[1] is True
    async with asyncio.timeout(HANG):
        await store.remember("c", [entry("k", "a")], None)
        await store.answered("c", entry("k", "a"), [b"1"])
    assert await keys(store) == ([b"k"], True)
    await store.close()


@pytest.mark.parametrize(
    ("view", "stats"),
    [
        pytest.param(b"garbage", {}, id="a garbage view"),
        pytest.param(b"{}", {}, id="an empty view"),
        pytest.param(b"\xff", {}, id="no UTF-8"),
        pytest.param(None, {b"requests": b"many"}, id="a count that is no number"),
        pytest.param(None, {b"surprise": b"1"}, id="an unknown count"),
        pytest.param(None, {b"\xff": b"1"}, id="a count without a name"),
    ],
)
async def test_a_redis_that_lies_about_a_view(
    view: bytes | None, stats: dict[bytes, bytes], redis_url: str, raw: Any, connect: Connect
) -> None:
    """No call raises: what can be read is shown, or what this process knows, or nothing."""
    store = connect(redis_url)
    await store.seen("c", VIEW, Tally(prompt_tokens=1))
    if view is not None:
        raw.set("strata:4:{c}:view", view)
    if stats:
        raw.hset("strata:4:{c}:stats", mapping=stats)
    found = await store.view("c")
    assert found is None or found.turns == 1
    await store.close()


async def test_more_requests_than_connections(redis_url: str, raw: Any, connect: Connect, entry: Make) -> None:
    """A burst on a healthy Redis opens no breaker for good, and every request has an answer."""
    store = connect(redis_url)
    await store.remember("c", [entry("k", "a")], None)
    found = await asyncio.gather(*(keys(store) for _ in range(300)))
    assert {tuple(places) for places, _ in found} == {(b"k",)}
    await until(lambda: not store.degraded)
    assert await keys(store) == ([b"k"], False)
    await store.close()


async def test_a_request_that_is_cancelled_leaves_the_connection_clean(
    redis_url: str, raw: Any, connect: Connect, entry: Make
) -> None:
    """Its answer is never read as another's."""
    store = connect(redis_url)
    for name in "cd":
        await store.remember(name, [entry(name, name)], None)
    for steps in range(1, 12):
        leaving = asyncio.ensure_future(store.recall("c"))
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await keys(store, "d") == ([b"d"], False)
    await store.close()


async def test_replicas_agree_on_a_set_of_tools(redis_url: str, raw: Any, connect: Connect) -> None:
    """Of two that saw it at once in different orders, both forward it as the first one wrote it."""
    one, two = connect(redis_url), connect(redis_url)
    await one.order("owner", (b"b", b"a"))
    await two.order("owner", (b"a", b"b"))
    for replica in (one, two):
        assert await replica.orders("owner", (b"a", b"b")) == ((b"b", b"a"),)
        await replica.close()


async def test_replicas_together_hold_a_bounded_number_of_sets(redis_url: str, raw: Any, connect: Connect) -> None:
    """Each of them sees other sets; Redis holds no more than one of them may."""
    replicas = [connect(redis_url) for _ in range(3)]
    for number in range(MOST_SETS):
        for place, replica in enumerate(replicas):
            await replica.order("owner", (f"{place}".encode(), f"{number}".encode()))
    [key] = raw.keys("*tools*")
    assert raw.hlen(key) <= MOST_SETS + len(replicas)
    for replica in replicas:
        await replica.close()


async def test_a_lying_order_of_tools_is_left_out(redis_url: str, raw: Any, connect: Connect, told: Any) -> None:
    """What stands in Redis may be anything; the sound ones count and each other one is told."""
    one, two = connect(redis_url), connect(redis_url)
    await one.order("owner", (b"b", b"a"))
    [key] = raw.keys("*tools*")
    raw.hset(key, "junk", b"\xc1")
    raw.hset(key, "text", b"hello")
    assert await two.orders("owner", (b"a", b"b")) == ((b"b", b"a"),)
    assert told.errors == ["recall", "recall"]
    for replica in (one, two):
        await replica.close()


async def test_a_full_set_of_tools_is_still_shared(redis_url: str, raw: Any, connect: Connect) -> None:
    """Where no more may be stored, what another replica stored of the same set still counts."""
    one, two = connect(redis_url), connect(redis_url)
    await one.order("owner", (b"b", b"a"))
    for number in range(MOST_SETS):
        await one.order("owner", (b"x", f"{number}".encode()))
    await two.order("owner", (b"a", b"b"))
    assert (b"b", b"a") in await two.orders("owner", (b"a", b"b"))
    for replica in (one, two):
        await replica.close()
