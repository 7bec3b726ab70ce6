"""``POST /v1/completions``: https://platform.openai.com/docs/api-reference/completions (read 2026-11)."""

from itertools import chain, zip_longest

from proxy.simulator.answers import Choice, prose
from proxy.simulator.chat import DONE, asked_tokens, check_length, usage
from proxy.simulator.exchange import Exchange, Script, sse
from proxy.simulator.prompt import compact, render_text
from proxy.simulator.shape import Body, integer, mapping, sequence, text
from proxy.simulator.tokens import tokenizer
from proxy.simulator.validity import check_present


async def completions(exchange: Exchange) -> None:
    """Continue one or several prompts."""
    body = exchange.body()
    check_present(body, "prompt")
    vocabulary = tokenizer(text(body["model"]))
    prompt = render_text(body["prompt"], vocabulary)
    check_length(exchange, prompt, asked_tokens(body))
    charge = exchange.charge(body, (segment.tokens for segment in prompt.segments))
    made = [
        prose(seed, vocabulary, words=exchange.simulator.options.reply_words, limit=integer(body.get("max_tokens")))
        for seed in _seeds(body)
    ]
    tokens = sum(choice.tokens for choice in made)
    frame: dict[str, object] = {
        "id": f"cmpl-sim{exchange.entry.index:08d}",
        "object": "text_completion",
        "created": exchange.created,
        "model": body["model"],
    }
    counted = usage(charge, tokens)
    if body.get("stream"):
        reported = mapping(body.get("stream_options")).get("include_usage") is True and not exchange.faults.no_usage
        await exchange.stream(_script(frame, made, counted if reported else None, tokens))
        return
    whole = {
        **frame,
        "choices": [_choice(index, choice.text or "", choice.finish_reason) for index, choice in enumerate(made)],
    }
    if not exchange.faults.no_usage:
        whole["usage"] = counted
    await exchange.generate(whole, tokens, max((len(choice.pieces) for choice in made), default=0))


def _seeds(body: Body) -> list[str]:
    prompt = body["prompt"]
    several = isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt)
    prompts = sequence(prompt) if several else [prompt]
    return [f"{index}\0{compact(part)}" for part in prompts for index in range(integer(body.get("n")) or 1)]


def _choice(index: int, piece: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"index": index, "text": piece, "logprobs": None, "finish_reason": finish_reason}


def _script(frame: dict[str, object], made: list[Choice], counted: dict[str, object] | None, tokens: int) -> Script:
    tail: dict[str, object] = {} if counted is None else {"usage": None}
    lanes = [
        [sse({**frame, "choices": [_choice(index, piece)], **tail}) for piece in choice.pieces]
        for index, choice in enumerate(made)
    ]
    ending = [
        sse({**frame, "choices": [_choice(index, "", choice.finish_reason)], **tail})
        for index, choice in enumerate(made)
    ]
    if counted is not None:
        ending.append(sse({**frame, "choices": [], "usage": counted}))
    interleaved = (event for event in chain.from_iterable(zip_longest(*lanes)) if event is not None)
    return Script(deltas=tuple(interleaved), ending=tuple(ending), done=(DONE,), tokens=tokens)
