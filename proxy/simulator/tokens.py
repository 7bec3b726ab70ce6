"""Text to token ids with the vocabularies bundled next to this package; never touches the network."""

import base64
from array import array
from collections import OrderedDict
from functools import cache
from pathlib import Path
from threading import Lock

import tiktoken

_RANKS = Path(__file__).parent.parent / "ranks"

# The patterns of tiktoken_ext.openai_public, whose own constructors would download the ranks.
PATTERNS = {
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k_base": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
_OLD_MODELS = ("gpt-4-", "gpt-3.5", "text-embedding")

PIECE_CHARS = 400_000
"""Longest text handed to tiktoken at once: it panics on a run of 1,000,000 spaces."""
MEMO_CHARS = 32_000_000
"""Total length of the recent texts that are remembered."""


def encoding_name(model: str) -> str:
    """Name the vocabulary of an OpenAI model; the current one for every model not known to be old."""
    return "cl100k_base" if model == "gpt-4" or model.startswith(_OLD_MODELS) else "o200k_base"


class Tokenizer:
    """One vocabulary with a memory of recent texts, bounded by their total length."""

    __slots__ = ("_encoding", "_limit_chars", "_lock", "_memo", "_memo_chars")

    def __init__(self, name: str, *, memo_chars: int = MEMO_CHARS) -> None:
        self._limit_chars = memo_chars
        self._lock = Lock()  # servers in several threads share a vocabulary
        self._encoding = _encoding(name)
        self._memo: OrderedDict[str, array[int]] = OrderedDict()
        self._memo_chars = 0

    def encode(self, text: str) -> "array[int]":
        """Token ids of a text; special tokens are read as plain text, lone surrogates as ``?``.

        The array belongs to the memory: read it, do not change it.
        """
        with self._lock:
            known = self._memo.get(text)
            if known is not None:
                self._memo.move_to_end(text)
                return known
        ids = array("I")
        clean = text.encode("utf-8", "replace").decode()
        for start in range(0, len(clean), PIECE_CHARS):
            ids.extend(self._encoding.encode_ordinary(clean[start : start + PIECE_CHARS]))
        with self._lock:
            self._remember(text, ids)
        return ids

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode(text))

    def _remember(self, text: str, ids: "array[int]") -> None:
        if text not in self._memo:
            self._memo_chars += len(text)
        self._memo[text] = ids
        while self._memo_chars > self._limit_chars:
            oldest, _ = self._memo.popitem(last=False)
            self._memo_chars -= len(oldest)


@cache
def tokenizer(model: str) -> Tokenizer:
    """Tokenizer of a model's vocabulary, shared by all models of the same vocabulary."""
    return _tokenizer(encoding_name(model))


@cache
def _tokenizer(name: str) -> Tokenizer:
    return Tokenizer(name)


@cache
def _encoding(name: str) -> tiktoken.Encoding:
    ranks = {}
    for line in (_RANKS / f"{name}.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
