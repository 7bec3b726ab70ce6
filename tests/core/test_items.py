"""Text → context items."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.items import TAGS, Block, Item, Tags, find, make
from proxy.memo import count

TABLE = Tags.of()
LONG = "word " * 80


def items(text: str) -> list[Item]:
    return [block.item for block in find(text, TABLE, count) if block.item]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        pytest.param("no tags at all", [], id="plain"),
        pytest.param("<note_context>a</note_context>", ["<note_context>a</note_context>"], id="one"),
        pytest.param("x\n<file>a</file>\ny\n<file>b</file>", ["<file>a</file>", "<file>b</file>"], id="two"),
        pytest.param('<file name="a>b">c</file>', ['<file name="a>b">c</file>'], id="an angle bracket inside"),
        pytest.param("<file>a <file>b</file> c</file>", ["<file>a <file>b</file> c</file>"], id="nested, same tag"),
        pytest.param("<file>a<context>b</context></file>", ["<file>a<context>b</context></file>"], id="outermost only"),
        pytest.param("<file>a\n<context>b</context>", ["<context>b</context>"], id="an unclosed one is text"),
        pytest.param('<file path="x"/>\n<file>a</file>', ["<file>a</file>"], id="self-closing is text"),
        pytest.param('<file>a <file path="x"/> b</file>', ['<file>a <file path="x"/> b</file>'], id="closes itself"),
        pytest.param("<files>a</files>", [], id="only whole names"),
        pytest.param("<context_library>a</context_library>", [], id="a longer name"),
        pytest.param("</file>\n<file>a</file>", ["<file>a</file>"], id="a stray close"),
        pytest.param("<FILE>a</FILE>", [], id="case matters"),
        pytest.param("<file>a</file >", [], id="the close is spelled plainly"),
        pytest.param(" \t<file>a</file> \nx", ["<file>a</file>"], id="blanks around it"),
        pytest.param("<file>a</file><file>b</file>", ["<file>a</file>", "<file>b</file>"], id="one behind another"),
        pytest.param("<file>a</file> <file>b</file>", ["<file>a</file>", "<file>b</file>"], id="a blank between them"),
        pytest.param("What does <file>a</file> mean?", [], id="in the middle of a sentence"),
        pytest.param("Why? <file>a</file>", [], id="behind words"),
        pytest.param("<file>a</file> Why?", [], id="in front of words"),
        pytest.param("x = '<file>a</file>'\n<file>b</file>", ["<file>b</file>"], id="in code"),
        pytest.param("<file>a</file> is what\n<file>b</file>", ["<file>b</file>"], id="a block behind a sentence"),
    ],
)
def test_blocks_are_the_outermost_closed_tags(text: str, blocks: list[str]) -> None:
    """Only a whole, outermost block of a known tag is found."""
    found = find(text, TABLE, count)
    assert [text[block.start : block.end] for block in found] == blocks


@pytest.mark.parametrize("tag", sorted(TAGS))
def test_every_tag_of_the_table_is_recognised(tag: str) -> None:
    """A tool output's block is found but is no item; a web page's is not trusted."""
    (block,) = find(f"a\n<{tag}>x</{tag}>\nb", TABLE, count)
    if TAGS[tag] == "tool":
        assert block.item is None
    else:
        assert block.item is not None
        assert block.item.trusted is (TAGS[tag] == "item")


def test_tags_inside_a_tool_output_are_plain_text() -> None:
    """A note quoted by a tool is not an item."""
    (block,) = find("<webSearch><file>a</file></webSearch>", TABLE, count)
    assert block == Block(0, 37, None)


@pytest.mark.parametrize(
    ("block", "label"),
    [
        pytest.param("<note_context><title>T</title><path>a/b.md</path></note_context>", "a/b.md", id="a path child"),
        pytest.param('<document id="7">x</document>', "7", id="an attribute"),
        pytest.param("<document id='7'>x</document>", "7", id="in single quotes"),
        pytest.param('<url_content url="https://a.b/c?d=1">x</url_content>', "https://a.b/c?d=1", id="a URL"),
        pytest.param("<url_content><url>https://a.b</url></url_content>", "https://a.b", id="a URL child"),
        pytest.param('<file path=" a \n b ">x</file>', "a b", id="white space"),
        pytest.param('<file path="">x <name>n</name></file>', "n", id="an empty attribute"),
        pytest.param(
            "<selected_text><path>a.md</path><start_line>3</start_line><end_line>9</end_line></selected_text>",
            "a.md lines 3-9",
            id="a line range",
        ),
        pytest.param('<snippet path="a" start_line="3">x</snippet>', "a lines 3-3", id="one line"),
        pytest.param(
            "<dataview_block><path>a.md</path><query>TABLE x</query></dataview_block>",
            "a.md query bb3eacc5",
            id="a query's digest",
        ),
    ],
)
def test_an_item_is_named_by_what_identifies_it(block: str, label: str) -> None:
    """Path, URL or id, with the line range or the query's digest where one is given."""
    (item,) = items(block)
    assert item.label == label


def test_two_queries_of_one_note_are_two_items() -> None:
    """The query belongs to the identity of a dataview block."""
    one, two = (
        items(f"<dataview_block><path>a.md</path><query>{query}</query></dataview_block>")[0] for query in ("A", "B")
    )
    assert one.key != two.key


def test_attributes_say_who_a_block_is_before_its_content_does() -> None:
    """A file's own `<id>` inside it does not take over the name that the client gave."""
    one, two = items('<file name="a/pom.xml"><id>central</id>1</file><file name="b/pom.xml"><id>central</id>2</file>')
    assert (one.label, two.label) == ("a/pom.xml", "b/pom.xml")


def test_unnamed_blocks_are_told_apart_by_their_content() -> None:
    """Two blocks without a name that begin alike are two items, not two versions of one."""
    same = "The same first sentence of every chunk, longer than any label would be. "
    one, two = items(f"<document>{same}1</document><document>{same}2</document>")
    again = items(f"x\n<document>{same}1</document>")[0]
    assert one.key != two.key
    assert one.key == again.key


def test_identity_stands_at_the_head_of_a_block() -> None:
    """A tag far inside is content."""
    (item,) = items("<file>" + LONG * 10 + "<path>far.md</path></file>")
    assert "far.md" not in item.label


@pytest.mark.parametrize(
    ("content", "referable"),
    [
        pytest.param("<file>x</file>", False, id="a few characters"),
        pytest.param("<file>a few words only</file>", False, id="a few words"),
        pytest.param("<file>" + "word " * 80 + "</file>", True, id="80 words"),
        pytest.param("<file>" + "word " * 2_000 + "</file>", True, id="long"),
        pytest.param("<file>" + "日本語の文章" * 40 + "</file>", True, id="few characters, many tokens"),
    ],
)
def test_short_blocks_are_left_alone(content: str, referable: bool) -> None:
    """Below 64 tokens a reference is not worth it."""
    assert items(content)[0].referable is referable


@pytest.mark.parametrize(
    ("block", "trusted", "promotable"),
    [
        pytest.param("<file>x</file>", True, True, id="a file"),
        pytest.param('<file trust="untrusted">x</file>', False, True, id="marked by the client"),
        pytest.param("<untrusted>x</untrusted>", False, True, id="a frame"),
        pytest.param('<url_content trust="trusted">x</url_content>', False, True, id="a web page stays untrusted"),
        pytest.param("<untrusted><file>x</file></untrusted>", False, True, id="a file in an untrusted frame"),
        pytest.param("<file>![](data:image/png;base64,AA)</file>", True, False, id="an image"),
    ],
)
def test_trust_and_promotion(block: str, trusted: bool, promotable: bool) -> None:
    """Trust comes from the tag and can only be taken away; what carries an image is never promoted."""
    (item,) = items(block)
    assert (item.trusted, item.promotable) == (trusted, promotable)


def test_the_table_can_be_extended() -> None:
    """A bare name is an ordinary item; a mapping says the kind; the built-in table stays."""
    assert find("<wiki>x</wiki>", Tags.of(["wiki"]), count)[0].item is not None
    assert find("<wiki>x</wiki>", Tags.of({"wiki": "tool"}), count)[0].item is None
    assert find("<a.b>x</a.b><file>y</file>", Tags.of(["a.b"]), count)[1].item is not None
    assert not find("<aXb>x</aXb>", Tags.of(["a.b"]), count)


def test_versions_share_a_key_and_differ_in_digest() -> None:
    """The same path and tag with other content is another version of the same item."""
    one, two = items('<file path="a">1</file><file path="a">2</file>')
    other = items('<document path="a">1</document>')[0]
    assert one.key == two.key != other.key
    assert one.sha256 != two.sha256


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["<file>", "</file>", '<file path="a">', "<context>", "</context>", "<file ", ">", "x", "\n"])
    )
)
def test_blocks_stand_in_order_and_apart(pieces: list[str]) -> None:
    """Whatever the text, blocks do not overlap, and each begins and ends with its own tag."""
    text, at = "".join(pieces), 0
    for block in find(text, TABLE, count):
        assert at <= block.start < block.end <= len(text)
        content = text[block.start : block.end]
        assert content.startswith(("<file", "<context"))
        assert content.endswith("</file>" if content.startswith("<file") else "</context>")
        at = block.end


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<file>" * 100_000, id="openings without a close"),
        pytest.param("<file " * 100_000, id="openings that never end"),
        pytest.param("<file" + " " * 200_000, id="blanks behind a tag's name"),
        pytest.param("<file " + "a" * 200_000 + ">x</file>", id="a long word for an attribute"),
        pytest.param("<file " + "a=" * 100_000 + ">x</file>", id="attributes without a value"),
        pytest.param("<file><path>" + " " * 1_900 + "</file>" + "<file><path>" + " " * 1_900 + "</file>", id="blanks"),
        pytest.param("<file><path>" + " x" * 900 + "</file>" * 100_000, id="closes without an opening"),
        pytest.param("<file>x</file>" * 20_000, id="very many blocks"),
        pytest.param("x " + "<file>" * 300_000, id="openings in the middle of a line"),
        pytest.param("<file>x</file> x" * 100_000, id="closes in the middle of a line"),
    ],
)
def test_no_text_makes_the_search_slow(
    text: str, guard: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    """The search is linear: what would take minutes otherwise is done at once."""
    with guard(4):
        found = find(text, TABLE, lambda text: len(text))
    assert len(found) <= 20_000


@pytest.mark.parametrize(
    ("tag", "asked", "trusted", "promotable"),
    [
        pytest.param("file", True, True, True, id="an item"),
        pytest.param("file", False, False, True, id="an untrusted one"),
        pytest.param("url_content", True, False, True, id="a web page"),
        pytest.param("webSearch", True, False, False, id="a tool's output"),
        pytest.param("anything", True, True, True, id="a tag of the client's own"),
    ],
)
def test_make_keeps_the_whole_block(tag: str, asked: bool, trusted: bool, promotable: bool) -> None:
    """The content is the block with its tags, so that it can stand elsewhere; its tag says what it may become."""
    item = make(tag, f"<{tag}>x</{tag}>", "a", count, TABLE, trusted=asked)
    assert (item.content, item.key) == (f"<{tag}>x</{tag}>", (tag, "a"))
    assert (item.trusted, item.promotable) == (trusted, promotable)


def test_a_block_without_a_name_is_called_by_its_first_words() -> None:
    """And is no version of another, whatever stands in it."""
    item = make("file", "<file>\n<b>Some words</b> of it</file>", "", count, TABLE, trusted=True)
    assert (item.label, item.named) == ('"Some words of it…"', False)
