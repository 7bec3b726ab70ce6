"""A prompt arranged and not yet rendered: which messages stand, and what is done to each. Values only.

A message that needs no change is only named by its place, so that the client's own bytes go upstream.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.cut import WHOLE, Cut
from proxy.core.items import Block, Item
from proxy.core.library import Library
from proxy.core.message import Message
from proxy.core.turn import Span

SEPARATOR = "\n\n"
"""Stands between layers."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Put `text` in the place of `start:end` of a message's text, spelled in JSON as it was, where that is known."""

    start: int
    end: int
    text: str
    spelled: bytes = b""

    @property
    def size_bytes(self) -> int:
        """How much is put in, as it is spelled or about that."""
        return len(self.spelled) or len(self.text.encode("utf-8", "surrogatepass"))


def touches(runs: Sequence[Replacement], block: Block) -> bool:
    """Whether some of a block is replaced; `runs` are in order."""
    at = bisect.bisect_right(runs, block.start, key=lambda run: run.end)
    return at < len(runs) and runs[at].start < block.end


Replaced = Mapping[tuple[int, int], tuple[Replacement, ...]]
"""What is replaced in a message, by where the text stands in it."""
NONE_REPLACED: Replaced = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done to one message: text put before, text put behind, what is replaced in its texts."""

    before: str = ""
    behind: str = ""
    replaced: Replaced = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class L1:
    """What is done to the leading system messages: by index, lines replaced; what joins the last one, behind L2.

    `digest` is that of L1 as it is forwarded, L2 left out; empty where L1 stands as sent.
    """

    replaced: Mapping[int, Replaced] = field(default_factory=dict)
    behind: str = ""
    digest: bytes = b""


AS_SENT = L1()


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What becomes of L1's volatile lines: `l1` without them, and where their current values are told.

    `told` are the values by slot; `text` is how they stand in L3, `last` how they stand at the prompt's very end. There
    they have the `role` that L1 has: some models take `developer` only.
    """

    l1: L1 = AS_SENT
    told: tuple[tuple[int, str], ...] = ()
    text: str = ""
    last: str = ""
    role: str = "system"


NO_VALUES = Values()


@dataclass(frozen=True, slots=True)
class Slot:
    """A message to be arranged: the client's own, or in another form (`raw`). What is `fixed` stands as it is.

    `spelled`: its blocks are stand-ins of one character, and these are the items' JSON spellings, by content digest.
    """

    message: Message
    raw: bytes | None = None
    fixed: bool = False
    spelled: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt arranged but not rendered. `referenced` are the items of whose content a reference stands instead.

    `forms` are the messages that are not taken from the request, before their change is made. `before` are the items
    that stand in front of the newest turn. `inserted` is the text of a user message put in front, for what has no user
    message that could take it. `tools` is the array of tools where it stands in another order than sent.
    `values` are the current values that are told; `cut` is what the limit took.
    """

    leading: int
    newest: Span
    forms: Mapping[int, bytes] = field(default_factory=dict)
    changes: dict[int, Change] = field(default_factory=dict)
    library: Library
    library_index: int | None = None
    before: tuple[Item, ...] = ()
    referenced: tuple[Item, ...] = ()
    context: str = ""
    inserted: str = ""
    tools: bytes = b""
    values: Values = NO_VALUES
    cut: Cut = WHOLE

    @property
    def dropped(self) -> tuple[Span, ...]:
        """The runs of messages that are not sent."""
        return self.cut.dropped

    def keeps(self, index: int) -> bool:
        """Whether the message at this place is sent."""
        return not self.cut.drops(index)

    def runs(self, index: int) -> list[Replacement]:
        """What is replaced in a message."""
        return [run for runs in self.changes[index].replaced.values() for run in runs] if index in self.changes else []
