"""Quotas in Redis: the same rules as in the core, exact across replicas, and what happens when Redis is away."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis

from proxy.core.quota import KINDS, Ask, Kind, Quotas, periods
from proxy.memory.local import LocalStore
from proxy.memory.quotas import _SHARED, LocalCounting, RedisCounting
from proxy.memory.redis import ROOT, RedisStore

NOON = 1_790_000_000_000


def store(url: str) -> RedisStore:
    local = LocalStore(max_bytes=1_000_000, ttl_seconds=60, clock=time.monotonic)
    return RedisStore(url, copy=local, ttl_seconds=60, on_error=lambda _: None, on_state=lambda _: None)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine be no outage."""
    monkeypatch.setattr("proxy.memory.quotas.RECALL_SECONDS", 10.0)


@pytest.fixture
async def counting(redis_url: str) -> AsyncIterator[RedisCounting]:
    """Counts in a real Redis."""
    held = store(redis_url)
    yield RedisCounting(held)
    await held.close()


@pytest.fixture
def owner() -> str:
    """Somebody new: Redis is shared by all tests."""
    return uuid.uuid4().hex


@pytest.fixture
def set_clock(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Say what time it is in Redis."""
    monkeypatch.setattr("proxy.memory.quotas._NOW", "local now = tonumber(redis.call('GET', 'now'))\n")
    with redis.Redis.from_url(redis_url) as client:
        yield lambda now: client.set("now", now)


@pytest.mark.parametrize("seed", range(12))
async def test_the_script_decides_as_the_core_does(
    set_clock: Callable[[int], None], redis_url: str, owner: str, seed: int
) -> None:
    """Random limits, requests, waits, ends, lost leases and clocks that jump: the same verdicts, number by number."""
    held = store(redis_url)
    counting = RedisCounting(held)
    chance, local, now = random.Random(seed), LocalCounting(), NOON
    limits = {kind: chance.choice((3, 50, 400, 2_000)) for kind in KINDS if chance.random() < 0.7}
    quotas, live = Quotas(limits=limits, shadow=seed % 4 == 3), []
    for number in range(120):
        now += chance.choice((0, 1, 250, 7_000, 70_000, 130_000 if chance.random() < 0.2 else 5))
        now += chance.choice((0,) * 30 + (3_600_000, -300_000, -3_600_000))
        set_clock(now)
        ask = Ask(f"r{number}", chance.randrange(120), chance.randrange(120))
        one, other = await local.admit(owner, quotas, ask, now), await counting.admit(owner, quotas, ask, now)
        assert one == other
        if not one.over or quotas.shadow:
            live.append(ask)
        for done in [ask for ask in live if chance.random() < 0.4]:
            live.remove(done)
            tokens, nanos = chance.randrange(150), chance.randrange(150)
            for each in (local, counting):
                await each.settle(owner, done, tokens=tokens, nanos=nanos, now_ms=now)
        if chance.random() < 0.3:
            for renewing in (local, counting):
                await renewing.renew({owner: live}, now)
    await held.close()


async def test_two_replicas_never_admit_more_than_there_is(redis_url: str, owner: str) -> None:
    """Fifty clients at once, half of them at each: what is admitted is the limit, to the token."""
    stores = [store(redis_url), store(redis_url)]
    replicas = [RedisCounting(each) for each in stores]
    quotas, now = Quotas(limits={"tokens_per_day": 1_000}), int(time.time() * 1000)

    async def one(number: int) -> int:
        ask = Ask(f"r{number}", 40, 0)
        verdict = await replicas[number % 2].admit(owner, quotas, ask, now)
        assert verdict is not None
        if verdict.over:
            return 0
        await replicas[number % 2].settle(owner, ask, tokens=40, nanos=0, now_ms=now)
        return 40

    assert sum(await asyncio.gather(*(one(number) for number in range(50)))) == 1_000
    for each in stores:
        await each.close()


async def test_owners_share_nothing(counting: RedisCounting, owner: str) -> None:
    """One owner's use is no other's."""
    quotas, now = Quotas(limits={"requests_per_minute": 1}), int(time.time() * 1000)
    for each in (owner, owner + "2"):
        verdict = await counting.admit(each, quotas, Ask("r", 1, 0), now)
        assert verdict is not None
        assert not verdict.over


async def test_without_redis_nothing_is_said_and_what_is_used_is_told_later(redis_url: str, owner: str) -> None:
    """What was settled while Redis was away counts once it is back; nothing counts twice."""
    held = store(redis_url)
    counting, quotas, now = RedisCounting(held), Quotas(limits={"tokens_per_day": 100}), int(time.time() * 1000)
    held._breaker.open = True
    assert await counting.admit(owner, quotas, Ask("r1", 10, 0), now) is None
    await counting.settle(owner, Ask("r1", 10, 0), tokens=30, nanos=0, now_ms=now)
    held._breaker.open = False
    await counting.settle(owner, Ask("r2", 10, 0), tokens=50, nanos=0, now_ms=now)
    verdict = await counting.admit(owner, quotas, Ask("r3", 20, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": 100}
    await held.close()


@pytest.mark.parametrize("reserved", [True, False])
async def test_a_settlement_whose_answer_was_lost_counts_once(
    counting: RedisCounting, owner: str, monkeypatch: pytest.MonkeyPatch, *, reserved: bool
) -> None:
    """Redis knows what each process has settled last, whether or not it was reserved."""
    quotas, now, ask = Quotas(limits={"tokens_per_day": 100}), int(time.time() * 1000), Ask("r1", 10, 0)
    if reserved:
        await counting.admit(owner, quotas, ask, now)
    run, lost = counting._store.run, []

    async def losing(*given: Any, **named: Any) -> Any:
        answer = await run(*given, **named)
        lost.append(answer)
        return None if len(lost) == 1 else answer

    monkeypatch.setattr(counting._store, "run", losing)
    await counting.settle(owner, ask, tokens=30, nanos=0, now_ms=now)
    await counting.renew({}, now)
    assert len(lost) == 2
    verdict = await counting.admit(owner, quotas, Ask("r2", 0, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": 30}


@pytest.mark.parametrize("limit", ["tokens_per_day", "tokens_per_month", "usd_per_day", "usd_per_month"])
async def test_what_was_used_outlives_the_traffic_of_others(server: Any, owner: str, limit: Kind) -> None:
    """A Redis that is full and told to let go of what has a time to live, as `deploy/compose.yaml` tells it."""
    held = store(server.url)
    counting, quotas, now = RedisCounting(held), Quotas(limits={limit: 100}), int(time.time() * 1000)
    await counting.settle(owner, Ask("r1", 0, 0), tokens=90, nanos=90, now_ms=now)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 500_000)
        for number in range(3_000):
            client.set(f"{number}", b"x" * 1_000, ex=86_400)
        assert client.info("stats")["evicted_keys"] > 1_000
    verdict = await counting.admit(owner, quotas, Ask("r2", 20, 20), now)
    assert verdict is not None
    assert (verdict.over, verdict.used) == ((limit,), {limit: 90})
    await held.close()


@pytest.mark.parametrize(("lost", "used"), [("live", 10), ("held", 40)])
async def test_reservations_of_which_a_half_was_lost(
    counting: RedisCounting, redis_url: str, owner: str, lost: str, used: int
) -> None:
    """They are counted by what is left, and neither hold anything back for ever nor give back what was never taken."""
    quotas, now = Quotas(limits={"tokens_per_day": 100}), int(time.time() * 1000)
    await counting.admit(owner, quotas, Ask("r1", 30, 0), now)
    with redis.Redis.from_url(redis_url) as client:
        assert client.delete(f"{ROOT}:quota:{{{owner}}}:{lost}") == 1
    verdict = await counting.admit(owner, quotas, Ask("r2", 10, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": used}
    for name, tokens in (("r1", 30), ("r2", 10)):
        await counting.settle(owner, Ask(name, tokens, 0), tokens=tokens, nanos=0, now_ms=now)
    verdict = await counting.admit(owner, quotas, Ask("r3", 0, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": 40}


async def test_old_periods_go_and_the_present_ones_stay(
    set_clock: Callable[[int], None], counting: RedisCounting, redis_url: str, owner: str
) -> None:
    """What has no time to live does not grow: days and months that are over go when the next begins."""
    for days in (0, 1, 2, 5, 40, 400):
        set_clock(NOON + days * 86_400_000)
        await counting.settle(owner, Ask(f"r{days}", 0, 0), tokens=7, nanos=0, now_ms=0)
        await counting.settle(owner, Ask(f"s{days}", 0, 0), tokens=0, nanos=3, now_ms=0)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        [key] = client.keys(f"*{owner}*:used")
        assert client.ttl(key) == -1
        day, month = periods(NOON + 400 * 86_400_000)
        assert client.hgetall(key) == {
            f"{day}:tokens": "7", f"{day}:nanos": "3", f"{month}:tokens": "7", f"{month}:nanos": "3",
        }  # fmt: skip


async def test_who_uses_nothing_leaves_nothing(counting: RedisCounting, redis_url: str, owner: str) -> None:
    """A made-up key that the upstream refuses takes no room that never expires."""
    quotas = Quotas(limits={"tokens_per_day": 100})
    await counting.admit(owner, quotas, Ask("r1", 30, 0), 0)
    await counting.settle(owner, Ask("r1", 30, 0), tokens=0, nanos=0, now_ms=0)
    with redis.Redis.from_url(redis_url) as client:
        assert all(client.ttl(key) > 0 for key in client.keys(f"*{owner}*"))


def test_the_scripts_calendar_is_utc(redis_url: str) -> None:
    """Every day of a century has the name that the core gives it, and its last millisecond too."""
    day = 86_400_000
    text = (
        "local now = 0\n" + _SHARED + "local names = {} for i = 2, #ARGV do names[i - 1] = date(tonumber(ARGV[i])) end"
    )
    times = [each for number in range(36_525) for each in (number * day, number * day + day - 1)]
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for start in range(0, len(times), 2_000):
            some = times[start : start + 2_000]
            assert client.eval(text + " return names", 3, "a", "b", "c", 1, *some) == [periods(at)[0] for at in some]


async def test_replicas_whose_clocks_differ_count_by_redis(redis_url: str, owner: str) -> None:
    """One that is an hour ahead empties no bucket, begins no other day and ends no other's reservations."""
    limits: dict[Kind, int] = {"requests_per_minute": 60, "concurrent_requests": 2, "tokens_per_day": 1_000_000}
    stores = [store(redis_url), store(redis_url)]
    ahead, right = (RedisCounting(each) for each in stores)
    quotas, now = Quotas(limits=limits), int(time.time() * 1000)
    late = now + 40 * 86_400_000
    found = [
        await right.admit(owner, quotas, Ask("r1", 0, 0), now),
        await ahead.admit(owner, quotas, Ask("r2", 0, 0), late),
    ]
    found += [await each.admit(owner, quotas, Ask("r3", 0, 0), at) for each, at in ((ahead, late), (right, now))]
    assert [each and each.over for each in found] == [(), (), ("concurrent_requests",), ("concurrent_requests",)]
    await ahead.renew({owner: [Ask("r2", 0, 0)]}, late)
    await ahead.settle(owner, Ask("r2", 0, 0), tokens=30, nanos=0, now_ms=late)
    verdict = await right.admit(owner, quotas, Ask("r4", 0, 0), now)
    assert verdict is not None
    assert (verdict.over, verdict.used["tokens_per_day"]) == ((), 30)
    for each in stores:
        await each.close()


async def test_one_owners_broken_key_holds_up_nobody_else(counting: RedisCounting, redis_url: str, owner: str) -> None:
    """What Redis refuses to count waits, the others' counts do not, and it is counted once it can be."""
    quotas, now, other = Quotas(limits={"tokens_per_day": 100}), int(time.time() * 1000), owner + "2"
    with redis.Redis.from_url(redis_url) as client:
        client.set(key := f"{ROOT}:quota:{{{owner}}}:used", "junk")
        for number in range(5):
            for each in (owner, other):
                await counting.settle(each, Ask(f"r{number}", 0, 0), tokens=10, nanos=0, now_ms=now)
        assert await counting.admit(owner, quotas, Ask("s", 0, 0), now) is None
        verdict = await counting.admit(other, quotas, Ask("s", 0, 0), now)
        assert verdict is not None
        assert verdict.used == {"tokens_per_day": 50}
        client.delete(key)
    await counting.renew({}, now)
    verdict = await counting.admit(owner, quotas, Ask("s", 0, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": 50}


async def test_what_is_owed_is_bounded(redis_url: str, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of whoever owes most goes."""
    monkeypatch.setattr("proxy.memory.quotas._MOST_OWED", 5)
    held = store(redis_url)
    counting, quotas, other = RedisCounting(held), Quotas(limits={"tokens_per_day": 100}), owner + "2"
    held._breaker.open = True
    await counting.settle(other, Ask("r", 0, 0), tokens=1, nanos=0, now_ms=0)
    for number in range(9):
        await counting.settle(owner, Ask(f"r{number}", 0, 0), tokens=number, nanos=0, now_ms=0)
    held._breaker.open = False
    await counting.renew({}, 0)
    for each, used in ((owner, 5 + 6 + 7 + 8), (other, 1)):
        verdict = await counting.admit(each, quotas, Ask("s", 0, 0), 0)
        assert verdict is not None
        assert verdict.used == {"tokens_per_day": used}
    await held.close()
