"""``POST /v1/chat/completions``: https://platform.openai.com/docs/api-reference/chat (read 2026-11)."""

from collections.abc import Iterator
from itertools import chain, zip_longest

from proxy.simulator.accounting import Charge
from proxy.simulator.answers import Call, Choice, choices
from proxy.simulator.exchange import Exchange, Script, sse
from proxy.simulator.prompt import Prompt, render
from proxy.simulator.refusal import too_long
from proxy.simulator.shape import Body, integer, mapping, text
from proxy.simulator.tokens import tokenizer
from proxy.simulator.validity import check_chat

DONE = b"data: [DONE]\n\n"


async def chat(exchange: Exchange) -> None:
    """Answer a chat request, whole or as a stream."""
    body = exchange.body()
    options = exchange.simulator.options
    check_chat(body, strict=options.strict)
    vocabulary = tokenizer(text(body["model"]))
    prompt = render(body, vocabulary)
    check_length(exchange, prompt, asked_tokens(body))
    charge = exchange.charge(body, (prompt.tokens,))
    made = choices(body, vocabulary, words=options.reply_words)
    tokens = sum(choice.tokens for choice in made)
    frame = _frame(exchange, body, "chat.completion.chunk" if body.get("stream") else "chat.completion")
    counted = usage(charge, tokens)
    if body.get("stream"):
        await exchange.stream(_script(exchange, body, frame, made, counted))
        return
    frame["choices"] = [
        {"index": index, "message": _message(choice), "logprobs": None, "finish_reason": choice.finish_reason}
        for index, choice in enumerate(made)
    ]
    if not exchange.faults.no_usage:
        frame["usage"] = counted
    await exchange.generate(frame, tokens, max(len(list(_deltas(choice))) for choice in made))


def asked_tokens(body: Body) -> int:
    """Reply tokens the request reserves in the context window."""
    return integer(body.get("max_completion_tokens")) or integer(body.get("max_tokens")) or 0


def check_length(exchange: Exchange, prompt: Prompt, completion: int) -> None:
    """Refuse what exceeds the context window."""
    limit = exchange.simulator.options.max_context_tokens
    if limit is None or prompt.count() + completion <= limit:
        return
    functions = prompt.count("tool", "schema")
    raise too_long(limit=limit, messages=prompt.count() - functions, functions=functions, completion=completion)


def usage(charge: Charge, completion_tokens: int) -> dict[str, object]:
    """Usage in the shape of chat and completions."""
    return {
        "prompt_tokens": charge.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": charge.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": charge.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _frame(exchange: Exchange, body: Body, kind: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-sim{exchange.entry.index:08d}",
        "object": kind,
        "created": exchange.created,
        "model": body["model"],
        "service_tier": "default",
        "system_fingerprint": "fp_simulator",
    }


def _message(choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _script(
    exchange: Exchange,
    body: Body,
    frame: dict[str, object],
    made: tuple[Choice, ...],
    counted: dict[str, object],
) -> Script:
    reported = mapping(body.get("stream_options")).get("include_usage") is True and not exchange.faults.no_usage
    tail: dict[str, object] = {"usage": None} if reported else {}

    def chunk(index: int, delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse({**frame, "choices": [choice], **tail})

    lanes = [[chunk(index, delta) for delta in _deltas(choice)] for index, choice in enumerate(made)]
    ending = [chunk(index, {}, choice.finish_reason) for index, choice in enumerate(made)]
    if reported:
        ending.append(sse({**frame, "choices": [], "usage": counted}))
    interleaved = (event for event in chain.from_iterable(zip_longest(*lanes)) if event is not None)
    return Script(
        deltas=tuple(interleaved), ending=tuple(ending), done=(DONE,), tokens=sum(choice.tokens for choice in made)
    )


def _deltas(choice: Choice) -> Iterator[dict[str, object]]:
    """The role, then a word at a time: text, or the arguments of one call after the other."""
    if not choice.calls:
        yield {"role": "assistant", "content": "", "refusal": None}
        for piece in choice.pieces:
            yield {"content": piece}
        return
    yield {"role": "assistant", "content": None, "refusal": None}
    for position, call in enumerate(choice.calls):
        yield from _call_deltas(position, call)


def _call_deltas(position: int, call: Call) -> Iterator[dict[str, object]]:
    function = {"name": call.name, "arguments": ""}
    yield {"tool_calls": [{"index": position, "id": call.id, "type": "function", "function": function}]}
    for piece in call.pieces:
        yield {"tool_calls": [{"index": position, "function": {"arguments": piece}}]}
