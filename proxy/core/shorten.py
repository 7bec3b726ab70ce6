"""The ladder's rungs for single texts: pure functions of a message or an item, never of what is left.

A long tool output or reply keeps its head and tail; an item keeps its headings and the first words of each section;
the items of `strata.context` lose doubles and the ends of the longest.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import orjson

from proxy.core.body import Edit, splice
from proxy.core.items import Item
from proxy.core.message import Message, texts
from proxy.errors import Odd

HEAD = 1_200
TAIL = 600
LONG = 3_000
"""Characters: of a text longer than `LONG`, so much of its beginning and its end is kept."""
PREVIEW = 500
"""Characters kept of each section of an outlined item."""
OUTLINE = "prior_context"
_WORTH = 0.6
"""An outline that is not shorter than this share of its item is none."""
PACKED = 2_000
"""Characters kept at least of each item that `strata.context` brings to a prompt that else does not fit."""
_HEAD_TOKENS = 16
"""What the line that heads an item and the word that ends it may weigh."""
_ALIKE = 0.85
_MOST_HOLDERS = 8
"""Words that stand in more items than these are looked for in the longest only."""
_WORDS = 5
_HEADING = re.compile(r"^#{1,6}\s.*$", re.MULTILINE)
_SENTENCE = re.compile(r"[.!?。！？…](?=\s|$)|\n")
_TAG = re.compile(r"\A<([A-Za-z_][\w.-]*)([^<>]*)>\n?|\n?</[A-Za-z_][\w.-]*>\Z")


def message(raw: bytes, found: Message) -> bytes:
    """Return a message whose long texts keep head and tail; the very bytes where none is long.

    Signed reasoning and a client's own cache marks are not touched, and calls never are.
    """
    if found.signed or found.marked or found.size_bytes <= LONG:
        return raw
    try:
        _, held, _ = texts(raw)
    except (Odd, msgspec.DecodeError, msgspec.ValidationError):
        return raw
    edits = [Edit(start, end, orjson.dumps(text(value))) for start, end, value in held if len(value) > LONG]
    return splice(raw, edits) if edits else raw


def text(whole: str) -> str:
    """Return head and tail of a long text, and in numbers what stood between: whole lines where lines are short."""
    if len(whole) <= LONG:
        return whole
    head, tail = HEAD, len(whole) - TAIL
    line = whole.rfind("\n", HEAD // 2, HEAD)
    head = line + 1 if line >= 0 else head
    line = whole.find("\n", tail, tail + TAIL // 2)
    tail = line + 1 if line >= 0 else tail
    left_out = whole[head:tail]
    lines = left_out.count("\n")
    told = f"{len(left_out)} characters" + (f" in {lines} lines" if lines else "")
    glue = "" if whole[:head].endswith("\n") else "\n"
    return f"{whole[:head]}{glue}[… {told} left out …]\n{whole[tail:]}"


def outlined(item: Item, summary: str = "") -> Item:
    """Return an item as its outline, or its `summary`; itself where that would not be much shorter.

    `<prior_context source="a.md" type="note_context">…</prior_context>`: headings, and the beginning of each section.
    """
    if item.partial or len(item.content) <= PREVIEW * 2:
        return item
    inner = _TAG.sub("", item.content)
    edges = [found.start() for found in _HEADING.finditer(inner)]
    starts = sorted({0, *edges})
    sections = [inner[start:end] for start, end in zip(starts, [*starts[1:], len(inner)], strict=True)]
    kept = summary or "\n".join(_preview(section.strip()) for section in sections if section.strip())
    content = f'<{OUTLINE} source="{item.label}" type="{item.tag}">\n{kept}\n</{OUTLINE}>'
    if len(content) > _WORTH * len(item.content):
        return item
    return dataclasses.replace(item, content=content, partial=True)


def _preview(section: str) -> str:
    first, line, rest = section.partition("\n")
    if not first.startswith("#"):
        first, line, rest = "", "", section
    rest = rest.strip()
    return first + line + (rest if len(rest) <= PREVIEW else _cut(rest, PREVIEW) + " …")


def packed(context: Sequence[Item], most: int = PACKED) -> tuple[Item, ...]:
    """Return the items of a turn without doubles, each cut at a sentence's end and named in its first line.

    `[a.md:1]` heads each; `[truncated]` ends one that was cut, to `most` characters.
    """
    kept = _distinct(context)
    counts: Counter[str] = Counter()
    made = []
    for item in dict.fromkeys(context):
        if item in kept:
            counts[item.label] += 1
            made.append(_packed(item, counts[item.label], most))
    return tuple(made)


def share(context: Sequence[Item], room: int, weigh: Callable[[str], int]) -> int:
    """Return how many characters each item may keep if all are to hold about `room` tokens: `PACKED` at least.

    What is short stays whole, and what is long shares evenly what is left.
    """
    sizes = [(len(item.content), weigh(item.content)) for item in _distinct(context)]

    def takes(most: int) -> int:
        return sum(min(tokens, tokens * most // size + _HEAD_TOKENS) for size, tokens in sizes)

    lengths = range(PACKED, max((size for size, _ in sizes), default=PACKED) + 1)
    return PACKED + max(0, bisect.bisect_right(lengths, room, key=takes) - 1)


def _distinct(context: Sequence[Item]) -> set[Item]:
    """Return a turn's items without doubles.

    Of two of which one holds 85 % of the other's words, in their order, the longer stays: nothing is lost that it does
    not say.
    """
    kept: set[Item] = set()
    holders: dict[str, list[Item]] = {}
    for item in sorted(dict.fromkeys(context), key=lambda item: -len(item.content)):
        runs = _runs(_TAG.sub("", item.content))
        shared = Counter(holder for run in runs for holder in holders.get(run, ()))
        if max(shared.values(), default=0) >= _ALIKE * len(runs):
            continue
        kept.add(item)
        for run in runs:
            if len(holders.setdefault(run, [])) < _MOST_HOLDERS:
                holders[run].append(item)
    return kept


def _packed(item: Item, chunk: int, most: int) -> Item:
    opening = re.match(r"<[A-Za-z_][^<>]*>\n?", item.content)
    closing = re.search(r"\n?</[A-Za-z_][\w.-]*>\Z", item.content)
    start = opening.end() if opening else 0
    end = closing.start() if closing else len(item.content)
    inner = item.content[start:end]
    inner = inner if len(inner) <= most else _cut(inner, most) + " [truncated]"
    content = f"{item.content[:start]}[{item.label}:{chunk}]\n{inner}{item.content[end:]}"
    if len(content) >= len(item.content):
        return item
    return dataclasses.replace(item, content=content, partial=True)


def _cut(whole: str, most: int) -> str:
    """Cut at the last end of a sentence, else of a word."""
    ends = [found.end() for found in _SENTENCE.finditer(whole, most // 2, most)]
    at = ends[-1] if ends else whole.rfind(" ", most // 2, most)
    return whole[: at if at > 0 else most].rstrip()


def _runs(whole: str) -> frozenset[str]:
    words = whole.split()
    if len(words) <= _WORDS:
        return frozenset({" ".join(words)})
    return frozenset(" ".join(words[at : at + _WORDS]) for at in range(len(words) - _WORDS + 1))
