"""Bundled rank data of tiktoken's encodings: exact counts with no download, ever.

Files as OpenAI publishes them (tiktoken 0.14, `tiktoken_ext/openai_public.py`); their digests are checked on load.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
from pathlib import Path
from typing import Literal

import tiktoken

Name = Literal["o200k_base", "cl100k_base"]

_O200K = "|".join(
    (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_PATTERNS: dict[Name, str] = {"o200k_base": _O200K, "cl100k_base": _CL100K}
DIGESTS: dict[Name, str] = {
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}


@functools.cache
def load(name: Name) -> tiktoken.Encoding:
    """Return the encoding, without special tokens: in a prompt their literal text is text. About 0.5 s, once."""
    # Not tiktoken's own loader: that keeps a second copy of the file in a shared temporary folder.
    data = Path(__file__).with_name(f"{name}.tiktoken").read_bytes()
    if hashlib.sha256(data).hexdigest() != DIGESTS[name]:
        raise ValueError(f"{name}.tiktoken is not the published rank data; reinstall strata-proxy")
    pairs = (line.split() for line in io.BytesIO(data))
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    encoding = tiktoken.Encoding(name, pat_str=_PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
    # The encoder has copied them; this second copy is 26 MB for helpers nobody calls here.
    encoding._mergeable_ranks = {}
    return encoding
