"""What a tenant's settings say of its plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxy.core.profile import USUAL, Profile

Mode = Literal["layered", "observe"]
Promotion = Literal["deferred", "eager"]
OverBudget = Literal["forward", "reject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings a plan depends on, of one tenant; tokens."""

    mode: Mode
    promotion: Promotion = "deferred"
    budget_tokens: int | None
    reserve_tokens: int
    over_budget: OverBudget
    current_values: bool = True
    anonymous_library: bool = True
    windowed: bool = False
    profile: Profile = USUAL
