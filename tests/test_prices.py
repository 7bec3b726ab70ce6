"""Which price a model has: the settings', else the list's where the upstream is a provider's, else none."""

from decimal import Decimal

import pytest

from proxy.core.price import Price, Rates
from proxy.prices import Prices

NOW = 1_795_993_200.0
MINE = Rates(input=Decimal(1), cached_read=Decimal("0.1"), cached_write=Decimal(1), output=Decimal(4))


class At:
    """The prices at one upstream."""

    def __init__(self, url: str, **given: Rates) -> None:
        self.url, self.prices = url, Prices(given)

    def of(self, model: str, now: float) -> Price | None:
        return self.prices.of(model, self.url, now)


def loaded(url: str, **given: Rates) -> At:
    found = At(url, **given)
    found.prices.load([url])
    return found


@pytest.mark.parametrize(
    ("url", "model", "dollars"),
    [
        ("https://api.openai.com/v1", "gpt-5.1", "1.25"),
        ("https://api.openai.com/v1", "GPT-5.1", "1.25"),
        ("https://api.anthropic.com/v1", "claude-sonnet-4-5", "3"),
        ("https://api.openai.com/v1", "no-such-model", None),
        ("https://api.openai.com/v1", "", None),
        ("https://llm.example.com/v1", "gpt-5.1", None),
        ("http://127.0.0.1:8000/v1", "gpt-5.1", None),
        ("http://vllm:8000/v1", "gpt-5.1", None),
    ],
)
def test_a_price_is_that_of_the_upstream(url: str, model: str, dollars: str | None) -> None:
    """A model at an address of one's own has the price of no provider, whatever it is called."""
    price = loaded(url).of(model, NOW)
    assert (price.rates(1_000).input if price else None) == (None if dollars is None else Decimal(dollars))


def test_the_settings_come_first() -> None:
    """By the whole name or the one behind the slash, at any upstream."""
    prices = loaded("http://127.0.0.1:8000/v1", mine=MINE)
    assert [prices.of(name, NOW) is not None for name in ("mine", "MINE", "org/mine", "yours")] == [True] * 3 + [False]
    own = loaded("https://api.openai.com/v1", **{"gpt-5.1": MINE}).of("gpt-5.1", NOW)
    assert own is not None
    assert own.rates(1).input == 1


def test_tiers_and_cached_rates_are_read() -> None:
    """As the list has them."""
    price = loaded("https://api.anthropic.com/v1").of("claude-sonnet-4-5", NOW)
    assert price is not None
    assert [start for start, _ in price.tiers] == [0, 200_000]
    assert price.rates(1).cached_read < price.rates(1).input < price.rates(1).cached_write
    assert price.rates(300_000).input > price.rates(1).input


def test_before_the_list_is_loaded_nothing_is_known() -> None:
    """And nothing is made up."""
    assert At("https://api.openai.com/v1").of("gpt-5.1", NOW) is None


def test_many_models_are_not_remembered_for_ever() -> None:
    """Whatever clients call them."""
    prices = loaded("https://api.openai.com/v1").prices
    for number in range(3_000):
        assert prices.of(f"junk-{number}", "https://api.openai.com/v1", NOW) is None
    assert len(prices._known) <= 1_000
