"""What the clients send: 2 KB chats that are all different, and agents' histories of 400 KB that grow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import orjson

from answers import ANSWER_TEXT, MODEL

SMALL_BYTES = 2_048
HISTORY_BYTES = 400_000
HISTORY_MESSAGES = 60

_TEXT = """the proxy reads a request from the client and sends it to the upstream which answers with a stream of events
each of which carries one token so the reader has to find where an event ends before it may pass it on when the tests
of this module failed on Tuesday nobody had changed the code but the clock of the build machine stood in another zone
def return self if not None raise ValueError import from class async await for item in values yield response status
headers body timeout retry connection pool budget window cache prefix layer history message system tool result path
line file function value error warning trace metric label counter histogram please look at why this is slow and fix it
without changing the public interface naïve café – “quoted” → next"""
_WORDS = _TEXT.split()

_HEADERS = (
    b"Host: 127.0.0.1\r\nAuthorization: Bearer sk-bench-0123456789abcdef0123456789abcdef\r\n"
    b"Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nContent-Type: application/json\r\n"
    b"User-Agent: AsyncOpenAI/Python 3.57.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 3.57.0\r\n"
    b"X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
    b"X-Stainless-Runtime-Version: 3.11.7\r\nX-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\n"
)


def http_request(body: bytes, *, events: int = 0, rate: int = 0) -> bytes:
    """Return the bytes of a chat request; `events` and `rate` (per second) tell the mock upstream what to stream."""
    pace = b"x-bench-events: %d\r\nx-bench-rate: %d\r\n" % (events, rate) if events else b""
    head = b"POST /v1/chat/completions HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n" % (_HEADERS, pace, len(body))
    return head + body


def _text(rng: random.Random, size: int) -> str:
    """Return prose of about `size` bytes: known words, and now and then an identifier no one has seen."""
    words = rng.choices(_WORDS, k=size // 6 + 1)
    for at in range(7, len(words), 23):
        words[at] = f"id_{rng.getrandbits(32):08x}\n"
    return " ".join(words)[:size]


def _options(*, stream: bool, include_usage: bool) -> bytes:
    usage = b',"stream_options":{"include_usage":true}' if include_usage else b""
    return b',"temperature":0.2' + (b',"stream":true' + usage if stream else b"") + b"}"


def small_bodies(*, stream: bool = False, include_usage: bool = False, start: int = 0) -> Iterator[bytes]:
    """Yield chats of exactly 2,048 bytes: one shared system prompt, and a question that never comes twice."""
    rng = random.Random(1)
    system = orjson.dumps({"role": "system", "content": "You are a careful assistant. " + _text(rng, 800)})
    tail = _options(stream=stream, include_usage=include_usage)
    head = b'{"model":"%b","messages":[%b,' % (MODEL.encode(), system)
    head += b'{"role":"user","content":"Question %010d of today: '
    padding = SMALL_BYTES - len(head % 0) - len(b'"}]') - len(tail)
    question = (_text(rng, 2 * SMALL_BYTES).encode("ascii", "ignore").replace(b"\n", b" "))[:padding]
    for number in count(start):
        yield head % number + question + b'"}]' + tail


def _tools(rng: random.Random) -> list[dict[str, object]]:
    names = ("read_file", "write_file", "list_directory", "search_text", "run_tests", "fetch_page", "ask_user")
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": _text(rng, 350),
                "parameters": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": _text(rng, 120)},
                        "limit": {"type": "integer", "description": _text(rng, 80), "minimum": 1},
                    },
                    "required": ["path"],
                    "additionalProperties": False,
                },
            },
        }
        for name in names
    ]


def _messages(rng: random.Random) -> Iterator[dict[str, object]]:
    """Yield the 60 messages of an agent at work; the tool results are most of the 400 KB."""
    yield {"role": "system", "content": "You are a coding agent. " + _text(rng, 6_000)}
    for step in range((HISTORY_MESSAGES - 4) // 4):
        arguments = orjson.dumps({"path": f"src/module_{rng.getrandbits(16)}.py", "limit": 400}).decode()
        call = {"id": f"call_{step}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        yield {"role": "user", "content": _text(rng, 2_500)}
        yield {"role": "assistant", "content": _text(rng, 500), "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call_{step}", "content": _text(rng, 19_500)}
        yield {"role": "assistant", "content": _text(rng, 4_000)}
    yield {"role": "user", "content": _text(rng, 2_500)}
    yield {"role": "assistant", "content": _text(rng, 4_000)}
    yield {"role": "user", "content": _text(rng, 1_000)}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One agent's prepared history, as JSON bytes."""

    head: bytes
    messages: bytes
    questions: tuple[bytes, ...]


def history(seed: int, turns: int) -> History:
    """Prepare a history of 400 KB that can grow by `turns` exchanges."""
    rng = random.Random(seed)
    questions = ({"role": "user", "content": f"Step {turn}: {_text(rng, 400)}"} for turn in range(turns))
    return History(
        head=b'{"model":"%b","tools":%b,"messages":[' % (MODEL.encode(), orjson.dumps(_tools(rng))),
        messages=b",".join(map(orjson.dumps, _messages(rng))),
        questions=tuple(map(orjson.dumps, questions)),
    )


class Conversation:
    """A history as it grows: each body is the one before it and one exchange (0.8 KB) more."""

    def __init__(self, prepared: History) -> None:
        self._prepared = prepared
        self._messages = bytearray(prepared.messages)
        self._reply = b"," + orjson.dumps({"role": "assistant", "content": ANSWER_TEXT}) + b","
        self._turn = 0

    @property
    def finished(self) -> bool:
        """Whether every prepared exchange was used."""
        return self._turn > len(self._prepared.questions)

    def next_body(self, *, stream: bool = False, include_usage: bool = False) -> bytes:
        """Return the next turn's request body (the first: the history as it stands)."""
        if self._turn:
            self._messages += self._reply
            self._messages += self._prepared.questions[self._turn - 1]
        self._turn += 1
        options = _options(stream=stream, include_usage=include_usage)
        return b"".join((self._prepared.head, self._messages, b"]", options))
