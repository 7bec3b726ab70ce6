"""Bytes of an event stream → whole events, however the network cut them."""

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.sse import LARGEST_HELD, Stream, data, events, payload

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9}}'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
DONE = b"data: [DONE]"
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"content":"h\xc3\xa9 \xf0\x9f\x98\x80"},"finish_reason":null}]}',
    FINISH,
    USAGE,
    b'data:{"choices":[{"finish_reason" : "length"}],"usage":{"prompt_tokens":9}}',
    b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}],"usage":null}',
    b'data: {"choices":[],"usage":null}',
    b'data: {"choices":[],"timings":{"cache_n":1}}',
    b'data: {"usage":{"broken"',
    b": ping",
    b"event: error\ndata: x",
    b'data: {"error":{"message":"x"}}',
    b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":9}}',
    DONE,
    b"",
]
ENDS = [b"\n\n", b"\r\n\r\n"]

Facts = tuple[bytes, int, bool, bool, bool, bytes]


def feed(pieces: Sequence[bytes], *, strip: bool = True, choices: int = 1) -> Facts:
    tap = Stream(strip_usage=strip, choices=choices)
    out = b"".join([*map(tap.feed, pieces), tap.end()])
    return out, tap.finished, tap.done, tap.error, tap.complete, tap.usage_event.strip()


def bytewise(raw: bytes) -> list[bytes]:
    return [raw[at : at + 1] for at in range(len(raw))]


@st.composite
def streams(draw: st.DrawFn, ends: Sequence[bytes] = ENDS) -> bytes:
    end = draw(st.sampled_from(ends))
    return b"".join(
        event.replace(b"\n", end[: len(end) // 2]) + end for event in draw(st.lists(st.sampled_from(EVENTS)))
    )


@settings(deadline=None)
@given(streams(), st.lists(st.integers(0, 2_000)))
def test_every_cut_gives_the_same_output_and_facts(raw: bytes, cuts: list[int]) -> None:
    """Whole, byte by byte, and cut anywhere: inside a UTF-8 character, inside CRLF, between events."""
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    whole = feed([raw])
    assert feed([raw[start:end] for start, end in pairwise(places)]) == whole
    assert feed(bytewise(raw)) == whole


@settings(deadline=None)
@given(streams(ends=[b"\r\r"]))
def test_lone_carriage_returns_end_lines_too(raw: bytes) -> None:
    """The third line end of the standard: https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    assert feed([raw]) == feed(bytewise(raw))


@settings(deadline=None)
@given(streams())
def test_only_a_usage_chunk_is_ever_taken_out(raw: bytes) -> None:
    """Everything else is passed on byte for byte; nothing at all is taken where the client asked for usage."""
    kept = [event for event in events(raw) if event.strip() not in _stripped(raw)]
    assert feed([raw])[0] == b"".join(kept)
    assert feed([raw], strip=False)[0] == raw


def _stripped(raw: bytes) -> set[bytes]:
    found = set()
    for event in events(raw):
        if (read := payload(event)) is not None and read.choices == [] and b'"prompt_tokens"' in event:
            found.add(event.strip())
    return found


@settings(deadline=None)
@given(streams(), st.integers(0, 5_000))
def test_what_goes_on_before_a_break_is_whole_lines(raw: bytes, cut: int) -> None:
    """Should the upstream break off, no half line has been passed on, and what follows is told to begin anew."""
    tap = Stream(strip_usage=False)
    broken = raw[: cut % (len(raw) + 1)]
    out = b"".join(tap.feed(piece) for piece in bytewise(broken))
    assert tap.torn is not (out == b"" or out.endswith((b"\n\n", b"\r\n\r\n")))
    assert raw.startswith(out)
    assert out == b"" or out.endswith((b"\n", b"\r"))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    "line",
    [
        b": ping", b":", b"", b'data: {"choices":[{"delta":{"content":"a"}}]}',
        b'data:{"choices":[],"usage":null}', b"data: [DONE]", b'data: {"error":"x"}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_usage_goes_on_at_once(line: bytes, end: bytes) -> None:
    """A sign of life, and streams whose events end with one line end: nobody waits for what comes next."""
    tap = Stream(strip_usage=True)
    assert b"".join(map(tap.feed, bytewise(line + end))) == line + end
    assert tap.feed(line + end) == line + end


@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize(
    "beside", [b'"choices":[]', b'"choices":null', b'"id":"x"', b'"choices":[],"x_groq":{"usage":{}},"metrics":{"a":1}']
)
def test_a_chunk_of_usage_has_many_forms(beside: bytes, strip: bool) -> None:
    """With no choices in whatever spelling, and with what else servers tell of an answer."""
    chunk = b"data: {" + beside + b',"usage":{"prompt_tokens":9}}\n\r\n'
    assert feed([chunk], strip=strip)[0] == (b"" if strip else chunk)
    assert feed(bytewise(chunk), strip=strip)[0] == (b"" if strip else chunk)


@pytest.mark.parametrize(
    "beside",
    [
        b'"type":"content-delta","response":" world"',
        b'"error":{"message":"x"}',
        b'"error":"x"',
        b'"citations":["a"]',
        b'"prompt_filter_results":[{"a":1}]',
    ],
)
def test_what_is_more_than_usage_is_passed_on(beside: bytes) -> None:
    """Nothing is lost that stands in one chunk with it."""
    choices = b"" if b"response" in beside else b'"choices":[],'
    chunk = b"data: {" + choices + beside + b',"usage":{"prompt_tokens":9}}\n\n'
    assert feed([chunk])[0] == chunk


@pytest.mark.parametrize("fields", [b"", b"event: usage\nid: 1\n"])
def test_a_sign_of_life_in_front_of_usage_is_passed_on(fields: bytes) -> None:
    """However the network cuts it; an event's own fields go with it."""
    raw = b": ping\n" + fields + USAGE + b"\n\n" + DONE + b"\n\n"
    assert feed([raw])[0] == feed(bytewise(raw))[0] == b": ping\n" + DONE + b"\n\n"


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"id":"x","error":{"message":"m"},"choices":[]}',
        b'{"type":"error","error":{"message":"m"}}',
        b'{"type" : "error","message":"m"}',
        b'{"object":"error","message":"m"}',
        b'{"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}',
    ],
)
def test_an_error_is_known_in_whatever_dialect(chunk: bytes) -> None:
    """The answer has failed, and nobody adds an error of his own."""
    *_, error, complete, _ = feed([b"data: " + chunk + b"\n\n" + DONE + b"\n\n"])
    assert (error, complete) == (True, True)


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[{"delta":{"content":"\\"error\\": {"}}]}',
        b'{"choices":[{"delta":{},"error":"x"}]}',
        b'{"error":null,"choices":[]}',
        b'{"choices":[{"delta":{"content":"x"}}],"error":""}',
        b'{"error":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"choices":[{"delta":{"tool_calls":[{"type":"error"}]}}]}',
    ],
)
def test_what_only_speaks_of_an_error_is_none(chunk: bytes) -> None:
    """In an answer's words, or in a part of it."""
    assert feed([b"data: " + chunk + b"\n\n"])[3] is False


@pytest.mark.parametrize("strip", [True, False])
def test_the_usage_event_is_kept_for_the_reader(strip: bool) -> None:
    """Whether or not it is passed on."""
    out, *_, usage = feed([USAGE + b"\n\n" + DONE + b"\n\n"], strip=strip)
    assert usage == USAGE
    assert (USAGE in out) is not strip


@pytest.mark.parametrize(
    ("raw", "complete"),
    [
        pytest.param(b"", False, id="nothing"),
        pytest.param(b'data: {"choices":[]}\n\n', False, id="no end"),
        pytest.param(DONE + b"\n\n", True, id="done"),
        pytest.param(FINISH + b"\n\n", True, id="a finish reason without done"),
        pytest.param(b'data: {"error":{"message":"x"}}\n\n', True, id="an error of its own"),
        pytest.param(b'data: { "error" : "x"}\n\n', True, id="an error as a string"),
        pytest.param(b"event: error\ndata: x\n\n", True, id="an error event"),
        pytest.param(b'data: {"error":null,"choices":[]}\n\n', False, id="no error"),
        pytest.param(b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n', False, id="done in a text"),
        pytest.param(b'data: {"x":"\\"finish_reason\\":\\"stop\\""}\n\n', False, id="a finish reason in a text"),
        pytest.param(DONE, True, id="done without a blank line"),
        pytest.param(DONE + b"\n", True, id="done without a second newline"),
        pytest.param(FINISH, True, id="a finish reason without a blank line"),
        pytest.param(FINISH + b"\n", True, id="a finish reason without a second newline"),
        pytest.param(b'data: {"error":{"message":"x"}}', True, id="an error without a blank line"),
    ],
)
def test_when_a_stream_is_complete(raw: bytes, complete: bool) -> None:
    """A finish reason, `[DONE]` or an error of the upstream's own, also in a last event without a blank line."""
    assert feed([raw])[4] is complete
    assert feed([raw])[0] == raw


@pytest.mark.parametrize(("finishes", "complete"), [(1, False), (2, True)])
def test_all_choices_must_finish(finishes: int, complete: bool) -> None:
    """Of two choices one finish reason is half an answer."""
    assert feed([(FINISH + b"\n\n") * finishes], choices=2)[4] is complete


def test_an_end_without_a_blank_line_is_passed_on_less_usage() -> None:
    """The last event counts when the upstream closed in good order."""
    assert feed([FINISH + b"\n\n" + USAGE]) == (FINISH + b"\n\n", 1, False, False, True, USAGE)


@pytest.mark.parametrize("piece", [1_000, 1_024, 4_096, 65_536, 200_000])
@pytest.mark.parametrize(
    "tail", [b"", b"\n\n" + DONE + b"\n\n", b"\r\n\r\n" + USAGE + b"\r\n\r\n" + FINISH + b"\r\n\r\n"]
)
def test_a_very_long_event_is_passed_on_as_it_grows(piece: int, tail: bytes) -> None:
    """It is never held whole, nothing of it is lost, and what follows is read as ever."""
    head = b'data: {"choices":[{"delta":{"content":"' + b"x" * (2 * LARGEST_HELD) + b'"}}]}'
    raw = head + tail
    tap, out, held = Stream(strip_usage=True), b"", 0
    for at in range(0, len(raw), piece):
        out += tap.feed(raw[at : at + piece])
        held = max(held, min(at + piece, len(raw)) - len(out))
    assert held <= LARGEST_HELD + len(USAGE) + 4
    assert tap.torn is (tail == b"")
    assert out + tap.end() == raw.replace(USAGE + b"\r\n\r\n", b"")
    assert tap.complete is bool(tail)


@pytest.mark.parametrize("around", range(-3, 4))
def test_a_long_events_end_may_be_cut_too(around: int) -> None:
    """The blank line behind a long event is seen wherever the network cuts it."""
    head = b"data: " + b"x" * (LARGEST_HELD + 10) + b"\r\n\r\n"
    raw = head + FINISH + b"\r\n\r\n" + DONE + b"\r\n\r\n"
    cut = len(head) + around - 2
    assert feed([raw[:100], raw[100:cut], raw[cut:]])[:5] == (raw, 1, True, False, True)


def test_small_pieces_of_a_long_event_cost_no_more_than_large_ones(
    guard: Callable[[int], contextlib.AbstractContextManager[None]],
) -> None:
    """An upstream that sends 64 KB one byte a time does not stop the proxy."""
    raw = b"data: " + b"x" * 60_000 + b"\n\n"
    with guard(5):
        assert feed(bytewise(raw))[0] == raw


@pytest.mark.parametrize(
    ("raw", "cut"),
    [
        (b"", []),
        (b"a\n\nb\n\n", [b"a\n\n", b"b\n\n"]),
        (b"a\r\n\r\nb", [b"a\r\n\r\n", b"b"]),
        (b"a\r\rb", [b"a\r\r", b"b"]),
        (b"a\nb\n\n\n\n", [b"a\nb\n\n", b"\n\n"]),
    ],
)
def test_events_are_cut_at_blank_lines(raw: bytes, cut: list[bytes]) -> None:
    """Each with its own blank line; the last may have none."""
    assert events(raw) == cut


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\r\n\r\n", b" a"),
        (b"id: 1\ndata: a\nevent: x\ndata: b\n\n", b"a\nb"),
        (b": data: a\n\n", b""),
    ],
)
def test_data_lines_are_joined(event: bytes, expected: bytes) -> None:
    """One blank behind the colon is no data; other fields are passed over."""
    assert data(event) == expected


@pytest.mark.parametrize(
    "event", [b"", b": ping\n\n", b"data: [DONE]\n\n", b"data: [1]\n\n", b'data: {"choices":5}\n\n']
)
def test_what_is_no_chunk_has_no_payload(event: bytes) -> None:
    """It is passed on unread."""
    assert payload(event) is None
