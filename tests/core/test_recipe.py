"""A message is made again from digests, counts and white space, and the items of the request at hand."""

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import recipe, render
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


def put_back(first: bytes, then: bytes) -> str | list[str]:
    """Return the first message of `then` with what it held in `first`."""
    noted = recipe.log(read_body(first), (), (), KEY, goes_on=False)
    request = read_body(then)
    log = recipe.log(request, noted.recipes, (), KEY, goes_on=False)
    found = render.put_back(request, log)
    content = orjson.loads(found.get(0, request.raw(0)))["content"]
    return content if isinstance(content, str) else [part["text"] for part in content]


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
    again = put_back(
        spelled([{"role": "user", "content": form}], ascii_only=False),
        spelled([{"role": "user", "content": stripped}, ANSWER, newest], ascii_only=escaped),
    )
    assert again == ([part["text"] for part in form] if parts else whole)


@given(texts(), st.sampled_from(NAMES))
def test_an_item_that_is_nowhere_is_left_out(made: tuple[str, str, list[str]], gone: str) -> None:
    """And nothing else is; no other item takes its place."""
    whole, bare, names = made
    held = [name for name in NAMES if name != gone]
    newest = {"role": "user", "content": "\n\n".join([*map(note, held), "And now?"])}
    again = put_back(
        spelled([{"role": "user", "content": whole}], ascii_only=False),
        spelled([{"role": "user", "content": bare}, ANSWER, newest], ascii_only=True),
    )
    text = str(again)
    assert note(gone) not in text
    for name in held:
        assert text.count(note(name)) == names.count(name)
    for name in NAMES:
        text, whole = text.replace(note(name), " "), whole.replace(note(name), " ")
    assert text.split() == whole.split()


def test_a_log_is_bounded() -> None:
    """After sixty-four turns it begins anew with the newest."""
    messages: list[dict[str, Any]] = []
    recipes: tuple[recipe.Recipe, ...] = ()
    lengths = []
    for turn in range(66):
        messages.append({"role": "user", "content": f"{note('a')}\n\nq{turn}"})
        recipes = recipe.log(read_body({"messages": messages}), recipes, (), KEY, goes_on=False).recipes
        lengths.append(len(recipes))
        messages.append(ANSWER)
    assert lengths == [*range(1, 65), 1, 2]


def test_nothing_of_the_words_is_noted() -> None:
    """White space, counts and keyed digests only."""
    request = read_body({"messages": [{"role": "user", "content": f"{note('a')}\n\nWhy is that so?"}]})
    (noted,) = recipe.log(request, (), (), KEY, goes_on=False).recipes
    assert noted.texts[0][1:] == (recipe.Words("\n\n", 4, ""),)
    assert noted.texts[0][0] != recipe.log(request, (), (), b"other", goes_on=False).recipes[0].texts[0][0]


def test_a_turn_that_goes_on_is_noted_once() -> None:
    """Its first request has noted it."""
    request = read_body({"messages": [{"role": "user", "content": f"{note('a')}\n\nWhy?"}, ANSWER]})
    assert recipe.log(request, (), (), KEY, goes_on=True).recipes == ()
