"""L1 → lines: what one is, what is told of it, and which blocks they form."""

import contextlib
from collections.abc import Callable

import orjson
import pytest

from proxy.core import lines
from proxy.core.lines import Block
from proxy.memo import Analyst
from tests.core.conftest import ANALYST

KEY = b"tenant"


def read(*contents: object, key: bytes = KEY, analyst: Analyst = ANALYST) -> tuple[lines.Line, ...]:
    raws = [orjson.dumps({"role": "system", "content": content}) for content in contents]
    return lines.read([analyst.analyse(raw) for raw in raws], key)


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        pytest.param(["a b\n\n  c  \r\nd"], ["a b", "c", "d"], id="blanks and ends of lines belong to none"),
        pytest.param(["a", "b\nc"], ["a", "b", "c"], id="of all leading messages"),
        pytest.param([[{"type": "text", "text": "a\nb"}, {"type": "text", "text": "c"}]], ["a", "b", "c"], id="parts"),
        pytest.param(["It is 10. " + "x" * 400 + ". Be kind!\nshort. one"],
                     ["It is 10.", "x" * 400 + ".", "Be kind!", "short. one"], id="sentences of a long line"),
        pytest.param([""], [], id="nothing"),
        pytest.param([" \n\n\t"], [], id="blanks"),
        pytest.param(["\n".join(map(str, range(lines.MOST_LINES + 1)))], [], id="a document is no prompt"),
    ],
)  # fmt: skip
def test_a_prompt_is_read_line_by_line(contents: list[object], found: list[str]) -> None:
    """Whatever its form."""
    assert [line.value for line in read(*contents)] == found


def test_a_digest_says_nothing_without_the_key() -> None:
    """The same line of two tenants has two digests, and one tenant's has one wherever it stands."""
    assert read("secret", key=b"one")[0].key != read("secret", key=b"two")[0].key
    assert read("secret")[0].key == read("a\nsecret\nb")[1].key


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Time: 2026-11-29 10:15:07", "Time: 2027-01-01 00:00:00", True),
        ("It is Sunday, 29 November.", "It is Monday, 30 November.", True),
        ("x-meta: build=9; nonce=a1b2;", "x-meta: build=9; nonce=c3d4;", True),
        ("Refund at most $100.", "Refund at most $50.", True),
        ("Mood: happy", "Mood: sad", False),
        ("Time: 10:15", "Date: 10:15", False),
    ],
)
def test_lines_are_compared_without_numbers_and_dates(one: str, other: str, same: bool) -> None:
    """So it is known whether the words of a line stayed."""
    words = [lines.words(line.key) for line in read(f"{one}\n{other}")]
    assert (words[0] == words[1]) is same


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<m>\na\n</m>", [Block(0, 2)]),
        ("<m>a</m>", [Block(0, 0)]),
        ("see <m>a</m>", [Block(0, 0)]),
        ("<m> a\nb </m>", [Block(0, 1)]),
        ("<a>\n<b>\n</b>\n</a>", [Block(1, 2), Block(0, 3)]),
        ("<a>\n<b>\n</a>", [Block(0, 2)]),
        ('<m at="10:15">\na\n</m>', [Block(0, 2)]),
        ("<br/>\na\n</br>", []),
        ("</m>\n<m>", []),
        ("```json\n{}\n```", [Block(0, 2)]),
        ("1 < 2\nand\n2 > 1", []),
    ],
)
def test_tags_and_fences_make_blocks(text: str, found: list[Block]) -> None:
    """Inner ones first; what is not closed is none."""
    assert list(lines.blocks(read(text))) == found


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<p>" * 20_000 + "</q>" * 20_000, id="tags that close nothing"),
        pytest.param("".join(f"<t{number}>" for number in range(30_000)), id="tags that are never closed"),
        pytest.param("<a " * 50_000, id="tags that never end"),
        pytest.param("x\n" * 500_000, id="lines without end"),
        pytest.param("x" * 1_000_000, id="one word"),
        pytest.param("a. " * 300_000, id="sentences without end"),
        pytest.param("1" * 1_000_000, id="one number"),
        pytest.param("a" + " " * 100_000 + "b" + "c" * 400, id="blanks without end"),
    ],
)
def test_odd_prompts_take_bounded_time(
    text: str, guard: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    """Nothing in a prompt's text makes looking at it slow."""
    found = read(text)
    with guard(5):
        for _ in range(3):
            lines.blocks(read(text))
    assert len(found) <= lines.MOST_LINES


@pytest.mark.parametrize(
    ("text", "whole"),
    [("", True), ("<a>\nx\n</a>", True), ("<a>x</a>", True), ("<a>\n<b>y</b>\n</a>\n<c>\n</c>", True), ("x", False),
     ("<a>\nx", False), ("</a>\n<a>", False), ("<a>\nx\n</a>\ny", False), ("see <a>x</a>", False)],
)  # fmt: skip
def test_whole_blocks_are_told_by_their_digests(text: str, whole: bool) -> None:
    """So also those that have gone are known to have been."""
    assert lines.whole(line.key for line in read(text)) is whole
