"""Counting what is sent: messages, tools, response formats.

The rule is OpenAI's published one (cookbook, "How to count tokens with tiktoken"): 3 tokens a message and its role, one
more with a `name`, 3 that prime the reply. `count` counts plain text; literal special tokens in it are text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import tiktoken

Count = Callable[[str], int]

PER_MESSAGE = 3
PER_NAME = 1
PER_CALL = 8
"""The frame around one tool call: what it adds in practice to its name and arguments."""
PER_TOOL = 8
PRIMING = 3
IMAGE_LOW = 85
IMAGE_HIGH = 765
"""A 1024 x 1024 image at high detail for gpt-4o (OpenAI's images guide); its true size is not looked at yet."""
AUDIO = 400
FILE = 1_500
_PIECE = 16_384
_BIGGEST_PIECE = 65_536


def counter(encoding: tiktoken.Encoding) -> Count:
    """Return a count for texts of any length: fed in pieces, so that no run of equal characters can break the encoder.

    Exact: a piece ends between a newline and a letter or digit, where neither encoding has a token. Only a text with
    no such place for 64 Ki characters is cut hard, which may count a token or two too many.
    """
    encode = encoding.encode_ordinary

    def count(text: str) -> int:
        if len(text) <= _PIECE:
            return len(encode(text))
        return sum(len(encode(piece)) for piece in pieces(text))

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


class _Function(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw(b'""')


class _Call(msgspec.Struct):
    function: _Function = _Function()


class _Image(msgspec.Struct):
    detail: str | None = None


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: _Image | str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


_message = msgspec.json.Decoder(_Message)


def message(raw: bytes, count: Count) -> int:
    """Return the tokens of one message `{"role": …}` on the wire; an unreadable one counts as text, all of it."""
    try:
        read = _message.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return PER_MESSAGE + count(raw.decode("utf-8", "replace"))
    total = PER_MESSAGE + count(read.role)
    if read.name:
        total += PER_NAME + count(read.name)
    for text in (read.refusal, read.reasoning_content):
        total += count(text) if text else 0
    if isinstance(read.content, str):
        total += count(read.content)
    elif read.content:
        total += sum(_part(part, count) for part in read.content)
    for call in read.tool_calls or ():
        total += PER_CALL + count(call.function.name) + count(_text(call.function.arguments))
    return total


def schema(raw: bytes, count: Count) -> int:
    """Return the tokens of a tool definition or a response format: its JSON as it stands, and a frame."""
    return PER_TOOL + count(raw.decode("utf-8", "replace"))


def _part(part: _Part, count: Count) -> int:
    match part.type:
        case "text" | "input_text" | "output_text":
            return count(part.text or "")
        case "refusal":
            return count(part.refusal or "")
        case "image_url" | "input_image" | "image":
            detail = part.image_url.detail if isinstance(part.image_url, _Image) else None
            return IMAGE_LOW if detail == "low" else IMAGE_HIGH
        case "input_audio":
            return AUDIO
        case "file" | "input_file":
            return FILE
        case _:
            return count(part.text or "")


def _text(raw: msgspec.Raw) -> str:
    """Arguments are a JSON string on the wire; some servers also take an object."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return bytes(raw).decode("utf-8", "replace")
