"""L1 → lines, the units in which a system prompt is stable or not; sentences, where a line is very long.

A line is known by a keyed digest: who reads what is remembered learns nothing of a prompt, and cannot test a guess.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.core.message import Message, Text

LONG_CHARACTERS = 400
"""A longer line is cut into sentences: some clients send a system prompt as one line."""
MOST_LINES = 2_000
"""Of a longer prompt nothing is learned: what comes in so many lines is a document."""

Key = bytes
"""A line's digest (8 bytes), and that of its words without numbers and dates (4 bytes)."""
WORDS = slice(8, 12)

_LINE = re.compile(r"\S[^\n]*")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_COUNTING = re.compile(
    r"\b(?:(?=\w*\d)\w+|(?:mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun"
    r"|january|february|march|april|may|june|july|august|september|october|november|december"
    r"|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|am|pm)\b",
    re.IGNORECASE,
)
_TAG = re.compile(r"<(/?)([A-Za-z_][\w.-]*)(?:\s[^<>]*)?(?<!/)>|^(```|~~~)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a leading system message: it fills `start:end` of a text of it, blanks at its ends left out."""

    index: int
    text: Text
    start: int
    end: int
    key: Key

    @property
    def value(self) -> str:
        """The line's own words."""
        return self.text.value[self.start : self.end]


def read(leading: Sequence[Message], key: bytes) -> tuple[Line, ...]:
    """Cut the leading system messages into lines; nothing where they have more than is looked at."""
    found = tuple(
        Line(index, text, start, end, _key(text.value[start:end], key))
        for index, message in enumerate(leading)
        for text in message.texts
        for start, end in _spans(text.value)
    )
    return found if len(found) <= MOST_LINES else ()


def _spans(text: str) -> Iterator[tuple[int, int]]:
    for line in _LINE.finditer(text):
        start, end = line.start(), line.start() + len(line.group().rstrip())
        if end - start > LONG_CHARACTERS:
            for gap in _SENTENCE_END.finditer(text, start, end):
                yield start, gap.start()
                start = gap.end()
        yield start, end


@functools.lru_cache(maxsize=8_192)
def _key(line: str, key: bytes) -> Key:
    def digest(text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size, key=key).digest()

    return digest(line, 8) + digest(_COUNTING.sub("#", line), 4)


@dataclass(frozen=True, slots=True)
class Block:
    """A tagged or fenced block from one line to another. `whole`: nothing else stands on its two lines."""

    first: int
    last: int
    whole: bool


def blocks(lines: Sequence[Line]) -> tuple[Block, ...]:
    """Find the blocks that open in one line and close in the same or another, inner ones first."""
    found: list[Block] = []
    opened: list[tuple[str, int, bool]] = []
    for place, line in enumerate(lines):
        for tag in _TAG.finditer(line.value):
            closes, name, fence = tag.groups()
            name = name or fence
            at = next((depth for depth in reversed(range(len(opened))) if opened[depth][0] == name), None)
            if at is not None and (closes or fence):
                _, first, opens_line = opened[at]
                found.append(Block(first, place, opens_line and tag.end() == len(line.value)))
                del opened[at:]
            elif not closes:
                opened.append((name, place, tag.start() == 0))
    return tuple(found)
