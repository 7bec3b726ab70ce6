"""Counting what is sent."""

import base64
import contextlib
import hashlib
import struct
from collections.abc import Callable
from itertools import pairwise

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import ranks
from proxy.core import media, tokens
from proxy.core.tokens import counter, message, pieces, schema
from proxy.simulator.prompt import render
from proxy.simulator.tokens import tokenizer

ENCODINGS = ["o200k_base", "cl100k_base"]
COUNT = counter(ranks.load("o200k_base"))
LINES = [
    "A plain sentence of English words, with commas.\n", "    indented = code(1, 'x')  # comment\n", "\n", "\r\n",
    "日本語の文章。\n", "Überraschend schön: Ähre\n", "1234567890 3.14159 0x7f\n", "/path/to/file\n", "  \n\t\n",
    "😀 👩‍👩‍👧 e\u0301\n", "don't we'll I'M\n", "<|endoftext|>\n", "no newline ",
    "²③Ⅷ\n", "\u00a0\u2003x\n", "***\n---\n",
]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=40), times=st.integers(20, 120))
@pytest.mark.parametrize("name", ENCODINGS)
def test_long_texts_count_exactly(name: ranks.Name, lines: list[str], times: int) -> None:
    """A text fed in pieces has as many tokens as tiktoken finds in it whole."""
    text = "".join(lines) * times
    assert counter(ranks.load(name))(text) == len(ranks.load(name).encode_ordinary(text))


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=40), times=st.integers(1, 300))
def test_pieces_are_the_text(lines: list[str], times: int) -> None:
    """Nothing is lost between them, and each ends in front of a letter or digit behind a newline, if it is not long."""
    text = "".join(lines) * times
    found = list(pieces(text))
    assert "".join(found) == text
    for piece, following in pairwise(found):
        assert len(piece) <= 16_384 + 65_536
        assert len(piece) == 65_536 or not following or (piece[-1] == "\n" and following[0].isalnum())


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a" * 1_200_000, id="equal letters"),
        pytest.param(" " * 1_200_000, id="blanks"),
        pytest.param("\n" * 1_200_000, id="newlines"),
        pytest.param("😀" * 300_000, id="emoji"),
        pytest.param("=" * 1_200_000, id="a ruler"),
        pytest.param("ab1 " * 300_000, id="one long line"),
    ],
)
def test_no_run_breaks_the_encoder(
    name: ranks.Name, text: str, guard: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    """More than a million equal characters neither panic nor take minutes."""
    with guard(60):
        assert 0 < counter(ranks.load(name))(text) <= len(text.encode())


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|im_start|>system", "<|fim_prefix|>", "<|endofprompt|>"])
def test_special_tokens_are_text(special: str) -> None:
    """Their literal spelling in a prompt is several ordinary tokens."""
    assert COUNT(special) > 3
    assert COUNT("x " + special) > COUNT(special)


def test_a_published_example_counts_as_published() -> None:
    """The cookbook's example: 124 tokens for gpt-4o, 129 for gpt-4."""
    help_ = "You are a helpful, pattern-following assistant that translates corporate jargon into plain English."
    late = "This late pivot means we don't have time to boil the ocean for the client deliverable."
    talk = [
        {"role": "system", "content": help_},
        {"role": "system", "name": "example_user", "content": "New synergies will help drive top-line growth."},
        {
            "role": "system",
            "name": "example_assistant",
            "content": "Things working well together will increase revenue.",
        },
        {
            "role": "system",
            "name": "example_user",
            "content": "Let's circle back when we have more bandwidth to touch base on opportunities for increased "
            "leverage.",
        },
        {
            "role": "system",
            "name": "example_assistant",
            "content": "Let's talk later when we're less busy about how to do better.",
        },
        {"role": "user", "content": late},
    ]
    for name, published in (("o200k_base", 124), ("cl100k_base", 129)):
        count = counter(ranks.load(name))
        assert tokens.PRIMING + sum(message(orjson.dumps(said), count) for said in talk) == published


@settings(deadline=None)
@given(
    talk=st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "developer", "user", "assistant"]),
                "content": st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
                | st.lists(
                    st.fixed_dictionaries({"type": st.just("text"), "text": st.text("ab \n", max_size=9)}), min_size=1
                ),
            },
            optional={"name": st.sampled_from(["ann", "example_user"])},
        ),
        min_size=1,
        max_size=6,
    )
)
@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4"])
def test_plain_chats_count_as_the_provider_counts_them(model: str, talk: list[dict[str, object]]) -> None:
    """The simulated provider counts on its own, and comes to the same number."""
    count = counter(ranks.load("cl100k_base" if model == "gpt-4" else "o200k_base"))
    mine = tokens.PRIMING + sum(message(orjson.dumps(said), count) for said in talk)
    assert mine == render({"model": model, "messages": talk}, tokenizer(model)).count()


WORDS = "word " * 500
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": WORDS}}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"content": WORDS}, id="text"),
        pytest.param({"content": [{"type": "text", "text": WORDS}]}, id="a part"),
        pytest.param({"content": [{"type": "input_text", "text": WORDS}]}, id="an input part"),
        pytest.param({"content": [{"type": "refusal", "refusal": WORDS}]}, id="a refusal part"),
        pytest.param({"content": [{"type": "unheard-of", "text": WORDS}]}, id="an unknown part"),
        pytest.param({"content": None, "refusal": WORDS}, id="a refusal"),
        pytest.param({"content": "", "reasoning_content": WORDS}, id="reasoning"),
        pytest.param({"content": None, "tool_calls": [CALL]}, id="arguments"),
        pytest.param(
            {"content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": WORDS}}}]},
            id="arguments as an object",
        ),
        pytest.param(
            {"content": None, "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": WORDS}}]},
            id="a custom tool's input",
        ),
        pytest.param(
            {"content": None, "function_call": {"name": "f", "arguments": WORDS}}, id="a legacy function call"
        ),
        pytest.param({"content": "", "reasoning_details": [{"type": "reasoning.text", "text": WORDS}]}, id="details"),
        pytest.param({"content": "", "thinking_blocks": [{"type": "thinking", "thinking": WORDS}]}, id="thinking"),
        pytest.param({"content": 5, "x": WORDS}, id="what cannot be read counts as text"),
    ],
)
def test_everything_that_is_sent_counts(fields: dict[str, object]) -> None:
    """No field that reaches the model is left out of the count."""
    assert message(orjson.dumps({"role": "assistant", **fields}), COUNT) >= 500


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        pytest.param({"type": "image_url", "image_url": {"url": "u"}}, 1_105, id="an image"),
        pytest.param({"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, 85, id="low detail"),
        pytest.param({"type": "input_image", "image_url": "u"}, 1_105, id="a bare URL"),
        pytest.param({"type": "image"}, 1_105, id="another dialect"),
        pytest.param({"type": "input_audio", "input_audio": {"data": "A" * 64_000}}, 60, id="audio"),
        pytest.param({"type": "file", "file": {"file_id": "f"}}, 1_465, id="a file"),
        pytest.param({"type": "unheard-of"}, 0, id="an unknown part"),
        pytest.param({"type": "text"}, 0, id="no text"),
        pytest.param({"type": "refusal"}, 0, id="no refusal"),
    ],
)
def test_parts_have_their_price(part: dict[str, object], expected: int) -> None:
    """Images, audio and files by their family's rules."""
    found = message(orjson.dumps({"role": "user", "content": [part]}), COUNT, media.of("gpt-4o"))
    assert found == tokens.PER_MESSAGE + COUNT("user") + expected


NOISE = hashlib.shake_128(b"noise").digest(90_000)
DATA = base64.b64encode(NOISE).decode()
PICTURE = base64.b64encode(
    b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 1024, 1024, 8, 2, 0, 0, 0, 0) + NOISE
).decode()
PNG = f"data:image/png;base64,{PICTURE}"
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
SIGNATURE = len(DATA) // 16


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"images": [IMAGE]}, 765, id="pictures a model made"),
        pytest.param({"images": [PICTURE]}, 765, id="pictures without an address"),
        pytest.param({"provider_specific_fields": {"images": [IMAGE]}}, 765, id="a gateway's own fields"),
        pytest.param({"experimental_attachments": [{"name": "a", "url": PNG}]}, 765, id="attachments"),
        pytest.param({"annotations": [{"type": "file", "file": {"content": [IMAGE]}}]}, 765, id="a file's pictures"),
        pytest.param({"metadata": f'{{"shown": "{PNG}"}}'}, 765, id="JSON in a string"),
        pytest.param({"attachments": [f"data:image/bmp;base64,{DATA}"]}, 1_105, id="a picture nobody can read"),
        pytest.param({"attachments": [f"data:application/zip;base64,{DATA}"]}, 2 * 1_465, id="a file nobody can read"),
        pytest.param({"audio": {"id": "a", "data": DATA, "transcript": "Hi."}}, 113, id="sound a model made"),
        pytest.param({"clip": f"data:audio/mp3;base64,{DATA}"}, 113, id="sound"),
        pytest.param({"reasoning_details": [{"data": DATA}]}, SIGNATURE, id="encrypted reasoning"),
        pytest.param({"thinking_blocks": [{"thinking": "Hm.", "signature": DATA}]}, SIGNATURE, id="a signature"),
        pytest.param({"tool_calls": [{"id": f"call_1_{DATA}"}]}, SIGNATURE, id="a signature in a call's id"),
        pytest.param({"role": "tool", "tool_call_id": f"call_1_{DATA}"}, SIGNATURE, id="and in its result's"),
    ],
)
def test_data_outside_of_content_is_no_text(fields: dict[str, object], expected: int) -> None:
    """Pictures, sound and files weigh as in a content part, other data a sixteenth of its length."""
    found = message(orjson.dumps({"role": "assistant", "content": "Here.", **fields}), COUNT, media.of("gpt-4o"))
    assert expected <= found <= expected + 25


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"content": DATA}, id="words"),
        pytest.param({"content": [{"type": "text", "text": PNG}]}, id="a text part"),
        pytest.param({"role": "tool", "content": PNG}, id="an output"),
        pytest.param({"tool_calls": [{"function": {"name": "f", "arguments": DATA}}]}, id="arguments"),
        pytest.param({"reasoning_content": "说" * 90_000}, id="reasoning in a language without blanks"),
    ],
)
def test_what_a_model_reads_as_text_counts_as_text(fields: dict[str, object]) -> None:
    """Base64 that stands in words, in a tool's output or in arguments reaches the model letter by letter."""
    assert message(orjson.dumps({"role": "assistant", **fields}), COUNT) > 50_000


@given(
    kind=st.sampled_from(["image/png", "audio/wav", "audio/mp3", "application/pdf", "text/plain", "x/y"]),
    size=st.integers(0, 6_000),
    bare=st.booleans(),
    model=st.sampled_from(["gpt-4o-mini", "gemini-3", "llama-3"]),
)
def test_no_data_weighs_more_than_its_bytes(kind: str, size: int, bare: bool, model: str) -> None:
    """So where a request has fewer bytes than its limit has tokens, all fits, whatever it holds."""
    data = base64.b64encode(NOISE[:size]).decode()
    raw = orjson.dumps({"role": "user", "images": [data if bare else f"data:{kind};base64,{data}"]})
    assert message(raw, COUNT, media.of(model)) <= len(raw)


@pytest.mark.parametrize(
    "piece", ["a" * 1_000 + ".", "data:a/b;" * 99 + " ", "data:image/png;base64,", "a/" * 500 + " "]
)
def test_data_is_looked_for_in_about_the_length_of_the_text(
    piece: str, guard: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    """Whatever stands there that is nearly some."""
    with guard(10):
        assert media.apart(piece * (4_000_000 // len(piece)))


def test_a_schema_counts_as_it_stands() -> None:
    """Its JSON as text, and a frame."""
    assert schema(b'[{"type":"function"}]', COUNT) == tokens.PER_TOOL + COUNT('[{"type":"function"}]')


@pytest.mark.parametrize("raw", [b"[1]", b"", b'{"role":', b'{"role":"user","content":' + b"[" * 100_000])
def test_what_is_no_message_counts_as_text(raw: bytes) -> None:
    """All of it: nothing is ever sent uncounted."""
    assert message(raw, COUNT) == tokens.PER_MESSAGE + COUNT(raw.decode())


@pytest.mark.parametrize("call", [{}, {"function": None}, {"function": 5}, {"type": "unheard-of"}])
def test_a_call_without_a_function_is_its_frame(call: dict[str, object]) -> None:
    """Whatever stands in its place, counting never fails."""
    bare = message(b'{"role":"assistant"}', COUNT)
    assert message(orjson.dumps({"role": "assistant", "tool_calls": [call]}), COUNT) == bare + tokens.PER_CALL


def test_a_call_has_a_frame() -> None:
    """Its name, its arguments and what goes around them; arguments that are absent count nothing."""
    called = message(b'{"role":"assistant","tool_calls":[{"function":{"name":"find"}}]}', COUNT)
    assert called == tokens.PER_MESSAGE + COUNT("assistant") + tokens.PER_CALL + COUNT("find")
