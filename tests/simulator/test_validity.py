"""Requests OpenAI refuses, in its words."""

import pytest

from proxy.simulator.refusal import Refusal, bad_key, of_status, too_long
from proxy.simulator.validity import check_chat

USER = {"role": "user", "content": "hi"}


def call(*ids: str) -> dict[str, object]:
    functions = [{"id": one, "type": "function", "function": {"name": "find", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def result(identity: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": identity, "content": "found"}


def body(*messages: object, **fields: object) -> dict[str, object]:
    return {"model": "m", "messages": list(messages), **fields}


TOOL = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    "accepted",
    [
        body(USER),
        body({"role": "system", "content": [{"type": "text", "text": "x"}]}, USER, {"role": "system", "content": "y"}),
        body(USER, call("a"), result("a")),
        body(USER, call("a", "b"), result("b"), result("a"), USER, call("c"), result("c"), USER),
        body(USER, {"role": "assistant", "refusal": "no"}),
        body({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}),
        body(USER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "find"}}),
        body(USER, tools=[{"type": "custom", "custom": {"name": "x"}}]),
        body(USER, stream=True, stream_options={"include_usage": True}, n=2, max_tokens=1),
        body({"role": "user", "content": "as JSON"}, response_format={"type": "json_object"}),
        body(USER, something_new=1),
    ],
)
def test_valid_requests_pass(accepted: dict[str, object]) -> None:
    """What OpenAI accepts is accepted."""
    check_chat(accepted, strict=False)


@pytest.mark.parametrize(
    ("refused", "param", "words"),
    [
        ({"messages": [USER]}, None, "must provide a model"),
        ({"model": "m"}, "messages", "Missing required parameter: 'messages'"),
        ({"model": "m", "messages": "x"}, "messages", "expected an array of objects, but got a string"),
        (body(), "messages", "empty array"),
        (body(5), "messages[0]", "expected an object, but got an integer"),
        (body({"content": "x"}), "messages[0].role", "Missing"),
        (body({"role": "robot", "content": "x"}), "messages[0].role", "Invalid value: 'robot'. Supported values"),
        (body({"role": "user"}), "messages[0].content", "Missing"),
        (body({"role": "user", "content": None}), "messages[0].content", "expected a string, got null"),
        (body({"role": "assistant", "content": None}), "messages[0].content", "expected a string, got null"),
        (body({"role": "user", "content": 1.5}), "messages[0].content", "but got a decimal number"),
        (body({"role": "user", "content": []}), "messages[0].content", "empty array"),
        (body({"role": "user", "content": ["x"]}), "messages[0].content[0]", "expected an object"),
        (body({"role": "user", "content": [{}]}), "messages[0].content[0].type", "Missing"),
        (body({"role": "user", "content": [{"type": "refusal"}]}), "messages[0].content[0].type", "'refusal'"),
        (body({"role": "system", "content": [{"type": "image_url"}]}), "messages[0].content[0].type", "'image_url'"),
        (body({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text", "Missing"),
        (body({"role": "user", "content": [{"type": "image_url"}]}), "messages[0].content[0].image_url", "Missing"),
        (body(result("a")), "messages.[0].role", "must be a response to a preceeding message"),
        (body(USER, call("a"), USER), "messages.[1].role", "did not have response messages: a"),
        (body(USER, call("a")), "messages.[1].role", "did not have response messages: a"),
        (body(USER, call("a", "b"), result("b")), "messages.[1].role", "did not have response messages: a"),
        (body(USER, call("a"), result("b")), "messages.[2].tool_call_id", "'tool_call_id' of 'b' not found"),
        (body(USER, call("a"), result("a"), USER, result("a")), "messages.[4].role", "preceeding"),
        (body({"role": "tool", "content": "x"}), "messages[0].tool_call_id", "Missing"),
        (body({"role": "assistant", "content": "x", "tool_calls": []}), "messages[0].tool_calls", "empty array"),
        (body({"role": "assistant", "content": "x", "tool_calls": 1}), "messages[0].tool_calls", "an array"),
        (body({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls[0].id", "Missing"),
        (body({"role": "assistant", "tool_calls": [{"id": "a"}]}), "messages[0].tool_calls[0].type", "Missing"),
        (
            body({"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "x"}}]}),
            "messages[0].tool_calls[0].function.arguments",
            "Missing",
        ),
        (
            body(
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "x", "arguments": {}}}],
                }
            ),
            "messages[0].tool_calls[0].function.arguments",
            "expected a string, but got an object",
        ),
        (body(USER, tools=[]), "tools", "empty array"),
        (body(USER, tools="x"), "tools", "an array"),
        (body(USER, tools=[{}]), "tools[0].type", "Missing"),
        (body(USER, tools=[{"type": "function"}]), "tools[0].function.name", "Missing"),
        (body(USER, tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "pattern"),
        (body(USER, tool_choice="auto"), "tool_choice", "only allowed when 'tools'"),
        (body(USER, parallel_tool_calls=True), "parallel_tool_calls", "only allowed when 'tools'"),
        (
            body(USER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "x"}}),
            "tool_choice",
            "no function named 'x'",
        ),
        (body(USER, stream_options={}), "stream_options", "only allowed when 'stream' is enabled"),
        (body(USER, max_tokens=1, max_completion_tokens=1), None, "at the same time"),
        (body(USER, max_tokens=0), "max_tokens", "Expected a value >= 1, but got 0"),
        (body(USER, max_tokens="9"), "max_tokens", "expected an integer, but got a string"),
        (body(USER, n=True), "n", "but got a boolean"),
        (body(USER, response_format={"type": "json_object"}), "messages", "must contain the word 'json'"),
    ],
)
def test_invalid_requests_are_refused(refused: dict[str, object], param: str | None, words: str) -> None:
    """What OpenAI refuses is refused with its wording and parameter path."""
    with pytest.raises(Refusal) as caught:
        check_chat(refused, strict=False)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (body(USER, stream=True, stream_options={}), "Unrecognized request argument supplied: stream_options"),
        (body(USER, prompt_cache_key="k"), "Unrecognized request argument supplied: prompt_cache_key"),
        (body(USER, {"role": "system", "content": "x"}), "System message must be at the beginning."),
    ],
)
def test_strict_provider_refuses_more(refused: dict[str, object], words: str) -> None:
    """A strict provider refuses later fields and late system messages that others accept."""
    check_chat(refused, strict=False)
    with pytest.raises(Refusal) as caught:
        check_chat(refused, strict=True)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("functions", "completion", "message"),
    [
        (0, 0, "However, your messages resulted in 120 tokens. Please reduce the length of the messages."),
        (
            5,
            0,
            "However, your messages resulted in 125 tokens (120 in the messages, 5 in the functions). "
            "Please reduce the length of the messages or functions.",
        ),
    ],
)
def test_long_prompt_is_worded_as_by_openai(functions: int, completion: int, message: str) -> None:
    """The context error names the window and the parts of the prompt."""
    error = too_long(limit=100, messages=120, functions=functions, completion=completion)
    assert error.message == f"This model's maximum context length is 100 tokens. {message}"
    assert error.code == "context_length_exceeded"


def test_long_reply_is_worded_as_by_openai() -> None:
    """When only the reply is too long the error adds it to the request."""
    error = too_long(limit=100, messages=60, functions=0, completion=50)
    assert error.message.endswith(
        "However, you requested 110 tokens (60 in the messages, 50 in the completion). "
        "Please reduce the length of the messages or completion."
    )


def test_refusals_are_exceptions_with_openai_bodies() -> None:
    """A refusal can be raised and shown, and hides all of a key but its end."""
    assert str(of_status(503)).startswith("503 ")
    assert of_status(418).body["error"] != of_status(599).body["error"]
    assert "sk-secret" not in bad_key("sk-secret-1234").message
    assert "1234" in bad_key("sk-secret-1234").message
    assert "didn't provide" in bad_key("").message
