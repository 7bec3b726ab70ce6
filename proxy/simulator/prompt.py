"""The prompt a provider makes of a request: token ids in prefix order.

Order: tools, response schema, messages (https://developers.openai.com/api/docs/guides/prompt-caching).
Count: 3 tokens per message, 1 per name, 3 to prime the reply, and every string of a message
(https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken). Pure; reads any JSON without failing.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import orjson

from proxy.simulator.shape import Body, mapping, sequence, text
from proxy.simulator.tokens import Tokenizer

DEFINITION_TOKENS = 2
"""Overhead of one tool definition or of a response schema, around its compact JSON."""
CALL_TOKENS = 3
"""Overhead of one tool call, around its name and arguments."""
IMAGE_TOKENS = {"low": 85, "high": 765, "auto": 765}
"""Flat price of an image by ``detail``; its real size is not looked at."""
MEDIA_TOKENS = 250
"""Flat price of an audio or file part."""

# Ids above every vocabulary: structure, and digests that stand for the content of images, audio and files.
_START, _SEPARATOR, _END, _NAME, _CALL, _OPEN, _CLOSE = range(1_000_000, 1_000_007)
_MEDIA_BASE = 2_000_000

_READ_FIRST = ("role", "content", "name", "tool_calls", "function_call", "tool_call_id")
_NOT_PROMPT = frozenset({"cache_control", "prompt_cache_breakpoint"})
_DEEPEST = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One piece of the prompt; ``kind`` is ``tool``, ``schema``, ``message``, ``text`` or ``priming``."""

    kind: str
    tokens: "array[int]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """All pieces, in the order in which the provider's cache sees them."""

    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> "array[int]":
        """Ids of the whole prompt."""
        return _joined(segment.tokens for segment in self.segments)

    def count(self, *kinds: str) -> int:
        """Tokens of the segments of these kinds, or of all."""
        return sum(len(segment.tokens) for segment in self.segments if not kinds or segment.kind in kinds)


def render(body: Body, tokenizer: Tokenizer) -> Prompt:
    """Render a chat request, e.g. ``{"messages": [...], "tools": [...], "response_format": {...}}``.

    The key order inside tools and schemas counts; that of the messages themselves does not.
    """
    segments = [
        _definition("tool", tool, tokenizer)
        for tool in (*sequence(body.get("tools")), *sequence(body.get("functions")))
    ]
    schema = mapping(body.get("response_format")).get("json_schema")
    if schema is not None:
        segments.append(_definition("schema", schema, tokenizer))
    segments += [
        Segment(kind="message", tokens=_joined(_message(mapping(message), tokenizer)))
        for message in sequence(body.get("messages"))
    ]
    priming = _joined([array("I", [_START]), tokenizer.encode("assistant"), array("I", [_SEPARATOR])])
    return Prompt(segments=(*segments, Segment(kind="priming", tokens=priming)))


def render_text(value: object, tokenizer: Tokenizer) -> Prompt:
    """Render the ``prompt`` of a completion or the ``input`` of an embedding: text, ids, or a list of either."""
    parts = [value] if isinstance(value, str) or _is_ids(value) else sequence(value)
    return Prompt(segments=tuple(Segment(kind="text", tokens=_ids(part, tokenizer)) for part in parts))


def compact(value: object) -> str:
    """JSON of a value without whitespace, keys in their own order; what JSON cannot carry is replaced."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return orjson.dumps(_carriable(value, 0)).decode()


def _definition(kind: str, value: object, tokenizer: Tokenizer) -> Segment:
    return Segment(
        kind=kind, tokens=_joined([array("I", [_OPEN]), tokenizer.encode(compact(value)), array("I", [_CLOSE])])
    )


def _message(message: Body, tokenizer: Tokenizer) -> Iterator["array[int]"]:
    yield array("I", [_START])
    yield tokenizer.encode(text(message.get("role")))
    yield array("I", [_SEPARATOR])
    if isinstance(message.get("name"), str):
        yield array("I", [_NAME])
        yield tokenizer.encode(text(message["name"]))
    yield from _content(message.get("content"), tokenizer)
    for call in (*sequence(message.get("tool_calls")), *_one(message.get("function_call"))):
        yield from _call(mapping(call), tokenizer)
    yield from _scalar(message.get("tool_call_id"), tokenizer)
    for key in sorted(message.keys() - {*_READ_FIRST, *_NOT_PROMPT}):
        yield from _scalar(message[key], tokenizer)
    yield array("I", [_END])


def _content(content: object, tokenizer: Tokenizer) -> Iterator["array[int]"]:
    if not isinstance(content, list):
        yield from _scalar(content, tokenizer)
        return
    for part in content:
        yield from _part(part, tokenizer)


def _part(part: object, tokenizer: Tokenizer) -> Iterator["array[int]"]:
    fields = mapping(part)
    match fields.get("type"):
        case "text" | "refusal" | "input_text" | "output_text":
            yield from _scalar(fields.get("text", fields.get("refusal")), tokenizer)
        case "image_url" | "input_image":
            image = fields.get("image_url")
            detail = text(mapping(image).get("detail", fields.get("detail"))) or "auto"
            yield _media(image, IMAGE_TOKENS.get(detail, IMAGE_TOKENS["auto"]))
        case "input_audio" | "file" | "input_file":
            yield _media({key: fields[key] for key in fields.keys() - _NOT_PROMPT}, MEDIA_TOKENS)
        case _:
            yield from _scalar(part, tokenizer)


def _call(call: Body, tokenizer: Tokenizer) -> Iterator["array[int]"]:
    function = mapping(call.get("function", call.get("custom"))) or call
    yield array("I", [_CALL] * CALL_TOKENS)
    yield from _scalar(call.get("id"), tokenizer)
    yield from _scalar(function.get("name"), tokenizer)
    yield from _scalar(function.get("arguments", function.get("input")), tokenizer)


def _scalar(value: object, tokenizer: Tokenizer) -> Iterator["array[int]"]:
    if isinstance(value, str):
        yield tokenizer.encode(value)
    elif value not in (None, [], {}):
        yield tokenizer.encode(compact(value))


def _media(value: object, count: int) -> "array[int]":
    digest = blake2b(compact(value).encode(), digest_size=4).digest()
    return array("I", [_MEDIA_BASE + int.from_bytes(digest) % 1_000_000_000] * count)


def _one(value: object) -> Sequence[object]:
    return () if value is None else (value,)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _ids(value: object, tokenizer: Tokenizer) -> "array[int]":
    if _is_ids(value):
        return array("I", (item & 0x7FFF_FFFF for item in sequence(value) if isinstance(item, int)))
    return _joined(_scalar(value, tokenizer))


def _joined(arrays: Iterable["array[int]"]) -> "array[int]":
    whole = array("I")
    for part in arrays:
        whole.extend(part)
    return whole


def _carriable(value: object, depth: int) -> object:
    """Replace lone surrogates, and what lies too deep for the JSON writer."""
    if depth > _DEEPEST:
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_carriable(str(key), depth): _carriable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_carriable(item, depth + 1) for item in value]
    if isinstance(value, bool | float | None) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return value
    return repr(value)
