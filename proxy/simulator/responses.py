"""``POST /v1/responses``, the part that text, tools and usage need.

https://platform.openai.com/docs/api-reference/responses (read 2026-11). A request is read as the chat request
that says the same, so both endpoints count and answer alike. ``previous_response_id`` is followed.
"""

from collections.abc import Iterator
from itertools import count

from proxy.simulator.accounting import Charge
from proxy.simulator.answers import Choice, choices
from proxy.simulator.chat import asked_tokens, check_length
from proxy.simulator.exchange import Exchange, Script, sse
from proxy.simulator.prompt import render
from proxy.simulator.record import shelve
from proxy.simulator.refusal import Refusal
from proxy.simulator.shape import Body, mapping, sequence, text
from proxy.simulator.tokens import tokenizer
from proxy.simulator.validity import check_present


async def responses(exchange: Exchange) -> None:
    """Answer a response request, whole or as a stream of named events."""
    body = exchange.body()
    check_present(body, "input")
    conversation = _conversation(exchange, body)
    read = _as_chat(body, conversation)
    vocabulary = tokenizer(text(body["model"]))
    prompt = render(read, vocabulary)
    check_length(exchange, prompt, asked_tokens(read))
    charge = exchange.charge(body, (prompt.tokens,))
    (choice,) = choices(read, vocabulary, words=exchange.simulator.options.reply_words)
    items = _items(exchange, choice)
    frame = _frame(exchange, body)
    shelve(exchange.simulator.conversations, str(frame["id"]), (*conversation, *items))
    incomplete = choice.finish_reason == "length"
    ended: dict[str, object] = {
        **frame,
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
        "output": items,
    }
    if not exchange.faults.no_usage:
        ended["usage"] = _usage(charge, choice.tokens)
    if body.get("stream"):
        await exchange.stream(_script(frame, ended, choice, items))
    else:
        await exchange.generate(ended, choice.tokens, len(choice.pieces))


def _conversation(exchange: Exchange, body: Body) -> tuple[object, ...]:
    given = body["input"]
    items = ({"role": "user", "content": given},) if isinstance(given, str) else tuple(sequence(given))
    previous = body.get("previous_response_id")
    if previous is None:
        return items
    earlier = exchange.simulator.conversations.get(text(previous))
    if earlier is None:
        raise Refusal(
            message=f"Previous response with id '{previous}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return (*earlier, *items)


def _as_chat(body: Body, conversation: tuple[object, ...]) -> Body:
    instructions = text(body.get("instructions"))
    messages: list[dict[str, object]] = [{"role": "system", "content": instructions}] if instructions else []
    messages += [message for item in conversation for message in _as_messages(mapping(item))]
    chosen = mapping(body.get("tool_choice"))
    layout = mapping(mapping(body.get("text")).get("format"))
    tools = [_as_tool(tool) for tool in sequence(body.get("tools"))]
    return {
        "model": body["model"],
        "messages": messages,
        "tools": tools,
        "tool_choice": {"function": {"name": chosen.get("name")}} if chosen else body.get("tool_choice"),
        "parallel_tool_calls": body.get("parallel_tool_calls"),
        "max_completion_tokens": body.get("max_output_tokens"),
        "response_format": {"type": layout.get("type"), "json_schema": layout if "schema" in layout else None},
    }


def _as_tool(tool: object) -> object:
    return {"type": "function", "function": tool} if mapping(tool).get("type") == "function" else tool


def _as_messages(item: Body) -> Iterator[dict[str, object]]:
    match item.get("type", "message"):
        case "message":
            yield {"role": item.get("role"), "content": item.get("content")}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            yield {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case _:  # reasoning and the like take no part
            pass


def _frame(exchange: Exchange, body: Body) -> dict[str, object]:
    return {
        "id": f"resp_sim{exchange.entry.index:08d}",
        "object": "response",
        "created_at": exchange.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": body["model"],
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature", 1.0),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "usage": None,
    }


def _usage(charge: Charge, output_tokens: int) -> dict[str, object]:
    return {
        "input_tokens": charge.prompt_tokens,
        "input_tokens_details": {"cached_tokens": charge.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": charge.prompt_tokens + output_tokens,
    }


def _part(spoken: str) -> dict[str, object]:
    return {"type": "output_text", "text": spoken, "annotations": [], "logprobs": []}


def _items(exchange: Exchange, choice: Choice) -> list[dict[str, object]]:
    index = exchange.entry.index
    if choice.calls:
        return [
            {
                "id": f"fc_sim{index:08d}_{position}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }
            for position, call in enumerate(choice.calls)
        ]
    return [
        {
            "id": f"msg_sim{index:08d}",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [_part(choice.text or "")],
        }
    ]


def _script(
    frame: dict[str, object], ended: dict[str, object], choice: Choice, items: list[dict[str, object]]
) -> Script:
    numbers = count()

    def event(kind: str, **fields: object) -> bytes:
        return sse({"type": kind, "sequence_number": next(numbers), **fields}, event=kind)

    deltas = [event("response.created", response=frame), event("response.in_progress", response=frame)]
    for position, item in enumerate(items):
        deltas += [
            event(kind, output_index=position, **fields) for kind, fields in _item_events(choice, position, item)
        ]
    return Script(
        deltas=tuple(deltas),
        ending=(),
        done=(event(f"response.{ended['status']}", response=ended),),
        tokens=choice.tokens,
    )


def _item_events(choice: Choice, position: int, item: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    place: dict[str, object] = {"item_id": item["id"]}
    started = {**item, "status": "in_progress"}
    if choice.calls:
        call = choice.calls[position]
        yield "response.output_item.added", {"item": {**started, "arguments": ""}}
        for piece in call.pieces:
            yield "response.function_call_arguments.delta", {**place, "delta": piece}
        yield "response.function_call_arguments.done", {**place, "name": call.name, "arguments": call.arguments}
    else:
        place["content_index"] = 0
        spoken = choice.text or ""
        yield "response.output_item.added", {"item": {**started, "content": []}}
        yield "response.content_part.added", {**place, "part": _part("")}
        for piece in choice.pieces:
            yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
        yield "response.output_text.done", {**place, "text": spoken, "logprobs": []}
        yield "response.content_part.done", {**place, "part": _part(spoken)}
    yield "response.output_item.done", {"item": item}
