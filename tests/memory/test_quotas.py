"""Quotas in Redis: the same rules as in the core, exact across replicas, and what happens when Redis is away."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.core.quota import KINDS, Ask, Quotas
from proxy.memory.local import LocalStore
from proxy.memory.quotas import LocalCounting, RedisCounting
from proxy.memory.redis import RedisStore


def store(url: str) -> RedisStore:
    local = LocalStore(max_bytes=1_000_000, ttl_seconds=60, clock=time.monotonic)
    return RedisStore(url, copy=local, ttl_seconds=60, on_error=lambda _: None, on_state=lambda _: None)


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


@pytest.mark.parametrize("seed", range(12))
async def test_the_script_decides_as_the_core_does(counting: RedisCounting, owner: str, seed: int) -> None:
    """Random limits, requests, waits, ends and lost leases: the same verdicts, number by number."""
    chance, local, now = random.Random(seed), LocalCounting(), int(time.time() * 1000)
    limits = {kind: chance.choice((3, 50, 400, 2_000)) for kind in KINDS if chance.random() < 0.7}
    quotas, live = Quotas(limits=limits, shadow=seed % 4 == 3), []
    for number in range(120):
        now += chance.choice((0, 1, 250, 7_000, 70_000, 130_000 if chance.random() < 0.2 else 5))
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


async def test_two_replicas_never_admit_more_than_there_is(
    redis_url: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty clients at once, half of them at each: what is admitted is the limit, to the token."""
    monkeypatch.setattr("proxy.memory.quotas.RECALL_SECONDS", 10.0)
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
    await counting.settle(owner, Ask("r1", 10, 0), tokens=30, nanos=0, now_ms=now, reserved=False)
    held._breaker.open = False
    await counting.settle(owner, Ask("r2", 10, 0), tokens=50, nanos=0, now_ms=now)
    verdict = await counting.admit(owner, quotas, Ask("r3", 20, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": 100}
    await held.close()


@pytest.mark.parametrize(("reserved", "used"), [(True, 30), (False, 60)])
async def test_a_settlement_whose_answer_was_lost_counts_once(
    counting: RedisCounting, owner: str, monkeypatch: pytest.MonkeyPatch, *, reserved: bool, used: int
) -> None:
    """Its reservation is gone, and so it is known to have been done; of what was never reserved nobody can know."""
    quotas, now, ask = Quotas(limits={"tokens_per_day": 100}), int(time.time() * 1000), Ask("r1", 10, 0)
    if reserved:
        await counting.admit(owner, quotas, ask, now)
    run, lost = counting._store.run, []

    async def losing(*given: Any, **named: Any) -> Any:
        answer = await run(*given, **named)
        lost.append(answer)
        return None if len(lost) == 1 else answer

    monkeypatch.setattr(counting._store, "run", losing)
    await counting.settle(owner, ask, tokens=30, nanos=0, now_ms=now, reserved=reserved)
    await counting.renew({}, now)
    assert len(lost) == 2
    verdict = await counting.admit(owner, quotas, Ask("r2", 0, 0), now)
    assert verdict is not None
    assert verdict.used == {"tokens_per_day": used}
