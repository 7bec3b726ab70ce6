"""A whole answer → digests of what was said in it, to be found again in the client's next request.

Read as leniently as clients do: what is odd in one member is no reason to forget the rest.
"""

from __future__ import annotations

import math

import msgspec

from proxy.core import sse
from proxy.core.message import Function, said, words_of

_BOM = b"\xef\xbb\xbf"


class _Custom(msgspec.Struct):
    name: object = None
    input: object = None


class _Call(msgspec.Struct):
    index: object = None
    function: Function | None = None
    custom: _Custom | None = None

    def words(self) -> tuple[str, str]:
        """Return the name and what it is called with, as far as they are told here."""
        if self.custom is not None:
            return _text(self.custom.name), _text(self.custom.input)
        return words_of(self.function) if self.function else ("", "")


class _Said(msgspec.Struct):
    content: object = None
    tool_calls: list[_Call] | None = None
    function_call: Function | None = None

    @property
    def text(self) -> str:
        """Its words; of several parts one behind the other."""
        parts = self.content if isinstance(self.content, list) else []
        return _text(self.content) + "".join(_text(part.get("text")) for part in parts if isinstance(part, dict))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """What it calls, the older form last."""
        legacy = [words_of(self.function_call)] if self.function_call else []
        return [*(call.words() for call in self.tool_calls or ()), *legacy]


class _Choice(msgspec.Struct):
    index: object = 0
    message: _Said | None = None
    delta: _Said | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: object = None


_answer = msgspec.json.Decoder(_Answer)


def of_answer(raw: bytes) -> tuple[bytes, ...]:
    """Read `{"choices": [{"message": {…}}]}`; nothing where it cannot be read."""
    found = _read(raw.removeprefix(_BOM))
    return tuple(
        said("assistant", [choice.message.text], choice.message.calls)
        for choice in (found.choices if found and found.choices else ())
        if choice.message
    )


def fails(raw: bytes) -> bool:
    """Whether an answer is an error, whatever its status: `{"error": {…}}` and no choices."""
    found = _read(raw.removeprefix(_BOM))
    return found is not None and bool(found.error) and not found.choices


def of_stream(raw: bytes) -> tuple[bytes, ...]:
    """Read a whole event stream of `{"choices": [{"delta": {…}}]}` chunks."""
    texts: dict[object, list[str]] = {}
    calls: dict[object, dict[float, list[list[str]]]] = {}
    for event in sse.events(raw.removeprefix(_BOM)):
        read = _read(sse.data(event))
        for choice in read.choices if read and read.choices else ():
            if choice.delta is None:
                continue
            of = choice.index if isinstance(choice.index, int | float) else 0
            texts.setdefault(of, []).append(choice.delta.text)
            for place, call in enumerate(choice.delta.tool_calls or ()):
                index = call.index if isinstance(call.index, int | float) else place
                _add(calls.setdefault(of, {}).setdefault(index, [[], []]), call.words())
            if choice.delta.function_call is not None:
                _add(calls.setdefault(of, {}).setdefault(math.inf, [[], []]), words_of(choice.delta.function_call))
    return tuple(
        said("assistant", ["".join(text)], [_joined(call) for _, call in sorted(calls.get(of, {}).items())])
        for of, text in texts.items()
    )  # fmt: skip


def _read(raw: bytes) -> _Answer | None:
    try:
        return _answer.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _add(parts: list[list[str]], words: tuple[str, str]) -> None:
    for told, each in zip(parts, words, strict=True):
        told.append(each)


def _joined(parts: list[list[str]]) -> tuple[str, str]:
    name, arguments = parts
    return "".join(name), "".join(arguments)
