"""Requests as token ids, in prefix order."""

import inspect

import orjson
import pytest
import tiktoken_ext.openai_public  # type: ignore[import-untyped]
from openai.types.chat import ChatCompletionMessageParam

from proxy.simulator.prompt import CALL_TOKENS, DEFINITION_TOKENS, IMAGE_TOKENS, compact, render, render_text
from proxy.simulator.tokens import PATTERNS, PIECE_CHARS, Tokenizer, encoding_name, tokenizer

WORDS = tokenizer("gpt-5.1")
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def count(*messages: object, **fields: object) -> int:
    return render({"messages": list(messages), **fields}, WORDS).count()


def test_cookbook_example_counts_as_published() -> None:
    """The cookbook's example conversation has its published 129 (cl100k) and 124 (o200k) tokens."""
    messages: list[ChatCompletionMessageParam] = [
        {
            "role": "system",
            "content": "You are a helpful, pattern-following assistant that translates corporate jargon into plain "
            "English.",
        },
        {
            "role": "system",
            "name": "example_user",
            "content": "New synergies will help drive top-line growth.",
        },
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
        {
            "role": "user",
            "content": "This late pivot means we don't have time to boil the ocean for the client deliverable.",
        },
    ]
    assert render({"messages": messages}, tokenizer("gpt-4")).count() == 129
    assert render({"messages": messages}, tokenizer("gpt-4o")).count() == 124


def test_ids_are_those_of_tiktoken() -> None:
    """Patterns are those tiktoken publishes, known texts get known ids, special tokens are read as text."""
    published = inspect.getsource(tiktoken_ext.openai_public)
    assert PATTERNS["cl100k_base"] in published
    assert all(line in published for line in PATTERNS["o200k_base"].split("|\\p{N}{1,3}|")[0].split("|[^"))
    assert WORDS.encode("hello world").tolist() == [24912, 2375]
    assert tokenizer("gpt-4").encode("hello world").tolist() == [15339, 1917]
    text = "Hello, wörld! 你好 123456 <|endoftext|>\n\n\t  def f(x):\r\n    return x's 🙂"
    assert all(index < 199_998 for index in WORDS.encode(text))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-4", "cl100k_base"),
        ("gpt-4-turbo", "cl100k_base"),
        ("gpt-3.5-turbo", "cl100k_base"),
        ("text-embedding-3-small", "cl100k_base"),
        ("gpt-4o", "o200k_base"),
        ("gpt-4.1-mini", "o200k_base"),
        ("openai/gpt-oss-120b", "o200k_base"),
    ],
)
def test_vocabulary_follows_the_model(model: str, name: str) -> None:
    """Old OpenAI models keep their vocabulary, every other name gets the current one."""
    assert encoding_name(model) == name


def test_prefix_order_is_tools_schema_messages() -> None:
    """Tools come first, then the response schema, then messages, whatever the body's key order."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "tools": [TOOL],
    }
    assert [segment.kind for segment in render(body, WORDS).segments] == ["tool", "schema", "message", "priming"]


def test_key_order_of_tools_is_part_of_the_prompt() -> None:
    """The same tool with its keys in another order is another prompt; the order of message keys does not matter."""
    turned = {"function": TOOL["function"], "type": "function"}
    assert render({"tools": [TOOL]}, WORDS).tokens != render({"tools": [turned]}, WORDS).tokens
    assert (
        render({"messages": [{"role": "user", "content": "hi"}]}, WORDS).tokens
        == render({"messages": [{"content": "hi", "role": "user"}]}, WORDS).tokens
    )


def test_tool_counts_its_compact_json() -> None:
    """A tool costs the tokens of its compact JSON and a stated overhead."""
    size = WORDS.count(orjson.dumps(TOOL).decode())
    assert count(tools=[TOOL]) - count() == size + DEFINITION_TOKENS


def test_appending_a_message_extends_the_prefix() -> None:
    """All tokens but the priming of the shorter conversation begin the longer one."""
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    more = [*first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]
    short, long = (render({"messages": messages}, WORDS).tokens for messages in (first, more))
    assert long[: len(short)] == short


def test_text_parts_count_as_their_text() -> None:
    """A message in text parts counts the sum of its parts, and one part equals the plain string."""
    part = {"type": "text", "text": "hello there"}
    plain = {"role": "user", "content": "hello there"}
    assert count({"role": "user", "content": [part]}) == count(plain)
    assert count({"role": "user", "content": [part, part]}) == count(plain) + WORDS.count("hello there")


def test_cache_markers_are_no_content() -> None:
    """Markers for other providers' caches add no tokens."""
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    marked = {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}}
    assert count(marked) == count({"role": "user", "content": "hello"})


@pytest.mark.parametrize(
    ("image", "tokens"),
    [
        ({"url": "data:,a", "detail": "low"}, IMAGE_TOKENS["low"]),
        ({"url": "data:,a", "detail": "high"}, IMAGE_TOKENS["high"]),
        ({"url": "data:,a"}, IMAGE_TOKENS["auto"]),
        ("data:,a", IMAGE_TOKENS["auto"]),
    ],
)
def test_image_has_a_flat_price(image: object, tokens: int) -> None:
    """An image counts by its detail alone."""
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": image}]}
    assert count(shown) == count({"role": "user", "content": ""}) + tokens


def test_other_image_is_another_prompt() -> None:
    """Two images of one price have different ids."""
    one, two = (
        render({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}, WORDS)
        for url in ("data:,a", "data:,b")
    )
    assert one.count() == two.count()
    assert one.tokens != two.tokens


def test_tool_call_counts_name_arguments_and_id() -> None:
    """A call costs its id, name, arguments and a stated overhead."""
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    expected = CALL_TOKENS + sum(map(WORDS.count, ("c1", "find", '{"a": 1}')))
    assert (
        count({"role": "assistant", "content": None, "tool_calls": [call]}) == count({"role": "assistant"}) + expected
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": "hi"},
        {"messages": [None, 3, "x", []]},
        {"messages": [{}, {"role": None}, {"role": 5, "content": 7}]},
        {"messages": [{"role": "user", "content": [None, 1, "x", {}, {"type": 4}, {"type": "new", "x": [1]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}, {"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [None, {}, {"function": 3}], "function_call": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800 lone \udfff"}], "tools": [{"a\ud800": "\udc00"}]},
        {"tools": {"a": 1}, "functions": [1], "response_format": {"json_schema": 5}},
        {"tools": [2**64, 1e300, 2**63, True, None]},
    ],
)
def test_odd_bodies_are_read(body: dict[str, object]) -> None:
    """No JSON value in any place makes rendering fail, and rendering is repeatable."""
    assert render(body, WORDS).tokens == render(body, WORDS).tokens


def test_deep_json_is_cut_not_failed() -> None:
    """JSON deeper than the writer carries is cut off."""
    deep: object = "end"
    for _ in range(900):
        deep = [deep]
    assert render({"tools": [deep]}, WORDS).count() > 0
    assert compact({"a": [1, "\ud800"]}) == '{"a":[1,"?"]}'


def test_a_million_spaces_are_counted() -> None:
    """Runs that make tiktoken panic are handed over in pieces."""
    spaces = Tokenizer("o200k_base").count(" " * 1_000_001)
    assert 0 < spaces <= 1_000_001
    assert PIECE_CHARS < 500_000


def test_memory_of_texts_is_bounded() -> None:
    """Recent texts are remembered; beyond the memory's size the oldest is encoded anew, to the same ids."""
    fresh = Tokenizer("o200k_base", memo_chars=20)
    first = fresh.encode("first text")
    assert fresh.encode("first text") is first
    fresh.encode("another text")
    again = fresh.encode("first text")
    assert again is not first
    assert again == first


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("hello world", [2]),
        (["hello world", "hi"], [2, 1]),
        ([1, 2, 3], [3]),
        ([[1, 2], [3]], [2, 1]),
        ([], []),
        (None, []),
    ],
)
def test_prompts_without_messages(value: object, sizes: list[int]) -> None:
    """Completions and embeddings take text, ids, or lists of either."""
    assert [len(segment.tokens) for segment in render_text(value, WORDS).segments] == sizes
