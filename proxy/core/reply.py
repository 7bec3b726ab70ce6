"""A whole answer → digests of what was said in it, to be found again in the client's next request."""

from __future__ import annotations

import msgspec

from proxy.core import sse
from proxy.core.message import said


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Custom(msgspec.Struct):
    name: str | None = None
    input: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    function: _Function | None = None
    custom: _Custom | None = None

    def words(self) -> tuple[str, str]:
        """Return the name and what it is called with, as far as they are told here."""
        if self.custom is not None:
            return self.custom.name or "", self.custom.input or ""
        return (self.function.name or "", self.function.arguments or "") if self.function else ("", "")


class _Said(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Said | None = None
    delta: _Said | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_answer = msgspec.json.Decoder(_Answer)


def of_answer(raw: bytes) -> tuple[bytes, ...]:
    """Read `{"choices": [{"message": {…}}]}`; nothing where it cannot be read."""
    try:
        read = _answer.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return ()
    return tuple(
        _digest(choice.message.content or "", [call.words() for call in choice.message.tool_calls or ()])
        for choice in read.choices
        if choice.message
    )


def of_stream(raw: bytes) -> tuple[bytes, ...]:
    """Read a whole event stream of `{"choices": [{"delta": {…}}]}` chunks."""
    texts: dict[int, list[str]] = {}
    calls: dict[int, dict[int, list[list[str]]]] = {}
    for event in sse.events(raw):
        try:
            read = _answer.decode(sse.data(event))
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            continue
        for choice in read.choices:
            if choice.delta is None:
                continue
            texts.setdefault(choice.index, []).append(choice.delta.content or "")
            for place, call in enumerate(choice.delta.tool_calls or ()):
                index = place if call.index is None else call.index
                parts = calls.setdefault(choice.index, {}).setdefault(index, [[], []])
                for told, words in zip(parts, call.words(), strict=True):
                    told.append(words)
    return tuple(
        _digest("".join(text), [("".join(name), "".join(arguments)) for _, (name, arguments) in
                                sorted(calls.get(index, {}).items())])
        for index, text in texts.items()
    )  # fmt: skip


def _digest(content: str, calls: list[tuple[str, str]]) -> bytes:
    return said("assistant", [content], calls)
