"""An epoch: a span of a lineage in which the forwarded prompt only grows at its end; and the policy that ends it.

Ending it re-reads everything behind L1 once, and gets rid of what is only carried along: superseded versions, old
references, items that the client no longer sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from proxy.core.chain import Place
from proxy.core.items import Item
from proxy.core.profile import Profile

Reason = Literal["first", "limit", "l1_changed", "tools_changed", "dead_weight", "cold"]
REASONS: tuple[Reason, ...] = get_args(Reason)
NO_EPOCH: Place = b""

LEAST_DEAD_TOKENS = 512
"""Less is not worth taking away what somebody attached a moment ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one epoch began with. It began at `place`, for `reason`.

    `leading` are the system messages as forwarded, L2 included; `l1` and `tools` are digests of the client's own. What
    the limit took: `dropped` are runs of messages, each by its first and last place; `shortened` are the messages that
    keep head and tail; `packed` is how many characters each item of the context of the turn it began with may keep, 0
    for all; `summary` is the place up to which a summary tells what went; `model` is the one whose limit it was, empty
    where it took nothing. `rewritten`: something was forwarded that is not the client's own.
    """

    place: Place
    number: int
    started: float
    reason: Reason
    leading: tuple[bytes, ...]
    l1: bytes
    tools: bytes
    library: tuple[Item, ...] = ()
    dropped: tuple[tuple[Place, Place], ...] = ()
    shortened: frozenset[Place] = frozenset()
    packed: int = 0
    summary: Place = b""
    model: str = ""
    rewritten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How an epoch stands at one request, were it to go on.

    `dead_tokens` are carried along for nothing, `live_tokens` would be read anew if it ended; `turns` began since it
    did. `rewritten`: something forwarded so far is not the client's own.
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
    """Return why the epoch ends with this request; None where it goes on."""
    if not state.fits:
        return "limit"
    if not state.rewritten:
        # There is nothing to compact: the next epoch, too, is the client's own bytes.
        return "l1_changed" if state.l1 != epoch.l1 else None
    if state.signed:
        # Signed reasoning is accepted back only behind what it was made from.
        return None
    # A change of L1 or of the tools costs the re-read anyway.
    if state.l1 != epoch.l1:
        return "l1_changed"
    if state.tools != epoch.tools:
        return "tools_changed"
    if state.dead_tokens >= LEAST_DEAD_TOKENS and _carrying(state, profile) > _reading_anew(state, profile):
        return "dead_weight"
    cold = state.idle_seconds is not None and state.idle_seconds > profile.lifetime_seconds
    return "cold" if cold and state.dead_tokens > state.live_tokens else None


def _carrying(state: State, profile: Profile) -> float:
    """Return what the dead weight will cost, read every turn: an epoch is expected to last as long again as it has."""
    return state.dead_tokens * profile.read * state.turns


def _reading_anew(state: State, profile: Profile) -> float:
    """Return what one re-read costs more than going on reading from the prompt cache."""
    return state.live_tokens * (profile.write - profile.read)
