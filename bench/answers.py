"""What the mock upstream answers, and how the load generator knows an answer is whole.

Both sides build the bytes here: a canned OpenAI chat completion, or an SSE stream of `chat.completion.chunk` events of
one fixed size, so that bytes received tell how many events arrived. Token counts in `usage` follow the size of the body
the upstream got (one token per 4 bytes) and are padded with blanks to a fixed width, so every answer's length is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MODEL = "gpt-4.1"
ANSWER_TEXT = (
    "I read the two files again. The retry loop closes the response before it sleeps, so the connection goes back to "
    "the pool; the remaining problem is the timer, which starts before the first byte is sent. I will move it, run the "
    "tests of that module, and then look at how the metrics are labelled."
)

_COMMON = b'"created":1764000000,"model":"gpt-4.1-2025-04-14","service_tier":"default","system_fingerprint":"fp_bench",'
_USAGE = (
    b'"usage":{"prompt_tokens":%8d,"completion_tokens":%8d,"total_tokens":%8d,"prompt_tokens_details":'
    b'{"cached_tokens":%8d,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,'
    b'"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}}'
)
_ANSWER_HEAD = (
    b'{"id":"chatcmpl-bench","object":"chat.completion",'
    + _COMMON
    + b'"choices":[{"index":0,"message":{"role":"assistant","content":"'
    + ANSWER_TEXT.encode()
    + b'","refusal":null,"annotations":[]},"logprobs":null,"finish_reason":"stop"}],'
)
_CHUNK_HEAD = b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk",' + _COMMON
_CHUNK = _CHUNK_HEAD + b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
_DONE = b"data: [DONE]\n\n"

FIRST_EVENT = _CHUNK % (b'{"role":"assistant","content":"","refusal":null}', b"null")
LAST_EVENT = _CHUNK % (b"{}", b'"stop"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """An answer's known parts: how it starts, how it ends, and its length in bytes."""

    head: bytes
    tail: bytes
    size: int

    def matches(self, body: bytes | bytearray) -> bool:
        """Say whether `body` is this answer, whole and unchanged."""
        return len(body) == self.size and body.startswith(self.head) and body.endswith(self.tail)


def _usage(body_bytes: int, completion_tokens: int) -> bytes:
    prompt_tokens = body_bytes // 4
    cached_tokens = prompt_tokens // 256 * 128
    return _USAGE % (prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached_tokens)


def answer(body_bytes: int) -> bytes:
    """Return the complete chat completion for a request body of `body_bytes` bytes."""
    return _ANSWER_HEAD + _usage(body_bytes, 72)


def content_event(number: int) -> bytes:
    """Return the `number`-th content event; all have the same length."""
    return _CHUNK % (b'{"content":" word%06d"}' % number, b"null")


EVENT_BYTES = len(content_event(0))


def last_events(events: int, body_bytes: int, *, include_usage: bool) -> tuple[bytes, ...]:
    """Return what follows the content events: finish reason, usage where it was asked for, and `[DONE]`."""
    if not include_usage:
        return LAST_EVENT, _DONE
    return LAST_EVENT, _CHUNK_HEAD + b'"choices":[],' + _usage(body_bytes, events) + b"\n\n", _DONE


@lru_cache(maxsize=1)
def expected_answer() -> Expected:
    """Return what a not streamed answer must look like."""
    return Expected(head=_ANSWER_HEAD, tail=b"}}}", size=len(answer(0)))


@lru_cache(maxsize=64)
def expected_stream(events: int, *, include_usage: bool) -> Expected:
    """Return what a stream of `events` content events must look like."""
    head = FIRST_EVENT + b"".join(map(content_event, range(events))) + LAST_EVENT
    tail = last_events(events, 0, include_usage=include_usage)
    return Expected(head=head, tail=_DONE, size=len(head) + sum(map(len, tail[1:])))


def events_in(body: bytes | bytearray, events: int) -> int:
    """Return how many whole content events the first bytes `body` of a stream of `events` hold."""
    return min(max(len(body) - len(FIRST_EVENT), 0) // EVENT_BYTES, events)
