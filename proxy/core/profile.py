"""A provider's prompt cache, as far as a plan and a prediction depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`read` and `write` are prices, as shares of what an uncached token costs.

    A prompt below `minimum_tokens` is not held; what is held comes in whole blocks. `system_last` says whether the
    provider takes a system message at the end of a prompt, and leaves it there.
    """

    read: float = 0.10
    write: float = 1.0
    lifetime_seconds: float = 3_600.0
    minimum_tokens: int = 1_024
    block_tokens: int = 128
    system_last: bool = False


USUAL = Profile()
