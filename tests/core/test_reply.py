"""A whole answer → digests that the client's next request repeats."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.items import Tags
from proxy.core.message import analyse
from proxy.core.reply import of_answer, of_stream
from proxy.memo import count


def sent_back(message: object) -> bytes:
    """What the client's next request says in its place."""
    return analyse(orjson.dumps(message), tags=Tags.of(), count=count).said


def answer(*messages: object) -> bytes:
    return orjson.dumps({"choices": [{"index": n, "message": message} for n, message in enumerate(messages)]})


def stream(*deltas: object, index: int = 0) -> bytes:
    return b"".join(
        b"data: " + orjson.dumps({"choices": [{"index": index, "delta": delta}]}) + b"\n\n" for delta in deltas
    )


def call(name: str, arguments: str, **more: object) -> dict[str, object]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"role": "assistant", "content": "Fine, thanks."}, id="text"),
        pytest.param({"role": "assistant", "content": " a\n\n b "}, id="white space"),
        pytest.param({"role": "assistant", "content": ""}, id="no text"),
        pytest.param({"role": "assistant", "content": None, "refusal": "No."}, id="a refusal"),
        pytest.param({"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": "é"}')]}, id="a call"),
        pytest.param(
            {"role": "assistant", "content": "Wait.", "tool_calls": [call("f", "{}"), call("g", "")]}, id="text, calls"
        ),
        pytest.param({"role": "assistant", "content": None, "tool_calls": [CUSTOM]}, id="a custom tool's call"),
    ],
)
def test_an_answer_is_found_again(message: dict[str, object]) -> None:
    """Streamed or not, its digest is that of the message the client sends back."""
    calls = message.get("tool_calls")
    deltas: list[object] = [{"role": "assistant", "content": ""}]
    content = message["content"]
    if isinstance(content, str):
        deltas += [{"content": letter} for letter in content]
    for place, made in enumerate(calls if isinstance(calls, list) else []):
        deltas.append({"tool_calls": [{**made, "index": place}]})
    assert of_answer(answer(message)) == (sent_back(message),)
    assert of_stream(stream(*deltas) + b"data: [DONE]\n\n") == (sent_back(message),)


PARTS = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "Fine."}]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(answer({"content": PARTS}), {"content": "Fine."}, id="parts"),
        pytest.param(stream({"content": PARTS[:1]}, {"content": PARTS[1:]}), {"content": PARTS}, id="parts, streamed"),
        pytest.param(b"\xef\xbb\xbf" + stream({"content": "Fine."}), {"content": "Fine."}, id="a BOM"),
        pytest.param(b"\xef\xbb\xbf" + answer({"content": "Fine."}), {"content": "Fine."}, id="a BOM in JSON"),
        pytest.param(
            stream({"content": "Fine."}).replace(b'"index":0', b'"index":null'), {"content": "Fine."}, id="no index"
        ),
        pytest.param(
            stream({"tool_calls": [call("f", "1", index=0.0)]}, {"tool_calls": [call("", "2", index=0)]}),
            {"content": None, "tool_calls": [call("f", "12")]},
            id="an index that is no whole number",
        ),
        pytest.param(
            stream({"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}}),
            {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
            id="the older form of a call",
        ),
        pytest.param(
            stream({"tool_calls": [call("f", "x")]}).replace(b'"x"', b'"\xc3"'),
            {"content": None, "tool_calls": [call("f", '"\ufffd"')]},
            id="a character that was cut",
        ),
        pytest.param(
            b'{"choices":[{"message":{"content":"","tool_calls":[{"function":{"name":"f","arguments":{"a": 1}}}]}}]}',
            {"content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},
            id="arguments that are an object",
        ),
    ],
)
def test_odd_answers_are_found_again(raw: bytes, message: dict[str, object]) -> None:
    """Read as leniently as clients read them."""
    read = of_answer if raw.removeprefix(b"\xef\xbb\xbf").startswith(b"{") else of_stream
    assert read(raw) == (sent_back({"role": "assistant", **message}),)


def test_parts_sent_back_are_the_same_words() -> None:
    """A client that stores a string as parts still continues the conversation."""
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Fine,"}, {"type": "text", "text": "thanks."}]}
    assert of_answer(answer({"content": "Fine, thanks."})) == (sent_back(parts),)


def test_each_choice_is_an_answer() -> None:
    """Of several choices the client sends one back, nobody knows which."""
    one, two = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    both = (sent_back(one), sent_back(two))
    assert of_answer(answer(one, two)) == both
    mixed = stream({"content": "a"}) + stream({"content": ""}, index=1) + stream({"content": "b"}, index=1)
    assert of_stream(mixed) == both


def test_arguments_come_in_pieces() -> None:
    """Pieces of parallel calls are put together by their index, or by their place where none is given."""
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a":1}'), call("g", "{}")]}
    pieces = stream(
        {"tool_calls": [{"index": 0, "id": "c"}]},
        {"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    )
    assert of_stream(pieces) == (sent_back(message),)
    unnumbered = stream({"tool_calls": [call("f", '{"a":'), call("g", "{")]}, {"tool_calls": [
        {"function": {"arguments": "1}"}}, {"function": {"arguments": "}"}}]})  # fmt: skip
    assert of_stream(unnumbered) == (sent_back(message),)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"choices":5}', b'{"choices":[{"message":5}]}', b'{"choices":[' + b"[" * 100_000]
)
def test_what_cannot_be_read_is_no_answer(raw: bytes) -> None:
    """Nothing is remembered of it, and nothing is raised."""
    assert of_answer(raw) == ()
    assert of_stream(b"data: " + raw + b"\n\n") == ()


def test_other_events_are_passed_over() -> None:
    """Usage chunks, comments and the end of the stream say nothing."""
    raw = b': ping\n\ndata: {"choices":[],"usage":{}}\n\n' + stream({"content": "a"}) + b"data: [DONE]\n\n"
    raw += b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
    assert of_stream(raw) == (sent_back({"role": "assistant", "content": "a"}),)
    assert of_answer(b'{"choices":[{"index":0}]}') == ()


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=5))
def test_any_cut_of_a_text_is_the_same_answer(pieces: list[str]) -> None:
    """However the deltas cut it."""
    whole = sent_back({"role": "assistant", "content": "".join(pieces)})
    assert of_stream(stream(*({"content": piece} for piece in pieces))) == (whole,)
