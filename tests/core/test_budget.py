"""The limit and the grid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.budget import Limit, limit, step
from proxy.core.models import MARGIN, Model


def model(window: int | None = None, largest_input: int | None = None, *, exact: bool = True) -> Model:
    return Model(name="m", exact=exact, window=window, largest_input=largest_input)


@pytest.mark.parametrize(
    ("known", "budget", "reply", "expected"),
    [
        pytest.param(model(), None, None, None, id="nothing known"),
        pytest.param(model(128_000), None, None, Limit(tokens=124_000, base=128_000, own=None), id="the window"),
        pytest.param(model(128_000), None, 16_000, Limit(tokens=112_000, base=128_000, own=None), id="a long reply"),
        pytest.param(model(128_000), None, 100, Limit(tokens=127_900, base=128_000, own=None), id="a short reply"),
        pytest.param(model(), 50_000, None, Limit(tokens=46_000, base=50_000, own=46_000), id="a budget"),
        pytest.param(model(), 50_000, 16_000, Limit(tokens=46_000, base=50_000, own=46_000), id="a budget, any reply"),
        pytest.param(model(128_000), 50_000, None, Limit(tokens=46_000, base=50_000, own=46_000), id="both"),
        pytest.param(model(30_000), 50_000, None, Limit(tokens=26_000, base=30_000, own=46_000), id="a small window"),
        pytest.param(model(400_000, 272_000), None, None, Limit(tokens=272_000, base=272_000, own=None), id="an input"),
        pytest.param(
            model(400_000, 272_000), None, 200_000, Limit(tokens=200_000, base=272_000, own=None), id="input and reply"
        ),
        pytest.param(
            model(400_000, 272_000), 300_000, None, Limit(tokens=272_000, base=272_000, own=296_000), id="input, budget"
        ),
        pytest.param(
            model(exact=False), 50_000, None, Limit(tokens=41_818, base=50_000, own=41_818), id="an inexact count"
        ),
    ],
)
def test_the_limit_is_the_smallest_of_all(
    known: Model, budget: int | None, reply: int | None, expected: Limit | None
) -> None:
    """min(budget − reserve, largest input, window − this request's reserve); less where counting is a guess."""
    assert limit(model=known, budget=budget, reserve=4_000, reply=reply) == expected


def test_the_margin_is_what_the_inexact_limit_is_smaller_by() -> None:
    """A count that falls short by the margin still holds the budget."""
    assert int(46_000 / MARGIN) == 41_818


@pytest.mark.parametrize(
    ("base", "fixed", "expected"),
    [
        pytest.param(128_000, 0, 49_152, id="1.5 of 32 Ki"),
        pytest.param(100_000, 0, 32_768, id="1.0 of 32 Ki"),
        pytest.param(110_000, 0, 40_960, id="1.25 of 32 Ki"),
        pytest.param(150_000, 0, 57_344, id="1.75 of 32 Ki"),
        pytest.param(128_000, 3_000, 49_152, id="a little L1 moves nothing"),
        pytest.param(200, 0, 80, id="small"),
        pytest.param(160, 0, 64, id="the smallest"),
        pytest.param(100, 0, 64, id="below the smallest"),
        pytest.param(1_000, 5_000, 64, id="L1 over the budget"),
    ],
)
def test_the_step_is_a_round_number(base: int, fixed: int, expected: int) -> None:
    """40 % of the room, rounded down to 1, 1¼, 1½ or 1¾ times a power of two."""
    assert step(base, fixed) == expected


@given(st.integers(1, 2_000_000), st.integers(0, 2_000_000))
def test_the_step_is_near_its_share(base: int, fixed: int) -> None:
    """Never more than 40 % of the room, never less than 80 % of that, and on the grid."""
    found, room = step(base, fixed), int((base - fixed) * 0.40)
    assert found == 64 or 0.79 * room < found <= room
    assert (found << 2) % (1 << (found.bit_length() - 1)) == 0
