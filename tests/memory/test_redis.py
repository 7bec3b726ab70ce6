"""Redis that dies, hangs, forgets or lies; and what of it is shared."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from redis.crc import key_slot

from proxy.memory.redis import RedisStore
from proxy.memory.store import Keys, Tally, Turn, Unavailable, View

Make = Callable[..., Turn]
Connect = Callable[..., RedisStore]

HANG = 10
"""Seconds after which a call counts as hanging; each has a bound of its own of a second at most."""
VIEW = View(at=1, turns=1, layers=[], library=[])


async def keys(store: RedisStore, conversation: str = "c") -> tuple[list[bytes], bool]:
    async with asyncio.timeout(HANG):
        answer = await store.recall(conversation)
    return sorted(answer.recalled.turns), answer.degraded


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG):
        while not done():
            await asyncio.sleep(0.02)


async def test_two_stores_see_each_others_turns(redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """An agent's next step may reach another replica."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("c", turn("k", "a"))
    await two.answered("c", turn("k", "a"), [b"1"])
    await two.remember("c", turn("l", "a", "b"))
    seen = (await one.recall("c")).recalled
    assert seen == (await two.recall("c")).recalled
    assert sorted(seen.turns) == [b"k", b"l"]
    assert seen.turns[b"k"][0].replies == {b"1"}
    assert [item.content for item in seen.turns[b"l"][0].items] == [item.content for item in turn("l", "a", "b").items]
    await one.seen("c", VIEW, Tally(prompt_tokens=1))
    await two.seen("c", VIEW, Tally(prompt_tokens=2))
    found = await one.view("c")
    assert found is not None
    assert (found.requests, found.prompt_tokens) == (2, 3)
    assert await two.forget("c") is True
    assert await keys(one) == ([], False)
    await one.close()
    await two.close()


async def test_a_turn_being_written_is_known_here(redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """The client's next step may come before the write has ended."""
    store = connect(redis_url)
    await store.remember("c", turn("k", "a"))
    writing = asyncio.ensure_future(store.remember("c", turn("l", "b")))
    await asyncio.sleep(0)
    assert await keys(store) == ([b"k", b"l"], False)
    await writing
    assert await keys(store) == ([b"k", b"l"], False)
    await store.close()


async def test_everything_of_a_conversation_expires(redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """Each key has its time to live, which slides with each use."""
    store = connect(redis_url, ttl_seconds=500)
    await store.remember("c", turn("k", "a"))
    await store.answered("c", turn("k", "a"), [b"1"])
    await store.seen("c", VIEW, Tally(prompt_tokens=1))
    stored = raw.keys("*")
    assert len(stored) == 4
    assert all(490 <= raw.ttl(key) <= 500 for key in stored)
    for key in stored:
        raw.expire(key, 100)
    await store.recall("c")
    slid = [key for key in stored if raw.ttl(key) > 490]
    assert sorted(key.rpartition(b":")[2] for key in slid) == [b"contents", b"turns"]
    await store.close()


async def test_keys_of_one_conversation_are_one_cluster_slot(
    redis_url: str, raw: Any, connect: Connect, turn: Make
) -> None:
    """They share a hash tag, so that one script and one pipeline may touch them all."""
    store = connect(redis_url)
    await store.remember("c", turn("k", "a"))
    await store.seen("c", VIEW, Tally(prompt_tokens=1))
    await store.remember("d", turn("k", "a"))
    slots = {conversation: {key_slot(key) for key in raw.keys(f"*{{{conversation}}}*")} for conversation in "cd"}
    assert (len(raw.keys("*{c}*")), len(raw.keys("*"))) == (4, 6)
    assert [len(found) for found in slots.values()] == [1, 1]
    assert slots["c"] != slots["d"]
    await store.close()


async def test_no_stored_key_names_anybody(redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """No conversation id, API key, tenant or user stands in a key or in a counter's name."""
    store, digests = connect(redis_url), Keys(b"secret")
    partition = digests.partition({"authorization": "Bearer sk-very-secret"})
    for owner in (partition, digests.partition("acme")):
        conversation = digests.conversation(owner, "chat-with-ann", "ann@example.org")
        await store.remember(conversation, turn("k", "a"))
        await store.seen(conversation, VIEW, Tally(prompt_tokens=1))
        store.count(owner, Tally(prompt_tokens=1, cached_tokens=1))
    await store.secret()
    await until(lambda: len(raw.keys("strata:1:tenant:*")) == 2)
    names = b" ".join([*raw.keys("*"), *(field for key in raw.keys("*:turns") for field in raw.hkeys(key))])
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
    await until(lambda: raw.hget("strata:1:tenant:p", "requests") == b"10")
    assert raw.hgetall("strata:1:tenant:p") == {b"requests": b"10", b"prompt_tokens": b"55", b"cached_tokens": b"10"}
    one.count("p", Tally())
    await until(lambda: raw.hget("strata:1:tenant:p", "requests") == b"11")
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
    server: Any, connect: Connect, turn: Make, told: Any
) -> None:
    """The local copy answers, degraded; the breaker opens after three failures and closes by itself."""
    store = connect(server.url)
    await store.remember("c", turn("k", "a"))
    assert await keys(store) == ([b"k"], False)
    server.kill()
    for failures in range(1, 4):
        assert store.degraded is False
        assert await keys(store) == ([b"k"], True)
        assert told.errors == ["recall"] * failures
    assert store.degraded is True
    assert told.states == [True]
    assert await keys(store) == ([b"k"], True)
    assert told.errors == ["recall"] * 3
    async with asyncio.timeout(HANG):
        await store.remember("c", turn("l", "b"))
        await store.answered("c", turn("l", "b"), [b"1"])
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
    await store.remember("c", turn("m", "c"))
    assert await keys(store) == ([b"m"], False)
    await store.close()


async def test_a_frozen_redis_is_not_waited_for(server: Any, connect: Connect, turn: Make, told: Any) -> None:
    """Recall is bounded, and once thawed no answer belongs to another's question."""
    store = connect(server.url)
    for name in "cd":
        await store.remember(name, turn(name, name))
    assert await keys(store, "d") == ([b"d"], False)
    server.freeze()
    found = await asyncio.gather(*(keys(store, name) for name in "cdcdcd"))
    assert found == [([b"c"], True), ([b"d"], True)] * 3
    assert store.degraded is True
    assert told.states == [True]
    with pytest.raises(Unavailable):
        await store.forget("c")
    server.thaw()
    await until(lambda: not store.degraded)
    for _ in range(5):
        found = await asyncio.gather(*(keys(store, name) for name in "cdcdcd"))
        assert found == [([b"c"], False), ([b"d"], False)] * 3
    await store.close()


async def test_one_frozen_moment_opens_nothing(server: Any, connect: Connect, turn: Make, told: Any) -> None:
    """Failures are counted in a row: an answer in between starts anew."""
    store = connect(server.url)
    await store.remember("c", turn("k", "a"))
    for _ in range(4):
        server.freeze()
        assert await keys(store) == ([b"k"], True)
        server.thaw()
        assert await keys(store) == ([b"k"], False)
    assert store.degraded is False
    assert (told.states, told.errors) == ([], ["recall"] * 4)
    await store.close()


async def test_a_write_into_a_frozen_redis_ends(server: Any, connect: Connect, turn: Make, told: Any) -> None:
    """What could not be written is still known here."""
    store = connect(server.url)
    server.freeze()
    async with asyncio.timeout(HANG):
        await store.remember("c", turn("k", "a"))
        with pytest.raises(Unavailable):
            await store.forget("d")
    assert told.errors == ["remember", "forget"]
    assert await keys(store) == ([b"k"], True)
    await store.close()


async def test_a_redis_that_was_never_there(server: Any, connect: Connect, turn: Make, told: Any) -> None:
    """The proxy starts and works without it, and finds it when it comes."""
    server.kill()
    store = connect(server.url)
    assert await store.secret() is None
    for _ in range(3):
        await keys(store)
    assert store.degraded is True
    server.start()
    await until(lambda: not store.degraded)
    assert await store.secret() is not None
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


async def test_a_flushed_redis_has_forgotten(redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """That is an answer, no failure; what comes then is remembered anew."""
    store = connect(redis_url)
    await store.remember("c", turn("k", "a"))
    await store.recall("c")
    raw.flushall()
    assert await keys(store) == ([], False)
    await store.remember("c", turn("l", "a"))
    assert await keys(store) == ([b"l"], False)
    raw.execute_command("SCRIPT", "FLUSH")
    assert await keys(store) == ([b"l"], False)
    await store.close()


TURNS, CONTENTS = "strata:1:{c}:turns", "strata:1:{c}:contents"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({b"": b""}, id="an empty field"),
        pytest.param({b"abc": b"x"}, id="no digest"),
        pytest.param({b"zz:zz": b"x"}, id="no hexadecimal"),
        pytest.param({b"6b:6b": b"\xc1garbage"}, id="a garbage attempt"),
        pytest.param({b"6b:6b": b"\x90"}, id="an empty attempt"),
        pytest.param({b"6b:6b": b""}, id="no attempt"),
        pytest.param({b"6b:6b:zz": b""}, id="a garbage reply"),
        pytest.param({b"6b:6b:6b:6b:6b": b""}, id="too many parts"),
        pytest.param({b"\xff\xfe:\xff": b"x"}, id="no UTF-8"),
        pytest.param(
            {b"6b:6b": b"\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x91\x96\x01\x02\x03\x04\x05\x06"}, id="types"
        ),
    ],
)
async def test_a_redis_that_lies_about_turns(
    fields: dict[bytes, bytes], redis_url: str, raw: Any, connect: Connect, turn: Make
) -> None:
    """Garbage is not believed: at worst the local copy answers, degraded."""
    store = connect(redis_url)
    await store.remember("c", turn("k", "a"))
    await store.recall("c")
    raw.hset(TURNS, mapping=fields)
    turns, degraded = await keys(store)
    assert b"k" in turns
    assert (await store.recall("c")).recalled.turns[b"k"][-1].items in {turn("k", "a").items, ()}
    assert degraded or len(turns) == 1
    await store.close()


@pytest.mark.parametrize("content", [b"another content", b"", b"\xff\xfe"])
async def test_a_content_that_is_not_what_its_digest_says(
    content: bytes, redis_url: str, raw: Any, connect: Connect, turn: Make
) -> None:
    """It is left out: nobody's content is ever taken for another's."""
    one, two = connect(redis_url), connect(redis_url)
    await one.remember("c", turn("k", "a", "b"))
    lied = turn("k", "a").items[0].sha256.hex()
    raw.hset(CONTENTS, lied, content)
    found = (await two.recall("c")).recalled.turns[b"k"][0]
    assert found.items == turn("k", "b").items
    raw.hset(CONTENTS, "zz", content)
    raw.hset(CONTENTS, hashlib.sha256(b"\xff").hexdigest(), b"\xff")
    turns, _ = await keys(two)
    assert turns == [b"k"]
    await one.close()
    await two.close()


@pytest.mark.parametrize("kind", ["set", "lpush"])
async def test_a_key_of_the_wrong_type(kind: str, redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """Whoever wrote it there, no request fails for it."""
    store = connect(redis_url)
    for part in ("turns", "contents", "view", "stats"):
        getattr(raw, kind)(f"strata:1:{{c}}:{part}", "x")
    assert (await keys(store))[1] is True
    async with asyncio.timeout(HANG):
        await store.remember("c", turn("k", "a"))
        await store.answered("c", turn("k", "a"), [b"1"])
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
        raw.set("strata:1:{c}:view", view)
    if stats:
        raw.hset("strata:1:{c}:stats", mapping=stats)
    found = await store.view("c")
    assert found is None or found.turns == 1
    await store.close()


async def test_more_requests_than_connections(redis_url: str, raw: Any, connect: Connect, turn: Make) -> None:
    """A burst on a healthy Redis opens no breaker for good, and every request has an answer."""
    store = connect(redis_url)
    await store.remember("c", turn("k", "a"))
    found = await asyncio.gather(*(keys(store) for _ in range(300)))
    assert {tuple(turns) for turns, _ in found} == {(b"k",)}
    await until(lambda: not store.degraded)
    assert await keys(store) == ([b"k"], False)
    await store.close()


async def test_a_request_that_is_cancelled_leaves_the_connection_clean(
    redis_url: str, raw: Any, connect: Connect, turn: Make
) -> None:
    """Its answer is never read as another's."""
    store = connect(redis_url)
    for name in "cd":
        await store.remember(name, turn(name, name))
    for steps in range(1, 12):
        leaving = asyncio.ensure_future(store.recall("c"))
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await keys(store, "d") == ([b"d"], False)
    await store.close()
