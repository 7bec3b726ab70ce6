"""What an answer cost, and what the client's own bytes would have cost. Money is Decimal, in US dollars."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """US dollars a million tokens. `cached_write` is paid in the place of `input` for what is written to the cache."""

    input: Decimal
    cached_read: Decimal
    cached_write: Decimal
    output: Decimal


@dataclass(frozen=True, slots=True)
class Price:
    """Rates by the number of input tokens from which on they hold, ascending; the first from 0.

    Crossing a threshold puts all tokens of the request at its rates, as OpenAI, Anthropic and Google bill.
    """

    tiers: tuple[tuple[int, Rates], ...]

    def rates(self, input_tokens: int) -> Rates:
        """Return the rates for a request of this size."""
        return [rates for start, rates in self.tiers if input_tokens > start or start == 0][-1]

    def shares(self) -> tuple[float, float] | None:
        """Return what reading from and writing to the prompt cache costs as shares of plain input; None if not stated.

        A price that gives nothing off for cached tokens is taken for one that does not say.
        """
        rates = self.rates(0)
        if not rates.input or rates.cached_read >= rates.input:
            return None
        return float(rates.cached_read / rates.input), float(rates.cached_write / rates.input)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Tokens of one request. `input` holds those read from and written to the prompt cache."""

    input: int
    cached_read: int = 0
    cached_write: int = 0
    output: int = 0


def cost(price: Price, amount: Amount) -> Decimal:
    """Return what a request costs."""
    rates = price.rates(amount.input)
    plain = max(0, amount.input - amount.cached_read - amount.cached_write)
    return (
        plain * rates.input
        + amount.cached_read * rates.cached_read
        + amount.cached_write * rates.cached_write
        + amount.output * rates.output
    ) / _MILLION
