"""Prediction: the longest prefix forwarded before, inside the prompt cache's lifetime, minimum and blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import prefix
from proxy.core.prefix import CHUNK_BYTES, Ledger, Step, chunks
from proxy.core.profile import Profile

PLAIN = Profile(minimum_tokens=0, block_tokens=1, lifetime_seconds=100.0)
START = 7


def step(text: str, tokens: int = 100) -> Step:
    """A step whose bytes are so many repetitions as make four chunks."""
    raw = (text * CHUNK_BYTES)[: 4 * CHUNK_BYTES]
    return Step(raw.encode(), tokens, chunks(raw.encode()))


def steps(texts: str) -> tuple[Step, ...]:
    """Return one step of 100 tokens for each letter."""
    return tuple(step(letter * 4) for letter in texts)


def after(*prompts: str, at: float = 0.0) -> Ledger:
    """Return a ledger to which these prompts were forwarded, a second apart."""
    ledger = Ledger(max_bytes=10_000_000)
    for place, prompt in enumerate(prompts):
        ledger.forward(START, steps(prompt), now=at + place)
    return ledger


@pytest.mark.parametrize(
    ("before", "prompt", "cached"),
    [
        pytest.param((), "abc", 0, id="nothing was forwarded"),
        pytest.param(("ab",), "abc", 200, id="the prompt grew at its end"),
        pytest.param(("abc",), "abc", 299, id="the same again: the last token is always evaluated"),
        pytest.param(("abc",), "abd", 200, id="another end"),
        pytest.param(("abc",), "xbc", 0, id="another beginning"),
        pytest.param(("abc",), "axc", 100, id="something put between"),
        pytest.param(("abc",), "ab", 199, id="a prefix of it"),
        pytest.param(("ab", "ac", "ad"), "ace", 200, id="one of several branches"),
        pytest.param(("abc", "xyz"), "abd", 200, id="another conversation meanwhile"),
    ],
)
def test_the_longest_prefix_forwarded_before(before: tuple[str, ...], prompt: str, cached: int) -> None:
    """Whole steps count while they are the same."""
    assert after(*before).cached(START, steps(prompt), now=10.0, profile=PLAIN) == cached


def test_the_first_step_that_differs_counts_in_part() -> None:
    """A message whose second half changed is still read from the cache up to there."""
    raw = b"a" * 2 * CHUNK_BYTES
    ledger = Ledger(max_bytes=10_000_000)
    ledger.forward(START, [Step(b"1", 100, chunks(raw + b"b" * 2 * CHUNK_BYTES)), *steps("x")], now=0.0)
    changed = Step(b"2", 100, chunks(raw + b"c" * 2 * CHUNK_BYTES))
    assert ledger.cached(START, [changed, *steps("x")], now=1.0, profile=PLAIN) == 50


@pytest.mark.parametrize(("now", "cached"), [(100.0, 200), (100.5, 100), (150.0, 100), (151.0, 0)])
def test_a_prefix_lives_as_long_as_the_prompt_cache_and_use_refreshes_it(now: float, cached: int) -> None:
    """`ab` was read at 0 s, its beginning again at 50 s; a cache that lasts 100 s forgets them one after the other."""
    ledger = Ledger(max_bytes=10_000_000)
    ledger.forward(START, steps("ab"), now=0.0)
    ledger.forward(START, steps("a"), now=50.0)
    assert ledger.cached(START, steps("abz"), now=now, profile=PLAIN) == cached


@pytest.mark.parametrize(
    ("profile", "cached"),
    [
        (Profile(minimum_tokens=0, block_tokens=128), 128),
        (Profile(minimum_tokens=0, block_tokens=16), 192),
        (Profile(minimum_tokens=192, block_tokens=16), 192),
        (Profile(minimum_tokens=193, block_tokens=16), 0),
        (Profile(minimum_tokens=1_024, block_tokens=128), 0),
    ],
)
def test_whole_blocks_above_the_minimum(profile: Profile, cached: int) -> None:
    """200 tokens stand in the cache; what is held comes in blocks, and below the minimum there is nothing."""
    assert after("ab").cached(START, steps("abc"), now=1.0, profile=profile) == cached


def test_caches_are_apart() -> None:
    """What went out under one owner and model is not cached under another."""
    assert after("abc").cached(START + 1, steps("abc"), now=1.0, profile=PLAIN) == 0


def test_the_ledger_is_bounded() -> None:
    """The oldest prefixes go first; what was used lately stays."""
    ledger = Ledger(max_bytes=40_000)
    for place in range(200):
        ledger.forward(START, steps("ab"), now=float(place))
        ledger.forward(START, [step(f"{place:04}"), *steps("x")], now=float(place))
    assert ledger.cached(START, steps("abc"), now=200.0, profile=Profile(minimum_tokens=0, block_tokens=1)) == 200
    first = [step("0000"), *steps("xy")]
    assert ledger.cached(START, first, now=200.0, profile=Profile(minimum_tokens=0, block_tokens=1)) <= 100


@given(st.lists(st.text("abc", min_size=1, max_size=6), max_size=8), st.text("abc", min_size=1, max_size=6))
def test_prediction_equals_the_definition(before: list[str], prompt: str) -> None:
    """For steps that share no chunk it is the longest common prefix with anything forwarded, less the last token."""

    def common(one: str, other: str) -> int:
        return next((at for at in range(min(len(one), len(other))) if one[at] != other[at]), min(len(one), len(other)))

    longest = max((common(prompt, other) for other in before), default=0)
    assert after(*before).cached(START, steps(prompt), now=50.0, profile=PLAIN) == min(
        100 * longest, 100 * len(prompt) - 1
    )


def test_steps_hold_every_token_once() -> None:
    """Chunks cover a step's bytes from its beginning, the last one short."""
    assert len(chunks(b"x" * (CHUNK_BYTES + 1))) == 2 * 8
    assert chunks(b"x" * CHUNK_BYTES) == chunks(b"x" * (CHUNK_BYTES + 1))[:8]
    assert prefix.chunks(b"") == b""
