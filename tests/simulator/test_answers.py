"""Deterministic replies."""

import orjson
import pytest

from proxy.simulator.answers import Choice, choices, last_user_text, prose
from proxy.simulator.schema import example
from proxy.simulator.tokens import tokenizer

WORDS = tokenizer("gpt-5.1")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]


def one(content: object = "hi", **fields: object) -> Choice:
    (choice,) = choices({"messages": [{"role": "user", "content": content}], **fields}, WORDS)
    return choice


def names(choice: Choice) -> list[str]:
    return [call.name for call in choice.calls]


def test_same_question_same_answer() -> None:
    """The reply depends on the last user message, not on what stands before it."""
    asked = {"role": "user", "content": "hi"}
    (other,) = choices({"messages": [{"role": "system", "content": "x"}, asked]}, WORDS)
    assert other.text == one("hi").text
    assert one("hi").text != one("ho").text
    assert one([{"type": "text", "text": "hi"}]).text == one("hi").text


@pytest.mark.parametrize("model", ["gpt-5.1", "gpt-4"])
def test_every_piece_is_a_token(model: str) -> None:
    """Text is streamed one token at a time, so pieces, tokens and the tokenizer agree."""
    vocabulary = tokenizer(model)
    for seed in range(50):
        choice = prose(str(seed), vocabulary)
        assert len(choice.pieces) == choice.tokens == vocabulary.count(choice.text or "")
        assert 40 <= len((choice.text or "").split()) <= 45
        assert (choice.text or "").endswith(".")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limit_cuts_the_text(field: str) -> None:
    """A token limit below the reply's length is met exactly and named as the reason."""
    choice = one(**{field: 7})
    assert (choice.tokens, choice.finish_reason) == (7, "length")
    assert (one().text or "").startswith(choice.text or "x")
    assert one(**{field: 5000}).finish_reason == "stop"


def test_choices_differ() -> None:
    """``n`` choices are different texts, the first the one that would be sent alone."""
    made = choices({"messages": [{"role": "user", "content": "hi"}], "n": 3}, WORDS)
    assert len({choice.text for choice in made}) == 3
    assert made[0] == one("hi")


@pytest.mark.parametrize(
    ("content", "fields", "expected"),
    [
        ("please [call]", {}, ["weather"]),
        ("please [call:clock]", {}, ["clock"]),
        ("please [call:weather,clock]", {}, ["weather", "clock"]),
        ("please [call: weather , weather]", {}, ["weather", "weather"]),
        ("please [call:unknown]", {}, []),
        ("please [call]", {"tool_choice": "none"}, []),
        ("please [call:weather,clock]", {"parallel_tool_calls": False}, ["weather"]),
        ("hi", {}, []),
        ("hi", {"tool_choice": "auto"}, []),
        ("hi", {"tool_choice": "required"}, ["weather"]),
        ("hi [call:clock]", {"tool_choice": "required"}, ["clock"]),
        ("hi", {"tool_choice": {"type": "function", "function": {"name": "clock"}}}, ["clock"]),
        (
            "hi",
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "clock"}}]},
                }
            },
            ["clock"],
        ),
        ("please [call]", {"tools": None}, []),
    ],
)
def test_calls_follow_choice_and_mark(content: str, fields: dict[str, object], expected: list[str]) -> None:
    """Tools are called when the request forces it or the last user message asks for it."""
    assert names(one(content, **{"tools": TOOLS, **fields})) == expected


def test_marks_count_only_in_the_last_message() -> None:
    """After a tool's result the reply is text, so that a conversation ends."""
    messages = [{"role": "user", "content": "[call]"}, {"role": "tool", "content": "sunny"}]
    (choice,) = choices({"messages": messages, "tools": TOOLS}, WORDS)
    assert choice.calls == ()
    assert last_user_text({"messages": messages}) == "[call]"
    assert last_user_text({"messages": []}) == ""


def test_calls_carry_valid_arguments_and_own_ids() -> None:
    """Arguments satisfy the parameters, ids differ, and the finish reason is that of calls."""
    choice = one("[call:weather,clock,weather]", tools=TOOLS)
    first, second, third = choice.calls
    arguments = orjson.loads(first.arguments)
    assert isinstance(arguments["city"], str)
    assert arguments["days"] == 1
    assert second.arguments == "{}"
    assert len({first.id, second.id, third.id}) == 3
    assert choice.finish_reason == "tool_calls"
    assert choice.text is None


def test_named_function_finishes_with_stop() -> None:
    """OpenAI ends a reply with ``stop`` when the request names the function."""
    named = {"type": "function", "function": {"name": "clock"}}
    assert one(tools=TOOLS, tool_choice=named).finish_reason == "stop"


def test_limit_cuts_arguments() -> None:
    """A token limit inside the arguments leaves them incomplete and ends with ``length``."""
    choice = one("[call:weather,clock]", tools=TOOLS, max_tokens=8)
    assert choice.finish_reason == "length"
    assert len(choice.calls) == 1
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(choice.calls[0].arguments)


def test_json_mode_gives_json() -> None:
    """``json_object`` and ``json_schema`` replies parse."""
    assert "answer" in orjson.loads(one(response_format={"type": "json_object"}).text or "")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    assert set(orjson.loads(one(response_format=wanted).text or "")) == {"city", "days"}


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "next"],
        },
        "endless": {"type": "object", "properties": {"x": {"$ref": "#/$defs/endless"}}, "required": ["x"]},
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"enum": ["b", "a"]}, "b"),
        ({"const": 5}, 5),
        ({"type": "boolean"}, True),
        ({"type": "null"}, None),
        ({"type": ["integer", "null"]}, 0),
        ({"type": "integer", "minimum": 3, "multipleOf": 5}, 5),
        ({"type": "integer", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "minimum": 2.5}, 3),
        ({"type": "number", "maximum": -2}, -2),
        ({"type": "number", "exclusiveMaximum": 0}, -0.5),
        ({"type": "string"}, "word"),
        ({"type": "string", "minLength": 8}, "word word"),
        ({"type": "string", "maxLength": 2}, "wo"),
        ({"type": "string", "format": "date"}, "2030-01-02"),
        ({"type": "array", "items": {"type": "integer"}}, []),
        ({"type": "array", "items": {"const": 1}, "minItems": 2}, [1, 1]),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 3, "items": {"const": 9}},
            [1, 2, 9],
        ),
        ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["b"]}, {"b": 2}),
        ({"type": "object", "required": ["free"]}, {"free": "word"}),
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, {"a": 1}),
        ({"anyOf": [{"type": "object", "properties": {}}, {"type": "null"}]}, {}),
        ({"oneOf": [{"const": 3}, {"const": 4}]}, 3),
        (
            {
                "allOf": [
                    {"properties": {"a": {"const": 1}}, "required": ["a"]},
                    {"properties": {"b": {"const": 2}}, "required": ["b"]},
                ]
            },
            {"a": 1, "b": 2},
        ),
        (TREE, {"name": "word", "next": None}),
        ({**TREE, "$ref": "#/$defs/endless"}, None),
        ({**TREE, "$ref": "#/$defs/missing"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_example_is_minimal_and_valid(schema: object, expected: object) -> None:
    """Every supported rule of a schema is met with the smallest value."""
    assert example(schema, iter(lambda: "word", None)) == expected
