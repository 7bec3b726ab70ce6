"""Counting what is sent: messages, tools, response formats.

The rule is OpenAI's published one (cookbook, "How to count tokens with tiktoken"): 3 tokens a message and its role, one
more with a `name`, 3 that prime the reply. `count` counts plain text; literal special tokens in it are text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec
import tiktoken

from proxy.core import media
from proxy.core.media import Media

Count = Callable[[str], int]

PER_MESSAGE = 3
PER_NAME = 1
PER_CALL = 3
PER_TOOL = 8
PRIMING = 3
_object = msgspec.json.Decoder(dict[str, object])
_PIECE = 16_384
_BIGGEST_PIECE = 65_536


def counter(encoding: tiktoken.Encoding) -> Count:
    """Return a count for texts of any length: fed in pieces, so that no run of equal characters can break the encoder.

    Exact: a piece ends between a newline and a letter or digit, where neither encoding has a token. Only a text with
    no such place for 64 Ki characters is cut hard, which may count a token or two too many. A piece that comes again
    at once, as in a run of equal characters, is counted once.
    """
    encode = encoding.encode_ordinary

    def count(text: str) -> int:
        if len(text) <= _PIECE:
            return len(encode(text))
        return sum(len(encode(piece)) * len(list(again)) for piece, again in itertools.groupby(pieces(text)))

    return count


def pieces(text: str) -> Iterator[str]:
    """Cut a long text where no token crosses."""
    at = 0
    while len(text) - at > _PIECE:
        end = _edge(text, at + _PIECE, min(len(text), at + _BIGGEST_PIECE))
        yield text[at:end]
        at = end
    yield text[at:]


def _edge(text: str, start: int, stop: int) -> int:
    at = text.find("\n", start, stop)
    while at >= 0 and at + 1 < stop:
        if text[at + 1].isalnum():
            return at + 1
        at = text.find("\n", at + 1, stop)
    return stop


def message(raw: bytes, count: Count, rules: Media = media.UNKNOWN) -> int:
    """Return the tokens of one message `{"role": …}` on the wire; an unreadable one counts as text, all of it.

    Every string of a message counts, as the published rule has it: ids of tool calls and unknown fields too. Outside of
    its content and of calls, what is data weighs as such: a picture, sound, a file, a signature.
    """
    try:
        read = _object.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return PER_MESSAGE + count(raw.decode("utf-8", "replace"))
    return PER_MESSAGE + sum(_field(key, value, count, rules) for key, value in read.items())


def schema(raw: bytes, count: Count) -> int:
    """Return the tokens of a tool list or a response format: its JSON as it stands, and a frame."""
    return PER_TOOL + count(raw.decode("utf-8", "replace"))


def _field(key: str, value: object, count: Count, rules: Media) -> int:
    match key, value:
        case "content", list():
            return sum(_part(part, count, rules) for part in value if isinstance(part, dict))
        case "tool_calls", list():
            return sum(_call(call, count, rules) for call in value if isinstance(call, dict))
        case "function_call", dict():
            return _call({"function": value}, count, rules)
        case "name", str():
            return PER_NAME + count(value)
        case "content", str():
            return count(value)
        case "audio", {"data": str(data), **rest}:
            url = f"data:audio/{rest.get('format')};base64,{data}"
            return media.data(url, rules, count) + _field("", rest, count, rules)
        case _:
            return sum(_outside(text, count, rules) for text in _strings(value))


def _outside(text: str, count: Count, rules: Media) -> int:
    """Count a string that is neither content nor a call's: what is data in it weighs as data."""
    said, held = media.apart(text)
    return count(said) + sum(media.data(each, rules, count) for each in held)


def _call(call: dict[str, object], count: Count, rules: Media) -> int:
    function = call.get("function") or call.get("custom")
    texts = [function.get(key) for key in ("name", "arguments", "input")] if isinstance(function, dict) else []
    # Some gateways write a signature into the id.
    return PER_CALL + _outside(_text(call.get("id")), count, rules) + sum(count(_text(text)) for text in texts if text)


def _part(part: dict[str, object], count: Count, rules: Media) -> int:
    match part.get("type"):
        case "image_url" | "input_image" | "image":
            return media.image(part, rules)
        case "input_audio":
            return media.audio(part, rules)
        case "file" | "input_file" | "document":
            return media.file(part, rules, count)
        case "refusal":
            return count(_text(part.get("refusal")))
        case _:
            return count(_text(part.get("text")))


def _strings(value: object) -> Iterator[str]:
    """Find every string of a value: reasoning that comes back in `thinking_blocks`, say."""
    match value:
        case str():
            yield value
        case list():
            for part in value:
                yield from _strings(part)
        case dict():
            for part in value.values():
                yield from _strings(part)
        case _:
            return


def _text(value: object) -> str:
    """Arguments are a JSON string on the wire; some servers also take an object."""
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()
