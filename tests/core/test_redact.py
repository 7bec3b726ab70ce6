"""Traffic without its words: nothing that people wrote is left, and what broke the prompt cache still is."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import redact
from proxy.memo import TokenScale
from tests.core.test_divergence import PLANTED, Make, body, find, grown

KEY = b"k" * 32


def redacted(sent: Any, key: bytes = KEY) -> Any:
    return orjson.loads(redact.body(orjson.dumps(sent), key))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_keeps_its_length_and_its_marks(text: str) -> None:
    """What is neither a letter nor a digit stays where it is; digits stay digits; the same text comes out the same."""
    made = redact.text(text, KEY)
    assert len(made) == len(text)
    assert made == redact.text(text, KEY)
    for old, new in zip(text, made, strict=True):
        if old.isascii() and old.isdecimal():
            assert new.isdecimal()
        elif old.isascii() and not old.isalpha():
            assert new == old
        elif not old.isascii():
            assert new.isascii()


@given(st.from_regex(r"[a-z]{6,20}", fullmatch=True))
def test_words_are_others_and_not_the_same_under_another_key(word: str) -> None:
    """Whoever has two captures cannot lay them side by side."""
    if word not in redact._KEPT_WORDS:
        assert redact.text(word, KEY) != redact.text(word, b"j" * 32)
        assert redact.text(word, KEY) != word


def test_short_numbers_and_words_are_never_made_the_same() -> None:
    """A clock that goes on by a minute still does."""
    digits, small = "0123456789", "abcdefghijklmnopqrstuvwxyz"
    for alphabet, length in ((digits, 1), (digits, 2), (digits, 3), (digits, 4), (small, 1), (small, 2)):
        words = ["".join(letters) for letters in itertools.product(alphabet, repeat=length)]
        made = {word: redact.text(word, KEY) for word in words if word not in redact._KEPT_WORDS}
        assert len(set(made.values())) == len(made)


def test_planted_breaks_are_found_where_they_were(make: Make, scale: TokenScale) -> None:
    """At the same layer and message each, and almost all by the same kind."""
    alike = 0
    for _, _, before, now in PLANTED:
        first, later = body(), grown(body())
        before(first)
        now(later)
        plain = find(first, later, make, scale)
        found = find(redacted(first), redacted(later), make, scale)
        assert plain
        assert found
        assert (found.layer, found.message) == (plain.layer, plain.message)
        alike += found.kind == plain.kind
    assert alike >= 0.9 * len(PLANTED)


def test_what_a_prompt_cache_needs_stays_and_what_people_wrote_does_not() -> None:
    """Roles, models, tools' names, keys and tags stay; a speaker's name, arguments and metadata do not."""
    sent = {
        "model": "gpt-5.1",
        "metadata": {"user_id": "margaret@example.org"},
        "tools": [{"type": "function", "function": {"name": "find_order", "description": "Finds orders."}}],
        "messages": [
            {"role": "user", "name": "Margaret", "content": '<document path="secret.md">A plan</document> data: mine'},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_Ab12", "type": "function", "function": {"name": "find_order", "arguments": '{"who": "A"}'}}
            ]},
        ],
        "temperature": 0.2,
        "stream": True,
    }  # fmt: skip
    made = redacted(sent)
    whole = orjson.dumps(made).decode()
    for word in ("argaret", "example", "Finds", "orders", "secret", "plan", "mine", "Ab12"):
        assert word not in whole
    assert made["model"] == "gpt-5.1"
    assert (made["temperature"], made["stream"]) == (0.2, True)
    assert made["tools"][0]["function"]["name"] == "find_order"
    assert [message["role"] for message in made["messages"]] == ["user", "assistant"]
    assert made["messages"][0]["content"].startswith('<document path="')
    assert made["messages"][0]["content"].split("</")[1].startswith("document>")


def test_no_place_keeps_what_people_wrote() -> None:
    """Nor does a key that is one of the protocol's elsewhere: metadata, arguments as objects, names, stop words."""
    secret = "Margaret loves the secret plan"
    sent = {
        "model": "gpt-5.1",
        "metadata": {"name": secret, "type": secret, "model": secret, "detail": secret},
        "user": secret,
        "max_tokens": 4_711,
        "stop": [secret],
        "logit_bias": {"1234": 5},
        "response_format": {"type": "json_schema", "json_schema": {"name": secret, "schema": {"enum": [secret]}}},
        "tools": [{"name": "find", "input_schema": {"type": "object", "description": secret}}],
        "messages": [
            {"role": "user", "name": secret, "content": [{"type": "text", "text": secret}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "name": "find", "input": {secret: secret, "name": secret, "ssn": 987654321}}
            ]},
        ],
    }  # fmt: skip
    made = redacted(sent)
    whole = orjson.dumps(made).decode()
    for word in (*secret.split(), "1234", "987654321"):
        if word not in {"the"}:
            assert word not in whole
    assert made["tools"][0]["name"] == made["messages"][1]["content"][0]["name"] == "find"
    assert made["response_format"]["type"] == "json_schema"
    assert made["max_tokens"] == 4_711
    assert made["tools"][0]["input_schema"]["type"] == "object"


def test_of_an_image_only_the_head_stays_and_of_other_data_nothing() -> None:
    """Its size stands in the head; a text that begins like data is a text."""
    picture = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4).decode()
    made = redact.text(picture, KEY)
    assert made[:120] == picture[:120]
    assert set(made[120:]) <= set("0123456789abcdef")
    assert made != redact.text(picture[:-4] + "AAAA", KEY)
    assert len(made) == len(picture)
    for told in (
        "data:text/plain;base64,c2VjcmV0",
        "data:image/svg+xml;base64, secret",
        "data:my+secret/x;base64,secret",
    ):
        made = redact.text(told, KEY)
        assert len(made) == len(told)
        assert "secret" not in made
        assert "c2Vj" not in made
    assert "secret" not in redact.text("data: my secret", KEY)


def test_marks_and_pictures_of_other_scripts_go_too() -> None:
    """Vowel signs, points and emoji are words to those who read them."""
    for told in ("मेरा नाम राजेश है", "שָׁלוֹם", "😀🏥", "你好，世界", "٣٤٥"):
        made = redact.text(told, KEY)
        assert made.replace(" ", "").isascii()
        assert len(made) == len(told)


def test_a_time_in_seconds_is_still_one() -> None:
    """Its first two digits stay."""
    assert redact.text("ts=1796012345", KEY).startswith("ts=17") or redact.text("1796012345", KEY)[:2] == "17"
    assert redact.text("1796012345", KEY) != "1796012345"


def test_a_body_of_any_depth_is_no_harm() -> None:
    """Nothing below two hundred levels is told."""
    deep: Any = "secret"
    for _ in range(230):
        deep = [deep]
    assert "secret" not in orjson.dumps(redacted({"messages": deep})).decode()
