"""The provider's cache and price rules."""

import random
import time
from decimal import Decimal

import pytest

from proxy.simulator.accounting import OPENAI, VLLM, PromptCache, Rules, cost


def ids(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(200_000), k=length)


@pytest.mark.parametrize(
    ("rules", "first", "second", "cached"),
    [
        (OPENAI, ids(1023), ids(1023), 0),
        (OPENAI, ids(1024), ids(1024), 0),
        (OPENAI, ids(1025), ids(1025), 1024),
        (OPENAI, ids(1151), ids(1151), 1024),
        (OPENAI, ids(1152), ids(1152), 1024),
        (OPENAI, ids(1153), ids(1153), 1152),
        (OPENAI, ids(1500), ids(1500) + ids(700, 2), 1408),
        (OPENAI, ids(5000), ids(1300), 1280),
        (OPENAI, ids(5000), [7, *ids(5000)], 0),
        (OPENAI, ids(5000), [*ids(5000)[:1100], 7, *ids(5000)[1101:]], 1024),
        (OPENAI, ids(5000), [*ids(5000)[:1000], 7, *ids(5000)[1001:]], 0),
        (VLLM, ids(16), ids(16), 0),
        (VLLM, ids(17), ids(17), 16),
        (VLLM, ids(100), ids(100), 96),
        (VLLM, ids(100), [*ids(100)[:40], 7, *ids(100)[41:]], 32),
        (OPENAI, ids(2000), [], 0),
        (VLLM, [], ids(40), 0),
    ],
)
def test_hit_is_the_whole_blocks_of_the_shared_prefix(
    rules: Rules, first: list[int], second: list[int], cached: int
) -> None:
    """A second prompt hits the shared prefix in whole steps, from the minimum up, never its last token."""
    cache = PromptCache(rules)
    assert cache.charge(first, now=0, partition="a").cached_tokens == 0
    charge = cache.charge(second, now=1, partition="a")
    assert (charge.prompt_tokens, charge.cached_tokens) == (len(second), cached)
    assert charge.uncached_tokens == len(second) - cached


def test_keys_never_share() -> None:
    """A prompt known under one key is new under another."""
    cache = PromptCache(OPENAI)
    cache.charge(ids(2000), now=0, partition="a")
    assert cache.charge(ids(2000), now=0, partition="b").cached_tokens == 0
    assert cache.charge(ids(2000), now=0, partition="a").cached_tokens == 1920


@pytest.mark.parametrize(("idle_seconds", "cached"), [(0, 1920), (600, 1920), (600.1, 0)])
def test_blocks_live_ten_minutes_without_use(idle_seconds: float, cached: int) -> None:
    """A block unused for longer than the lifetime is gone."""
    cache = PromptCache(OPENAI)
    cache.charge(ids(2000), now=50, partition="a")
    assert cache.charge(ids(2000), now=50 + idle_seconds, partition="a").cached_tokens == cached


def test_use_refreshes_only_the_blocks_used() -> None:
    """Using a short prefix keeps it alive while the unused continuation expires."""
    cache = PromptCache(OPENAI)
    cache.charge(ids(4000), now=0, partition="a")
    cache.charge(ids(2000), now=500, partition="a")
    assert cache.charge(ids(4000), now=1000, partition="a").cached_tokens == 1920
    assert len(cache) == 4000 // 128


def test_full_cache_drops_the_least_recently_used_ends_first() -> None:
    """Over capacity, the oldest prompt loses its deepest blocks and keeps its start."""
    rules = Rules(
        name="small",
        minimum_tokens=16,
        step_tokens=16,
        lifetime_seconds=None,
        capacity_tokens=160,
        input_usd_per_mtok=Decimal(1),
        cached_usd_per_mtok=Decimal(1),
        write_usd_per_mtok=Decimal(1),
        output_usd_per_mtok=Decimal(1),
    )
    cache = PromptCache(rules)
    cache.charge(ids(97, 1), now=0, partition="a")
    cache.charge(ids(97, 2), now=1, partition="a")
    assert len(cache) == 10
    assert cache.charge(ids(97, 2), now=2, partition="a").cached_tokens == 96
    assert cache.charge(ids(97, 1), now=3, partition="a").cached_tokens == 64


def test_cleared_cache_holds_nothing() -> None:
    """After clearing, every prompt is new."""
    cache = PromptCache(VLLM)
    cache.charge(ids(100), now=0, partition="a")
    cache.clear()
    assert len(cache) == 0
    assert cache.charge(ids(100), now=0, partition="a").cached_tokens == 0


@pytest.mark.parametrize("rules", [OPENAI, VLLM])
def test_random_histories_keep_the_rules(rules: Rules) -> None:
    """Whatever is sent, a hit is a multiple of the step, at least the minimum, and leaves a token to evaluate."""
    dice = random.Random(7)
    cache = PromptCache(rules)
    sent: list[list[int]] = [ids(3000)]
    for now in range(200):
        base = dice.choice(sent)
        prompt = base[: dice.randrange(1, len(base) + 1)] + ids(dice.randrange(400), now)
        charge = cache.charge(prompt, now=now, partition="a")
        longest = max(_shared(prompt, other) for other in sent) if now else 0
        assert charge.cached_tokens % rules.step_tokens == 0
        assert charge.cached_tokens == 0 or charge.cached_tokens >= rules.minimum_tokens
        assert charge.cached_tokens <= min(longest, len(prompt) - 1)
        sent.append(prompt)


def _shared(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_a_long_prompt_is_accounted_in_milliseconds() -> None:
    """100,000 tokens cost a few milliseconds (allowing a busy machine 50)."""
    cache, prompt = PromptCache(OPENAI), ids(100_000)
    best = min(_timed(cache, prompt) for _ in range(5))
    assert best < 0.05


def _timed(cache: PromptCache, prompt: list[int]) -> float:
    started = time.perf_counter()
    cache.charge(prompt, now=0, partition="a")
    return time.perf_counter() - started


@pytest.mark.parametrize(
    ("prompt", "cached", "completion", "usd"),
    [
        (1_000_000, 0, 0, "1.25"),
        (1_000_000, 1_000_000, 0, "0.125"),
        (0, 0, 1_000_000, "10"),
        (2000, 1920, 44, "0.00078"),
    ],
)
def test_cost_follows_the_price_list(prompt: int, cached: int, completion: int, usd: str) -> None:
    """Dollars are uncached, cached and output tokens at their own prices."""
    paid = cost(OPENAI, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
    assert paid == Decimal(usd)


def test_written_tokens_have_their_own_price() -> None:
    """Tokens written to the cache are priced as writes instead of input."""
    paid = cost(OPENAI, prompt_tokens=1000, cached_tokens=0, written_tokens=1000)
    assert paid == 1000 * OPENAI.write_usd_per_mtok / 1_000_000
