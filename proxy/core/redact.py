"""Traffic without its words: what a prompt cache sees of it is left, what people wrote is not.

Every word becomes another of the same length by a keyed digest, the same word always the same; digits become digits.
The model, roles, types, names of tools, keys that are identifiers, and the tags that mark context stay: so a replay
finds the same breaks. Made-up words take more tokens than those of a language.
"""

from __future__ import annotations

import calendar
import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from proxy.core.items import TAGS

_KEPT = frozenset(
    {
        "system", "developer", "user", "assistant", "tool", "function",
        "text", "image_url", "input_audio", "file", "refusal", "image", "document", "thinking", "redacted_thinking",
        "tool_use", "tool_result", "base64", "url", "ephemeral", "enabled", "disabled", "adaptive", "custom",
        "object", "array", "string", "number", "integer", "boolean", "null", "json_object", "json_schema",
        "auto", "none", "required", "any", "low", "medium", "high", "minimal", "xhigh", "wav", "mp3", "default", "flex",
        "priority", "approximate", "content", "prediction", "web_search", "5m", "1h", "24h", "in_memory",
    }
)  # fmt: skip
"""Values of the protocols' own; they stay under `_KEYS`."""
_KEYS = frozenset(
    {"role", "type", "detail", "format", "effort", "reasoning_effort", "verbosity", "tool_choice", "function_call",
     "service_tier", "ttl", "prompt_cache_retention"}
)  # fmt: skip
_IDENTIFIER = re.compile(r"[A-Za-z_$][\w$.-]{0,63}")
_KEPT_WORDS = frozenset(TAGS) | {"path", "title", "url", "id", "content", "name", "source", "query", "document"}
_DATES = [*calendar.month_name[1:], *calendar.month_abbr[1:], *calendar.day_name, *calendar.day_abbr, "am", "pm"]
_KEPT_WORDS |= {*_DATES, *(word.lower() for word in _DATES), "AM", "PM", "UTC", "GMT", "T", "Z"}
"""So a date is still known for one."""
_RUN = re.compile(r"[^\W\d]+|\d+")
_DATA = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.IGNORECASE)
_HEAD = 120
"""Characters of an image's data that stay: its size stands there, and nothing else."""
_DEEPEST = 200
_DIGITS, _LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz"
_SMALL = 1_000
"""Of so few numbers or words of one length each gets another of its own: digests of them would often be the same."""


def body(raw: bytes, key: bytes) -> bytes:
    """Return a chat request's body redacted. Raises ValueError where it is no JSON."""
    found = orjson.loads(raw)
    made = _Body(key, frozenset(_tools(found))).value(found, 0)
    if isinstance(made, dict) and isinstance(found.get("model"), str):
        made["model"] = found["model"]
    return orjson.dumps(made)


def _tools(found: object) -> Iterator[str]:
    if not isinstance(found, dict):
        return
    for tool in (*_list(found.get("tools")), *_list(found.get("functions"))):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str):
            yield name


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class _Body:
    key: bytes
    tools: frozenset[str]

    def value(self, value: object, depth: int, name: str = "") -> object:
        """Return a value of the body, which stood under `name`."""
        if depth > _DEEPEST:
            return None
        match value:
            case dict():
                return {self._name(each): self.value(inner, depth + 1, each) for each, inner in value.items()}
            case list():
                return [self.value(inner, depth + 1, name) for inner in value]
            case str() if (name in _KEYS and value in _KEPT) or (name == "name" and value in self.tools):
                return value
            case str():
                return text(value, self.key)
            case _:
                return value

    def _name(self, name: str) -> str:
        return name if _IDENTIFIER.fullmatch(name) else text(name, self.key)


def text(value: str, key: bytes) -> str:
    """Return a text of other words."""
    data = _DATA.match(value)
    if data is not None:
        kept = _HEAD if data.group()[:11].lower() == "data:image/" else data.end()
        return value[:kept] + "A" * max(0, len(value) - kept)
    return _RUN.sub(lambda found: _word(found.group(), key), value)


@functools.lru_cache(maxsize=65_536)
def _word(word: str, key: bytes) -> str:
    if word in _KEPT_WORDS:
        return word
    alphabet = _DIGITS if word[0].isdecimal() else _LETTERS
    plain = word.lower()
    if len(alphabet) ** len(word) <= _SMALL and all(letter in alphabet for letter in plain):
        place = functools.reduce(lambda so_far, letter: so_far * len(alphabet) + alphabet.index(letter), plain, 0)
        made = _spelled(_shuffled(alphabet, len(word), key)[place], alphabet, len(word))
    else:
        digest = hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=64, key=key).digest()
        made = "".join(alphabet[byte % len(alphabet)] for byte in (digest * (len(word) // 64 + 1))[: len(word)])
    return "".join(new.upper() if old.isupper() else new for old, new in zip(word, made, strict=True))


@functools.lru_cache(maxsize=64)
def _shuffled(alphabet: str, length: int, key: bytes) -> list[int]:
    """Return the numbers below the count of words of that length, in an order that the key says."""

    def rank(number: int) -> bytes:
        return hashlib.blake2b(b"%d %d %d" % (len(alphabet), length, number), digest_size=16, key=key).digest()

    return sorted(range(len(alphabet) ** length), key=rank)


def _spelled(number: int, alphabet: str, length: int) -> str:
    letters = ""
    for _ in range(length):
        number, place = divmod(number, len(alphabet))
        letters = alphabet[place] + letters
    return letters
