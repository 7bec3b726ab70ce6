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
_RUN = re.compile(r"[0-9]+|(?:[A-Za-z]|[^\x00-\x7f])+")
_DATA = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.IGNORECASE)
_PICTURE = re.compile(r"data:image/(?:png;base64,iVBORw0KGgo|jpe?g;base64,/9j/|gif;base64,R0lGOD|webp;base64,UklGR)")
_HEAD = 120
"""Characters of a picture's data that stay: its size stands there, and nothing else."""
_INTEGER = re.compile(r"(?<![\d.])(?<!e[+-])\d+")
"""The digits of a number before its point."""
_MOST_DIGITS = 18
_UNIX = re.compile(r"1[6-9]\d{8}(?:\d{3})?")
"""A time in seconds or milliseconds; its first two digits stay."""
_LONGEST_CACHED = 64
_DEEPEST = 200
_DIGITS, _LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz"
_ROUNDS = 8


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
            case int() | float() if depth > 1 and not isinstance(value, bool):
                return _number(value, self.key)
            case _:
                return value

    def _name(self, name: str) -> str:
        return name if _IDENTIFIER.fullmatch(name) else text(name, self.key)


def text(value: str, key: bytes) -> str:
    """Return a text of other words."""
    data = _DATA.match(value)
    if data is None:
        return _RUN.sub(lambda found: _word(found.group(), key), value)
    picture = _PICTURE.match(value) is not None
    head = value[:_HEAD] if picture else _RUN.sub(lambda found: _word(found.group(), key), data.group())
    # Other data stays other data.
    told = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=32, key=key).hexdigest()
    return (head + told * ((len(value) - len(head)) // len(told) + 1))[: len(value)]


def _number(value: float, key: bytes) -> float:
    made = orjson.loads(_INTEGER.sub(lambda found: _whole(found.group()[:_MOST_DIGITS], key), repr(value)))
    assert isinstance(made, int | float)
    return made


def _whole(digits: str, key: bytes) -> str:
    """Return another number of as many digits; none begins with a zero that did not before."""
    made = _made(digits, key)
    return made if len(made) == 1 or made[0] != "0" else "1" + made[1:]


def _word(word: str, key: bytes) -> str:
    if word in _KEPT_WORDS:
        return word
    if _UNIX.fullmatch(word):
        return word[:2] + _made(word[2:], key)
    made = _made(word.lower(), key) if len(word.lower()) == len(word) else _made(word, key)
    return "".join(new.upper() if old.isupper() else new for old, new in zip(word, made, strict=True))


def _made(word: str, key: bytes) -> str:
    return _cached(word, key) if len(word) <= _LONGEST_CACHED else _digested(word, key)


@functools.lru_cache(maxsize=65_536)
def _cached(word: str, key: bytes) -> str:
    """Return another word of the same length, for each word its own where it is of ASCII letters or digits."""
    alphabet = _DIGITS if word[0] in _DIGITS else _LETTERS
    if not all(letter in alphabet for letter in word):
        return _digested(word, key)
    if len(word) == 1:
        return _shuffled(alphabet, key)[alphabet.index(word)]
    # Format-preserving encryption by a balanced Feistel network, as NIST SP 800-38G has it (2016), on other functions.
    base, half = len(alphabet), len(word) // 2
    sizes = (half, len(word) - half)
    left, right = _read(word[:half], alphabet), _read(word[half:], alphabet)
    for turn in range(_ROUNDS):
        told = b"%d %d %d %d" % (base, len(word), turn, right)
        mixed = int.from_bytes(hashlib.blake2b(told, digest_size=56, key=key).digest())
        left, right = right, (left + mixed) % base ** sizes[turn % 2]
    return _spelled(left, alphabet, sizes[0]) + _spelled(right, alphabet, sizes[1])


def _digested(word: str, key: bytes) -> str:
    alphabet = _DIGITS if word[0] in _DIGITS else _LETTERS
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=64, key=key).digest()
    return "".join(alphabet[byte % len(alphabet)] for byte in (digest * (len(word) // 64 + 1))[: len(word)])


@functools.lru_cache(maxsize=64)
def _shuffled(alphabet: str, key: bytes) -> str:
    """Return an alphabet in an order that the key says."""

    def rank(letter: str) -> bytes:
        return hashlib.blake2b(letter.encode(), digest_size=16, key=key).digest()

    return "".join(sorted(alphabet, key=rank))


def _read(word: str, alphabet: str) -> int:
    return functools.reduce(lambda number, letter: number * len(alphabet) + alphabet.index(letter), word, 0)


def _spelled(number: int, alphabet: str, length: int) -> str:
    letters = ""
    for _ in range(length):
        number, place = divmod(number, len(alphabet))
        letters = alphabet[place] + letters
    return letters
