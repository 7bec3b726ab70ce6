# ruff: noqa: E501 -- tables
"""Each token's one cause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cause import CAUSES, attribute
from proxy.core.divergence import Break, Piece, Trace
from proxy.core.profile import Profile

PROFILE = Profile(lifetime_seconds=600.0, minimum_tokens=1_024, block_tokens=128)


def prompt(tokens: int) -> Trace:
    return Trace(0.0, (), (Piece("L1", 0, b"x", tokens),))


def broken(shared: int) -> Break:
    return Break(layer="L1", kind="clock", shared_tokens=shared)


@pytest.mark.parametrize(
    ("cached", "before", "found", "idle", "expected"),
    [
        pytest.param(None, 3_000, None, 1.0, {"unreported": 4_000}, id="what is not said is not guessed"),
        pytest.param(0, None, None, None, {"cold_start": 4_000}, id="nothing came before"),
        pytest.param(2_944, 3_000, None, 1.0, {"new": 1_000, "below_minimum": 56}, id="growth, and a block's rest"),
        pytest.param(0, 3_000, None, 700.0, {"new": 1_000, "expired": 3_000}, id="it has gone cold"),
        pytest.param(0, 900, None, 1.0, {"new": 3_100, "below_minimum": 900}, id="too short to be kept"),
        pytest.param(0, 3_000, None, 1.0, {"new": 1_000, "below_minimum": 128, "provider_miss": 2_872}, id="the provider missed"),
        pytest.param(0, 3_000, broken(0), 1.0, {"new": 1_000, "changed": 3_000}, id="changed at its head"),
        pytest.param(1_920, 3_000, broken(2_000), 1.0, {"new": 1_000, "changed": 1_000, "below_minimum": 80}, id="changed within"),
        pytest.param(4_000, 3_000, None, 1.0, {}, id="all was read"),
    ],
)  # fmt: skip
def test_causes(
    cached: int | None, before: int | None, found: Break | None, idle: float | None, expected: dict[str, int]
) -> None:
    """Of a prompt of 4,000 tokens."""
    told = attribute(
        total=4_000, cached=cached, counted=4_000, before=None if before is None else prompt(before), found=found,
        idle_seconds=idle, profile=PROFILE, predicted=None,
    )  # fmt: skip
    assert told == expected


def test_what_others_share_is_no_cold_start() -> None:
    """A first request whose beginning the cache should have held."""
    told = attribute(total=4_000, cached=0, counted=4_000, before=None, found=None, idle_seconds=None, profile=PROFILE,
                     predicted=1_024)  # fmt: skip
    assert told == {"cold_start": 2_976, "provider_miss": 1_024}


@given(
    total=st.integers(1, 50_000),
    share=st.none() | st.floats(0, 1.2),
    counted=st.integers(1, 50_000),
    before=st.none() | st.integers(0, 60_000),
    shared=st.none() | st.integers(0, 60_000),
    idle=st.none() | st.floats(0, 10_000),
    predicted=st.none() | st.integers(0, 60_000),
)
def test_every_token_has_exactly_one(
    total: int, share: float | None, counted: int, before: int | None, shared: int | None, idle: float | None,
    predicted: int | None,
) -> None:  # fmt: skip
    """They sum to what was not read, whatever the numbers say; none is negative."""
    cached = None if share is None else int(total * share)
    told = attribute(
        total=total, cached=cached, counted=counted, before=None if before is None else prompt(before),
        found=None if shared is None or before is None else broken(min(shared, before)), idle_seconds=idle,
        profile=PROFILE, predicted=predicted,
    )  # fmt: skip
    assert sum(told.values()) == (total if cached is None else max(0, total - cached))
    assert all(amount > 0 and cause in CAUSES for cause, amount in told.items())
