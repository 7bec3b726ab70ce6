"""How a message was made is noted in digests, counts and white space."""

from typing import Any

from proxy.core import recipe
from tests.core.conftest import read_body

KEY, ANSWER = b"key", {"role": "assistant", "content": "ok"}
NOTE = "<note_context>\n<path>a.md</path>\n" + "several words that fill a note " * 20 + "\n</note_context>"


def test_a_log_is_bounded() -> None:
    """After sixty-four turns it begins anew with the newest."""
    messages: list[dict[str, Any]] = []
    recipes: tuple[recipe.Recipe, ...] = ()
    lengths = []
    for turn in range(66):
        messages.append({"role": "user", "content": f"{NOTE}\n\nq{turn}"})
        recipes = recipe.log(read_body({"messages": messages}), recipes, (), KEY, goes_on=False).recipes
        lengths.append(len(recipes))
        messages.append(ANSWER)
    assert lengths == [*range(1, 65), 1, 2]


def test_nothing_of_the_words_is_noted() -> None:
    """White space, counts and keyed digests only."""
    request = read_body({"messages": [{"role": "user", "content": f"{NOTE}\n\nWhy is that so?"}]})
    (noted,) = recipe.log(request, (), (), KEY, goes_on=False).recipes
    assert noted.texts[0][1:] == (recipe.Words("\n\n", 4, ""),)
    assert noted.texts[0][0] != recipe.log(request, (), (), b"other", goes_on=False).recipes[0].texts[0][0]


def test_a_turn_that_goes_on_is_noted_once() -> None:
    """Its first request has noted it."""
    request = read_body({"messages": [{"role": "user", "content": f"{NOTE}\n\nWhy?"}, ANSWER]})
    assert recipe.log(request, (), (), KEY, goes_on=True).recipes == ()
