"""References: which items stand in a prompt so far, and the lines that name them instead of repeating their content.

    Context attached:
    - a.md
    Find them above in this conversation.

Only what stands earlier in the same prompt, whole and in its newest version, is named; all else is sent in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.draft import NONE_REPLACED, Replaced, Replacement, touches
from proxy.core.items import Item
from proxy.core.message import ABOVE, ATTACHED, IN_LIBRARY, Message, Text

Key = tuple[str, str]
"""What makes two items versions of one."""
_NOWHERE = (b"", False)


@dataclass(frozen=True, slots=True)
class Named:
    """The line that names an item, and whether the item stands in L2."""

    line: str
    in_library: bool


@dataclass(slots=True)
class Seen:
    """What stands so far in the prompt being arranged: by item, its newest version and whether that is in L2."""

    newest: dict[Key, tuple[bytes, bool]] = field(default_factory=dict)
    tags: dict[str, set[str]] = field(default_factory=dict)
    unnamed: dict[Key, set[bytes]] = field(default_factory=dict)
    items: dict[Key, Item] = field(default_factory=dict)
    whole: set[bytes] = field(default_factory=set)
    referenced: list[Item] = field(default_factory=list)

    def place(self, item: Item, *, in_library: bool = False) -> None:
        """Note that an item stands from here on."""
        if item.partial:
            # It does not stand: its outline does.
            self.newest[item.key] = _NOWHERE
            return
        self.whole.add(item.sha256)
        if not item.named:
            self.unnamed.setdefault((item.tag, item.label), set()).add(item.sha256)
        in_library = in_library or self.newest.get(item.key) == (item.sha256, True)
        self.newest[item.key] = (item.sha256, in_library)
        self.items[item.key] = item
        self.tags.setdefault(item.label, set()).add(item.tag)

    def note(self, message: Message, replaced: Replaced = NONE_REPLACED) -> None:
        """Note what stands in a message; a block of which some was replaced by another text does not."""
        for text in message.texts:
            taken = [run for run in replaced.get(text.where, ()) if run.text]
            for block in text.blocks:
                if block.item and not touches(taken, block):
                    self.place(block.item)

    def doubt(self, message: Message, before: Mapping[Key, tuple[bytes, bool]]) -> None:
        """Refer to nothing that stands only here: it is the client's to take away. `before` is what stood earlier."""
        for text in message.texts:
            for block in text.blocks:
                if block.item and before.get(block.item.key, _NOWHERE)[0] != block.item.sha256:
                    self.newest[block.item.key] = _NOWHERE

    def holds(self, item: Item) -> bool:
        """Whether a reference would say what is meant: this very content, its newest version, and no other by its name.

        Blocks that name themselves nowhere are told by their first words; where two begin alike, neither is referenced.
        """
        known = item.referable and self.newest.get(item.key, _NOWHERE)[0] == item.sha256
        return known and (item.named or len(self.unnamed[item.tag, item.label]) == 1)

    def refer(self, item: Item) -> Named:
        """Name an item that stands."""
        self.referenced.append(item)
        tag = f" ({item.tag})" if len(self.tags[item.label]) > 1 else ""
        return Named(f"- {item.label}{tag}", in_library=self.newest[item.key][1])


def reference(named: Sequence[Named]) -> str:
    """Say where items stand."""
    where = IN_LIBRARY if all(each.in_library for each in named) else ABOVE
    return "\n".join([ATTACHED, *(each.line for each in named), f"Find them {where}"])


def replace(text: Text, seen: Seen, spelled: Mapping[bytes, bytes]) -> tuple[Replacement, ...]:
    """Put one reference in the place of neighbouring blocks that all stand earlier; what is new stands from here on.

    Where blocks only stand in for items (`spelled`, by digest), what cannot be referred to is put in whole.
    """
    runs: list[tuple[int, int, list[Named]]] = []
    whole: list[Replacement] = []
    open_run = False
    for block in text.blocks:
        if block.item is None or not seen.holds(block.item):
            open_run = False
            if block.item and spelled:
                # What stood whole and cannot be referred to stands once: the newest turn has it again anyway.
                once = block.item.sha256 not in seen.whole
                text_of = (block.item.content, spelled[block.item.sha256]) if once else ("", b"")
                whole.append(Replacement(block.start, block.end, *text_of))
            if block.item:
                seen.place(block.item)
            continue
        if open_run and not text.value[runs[-1][1] : block.start].strip():
            start, _, named = runs.pop()
        else:
            start, named = block.start, []
        runs.append((start, block.end, [*named, seen.refer(block.item)]))
        open_run = True
    lines = [Replacement(start, end, _alone(text.value, start, end, reference(named))) for start, end, named in runs]
    return tuple(sorted([*lines, *whole], key=lambda run: run.start) if whole else lines)


def _alone(text: str, start: int, end: int, reference: str) -> str:
    """Give a reference lines of its own: what stands beside it on the line is still a block when it is read again."""
    before = "\n" if start and text[start - 1] != "\n" else ""
    behind = "\n" if end < len(text) and text[end] != "\n" else ""
    return f"{before}{reference}{behind}"
