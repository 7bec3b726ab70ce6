"""What kind of thing broke a prompt cache: a clock, a nonce, a number, an edit, an epoch's end.

"Time: 10:01" → "Time: 10:02" is a clock, "Request 9f3a61d0" → "Request 81c2e0aa" a nonce
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Kind = Literal[
    "clock", "nonce", "number", "tool_order", "tool_set", "tool_schema", "response_format", "parameter", "image_url",
    "history_edited", "history_cut", "whitespace", "epoch_end", "library_grew", "current_values", "turn_context",
    "limit", "other",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
OURS: frozenset[Kind] = frozenset({"epoch_end", "library_grew", "current_values", "turn_context", "limit"})
"""Strata's own, where the client's bytes did not change: an epoch ended, the library grew, a line of the system prompt
was found to change and is told elsewhere, what stood before the user's words in an earlier turn or last is gone, the
limit took more, or less, where there are no epochs."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE = re.compile(
    r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b1[6-9]\d{8}(?:\d{3})?\b"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|\b(?:morning|afternoon|evening)\b|年|月|日|時|时"
    rf"|\b{_MONTH}\b\.?,? \d|\d{{1,2}}(?:st|nd|rd|th)?,? {_MONTH}\b",
    re.IGNORECASE,
)
_ABOUT_TIME = re.compile(r"\b(?:time|date|today|now|clock|day|year|uptime|timestamp|utc|gmt)\b", re.IGNORECASE)
_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b|\b[a-z]+[_-](?=\w*\d)\w{6,}\b"
    r"|\b(?=\w*\d)(?=\w*[A-Z])(?=\w*[a-z])\w{10,}\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?[$€£]?\d[\d.,_]*\s?%?[a-zA-Z]{0,3}")


def local(was: str, now: str, at: int) -> Kind:
    """Say what kind of thing differs at a character of two texts that are else alike."""
    mine, theirs = _words(now, at), _words(was, at)
    line = _line(now, at)
    if _DATE.search(mine) and (_DATE.search(theirs) or _ABOUT_TIME.search(line)):
        return "clock"
    if _NUMBER.fullmatch(mine.strip(" .,;:()[]\"'")) and _NUMBER.fullmatch(theirs.strip(" .,;:()[]\"'")):
        return "clock" if _DATE.search(line) and _ABOUT_TIME.search(line) else "number"
    if _ID.search(mine) and _ID.search(theirs):
        return "nonce"
    return "other"


def _words(text: str, at: int) -> str:
    """Return the words around a character: back to a blank, and as far as a date goes."""
    start = max(text.rfind(" ", 0, at), text.rfind("\n", 0, at), text.rfind("\t", 0, at)) + 1
    stop = re.compile(r"[\s]").search(text, at)
    end = stop.start() if stop else len(text)
    around = text[max(0, start - 12) : end + 12]
    word = text[start:end]
    found = next(
        (each for each in _DATE.finditer(around) if each.start() <= at - max(0, start - 12) <= each.end()), None
    )
    return found.group() if found and not _ID.search(word) else word


def _line(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]
