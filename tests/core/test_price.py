"""What an answer costs, in Decimal."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.price import Amount, Price, Rates, cost

GPT = Rates(input=Decimal("1.25"), cached_read=Decimal("0.125"), cached_write=Decimal("1.25"), output=Decimal(10))
LONG = Rates(input=Decimal(6), cached_read=Decimal("0.6"), cached_write=Decimal("7.5"), output=Decimal("22.5"))
SHORT = Rates(input=Decimal(3), cached_read=Decimal("0.3"), cached_write=Decimal("3.75"), output=Decimal(15))
CLAUDE = Price(((0, SHORT), (200_000, LONG)))


@pytest.mark.parametrize(
    ("price", "amount", "usd"),
    [
        (Price(((0, GPT),)), Amount(input=1_000_000), "1.25"),
        (Price(((0, GPT),)), Amount(input=1_000, cached_read=400, output=10), "0.0009"),
        (Price(((0, GPT),)), Amount(input=0), "0"),
        (CLAUDE, Amount(input=1_000, cached_write=1_000), "0.00375"),
        (CLAUDE, Amount(input=1_000, cached_read=500, cached_write=500), "0.002025"),
        (CLAUDE, Amount(input=200_000), "0.6"),
        (CLAUDE, Amount(input=200_001), "1.200006"),
        (CLAUDE, Amount(input=10, cached_read=20), "0.000006"),
    ],
)
def test_an_answer_costs(price: Price, amount: Amount, usd: str) -> None:
    """Read, written and plain tokens each at their rate; beyond a threshold all of them at the higher one."""
    assert cost(price, amount) == Decimal(usd)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_reading_from_the_cache_never_costs_more(tokens: int, cached: int) -> None:
    """Where it is the cheaper rate."""
    cached = min(tokens, cached)
    assert cost(CLAUDE, Amount(input=tokens, cached_read=cached)) <= cost(CLAUDE, Amount(input=tokens))
