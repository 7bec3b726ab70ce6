"""Every provider's dialect of usage → Usage. What a provider does not say is None, never 0.

OpenAI counts cached tokens inside `prompt_tokens`; Anthropic counts them beside `input_tokens`, and some gateways do so
beside `prompt_tokens` (PROVIDERS 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer as the upstream reported them. `input_tokens` holds the cached ones too."""

    input_tokens: int
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


_Soft = object
_MOST_TOKENS = 10**12
"""No prompt holds more: what says so says nothing."""


class _Wire(msgspec.Struct):
    prompt_tokens: _Soft = None
    completion_tokens: _Soft = None
    prompt_tokens_details: _Soft = None
    completion_tokens_details: _Soft = None
    input_tokens: _Soft = None
    output_tokens: _Soft = None
    input_tokens_details: _Soft = None
    cache_read_input_tokens: _Soft = None
    cache_creation_input_tokens: _Soft = None
    prompt_cache_hit_tokens: _Soft = None
    cached_tokens: _Soft = None


class _Nested(msgspec.Struct):
    model: _Soft = None
    usage: _Wire | None = None


class _Answer(msgspec.Struct):
    model: _Soft = None
    usage: _Wire | None = None
    timings: dict[str, object] | None = None
    response: _Nested | None = None
    message: _Nested | None = None


_answer = msgspec.json.Decoder(_Answer)


def parse(raw: bytes) -> Usage | None:
    """Read the usage of an answer or a usage chunk, `{"usage": {…}}`; None when it says nothing of its input."""
    try:
        answer = _answer.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    nested = next((each.usage for each in (answer.response, answer.message) if each and each.usage), None)
    wire, timings = answer.usage or nested or _Wire(), answer.timings or {}
    details = _first_dict(wire.prompt_tokens_details, wire.input_tokens_details)
    cached = _first(details.get("cached_tokens"), wire.prompt_cache_hit_tokens, wire.cached_tokens)
    written = _first(
        *map(details.get, ("cache_write_tokens", "cache_creation_tokens")), wire.cache_creation_input_tokens
    )
    total = _first(wire.prompt_tokens)
    if total is None and wire.input_tokens is not None:
        total, cached, written = _input(wire, cached, written)
    elif total is not None:
        beside = (_first(wire.cache_read_input_tokens) or 0) + (_first(wire.cache_creation_input_tokens) or 0)
        total += beside if beside > total else 0
    if total is None:
        total = _sum(timings.get("cache_n"), timings.get("prompt_n"))
    if cached is None:
        cached = _first(wire.cache_read_input_tokens, timings.get("cache_n"))
    if total is None:
        return None
    output = _first_dict(wire.completion_tokens_details)
    return Usage(
        input_tokens=total,
        output_tokens=_first(wire.completion_tokens, wire.output_tokens, timings.get("predicted_n")),
        cache_read_tokens=None if cached is None else min(cached, total),
        cache_write_tokens=written,
        reasoning_tokens=_first(output.get("reasoning_tokens")),
    )


def output(raw: bytes) -> int | None:
    """Return the output tokens that an answer or an event tells, whatever it says of its input."""
    try:
        answer = _answer.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    wires = (answer.usage, *(each.usage for each in (answer.response, answer.message) if each))
    return _first(*(value for wire in wires if wire for value in (wire.completion_tokens, wire.output_tokens)))


def model(raw: bytes) -> str:
    """Return the model an answer says it is of; empty where it says none."""
    try:
        answer = _answer.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return ""
    names = (answer.model, *(each.model for each in (answer.response, answer.message) if each))
    return next((name for name in names if isinstance(name, str)), "")


def _input(wire: _Wire, cached: int | None, written: int | None) -> tuple[int | None, int | None, int | None]:
    """OpenAI's Responses count everything in `input_tokens`; Anthropic's counts what was neither read nor written."""
    total = _first(wire.input_tokens)
    if total is None or isinstance(wire.input_tokens_details, dict):
        return total, cached, written
    read, wrote = _first(wire.cache_read_input_tokens), _first(wire.cache_creation_input_tokens)
    return total + (read or 0) + (wrote or 0), read if cached is None else cached, wrote if written is None else written


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_TOKENS:
        return None
    return int(value) if value == int(value) else None


def _first(*values: object) -> int | None:
    return next((number for number in map(_number, values) if number is not None), None)


def _first_dict(*values: object) -> dict[str, object]:
    return next((value for value in values if isinstance(value, dict)), {})


def _sum(*values: object) -> int | None:
    numbers = [_number(value) for value in values]
    return None if None in numbers else sum(number or 0 for number in numbers)
