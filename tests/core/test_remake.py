"""A message is made again from how it was made, the words that stand there now, and the items of the request."""

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import recipe, remake
from tests.core.conftest import read_body

WORDS = "several words that fill a note up to where it pays to refer to it " * 8
NAMES = ("a", "b", "c")
KEY = b"key"


def note(name: str) -> str:
    return f'<note_context>\n<path>{name}.md</path>\n{WORDS}{name} \\ "é" \U0001f600\n</note_context>'


spaces = st.text(" \n\t\u2003", max_size=5)
words = st.lists(st.text("abé'\"\\\U0001f600<>&", min_size=1, max_size=4), min_size=1, max_size=4)
between = st.builds(lambda before, said, inner, behind: (before, f"{inner or ' '}".join(said), behind), spaces, words,
                    st.sampled_from([" ", "\n", "  "]), spaces)  # fmt: skip


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """Return a text, what its client leaves of it, and the names of the items in it."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    held, bare, said = "", [], draw(st.integers(0, len(names)))
    for place, name in enumerate([*names, ""]):
        before, middle, behind = draw(between)
        if place == said or draw(st.booleans()):
            bare.append(middle)
            held += f"{before}\n{middle}\n{behind}"
        else:
            held += before
        held = f"{held}\n{note(name)}\n" if name else held
    return held, " ".join(bare), names


def spelled(messages: list[dict[str, Any]], *, ascii_only: bool) -> bytes:
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=ascii_only).encode()


def again(first: bytes, then: bytes) -> list[str]:
    """Return what the first message of `then` says with what it held in `first`, in the client's own spelling."""
    noted = recipe.log(read_body(first), (), (), KEY, goes_on=False)
    request = read_body(then)
    slot = remake.slots(request, recipe.log(request, noted.recipes, (), KEY, goes_on=False))[0]
    assert slot.raw is not None
    said = []
    for text in slot.message.texts:
        assert orjson.loads(slot.raw[text.start : text.end]) == text.value
        pieces, at = [], 0
        for block in text.blocks:
            assert block.item is not None
            raw = slot.spelled[block.item.sha256]
            assert raw in then
            pieces += [text.value[at : block.start], orjson.loads(b'"' + raw + b'"')]
            at = block.end
        said.append("".join([*pieces, text.value[at:]]))
    return said


ANSWER = {"role": "assistant", "content": "ok"}


@given(texts(), st.booleans(), st.booleans(), st.integers(0, 2))
def test_any_message_is_made_again(made: tuple[str, str, list[str]], escaped: bool, parts: bool, more: int) -> None:
    """To the character, whatever stands between items and words, and however the client spells it."""
    whole, bare, _ = made
    form: Any = [{"type": "text", "text": whole}] if parts else whole
    stripped: Any = [{"type": "text", "text": bare}] if parts else bare
    if parts:
        form = [{"type": "text", "text": note(name)} for name in NAMES[:more]] + form
    newest = {"role": "user", "content": "\n\n".join([*map(note, NAMES), "And now?"])}
    found = again(
        spelled([{"role": "user", "content": form}], ascii_only=False),
        spelled([{"role": "user", "content": stripped}, ANSWER, newest], ascii_only=escaped),
    )
    assert found == ([part["text"] for part in form] if parts else [whole])


@given(texts(), st.sampled_from(NAMES))
def test_an_item_that_is_nowhere_is_left_out(made: tuple[str, str, list[str]], gone: str) -> None:
    """And nothing else is; no other item takes its place."""
    whole, bare, names = made
    held = [name for name in NAMES if name != gone]
    newest = {"role": "user", "content": "\n\n".join([*map(note, held), "And now?"])}
    found = again(
        spelled([{"role": "user", "content": whole}], ascii_only=False),
        spelled([{"role": "user", "content": bare}, ANSWER, newest], ascii_only=True),
    )
    (text,) = found
    assert note(gone) not in text
    for name in held:
        assert text.count(note(name)) == names.count(name)
        assert all(not rest or rest[0].isspace() or rest[0] == "<" for rest in text.split(note(name))[1:])
    for name in NAMES:
        text, whole = text.replace(note(name), " "), whole.replace(note(name), " ")
    assert text.split() == whole.split()


def test_what_stands_in_front_of_an_item_that_is_nowhere_keeps_its_line() -> None:
    """A block directly in front of it still ends where a line ends."""
    first, second = NAMES[:2]
    newest = {"role": "user", "content": f"{note(first)}\n\nAnd now?"}
    found = again(
        spelled([{"role": "user", "content": f"{note(first)}{note(second)}\n\nWhy?"}], ascii_only=False),
        spelled([{"role": "user", "content": "Why?"}, ANSWER, newest], ascii_only=False),
    )
    assert found == [f"{note(first)}\n\nWhy?"]
