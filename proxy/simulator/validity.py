"""Which chat requests OpenAI accepts; raises `Refusal` with its wording for the others. Pure.

The message rules are those every client meets (roles, tool calls and their results, empty content);
sampling values are not checked.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from proxy.simulator.refusal import Refusal
from proxy.simulator.shape import Body, integer, mapping, sequence, text

_ROLES = ("system", "assistant", "user", "function", "tool", "developer")
_PARTS = {
    "user": ("text", "image_url", "input_audio", "file"),
    "assistant": ("text", "refusal"),
}
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_JSON_WORD = re.compile("json", re.IGNORECASE)
_STRICT_FIELD_LIST = """
model messages temperature top_p n stream stop max_tokens max_completion_tokens presence_penalty frequency_penalty
logit_bias logprobs top_logprobs user seed tools tool_choice parallel_tool_calls response_format functions
function_call
"""
_STRICT_FIELDS = frozenset(_STRICT_FIELD_LIST.split())


def check_chat(body: Body, *, strict: bool) -> None:
    """Check a chat request; ``strict`` also refuses later fields and system messages after the first position."""
    _check_model(body)
    messages = _messages(body)
    if strict:
        _check_strict(body, messages)
    for index, message in enumerate(messages):
        _check_message(message, index)
    _check_calls(messages)
    _check_tools(body)
    _check_options(body, messages)


def check_present(body: Body, *names: str) -> None:
    """Check that the request names its model and has these fields."""
    _check_model(body)
    for name in names:
        if body.get(name) is None:
            _missing(name)


def _missing(param: str) -> NoReturn:
    raise Refusal(message=f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _wrong_type(param: str, expected: str, value: object) -> NoReturn:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
    got = "null" if value is None else names.get(type(value), "a decimal number")
    raise Refusal(
        message=f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
        param=param,
        code="invalid_type",
    )


def _empty_array(param: str) -> NoReturn:
    raise Refusal(
        message=(
            f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array instead."
        ),
        param=param,
        code="empty_array",
    )


def _check_model(body: Body) -> None:
    if not text(body.get("model")):
        raise Refusal(message="you must provide a model parameter")


def _messages(body: Body) -> Sequence[Body]:
    found = body.get("messages")
    if found is None:
        _missing("messages")
    if not isinstance(found, list):
        _wrong_type("messages", "an array of objects", found)
    if not found:
        _empty_array("messages")
    for index, message in enumerate(found):
        if not isinstance(message, Mapping):
            _wrong_type(f"messages[{index}]", "an object", message)
    return found


def _check_strict(body: Body, messages: Sequence[Body]) -> None:
    for name in body:
        if name not in _STRICT_FIELDS:
            raise Refusal(message=f"Unrecognized request argument supplied: {name}")
    for index, message in enumerate(messages):
        if index and message.get("role") in ("system", "developer"):
            raise Refusal(
                message="System message must be at the beginning.",
                param=f"messages[{index}].role",
                code="invalid_value",
            )


def _check_message(message: Body, index: int) -> None:
    param = f"messages[{index}]"
    role = message.get("role")
    if role is None:
        _missing(f"{param}.role")
    if role not in _ROLES:
        supported = ", ".join(f"'{name}'" for name in _ROLES[:-1])
        raise Refusal(
            message=f"Invalid value: '{role}'. Supported values are: {supported}, and '{_ROLES[-1]}'.",
            param=f"{param}.role",
            code="invalid_value",
        )
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        _missing(f"{param}.tool_call_id")
    _check_content(message, str(role), param)


def _check_content(message: Body, role: str, param: str) -> None:
    content = message.get("content")
    if content is None:
        spoken = ("tool_calls", "function_call", "refusal", "audio")
        if role == "assistant" and any(message.get(name) for name in spoken):
            return
        if "content" not in message:
            _missing(f"{param}.content")
        raise Refusal(message="Invalid value for 'content': expected a string, got null.", param=f"{param}.content")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        _wrong_type(f"{param}.content", "one of a string or array of objects", content)
    if not content:
        _empty_array(f"{param}.content")
    for place, part in enumerate(content):
        _check_part(part, _PARTS.get(role, ("text",)), f"{param}.content[{place}]")


def _check_part(part: object, supported: Sequence[str], param: str) -> None:
    if not isinstance(part, Mapping):
        _wrong_type(param, "an object", part)
    kind = part.get("type")
    if kind is None:
        _missing(f"{param}.type")
    if kind not in supported:
        names = ", ".join(f"'{name}'" for name in supported)
        raise Refusal(
            message=f"Invalid value: '{kind}'. Supported values are: {names}.",
            param=f"{param}.type",
            code="invalid_value",
        )
    if kind != "text":
        if not isinstance(part.get(kind), str if kind == "refusal" else Mapping):
            _missing(f"{param}.{kind}")
    elif not isinstance(part.get("text"), str):
        _missing(f"{param}.text")


def _check_calls(messages: Sequence[Body]) -> None:
    """Every call is answered right after it, by nothing but its results."""
    waiting: dict[str, None] = {}
    asked_at = -1
    asked: frozenset[str] = frozenset()
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            _check_result(message, index, asked)
            waiting.pop(text(message.get("tool_call_id")), None)
            continue
        _check_answered(waiting, asked_at)
        asked = _call_ids(message, index)
        waiting, asked_at = dict.fromkeys(sorted(asked)), index
    _check_answered(waiting, asked_at)


def _call_ids(message: Body, index: int) -> frozenset[str]:
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or calls is None:
        return frozenset()
    if not isinstance(calls, list):
        _wrong_type(f"messages[{index}].tool_calls", "an array of objects", calls)
    if not calls:
        _empty_array(f"messages[{index}].tool_calls")
    for place, call in enumerate(calls):
        _check_call(mapping(call), f"messages[{index}].tool_calls[{place}]")
    return frozenset(text(mapping(call).get("id")) for call in calls)


def _check_call(call: Body, param: str) -> None:
    if not text(call.get("id")):
        _missing(f"{param}.id")
    kind = call.get("type")
    if kind not in ("function", "custom"):
        _missing(f"{param}.type")
    content = mapping(call.get(str(kind)))
    for name in ("name", "arguments" if kind == "function" else "input"):
        if name not in content:
            _missing(f"{param}.{kind}.{name}")
        if not isinstance(content[name], str):
            _wrong_type(f"{param}.{kind}.{name}", "a string", content[name])


def _check_result(message: Body, index: int, asked: frozenset[str]) -> None:
    if not asked:
        raise Refusal(
            message=(
                "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
                "'tool_calls'."
            ),
            param=f"messages.[{index}].role",
        )
    identity = text(message.get("tool_call_id"))
    if identity not in asked:
        raise Refusal(
            message=f"Invalid parameter: 'tool_call_id' of '{identity}' not found in 'tool_calls' of previous message.",
            param=f"messages.[{index}].tool_call_id",
        )


def _check_answered(waiting: Mapping[str, None], asked_at: int) -> None:
    if waiting:
        raise Refusal(
            message=(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(waiting)}"
            ),
            param=f"messages.[{asked_at}].role",
        )


def _check_tools(body: Body) -> None:
    tools = body.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if body.get(name) is not None:
                raise Refusal(
                    message=f"Invalid value for '{name}': '{name}' is only allowed when 'tools' are specified.",
                    param=name,
                )
        return
    if not isinstance(tools, list):
        _wrong_type("tools", "an array of objects", tools)
    if not tools:
        _empty_array("tools")
    for index, tool in enumerate(tools):
        _check_tool(mapping(tool), f"tools[{index}]")
    _check_choice(body, [mapping(mapping(tool).get("function")).get("name") for tool in tools])


def _check_tool(tool: Body, param: str) -> None:
    if tool.get("type") is None:
        _missing(f"{param}.type")
    if tool["type"] != "function":
        return
    name = mapping(tool.get("function")).get("name")
    if not isinstance(name, str):
        _missing(f"{param}.function.name")
    if not _TOOL_NAME.fullmatch(name):
        raise Refusal(
            message=(
                f"Invalid '{param}.function.name': string does not match pattern. "
                "Expected a string that matches the pattern '^[a-zA-Z0-9_-]+$'."
            ),
            param=f"{param}.function.name",
            code="invalid_value",
        )


def _check_choice(body: Body, known: Sequence[object]) -> None:
    choice = mapping(body.get("tool_choice"))
    if choice.get("type") != "function":
        return
    name = mapping(choice.get("function")).get("name")
    if name not in known:
        raise Refusal(
            message=(
                f"Invalid value for 'tool_choice': no function named '{name}' was specified in the 'tools' parameter."
            ),
            param="tool_choice",
        )


def _check_options(body: Body, messages: Sequence[Body]) -> None:
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refusal(
            message="The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
        )
    limits = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(limits) > 1:
        raise Refusal(
            message="Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
            code="invalid_parameter_combination",
        )
    for name in (*limits, *(("n",) if body.get("n") is not None else ())):
        value = integer(body[name])
        if value is None:
            _wrong_type(name, "an integer", body[name])
        if value < 1:
            raise Refusal(
                message=(
                    f"Invalid '{name}': integer below minimum value. Expected a value >= 1, but got {value} instead."
                ),
                param=name,
                code="integer_below_min_value",
            )
    if mapping(body.get("response_format")).get("type") == "json_object" and not _says_json(messages):
        raise Refusal(
            message=(
                "'messages' must contain the word 'json' in some form, to use 'response_format' of type 'json_object'."
            ),
            param="messages",
        )


def _says_json(messages: Sequence[Body]) -> bool:
    for message in messages:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [mapping(part).get("text") for part in sequence(content)]
        if any(_JSON_WORD.search(text(part)) for part in parts):
            return True
    return False
