"""What this process has found out about bytes it has seen: messages analysed once, tokens counted once. Bounded."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Generic, TypeVar

from typing_extensions import override

from proxy import ranks
from proxy.core import lines, message, prefix, tokens, tools
from proxy.core.items import Tags
from proxy.core.lines import Line
from proxy.core.measure import Scale
from proxy.core.media import UNKNOWN, Media
from proxy.core.message import Message
from proxy.core.models import Encoding
from proxy.core.prefix import Chunks
from proxy.core.tools import Toolset

T = TypeVar("T")


class Memo(Generic[T]):
    """Values by digest in two generations: what is asked for again lives on. Safe from several threads."""

    def __init__(self, *, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._young: dict[bytes, tuple[T, int]] = {}
        self._old: dict[bytes, tuple[T, int]] = {}
        self._size = 0

    def get(self, key: bytes) -> T | None:
        """Return a value, or None."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is None:
                return None
            self.put(key, *found)
        return found[0]

    def put(self, key: bytes, value: T, size: int) -> None:
        """Remember a value that takes about `size` bytes."""
        if self._size + size > self._half:
            self._old, self._young, self._size = self._young, {}, 0
        self._young[key] = (value, size)
        self._size += size


class Analyst:
    """Analyses messages, tools and system prompts, each distinct one once; remembers about `max_bytes` in all."""

    def __init__(self, tags: Tags, *, max_bytes: int) -> None:
        self.tags = tags
        self._memo: Memo[Message] = Memo(max_bytes=max_bytes // 2)
        self._chunks: Memo[Chunks] = Memo(max_bytes=max_bytes // 4)
        self._toolsets: Memo[Toolset] = Memo(max_bytes=max_bytes // 8)
        self._lines: Memo[tuple[Line, ...]] = Memo(max_bytes=max_bytes // 8)

    def analyse(self, raw: bytes) -> Message:
        """Return what a raw message is. Raises Odd."""
        return self.look(raw)[0]

    def look(self, raw: bytes) -> tuple[Message, bool]:
        """As `analyse`; and whether it was met for the first time."""
        digest = hashlib.sha256(raw).digest()
        found = self._memo.get(digest)
        if found is not None:
            return found, False
        found = message.analyse(raw, tags=self.tags, count=count)
        held = sum(len(text.value) + 400 * len(text.blocks) for text in found.texts)
        held += len(found.role) + sum(100 + len(call) for call in found.calls)
        self._memo.put(digest, found, 600 + 2 * held)
        return found, True

    def seen_tools(self, array: bytes) -> Toolset | None:
        """Return what a request's tools are, where they were met before."""
        return self._toolsets.get(hashlib.sha256(array).digest()) if array else tools.NONE

    def tools(self, array: bytes) -> Toolset:
        """Return what a request's tools are."""
        found = self.seen_tools(array)
        if found is None:
            found = tools.read(array)
            self._toolsets.put(hashlib.sha256(array).digest(), found, 2 * len(array) + 50 * len(found.keys))
        return found

    def lines(self, leading: Sequence[Message], key: bytes) -> tuple[Line, ...]:
        """Return the lines of leading system messages, known by this key."""
        digest = hashlib.blake2b(b"".join(message.digest for message in leading), digest_size=16, key=key).digest()
        found = self._lines.get(digest)
        if found is None:
            found = lines.read(leading, key)
            texts = sum(len(text.value) for message in leading for text in message.texts)
            self._lines.put(digest, found, 100 + 250 * len(found) + 2 * texts)
        return found

    def chunks(self, raw: bytes, digest: bytes) -> Chunks:
        """Return digests of a message's chunks."""
        found = self._chunks.get(digest)
        if found is None:
            found = prefix.chunks(raw)
            self._chunks.put(digest, found, 100 + len(found))
        return found

    def reader(self) -> Reader:
        """Return what analyses one request's messages."""
        return Reader(self)


class Reader:
    """Analyses the messages of one request; `unseen_bytes` is how much of them was met for the first time."""

    def __init__(self, analyst: Analyst) -> None:
        self._analyst = analyst
        self.unseen_bytes = 0

    def __call__(self, raw: bytes) -> Message:
        """Return what a raw message is. Raises Odd."""
        found, fresh = self._analyst.look(raw)
        self.unseen_bytes += len(raw) if fresh else 0
        return found


_MEDIA = (b'"image', b'"input_image', b'"input_audio', b'"file"', b'"input_file', b'"document"')
"""Types of the parts whose weight is a family's own."""


class TokenScale(Scale):
    """Counts with one encoding, each distinct text once; images and their like by one family's rules."""

    def __init__(self, encoding: Encoding, *, max_bytes: int, rules: Media = UNKNOWN) -> None:
        self._count = tokens.counter(ranks.load(encoding))
        self._rules = rules
        self._family = rules.family.encode()
        self._memo: Memo[int] = Memo(max_bytes=max_bytes)

    def of(self, rules: Media) -> TokenScale:
        """Return the scale of another family with the same tokenizer; what has been counted is known to both."""
        other = copy.copy(self)
        other._rules, other._family = rules, rules.family.encode()
        return other

    @override
    def message(self, raw: bytes, digest: bytes) -> int:
        # What has no media is known to all families; a message is searched for media when it is new, and never again.
        found = self._memo.get(digest)
        if found is None:
            found = self._memo.get(self._family + digest)
        if found is None:
            found = tokens.message(raw, self._count, self._rules)
            key = self._family + digest if any(mark in raw for mark in _MEDIA) else digest
            self._memo.put(key, found, 160)
        return found

    @override
    def text(self, text: str) -> int:
        if len(text) < 64:
            return self._count(text)
        key = b"t" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        found = self._memo.get(key)
        if found is None:
            found = self._count(text)
            self._memo.put(key, found, 160)
        return found

    @override
    def schema(self, raw: bytes) -> int:
        key = b"s" + hashlib.blake2b(raw, digest_size=16).digest()
        found = self._memo.get(key)
        if found is None:
            found = tokens.schema(raw, self._count)
            self._memo.put(key, found, 160)
        return found


def count(text: str) -> int:
    """Count with the common encoding, whatever the model: a decision that depends on it is the same everywhere."""
    return tokens.counter(ranks.load("o200k_base"))(text)
