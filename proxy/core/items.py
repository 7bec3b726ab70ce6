"""Text → context items: the outermost tagged blocks of a prompt's text, and who they are.

An item is `<note_context>…<path>a.md</path>…</note_context>`, `<document id="7">…</document>` and their like. A tool
output's block is recognised so that tags inside it stay plain text; it is no item.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["item", "web", "tool"]
Count = Callable[[str], int]

MINIMUM_TOKENS = 64
"""Below this a reference (about 12 tokens) is not worth the model's detour."""

TAGS: Mapping[str, Kind] = {
    # The context-engineering seed's own (an Obsidian copilot's).
    "note_context": "item", "active_note": "item", "embedded_note": "item", "embedded_pdf": "item",
    "selected_text": "item", "dataview_block": "item", "project_context": "item", "prior_context": "item",
    # What other clients send.
    "document": "item", "file": "item", "file_content": "item", "attachment": "item", "context": "item",
    "snippet": "item", "source": "item", "code_snippet": "item",
    # Web pages and retrieved chunks: anybody may have written them.
    "url_content": "web", "web_selected_text": "web", "web_page": "web", "webpage": "web",
    "youtube_video_context": "web", "search_result": "web", "retrieved_chunk": "web",
    "chunk": "web", "untrusted": "web",
    # Tool outputs belong to their turn.
    "localSearch": "tool", "webSearch": "tool", "readNote": "tool", "getFileTree": "tool", "getTagList": "tool",
    "tool_result": "tool", "tool_output": "tool", "tool_response": "tool",
}  # fmt: skip

_NAMES = ("path", "file_path", "filename", "url", "href", "src", "id", "name", "title", "source")
# Each begins where a word does and holds no run that another part could take: linear, whatever stands there.
_ATTRIBUTE = re.compile(r"""(?<![\w:.-])([A-Za-z_:][\w:.-]*)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_MARKUP = re.compile(r"<[^<>]*>")
_CHILD = re.compile(rf"<({'|'.join(_NAMES)}|start_line|end_line|query)>([^<>]{{1,1000}})</\1>")
_BLANK = re.compile(r"[^\S\n]*")
_HEAD = 2_000
"""Identity stands at a block's head; further in, the same tags are content."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The tag table in force, compiled once."""

    kinds: Mapping[str, Kind]
    opening: re.Pattern[str]

    @classmethod
    def of(cls, extra: Mapping[str, Kind] | Iterable[str] = ()) -> Tags:
        """Extend the built-in table; a bare name is an ordinary item."""
        added = dict(extra) if isinstance(extra, Mapping) else dict.fromkeys(extra, "item")
        kinds: dict[str, Kind] = {**TAGS, **added}  # type: ignore[dict-item]
        names = "|".join(re.escape(name) for name in sorted(kinds, key=lambda name: (-len(name), name)))
        return cls(kinds, re.compile(rf"<({names})((?:\s[^<>]*)?)>"))


BUILTIN = Tags.of()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One piece of context. `content` is the whole block, its tags included; `label` is how a reference names it.

    A block that names itself is `named`; of two others nobody can say that one is a version of the other. Where
    `partial`, `content` is an outline or a part, and `sha256` still that of the whole.
    """

    tag: str
    label: str
    named: bool
    sha256: bytes
    content: str
    trusted: bool
    promotable: bool
    referable: bool
    partial: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """What makes two items versions of one."""
        return self.tag, self.label if self.named else self.sha256.hex()


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block stands in a text; `item` is None for a tool output's block."""

    start: int
    end: int
    item: Item | None


def find(text: str, tags: Tags, count: Count) -> tuple[Block, ...]:
    """Return the outermost blocks of a text in order. Linear in the text, whatever stands in it.

    A block begins where a line or another block's end is, and ends where a line or another block begins: markup in the
    middle of somebody's code or sentence is no attachment.
    """
    blocks: list[Block] = []
    unclosed: set[str] = set()
    at, fresh = 0, True
    while opened := tags.opening.search(text, at):
        tag, attributes = opened.groups()
        before = text[at : opened.start()]
        line = before.rfind("\n") + 1
        if before[line:].strip() or not (fresh or line):
            at, fresh = opened.end(), False
            continue
        end = 0 if tag in unclosed or attributes.endswith("/") else _close(text, tag, opened.end())
        if not end:
            if not attributes.endswith("/"):
                unclosed.add(tag)
            at, fresh = opened.end(), False
            continue
        at, fresh = end, _closes_line(text, end, tags)
        if fresh:
            content, item = text[opened.start() : end], None
            if tags.kinds[tag] != "tool":
                item = make(tag, content, _name(attributes, content), count, tags, trusted=_trusts(attributes))
            blocks.append(Block(opened.start(), end, item))
    return tuple(blocks)


def _closes_line(text: str, end: int, tags: Tags) -> bool:
    blank = _BLANK.match(text, end)
    at = blank.end() if blank else end
    return text[at : at + 1] in {"", "\n"} or bool(tags.opening.match(text, at))


def make(tag: str, content: str, name: str, count: Count, tags: Tags, *, trusted: bool) -> Item:
    """Make an item of a whole block; `name` is empty where it names itself nowhere.

    Outside material is never trusted, whoever says so, and a tool's output is never promoted.
    """
    kind = tags.kinds.get(tag, "item")
    return Item(
        tag=tag,
        label=name or _excerpt(content),
        named=bool(name),
        sha256=hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest(),
        content=content,
        trusted=trusted and kind == "item",
        promotable=kind != "tool" and "data:image/" not in content,
        referable=_long_enough(content, count),
    )


def _name(attributes: str, content: str) -> str:
    """Return a block's identity: path, URL, id or title; with a line range or a query's digest where one is given.

    What its tag says of itself comes before what stands inside it.
    """
    inside: dict[str, str] = {}
    # Behind the opening tag: a block is not named by all that stands in it.
    for child, value in _CHILD.findall(content[content.find(">") + 1 :][:_HEAD]):
        inside.setdefault(child, value.strip())
    facts = inside | {key: one or other for key, one, other in _ATTRIBUTE.findall(attributes[:_HEAD])}
    own = {key for key, _, _ in _ATTRIBUTE.findall(attributes[:_HEAD])}
    name = next((facts[key] for key in (*(n for n in _NAMES if n in own), *_NAMES) if facts.get(key)), "")
    label = " ".join(name.split())[:300]
    if label and facts.get("start_line"):
        label += f" lines {facts['start_line']}-{facts.get('end_line', facts['start_line'])}"
    if label and facts.get("query"):
        label += f" query {hashlib.sha256(facts['query'].encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return label


def _trusts(attributes: str) -> bool:
    return all(key != "trust" or "untrusted" not in (one, other) for key, one, other in _ATTRIBUTE.findall(attributes))


def _excerpt(content: str) -> str:
    inner = _MARKUP.sub(" ", content[:_HEAD])
    return '"' + " ".join(inner.split())[:60].strip() + '…"'


def _long_enough(content: str, count: Count) -> bool:
    if len(content) < MINIMUM_TOKENS // 4:
        return False
    return len(content) > 16 * MINIMUM_TOKENS or count(content) >= MINIMUM_TOKENS


def _close(text: str, tag: str, at: int) -> int:
    """Return where the block opened before `at` ends, or 0; blocks of the same tag nest."""
    depth = 1
    for edge in _edges(tag).finditer(text, at):
        depth += -1 if edge.group(1) else 1
        if depth == 0:
            return edge.end()
    return 0


@functools.lru_cache(maxsize=256)
def _edges(tag: str) -> re.Pattern[str]:
    name = re.escape(tag)
    return re.compile(rf"(</{name}>)|<{name}(?:\s[^<>]*(?<!/))?>")
