"""When an epoch ends: one small policy over what it costs to go on and what it costs to begin anew.

Within an epoch the forwarded prompt only grows at its end. Ending it re-reads everything behind L1 once, and gets rid
of what is only carried along: superseded versions, items the client no longer sends, old references.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.lineage import Epoch, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A provider's prompt cache: prices as shares of an uncached token's, how long it lasts, what it counts in.

    Below `minimum_tokens` it holds nothing; what it holds comes in whole blocks. `system_last` says whether it takes a
    system message at the end of a prompt, there and not at its head.
    """

    read: float = 0.10
    write: float = 1.0
    lifetime_seconds: float = 3_600.0
    minimum_tokens: int = 1_024
    block_tokens: int = 128
    system_last: bool = False


USUAL = Profile()

LEAST_DEAD_TOKENS = 512
"""Less is not worth taking away what somebody attached a moment ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An epoch at one request. `dead_tokens` are carried along for nothing; `live_tokens` would be read anew.

    `rewritten` says whether anything forwarded so far is not the client's own.
    """

    l1: bytes
    tools: bytes
    turns: int
    idle_seconds: float | None
    dead_tokens: int
    live_tokens: int
    fits: bool
    signed: bool
    rewritten: bool


def ends(epoch: Epoch, state: State, profile: Profile) -> Reason | None:
    """Return why the epoch ends with this request, or None: it goes on.

    A change of L1 or of the tools costs the re-read anyway. Dead weight is weighed as one weighs renting against
    buying: it is paid at the read price every turn, and the epoch may be expected to last as long again as it has.
    Cold alone ends nothing, and where nothing was ever rewritten there is nothing to compact. Signed reasoning is
    accepted back only behind what it was made from: then the limit alone ends an epoch.
    """
    if not state.fits:
        return "limit"
    if state.l1 != epoch.l1 and not state.rewritten:
        return "l1_changed"
    if state.signed or not state.rewritten:
        return None
    if state.l1 != epoch.l1:
        return "l1_changed"
    if state.tools != epoch.tools:
        return "tools_changed"
    weighs = state.dead_tokens * profile.read * state.turns > state.live_tokens * (profile.write - profile.read)
    if weighs and state.dead_tokens >= LEAST_DEAD_TOKENS:
        return "dead_weight"
    cold = state.idle_seconds is not None and state.idle_seconds > profile.lifetime_seconds
    return "cold" if cold and state.dead_tokens > state.live_tokens else None
