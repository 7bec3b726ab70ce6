"""L1 → lines, the units in which a system prompt is stable or not; sentences, where a line is very long.

A line is known by a keyed digest: who reads what is remembered learns nothing of a prompt, and cannot test a guess.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from proxy.core.message import Message, Text

LONG_CHARACTERS = 400
"""A longer line is cut into sentences: some clients send a system prompt as one line."""
MOST_LINES = 2_000
"""Of a longer prompt nothing is learned: what comes in so many lines is a document."""
_REMEMBERED_CHARACTERS = 500

Key = bytes
"""A line's digest (8 bytes), its words' without numbers and dates (4), and whether it opens or closes a block (1)."""
KEY_BYTES = 13
_OPENS, _CLOSES, _WHOLE, _PLAIN = b"(", b")", b"*", b"-"

_LINE = re.compile(r"\S[^\n]*")
_SENTENCE_END = re.compile(r"(?<=[.!?;>])\s+|(?<=\S)\s+(?=<)")
_COUNTING = re.compile(
    r"\b(?:(?=\w*\d)\w+|(?:mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun"
    r"|january|february|march|april|may|june|july|august|september|october|november|december"
    r"|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|am|pm)\b",
    re.IGNORECASE,
)
_TAG = re.compile(r"<(/?)([A-Za-z_][\w.-]*)(?:\s[^<>]*)?(?<!/)>|^(```|~~~)")


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

    @property
    def size(self) -> int:
        """Its characters."""
        return self.end - self.start

    def beside(self, other: Line) -> bool:
        """Whether both stand in one text: the same words may stand in two messages."""
        return self.index == other.index and self.text.where == other.text.where


def read(leading: Sequence[Message], key: bytes) -> tuple[Line, ...]:
    """Cut the leading system messages into lines; nothing where they have more than is looked at."""
    texts = [(index, text) for index, message in enumerate(leading) for text in message.texts]
    spans = ((index, text, start, end) for index, text in texts for start, end in _spans(text.value))
    found = list(itertools.islice(spans, MOST_LINES + 1))
    if len(found) > MOST_LINES:
        return ()
    return tuple(Line(index, text, start, end, _key(text.value[start:end], key)) for index, text, start, end in found)


def digest(keys: Sequence[Key]) -> bytes:
    """Digest lines as one."""
    return hashlib.blake2b(b"".join(keys), digest_size=8).digest()


def words(key: Key) -> bytes:
    """Return the digest of a line's words without numbers and dates."""
    return key[8:12]


def _spans(text: str) -> Iterator[tuple[int, int]]:
    for line in _LINE.finditer(text):
        start, end = line.start(), line.start() + len(line.group().rstrip())
        if end - start > LONG_CHARACTERS:
            for gap in _SENTENCE_END.finditer(text, start, end):
                yield start, gap.start()
                start = gap.end()
        yield start, end


def _key(line: str, key: bytes) -> Key:
    return _digested(line, key) if len(line) > _REMEMBERED_CHARACTERS else _remembered(line, key)


def _digested(line: str, key: bytes) -> Key:
    def digest(text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size, key=key).digest()

    return digest(line, 8) + digest(_COUNTING.sub("#", line), 4) + _shape(line)


_remembered = functools.lru_cache(maxsize=8_192)(_digested)


def _shape(line: str) -> bytes:
    """Say whether a line begins with a tag, ends with the one that closes it, or both."""
    if not line.startswith("<") and not line.endswith(">"):
        return _PLAIN
    tags = list(_TAG.finditer(line))
    if not tags:
        return _PLAIN
    first, last = tags[0], tags[-1]
    opens = first.start() == 0 and not first.group(1)
    closes = last.end() == len(line) and bool(last.group(1))
    if opens and closes and first.group(2) == last.group(2):
        return _WHOLE
    return _OPENS if opens and not closes else _CLOSES if closes and not opens else _PLAIN


def whole(keys: Iterable[Key]) -> bool:
    """Whether lines are whole blocks from first to last, each opened and closed; true of no lines at all."""
    depth = 0
    for key in keys:
        shape = key[-1:]
        if depth == 0 and shape not in {_OPENS, _WHOLE}:
            return False
        depth += (shape == _OPENS) - (shape == _CLOSES)
    return depth == 0


@dataclass(frozen=True, slots=True)
class Block:
    """A tagged or fenced block from one line to another."""

    first: int
    last: int


def may_open(line: Line) -> bool:
    """Whether a block may begin or end in a line."""
    return "<" in line.value or line.value.startswith(("```", "~~~"))


def blocks(lines: Sequence[Line]) -> tuple[Block, ...]:
    """Find the blocks that open in one line and close in the same or another, inner ones first."""
    found: list[Block] = []
    opened: list[tuple[str, int]] = []
    depths: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        for tag in _TAG.finditer(line.value):
            closes, name, fence = tag.groups()
            name = name or fence
            known = depths.setdefault(name, [])
            while known and (known[-1] >= len(opened) or opened[known[-1]][0] != name):
                # It was left open inside a block that has been closed since.
                known.pop()
            if known and (closes or fence):
                found.append(Block(opened[known[-1]][1], place))
                del opened[known.pop() :]
            elif not closes:
                known.append(len(opened))
                opened.append((name, place))
    return tuple(found)
