"""The most tokens a request may hold, and the step of the grid on which history goes when it holds more.

History is cut on a fixed grid, a pure function of the request: so the cut, and with it the prefix, holds still while
the conversation grows by a step, after a restart and without any stored state.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core import calibration
from proxy.core.models import Model

_SHARE = 0.40
_SMALLEST_STEP = 64
_FRACTIONS = (1.75, 1.5, 1.25, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """`tokens` a request may hold, `base` the grid is laid over, `own` what the tenant's budget alone would allow."""

    tokens: int
    base: int
    own: int | None


def limit(
    *, model: Model, budget: int | None, reserve: int, reply: int | None, ratio: float | None = None
) -> Limit | None:
    """Return the limit, or None where neither a budget nor the model's window says one.

    `ratio` is what the model has taught of its own tokens; before that, a count that is not exact is held to a limit
    smaller by a margin. The reserve of a request is its `max_completion_tokens`, else the setting.
    """
    known = [tokens for tokens in (budget, model.window) if tokens is not None]
    if not known:
        return None
    own = budget - reserve if budget is not None else None
    limits = [own] if own is not None else []
    if model.largest_input is not None:
        limits.append(model.largest_input)
    if model.window is not None:
        limits.append(model.window - (reply if reply is not None and reply > 0 else reserve))
    scale = calibration.margin(model, ratio)
    bases = [*known, model.largest_input] if model.largest_input is not None else known
    return Limit(
        tokens=max(1, int(min(limits) / scale)),
        base=min(bases),
        own=None if own is None else max(1, int(own / scale)),
    )


def step(base: int, fixed: int) -> int:
    """Return the grid's step: 40 % of what L1 and the tools leave, so rounded that small changes of L1 do not move it.

    Rounded down to 1, 1¼, 1½ or 1¾ times a power of two.
    """
    room = int((base - fixed) * _SHARE)
    if room < _SMALLEST_STEP:
        return _SMALLEST_STEP
    power = 1 << (room.bit_length() - 1)
    return next(int(power * fraction) for fraction in _FRACTIONS if power * fraction <= room)
