"""What an owner may use: rates that refill, periods, what is under way."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.quota import (
    GRAINS,
    KINDS,
    LEASE_SECONDS,
    NEW,
    RATES,
    Account,
    Ask,
    Kind,
    Quotas,
    admit,
    nanos,
    periods,
    renew,
    settle,
)  # fmt: skip

NOON = 1_790_000_000_000
SECOND = 1_000
DAY = 86_400_000


def quotas(**limits: int) -> Quotas:
    return Quotas(limits={kind: limits[kind] for kind in KINDS if kind in limits})


def spent(held: Quotas, *asks: Ask, at: int = NOON) -> Account:
    """Admit and settle requests that use what they reserved."""
    account = NEW
    for ask in asks:
        account, verdict = admit(account, held, ask, at)
        assert not verdict.over
        account = settle(account, ask, tokens=ask.tokens, nanos=ask.nanos, now_ms=at)
    return account


@pytest.mark.parametrize(
    ("kind", "limit", "ask"),
    [
        ("requests_per_minute", 1, Ask("b", 1, 1)),
        ("tokens_per_minute", 100, Ask("b", 1, 0)),
        ("tokens_per_day", 100, Ask("b", 1, 0)),
        ("tokens_per_month", 100, Ask("b", 1, 0)),
        ("usd_per_day", 70, Ask("b", 0, 1)),
        ("usd_per_month", 70, Ask("b", 0, 1)),
    ],
)
def test_each_kind_refuses_what_is_over_it(kind: Kind, limit: int, ask: Ask) -> None:
    """And takes nothing then."""
    held = quotas(**{kind: limit})
    account = spent(held, Ask("a", 100, 70))
    after, verdict = admit(account, held, ask, NOON)
    assert verdict.over == (kind,)
    assert verdict.used == {kind: limit}
    assert after == account
    assert (verdict.wait_seconds is None) == (kind not in RATES)


def test_requests_under_way_count_until_they_end() -> None:
    """And one that ends makes room at once."""
    held = quotas(concurrent_requests=2)
    account, _ = admit(NEW, held, Ask("a", 0, 0), NOON)
    account, _ = admit(account, held, Ask("b", 0, 0), NOON)
    assert admit(account, held, Ask("c", 0, 0), NOON)[1].over == ("concurrent_requests",)
    account = settle(account, Ask("a", 0, 0), tokens=0, nanos=0, now_ms=NOON)
    assert admit(account, held, Ask("c", 0, 0), NOON)[1].over == ()


def test_what_is_reserved_counts_and_settling_puts_the_truth_in_its_place() -> None:
    """An estimate holds others back only while its request is under way."""
    held = quotas(tokens_per_day=1_000, tokens_per_minute=1_000)
    ask = Ask("a", 900, 0)
    account, verdict = admit(NEW, held, ask, NOON)
    assert verdict.used == {"tokens_per_day": 900, "tokens_per_minute": 900}
    assert admit(account, held, Ask("b", 200, 0), NOON)[1].over == ("tokens_per_minute", "tokens_per_day")
    account = settle(account, ask, tokens=100, nanos=0, now_ms=NOON)
    _, verdict = admit(account, held, Ask("b", 200, 0), NOON)
    assert (verdict.over, verdict.used) == ((), {"tokens_per_day": 300, "tokens_per_minute": 300})


@pytest.mark.parametrize(("waited", "goes"), [(0, False), (5_900, False), (6_000, True)])
def test_a_rate_refills_without_a_pause(waited: int, goes: bool) -> None:
    """600 tokens a minute are ten a second; the wait that is told is enough."""
    held = quotas(tokens_per_minute=600)
    account = spent(held, Ask("a", 600, 0))
    _, verdict = admit(account, held, Ask("b", 60, 0), NOON + waited)
    assert (not verdict.over) == goes
    if not goes:
        assert verdict.wait_seconds == pytest.approx((6_000 - waited) / 1000)


def test_what_is_larger_than_a_rate_is_never_worth_waiting_for() -> None:
    """A client is not told to try again."""
    assert admit(NEW, quotas(tokens_per_minute=100), Ask("a", 101, 0), NOON)[1].wait_seconds is None


def test_a_day_and_a_month_begin_anew() -> None:
    """In UTC; the month goes on where only the day ends."""
    held = quotas(tokens_per_day=100, tokens_per_month=150)
    account = spent(held, Ask("a", 100, 0))
    account, verdict = admit(account, held, Ask("b", 60, 0), NOON + DAY)
    assert (verdict.over, verdict.used["tokens_per_day"]) == (("tokens_per_month",), 0)
    assert admit(account, held, Ask("b", 60, 0), NOON + 31 * DAY)[1].over == ()
    assert periods(NOON) == ("2026-09-21", "2026-09")


def test_a_reservation_that_nobody_renews_is_given_back() -> None:
    """Whoever made it has died; what is renewed stays."""
    held = quotas(concurrent_requests=1)
    account, _ = admit(NEW, held, Ask("a", 0, 0), NOON)
    late = NOON + int(LEASE_SECONDS * SECOND) + 1
    assert admit(account, held, Ask("b", 0, 0), late)[1].over == ()
    account = renew(account, frozenset({"a"}), NOON + 60 * SECOND)
    assert admit(account, held, Ask("b", 0, 0), late)[1].over == ("concurrent_requests",)


def test_shadow_says_what_is_over_and_takes_it_all_the_same() -> None:
    """So that what is reported is what would have been used."""
    held = Quotas(limits={"tokens_per_day": 10}, shadow=True)
    account, verdict = admit(NEW, held, Ask("a", 50, 0), NOON)
    assert (verdict.over, verdict.used) == (("tokens_per_day",), {"tokens_per_day": 50})
    assert "a" in account.live


def test_shadows_rates_are_those_of_what_would_have_gone() -> None:
    """A burst that would have been refused does not fill them."""
    enforced, shadow = quotas(requests_per_minute=2), Quotas(limits={"requests_per_minute": 2}, shadow=True)
    one = other = NEW
    for number in range(20):
        one, mine = admit(one, enforced, Ask(str(number), 1, 0), NOON)
        other, told = admit(other, shadow, Ask(str(number), 1, 0), NOON)
        assert mine.over == told.over
    assert len(one.live) == 2
    assert len(other.live) == 20


def test_all_that_is_over_is_told() -> None:
    """Not only the first."""
    held = Quotas(limits={"requests_per_minute": 1, "tokens_per_day": 5, "usd_per_day": 5}, shadow=True)
    account, _ = admit(NEW, held, Ask("a", 1, 1), NOON)
    _, verdict = admit(account, held, Ask("b", 9, 9), NOON)
    assert verdict.over == ("requests_per_minute", "tokens_per_day", "usd_per_day")
    assert verdict.wait_seconds is None


@pytest.mark.parametrize(
    ("usd", "amount"), [(None, 0), (Decimal(1), 10**9), (Decimal("0.0000000001"), 1), (Decimal("2.5"), 2_500_000_000)]
)
def test_money_is_counted_in_billionths_and_rounded_up(usd: Decimal | None, amount: int) -> None:
    """Nothing is free."""
    assert nanos(usd) == amount


ASKS = st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 20_000), st.booleans())


@given(st.lists(ASKS, max_size=30), st.integers(1, 1_000), st.integers(1, 1_000))
def test_nothing_that_is_admitted_exceeds_a_limit(steps: list[tuple[int, int, int, bool]], day: int, rate: int) -> None:
    """Whatever comes and goes: used is at most the limit while no request uses more than it reserved."""
    held, account, now, live = quotas(tokens_per_day=day, tokens_per_minute=rate, concurrent_requests=3), NEW, NOON, []
    for number, (tokens, used, wait, ends) in enumerate(steps):
        now += wait
        ask = Ask(str(number), tokens, 0)
        account, verdict = admit(account, held, ask, now)
        if not verdict.over:
            live.append(ask)
            assert all(verdict.used[kind] <= held.limits[kind] for kind in held.limits)
        if ends and live:
            done = live.pop(0)
            account = settle(account, done, tokens=min(used, done.tokens), nanos=0, now_ms=now)
    assert account.day[1] <= day
    assert account.tokens is None or account.tokens.grains <= 2 * rate * GRAINS + 400 * GRAINS


def test_a_clock_that_went_ahead_and_back_holds_nobody_up() -> None:
    """A request an hour ahead keeps neither the buckets from filling nor a dead reservation for that hour."""
    held = quotas(requests_per_minute=60, tokens_per_minute=60, concurrent_requests=1)
    ahead = NOON + 3_600 * SECOND
    account, _ = admit(NEW, held, Ask("a", 60, 0), ahead)
    assert admit(account, held, Ask("b", 10, 0), NOON)[1].over == ("tokens_per_minute", "concurrent_requests")
    account, _ = admit(account, held, Ask("b", 10, 0), NOON)
    assert admit(account, held, Ask("b", 10, 0), NOON + 10 * SECOND)[1].over == ("concurrent_requests",)
    assert admit(account, held, Ask("b", 10, 0), NOON + int(LEASE_SECONDS * SECOND) + 1)[1].over == ()
