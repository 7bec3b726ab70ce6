"""The reply to a request: readable words, tool calls or JSON, the same for the same request.

Pure. Text is seeded by the last user message alone, so a request that reaches the provider with other context
in front of the same question is answered alike. ``[call]`` or ``[call:name1,name2]`` in that message asks for tools.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from itertools import chain, count, islice
from typing import Literal

import orjson

from proxy.simulator.prompt import CALL_TOKENS
from proxy.simulator.schema import example
from proxy.simulator.shape import Body, integer, mapping, sequence, text
from proxy.simulator.tokens import Tokenizer

Finish = Literal["stop", "length", "tool_calls"]

# 128 words, each one token in both vocabularies, with or without a leading space or a capital.
_WORD_LIST = """
the a of and to in is it that for with on as this are from by one each when more new time first way part work long
plan river morning paper window light small table answer question number line order point place house water city
road story music color winter summer simple clear quiet open early late often together before after under over
between across always never almost enough every many several other same different short strong warm cold dark green
blue white black old young good better best great large little next last second third hand head side end day night
week month year letter word page book field market bridge forest mountain ocean train station school teacher student
friend family child mother father coffee apple
"""
_WORDS = tuple(_WORD_LIST.split())
_MARK = re.compile(r"\[call(?::([\w.,\s-]+))?\]")
_PIECE = re.compile(r"\w+|\W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call; ``pieces`` joined are the JSON of its arguments."""

    id: str
    name: str
    pieces: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """The whole argument string."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One alternative: text in word-sized pieces, or calls. ``tokens`` is what it counts as output."""

    pieces: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    finish_reason: Finish = "stop"
    tokens: int = 0

    @property
    def text(self) -> str | None:
        """The whole text; nothing when the choice is tool calls."""
        return None if self.calls else "".join(self.pieces)


def choices(body: Body, tokenizer: Tokenizer, *, words: int = 40) -> tuple[Choice, ...]:
    """Answer a chat request: ``n`` choices of about ``words`` words, never longer than its token limit."""
    limit = integer(body.get("max_completion_tokens")) or integer(body.get("max_tokens"))
    asked = last_user_text(body)
    called = _called(body)
    made = []
    for index in range(integer(body.get("n")) or 1):
        seed = f"{index}\0{asked}"
        if called:
            made.append(_calling(body, called, seed, tokenizer, limit))
        elif (value := _structured(body, seed)) is not None:
            made.append(_bounded(tuple(_PIECE.findall(value)), tokenizer, limit))
        else:
            made.append(_bounded(tuple(_sentences(seed, words)), tokenizer, limit))
    return tuple(made)


def prose(seed: str, tokenizer: Tokenizer, *, words: int = 40, limit: int | None = None) -> Choice:
    """Plain text from a seed, for endpoints without messages."""
    return _bounded(tuple(_sentences(seed, words)), tokenizer, limit)


def last_user_text(body: Body) -> str:
    """Text of the last user message, its parts joined."""
    for message in reversed(sequence(body.get("messages"))):
        if mapping(message).get("role") == "user":
            return _text(mapping(message).get("content"))
    return ""


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(text(mapping(part).get("text")) for part in sequence(content))


def _random_bytes(seed: str) -> Iterator[int]:
    name = seed.encode("utf-8", "replace")
    return chain.from_iterable(shake_256(b"%d\0%b" % (block, name)).digest(64) for block in count())


def _word_stream(seed: str) -> Iterator[str]:
    return (_WORDS[byte % len(_WORDS)] for byte in _random_bytes(seed))


def _sentences(seed: str, words: int) -> Iterator[str]:
    """Pieces of whole sentences, each piece one token, until about ``words`` words are said."""
    numbers = _random_bytes(seed)
    said = 0
    while said < words:
        length = min(6 + next(numbers) % 7, max(words - said, 3))
        for position in range(length):
            word = _WORDS[next(numbers) % len(_WORDS)]
            shown = word if position else word.capitalize()
            yield shown if said + position == 0 else f" {shown}"
        yield "."
        said += length


def _bounded(pieces: tuple[str, ...], tokenizer: Tokenizer, limit: int | None) -> Choice:
    kept: list[str] = []
    tokens = 0
    for piece in pieces:
        size = tokenizer.count(piece)
        if limit is not None and tokens + size > limit:
            return Choice(pieces=tuple(kept), finish_reason="length", tokens=tokens)
        kept.append(piece)
        tokens += size
    return Choice(pieces=pieces, tokens=tokens)


def _functions(body: Body) -> dict[str, object]:
    """Parameter schemas of the function tools by name, in order."""
    tools = (mapping(mapping(tool).get("function")) for tool in sequence(body.get("tools")))
    return {text(function.get("name")): function.get("parameters") for function in tools if function.get("name")}


def _called(body: Body) -> tuple[str, ...]:
    """Names of the functions this reply calls, in order; empty for text."""
    known = tuple(_functions(body))
    names = tuple(name for name in _wished(body, known) if name in known)
    return names[:1] if body.get("parallel_tool_calls") is False else names


def _wished(body: Body, known: Sequence[str]) -> Sequence[str]:
    choice = body.get("tool_choice")
    if choice == "none" or not known:
        return ()
    named = text(mapping(mapping(choice).get("function")).get("name"))
    if named:
        return (named,)
    allowed = mapping(mapping(choice).get("allowed_tools"))
    if allowed:
        offered = [text(mapping(mapping(tool).get("function")).get("name")) for tool in sequence(allowed.get("tools"))]
        known = [name for name in known if name in offered]
    marked = _marked(body, known)
    return marked or (known[:1] if "required" in (choice, allowed.get("mode")) else ())


def _marked(body: Body, known: Sequence[str]) -> Sequence[str]:
    messages = sequence(body.get("messages"))
    if not messages or mapping(messages[-1]).get("role") != "user":
        return ()
    mark = _MARK.search(last_user_text(body))
    if mark is None:
        return ()
    names = [name.strip() for name in (mark[1] or "").split(",")]
    return [name for name in names if name in known] if mark[1] else known[:1]


def _calling(body: Body, names: tuple[str, ...], seed: str, tokenizer: Tokenizer, limit: int | None) -> Choice:
    """Calls with valid arguments; a limit cuts the arguments off, as providers do."""
    functions = _functions(body)
    turn = len(sequence(body.get("messages")))
    calls: list[Call] = []
    tokens = 0
    cut = False
    for position, name in enumerate(names):
        words = _word_stream(f"{name}\0{position}\0{seed}")
        pieces = tuple(_PIECE.findall(_dump(example(functions[name], words) or {})))
        tokens += CALL_TOKENS + tokenizer.count(name)
        arguments = _bounded(pieces, tokenizer, None if limit is None else max(0, limit - tokens))
        tokens += arguments.tokens
        cut = arguments.finish_reason == "length"
        identity = blake2b(f"{turn}\0{position}\0{name}\0{seed}".encode("utf-8", "replace"), digest_size=12)
        calls.append(Call(id=f"call_{identity.hexdigest()}", name=name, pieces=arguments.pieces))
        if cut:
            break
    # OpenAI says "stop", not "tool_calls", when the request names the function.
    named = "function" in mapping(body.get("tool_choice"))
    finish: Finish = "length" if cut else "stop" if named else "tool_calls"
    return Choice(calls=tuple(calls), finish_reason=finish, tokens=tokens)


def _structured(body: Body, seed: str) -> str | None:
    wanted = mapping(body.get("response_format"))
    words = _word_stream(seed)
    match wanted.get("type"):
        case "json_schema":
            return _dump(example(mapping(wanted.get("json_schema")).get("schema"), words))
        case "json_object":
            return _dump({"answer": " ".join(islice(words, 6))})
        case _:
            return None


def _dump(value: object) -> str:
    return orjson.dumps(value).decode()
