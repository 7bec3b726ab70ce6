"""The rungs of the ladder for single texts: head and tail, outlines, packed context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import shorten
from proxy.core.items import BUILTIN, Item, find
from proxy.core.message import analyse
from proxy.core.shorten import HEAD, LONG, PACKED, TAIL

LINES = "\n".join(f"line {number} of what the tool said" for number in range(400))


def of(message: dict[str, object]) -> dict[str, object]:
    raw = orjson.dumps(message)
    found: dict[str, object] = orjson.loads(shorten.message(raw, analyse(raw, tags=BUILTIN, count=len)))
    return found


def item(content: str, path: str = "a.md", tag: str = "note_context") -> Item:
    block = find(f"<{tag}>\n<path>{path}</path>\n{content}\n</{tag}>", BUILTIN, len)[0].item
    assert block is not None
    return block


def test_a_long_text_keeps_head_and_tail() -> None:
    """Whole lines, and in numbers what stood between."""
    short = shorten.text(LINES)
    head, _, rest = short.partition("[… ")
    told, _, tail = rest.partition(" left out …]\n")
    assert LINES.startswith(head)
    assert LINES.endswith(tail)
    assert head.endswith("\n")
    left_out = LINES[len(head) : len(LINES) - len(tail)]
    assert told == f"{len(left_out)} characters in {left_out.count(chr(10))} lines"
    assert HEAD // 2 <= len(head) <= HEAD
    assert TAIL // 2 <= len(tail) <= TAIL


@given(st.text(max_size=200).flatmap(lambda piece: st.integers(0, 100).map(lambda times: piece * times)))
def test_shortening_shortens_and_does_so_once(whole: str) -> None:
    """What is short stays as it is; what was shortened is short."""
    short = shorten.text(whole)
    assert len(short) <= max(LONG, len(whole))
    assert (short == whole) == (len(whole) <= LONG)
    assert shorten.text(short) == short


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "c", "content": "short"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": LINES}}],
        },
        {"role": "assistant", "content": LINES, "thinking_blocks": [{"type": "thinking", "signature": "s"}]},
        {"role": "tool", "content": [{"type": "text", "text": LINES, "cache_control": {"type": "ephemeral"}}]},
        {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "data:," + "A" * 5_000}}]},
    ],
    ids=["short", "calls", "signed", "marked", "an image"],
)
def test_what_is_not_to_be_shortened_is_the_very_bytes(message: dict[str, object]) -> None:
    """Calls, signed reasoning, a client's own cache marks, media."""
    raw = orjson.dumps(message)
    assert shorten.message(raw, analyse(raw, tags=BUILTIN, count=len)) is raw


@pytest.mark.parametrize("parts", [False, True])
def test_only_long_texts_change(parts: bool) -> None:
    """In string or parts; ids, names and short parts stay as they are."""
    content: object = [{"type": "text", "text": "first"}, {"type": "text", "text": LINES}] if parts else LINES
    short = of({"role": "tool", "tool_call_id": "call-1", "content": content, "x": [1, 2.50]})
    expected = [{"type": "text", "text": "first"}, {"type": "text", "text": shorten.text(LINES)}]
    wanted = expected if parts else shorten.text(LINES)
    assert short == {"role": "tool", "tool_call_id": "call-1", "content": wanted, "x": [1, 2.5]}


def test_an_outline_holds_headings_and_the_first_words_of_each_section() -> None:
    """In a frame that names the item and its type."""
    prose = "One sentence here. " * 100
    whole = item(f"# Plan\n{prose}\n## Steps\n{prose}\n## Short\nDone.")
    outline = shorten.outlined(whole)
    assert outline.content.startswith('<prior_context source="a.md" type="note_context">\n')
    assert outline.content.endswith("\n</prior_context>")
    assert [line for line in outline.content.split("\n") if line.startswith("#")] == ["# Plan", "## Steps", "## Short"]
    assert "Done." in outline.content
    assert outline.content.count("here. …") == 2
    assert len(outline.content) < 1_300
    assert (outline.partial, outline.sha256, outline.key) == (True, whole.sha256, whole.key)


@pytest.mark.parametrize("content", ["short", "\n# A\nword " * 300, "word " * 150])
def test_an_outline_that_saves_little_is_none(content: str) -> None:
    """The item stays whole."""
    whole = item(content)
    assert shorten.outlined(whole) is whole


def test_an_outline_is_outlined_no_further() -> None:
    """It is what it is."""
    outline = shorten.outlined(item("word " * 2_000))
    assert shorten.outlined(outline) is outline


def test_doubles_go_and_the_longer_stays() -> None:
    """Of chunks that overlap in more than 85 % of their words; others stay in their order."""
    sentences = [f"Sentence number {number} says something of its own." for number in range(60)]
    long, double, other = " ".join(sentences), " ".join(sentences[2:]), "Nothing of this stands anywhere else. " * 40
    packed = shorten.packed([item(double, "b"), item(long, "a"), item(other, "c")])
    assert [each.label for each in packed] == ["a", "c"]


def test_doubles_are_looked_for_among_very_many(
    guard: Callable[[int], contextlib.AbstractContextManager[None]],
) -> None:
    """What a request may bring costs about its length, also where all say the same in part."""
    same = " ".join(f"same{word}" for word in range(20))
    context = [item(f"{number}.md", f"{same} " + " ".join(f"w{number}x{word}" for word in range(20)))
               for number in range(8_000)]  # fmt: skip
    with guard(20):
        assert len(shorten.packed([*context, *context])) == 8_000


def test_a_long_item_is_cut_at_a_sentence_and_says_so() -> None:
    """And is headed by its name and chunk; its frame stays whole."""
    packed = shorten.packed([item("This is a sentence. " * 400, "a.md"), item("Other words are these. " * 400, "a.md")])
    assert [each.content.split("\n")[1] for each in packed] == ["[a.md:1]", "[a.md:2]"]
    for each in packed:
        assert each.content.endswith((". [truncated]\n</note_context>", "these. [truncated]\n</note_context>"))
        assert len(each.content) < PACKED + 100
        assert each.partial


@given(
    lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=6),
    room=st.integers(-500, 20_000),
    more=st.integers(0, 5_000),
)
def test_items_share_the_room_there_is(lengths: list[int], room: int, more: int) -> None:
    """More room lets none keep less; they hold the room or are at the least that is kept; what fits stays whole."""

    def weigh(text: str) -> int:
        return len(text) // 4

    context = [item(f"{number} " * (length // 2 + 1), f"{number}.md") for number, length in enumerate(lengths)]
    most = shorten.share(context, room, weigh)
    assert shorten.PACKED <= most <= shorten.share(context, room + more, weigh)
    whole = sum(weigh(each.content) for each in context)
    assert most >= max(len(each.content) for each in context) or whole > room
    packed = shorten.packed(context, most)
    assert most == shorten.PACKED or sum(weigh(each.content) for each in packed) <= room
    assert all(one == other for one, other in zip(context, packed, strict=True) if len(one.content) <= most)


def test_short_items_are_packed_as_they_are() -> None:
    """A name in front of what is not cut would only make it longer."""
    short = item("A few words. " * 8)
    assert shorten.packed([short, short]) == (short,)
