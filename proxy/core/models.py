"""What is known of models: their tokenizer and their window. A table; unknown models get a guess that says so.

Windows as of 2026-11-29, from the vendors' model pages: (window, largest input where it is stated apart).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.core import media
from proxy.core.media import UNKNOWN, Media

Encoding = Literal["o200k_base", "cl100k_base"]

OTHER = "other"
MARGIN = 1.10
"""How much an inexact count may fall short of the truth before a limit computed from it is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`name` is a label from a closed set; windows are tokens, None where unknown."""

    name: str
    encoding: Encoding = "o200k_base"
    exact: bool = False
    window: int | None = None
    largest_input: int | None = None
    media: Media = UNKNOWN


def _gpt(name: str, window: int, largest_input: int | None = None, encoding: Encoding = "o200k_base") -> Model:
    return Model(name=name, encoding=encoding, exact=True, window=window, largest_input=largest_input)


def _open(name: str, window: int) -> Model:
    return Model(name=name, window=window)


_TABLE = (
    _gpt("gpt-3.5-turbo", 16_385, encoding="cl100k_base"),
    _gpt("gpt-4", 8_192, encoding="cl100k_base"),
    _gpt("gpt-4-32k", 32_768, encoding="cl100k_base"),
    _gpt("gpt-4-1106-preview", 128_000, encoding="cl100k_base"),
    _gpt("gpt-4-0125-preview", 128_000, encoding="cl100k_base"),
    _gpt("gpt-4-vision-preview", 128_000, encoding="cl100k_base"),
    _gpt("gpt-4-turbo", 128_000, encoding="cl100k_base"),
    _gpt("gpt-4o", 128_000),
    _gpt("gpt-4o-mini", 128_000),
    _gpt("gpt-4.1", 1_047_576),
    _gpt("gpt-4.1-mini", 1_047_576),
    _gpt("gpt-4.1-nano", 1_047_576),
    _gpt("o1", 200_000),
    _gpt("o3", 200_000),
    _gpt("o3-mini", 200_000),
    _gpt("o4-mini", 200_000),
    _gpt("gpt-5", 400_000, 272_000),
    _gpt("gpt-5-mini", 400_000, 272_000),
    _gpt("gpt-5-nano", 400_000, 272_000),
    _gpt("gpt-5.1", 400_000, 272_000),
    _gpt("gpt-5.2", 400_000, 272_000),
    _gpt("gpt-5.4", 1_050_000),
    _gpt("gpt-5.5", 1_050_000),
    _gpt("gpt-5.6", 1_050_000, 922_000),
    _gpt("gpt-6", 1_050_000, 922_000),
    _gpt("gpt-6.1", 1_050_000, 922_000),
    _open("gpt-oss-120b", 131_072),
    _open("gpt-oss-20b", 131_072),
    _open("claude-opus-5", 1_000_000),
    _open("claude-sonnet-5", 1_000_000),
    _open("claude-haiku-5", 1_000_000),
    _open("claude-opus-4-6", 1_000_000),
    _open("claude-opus-4-7", 1_000_000),
    _open("claude-opus-4-8", 1_000_000),
    _open("claude-sonnet-4-6", 1_000_000),
    _open("claude-sonnet-4-5", 200_000),
    _open("claude-haiku-4-5", 200_000),
    _open("gemini-2.5-pro", 1_048_576),
    _open("gemini-2.5-flash", 1_048_576),
    _open("gemini-3", 1_048_576),
    _open("deepseek-v4", 1_000_000),
    _open("grok-4.6", 500_000),
    _open("kimi-k3", 1_048_576),
    _open("mistral-large", 262_144),
)
KNOWN: Mapping[str, Model] = {model.name: dataclasses.replace(model, media=media.of(model.name)) for model in _TABLE}
_LONGEST_FIRST = sorted(KNOWN, key=len, reverse=True)
# A model newer than this table whose family's tokenizer is known; its window is not.
_FAMILIES = ("gpt-4o", "gpt-4.1", "gpt-5", "gpt-6", "o1", "o3", "o4", "chatgpt-4o")


LONGEST_NAME = 256
"""A longer name, in characters, is no model's that anything is known of."""


NO_WINDOWS: Mapping[str, int] = {}


_LONG = frozenset({"claude-sonnet-4-5"})
_LONG_BETA, _LONG_WINDOW = "context-1m", 1_000_000
"""What some models hold where the request's `anthropic-beta` header asks for it."""


def describe(model: str, windows: Mapping[str, int] = NO_WINDOWS, *, beta: str = "") -> Model:
    """Return what is known of a model by the name a request gives: `openai/gpt-4o-2024-11-20` is `gpt-4o`.

    `windows`, by name or by what stands behind the slash, come before the table's. `beta` is the request's
    `anthropic-beta` header.
    """
    found = _described(model if len(model) <= LONGEST_NAME else "")
    if found.name in _LONG and _LONG_BETA in beta:
        found = dataclasses.replace(found, window=_LONG_WINDOW)
    window = windows.get(model) or windows.get(model.rpartition("/")[2])
    return dataclasses.replace(found, window=window, largest_input=None) if window else found


@functools.lru_cache(maxsize=512)
def _described(model: str) -> Model:
    name = model.rpartition("/")[2].lower()
    for known in _LONGEST_FIRST:
        if name == known or name.startswith((f"{known}-", f"{known}@", f"{known}:")):
            found = KNOWN[known]
            return found if name == known else dataclasses.replace(found, media=media.of(name))
    return Model(name=OTHER, exact=name.startswith(_FAMILIES), media=media.of(name))
