"""What a model's answers teach of its tokens."""

from __future__ import annotations

import random

import pytest

from proxy.core.calibration import margin, ratio, sample
from proxy.core.models import describe


@pytest.mark.parametrize(
    ("counted", "reported", "expected"),
    [
        (1_000, 1_300, 1.3),
        (199, 250, None),
        (1_000, 0, None),
        (1_000, 100, None),
        (1_000, 5_000, None),
        (400, 100, 0.25),
    ],
)
def test_a_sample_is_a_ratio_that_can_be(counted: int, reported: int, expected: float | None) -> None:
    """Of a prompt that is long enough."""
    assert sample(counted, reported) == expected


def test_nothing_is_said_before_enough_is_known() -> None:
    """Then the median, a little more rather than a little less."""
    assert ratio([1.3, 1.3]) is None
    assert ratio([1.3, 1.3, 9.0]) == pytest.approx(1.30325)


def test_outliers_move_nothing() -> None:
    """A third of the answers may have counted something else."""
    chance = random.Random(3)
    samples = [chance.choice((1.29, 1.3, 1.31)) if chance.random() < 0.67 else chance.uniform(2, 4) for _ in range(32)]
    assert ratio(samples) == pytest.approx(1.3, rel=0.02)


def test_what_is_told_holds_still_while_the_truth_wanders_within_a_step() -> None:
    """A limit that moved with every answer would move the cut."""
    chance, told, changes = random.Random(5), None, 0
    samples: list[float] = []
    for _ in range(500):
        samples.append(chance.gauss(1.3, 0.01))
        before, told = told, ratio(samples, told)
        changes += told != before
    assert changes <= 4


def test_what_really_changes_is_followed() -> None:
    """Within as many answers as are kept."""
    samples = [1.3] * 40 + [1.5] * 20
    assert ratio(samples, 1.3) == pytest.approx(1.50375)


@pytest.mark.parametrize(
    ("model", "learned", "expected"),
    [
        ("gpt-4o", None, 1.0), ("gpt-4o", 1.005, 1.0), ("gpt-4o", 0.8, 1.0), ("gpt-4o", 1.2, 1.2),
        ("mystery", None, 1.1), ("mystery", 0.8, 0.8), ("mystery", 1.2, 1.2),
    ],
)  # fmt: skip
def test_the_margin_is_what_was_learned(model: str, learned: float | None, expected: float) -> None:
    """A tokenizer that is known is never believed to count too much."""
    assert margin(describe(model), learned) == expected
