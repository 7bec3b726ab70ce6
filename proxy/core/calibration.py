"""How many tokens of the upstream's own a counted token is, learned of each model from what it reported.

A median, so that an answer that counted something else (a hidden prompt, a file) moves nothing. It is told in steps, so
that a limit computed from it, and with it the cut, holds still while the truth wanders within a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from proxy.core.models import MARGIN, Model

KEPT = 32
"""Samples kept of a model, the newest."""
_FEWEST = 3
_LEAST_TOKENS = 200
"""Of a shorter prompt what goes around the messages is too large a share."""
_SANE = (0.25, 4.0)
_STEP = 0.01


def sample(counted: int, reported: int) -> float | None:
    """Return what one answer says, or None where it says nothing."""
    if counted < _LEAST_TOKENS or not reported:
        return None
    ratio = reported / counted
    return ratio if _SANE[0] <= ratio <= _SANE[1] else None


def ratio(samples: Sequence[float], before: float | None = None) -> float | None:
    """Return the ratio in force, None before enough is known; `before` stays while it is near."""
    if len(samples) < _FEWEST:
        return before
    middle = statistics.median(samples[-KEPT:])
    if before is not None and abs(before / middle - 1) <= _STEP:
        return before
    # A little too much is less harm than a little too little.
    return middle * (1 + _STEP / 4)


def margin(model: Model, learned: float | None) -> float:
    """Return by what a limit in the upstream's tokens is divided to be one in ours."""
    if model.exact:
        # Less than what is counted is what some prompts weigh (tools, say), and not this one for certain.
        return learned if learned is not None and learned > 1 + _STEP else 1.0
    return MARGIN if learned is None else learned
