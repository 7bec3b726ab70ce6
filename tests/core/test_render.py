"""Draft → bytes, the only maker of what is forwarded."""

import contextlib
import json
from collections.abc import Callable

import orjson
import pytest

from proxy.core.request import Request
from proxy.errors import Odd

Forward = Callable[..., bytes]
WORDS = "word " * 80
NOTE = f"<note_context><path>a.md</path>{WORDS}</note_context>"
REFERENCE = "Context attached:\n- a.md\nFind them above in this conversation."


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(b"", b',"stream_options":{"include_usage":true}', id="none"),
        pytest.param(b',"stream_options": null', b',"stream_options": {"include_usage":true}', id="null"),
        pytest.param(b',"stream_options":{ }', b',"stream_options":{"include_usage":true }', id="empty"),
        pytest.param(
            b',"stream_options":{"a":1.0}', b',"stream_options":{"include_usage":true,"a":1.0}', id="others stay"
        ),
        pytest.param(
            b',"stream_options":{"a":1, "include_usage" : false }',
            b',"stream_options":{"a":1, "include_usage" : true }',
            id="not wanted",
        ),
        pytest.param(
            b',"stream_options":{"include_usage":null}', b',"stream_options":{"include_usage":true}', id="null inside"
        ),
    ],
)
def test_usage_is_asked_for(options: bytes, expected: bytes, forward: Forward) -> None:
    """On the proxy's own account, and nothing else changes."""
    body = b'{"model":"gpt-4o", "messages":[] ,"stream":true%s}'
    assert forward(body % options, ask_usage=True) == body % expected
    assert forward(body % options) == body % options


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(b'{"include_usage":true,"include_usage":false}', id="a key twice"),
        pytest.param(b'{"a":1,"a":2}', id="another key twice"),
        pytest.param(b"5", id="a number"),
        pytest.param(b"[1]", id="a list"),
    ],
)
def test_odd_stream_options_are_left_alone(options: bytes, read: Callable[[object], Request], forward: Forward) -> None:
    """Nothing is asked for on our account where it cannot be seen what the client asked for."""
    body = b'{"model":"gpt-4o","messages":[],"stream":true,"stream_options":%s,"x":1.0}' % options
    assert read(body).wants_usage is None
    assert forward(body) is body


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"strata":{},"model":"m","messages":[]}', b'{"model":"m","messages":[]}'),
        (b'{"model":"m","strata" : {} , "messages":[]}', b'{"model":"m" , "messages":[]}'),
        (b'{"model":"m","messages":[],"strata":{}}', b'{"model":"m","messages":[]}'),
        (b'{ "strata":{} , "messages":[] }', b'{ "messages":[] }'),
    ],
)
def test_the_own_member_stays_here(body: bytes, left: bytes, forward: Forward) -> None:
    """Wherever it stands, with one comma; everything around it keeps its bytes."""
    assert forward(body) == left


def test_the_own_member_last_and_usage_asked_for(forward: Forward) -> None:
    """Two edits at one place do not fall over each other."""
    body = b'{"messages":[],"stream":true,"strata":{}}'
    assert forward(body, ask_usage=True) == b'{"messages":[],"stream":true,"stream_options":{"include_usage":true}}'


def test_nothing_changed_is_the_same_object(forward: Forward) -> None:
    """The client's own bytes, not even copied."""
    body = b' { "messages" : [ {"role":"user","content":"\\u00e9 1.0"} ], "t":1e-7, "n":9007199254740993 } '
    assert forward(body) is body


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(f"{NOTE}\n\nAgain?", f"{REFERENCE}\n\nAgain?", id="in front"),
        pytest.param(f"Again?\n{NOTE}", f"Again?\n{REFERENCE}", id="behind"),
        pytest.param(NOTE, REFERENCE, id="alone"),
        pytest.param(f"{NOTE}\nx\n{NOTE}", f"{REFERENCE}\nx\n{REFERENCE}", id="twice, apart"),
        pytest.param(
            f"{NOTE}\n{NOTE}", "Context attached:\n- a.md\n- a.md\nFind them above in this conversation.", id="a run"
        ),
        pytest.param(
            [{"type": "text", "text": NOTE, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "é"}],
            [
                {"type": "text", "text": REFERENCE, "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "é"},
            ],
            id="parts",
        ),
    ],
)
def test_repeats_are_replaced_in_place(content: object, expected: object, forward: Forward) -> None:
    """Only the repeated block; the words around it stay."""
    first = [{"role": "user", "content": NOTE}, {"role": "assistant", "content": "ok"}]
    body = {"model": "gpt-4o", "messages": [*first, {"role": "user", "content": content}], "z": 1}
    sent = orjson.loads(forward(body))
    assert sent == {**body, "messages": [*first, {"role": "user", "content": expected}]}


CONTEXT = {"context": [{"id": "a.md", "content": "x"}]}
BLOCK = '<document id="a.md">\nx\n</document>'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param({"content": "Why?"}, {"content": f"{BLOCK}\n\nWhy?"}, id="a string"),
        pytest.param({"content": ""}, {"content": BLOCK}, id="an empty string"),
        pytest.param(
            {"content": [{"type": "text", "text": "Why?"}]},
            {"content": [{"type": "text", "text": f"{BLOCK}\n\n"}, {"type": "text", "text": "Why?"}]},
            id="parts",
        ),
        pytest.param({"content": []}, {"content": [{"type": "text", "text": f"{BLOCK}\n\n"}]}, id="no parts"),
        pytest.param(
            {"content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            {"content": [{"type": "text", "text": f"{BLOCK}\n\n"}, {"type": "image_url", "image_url": {"url": "u"}}]},
            id="an image",
        ),
    ],
)
def test_context_stands_before_the_users_words(
    message: dict[str, object], expected: dict[str, object], forward: Forward
) -> None:
    """In the form the client's message has."""
    sent = orjson.loads(forward({"messages": [{"role": "user", **message}], "strata": CONTEXT}))
    assert sent == {"messages": [{"role": "user", **expected}]}


@pytest.mark.parametrize(
    "fields", [pytest.param({"content": None}, id="null"), pytest.param({"name": "n"}, id="no content at all")]
)
def test_context_reaches_a_user_message_without_text(fields: dict[str, object], forward: Forward) -> None:
    """What is sent is JSON and the context stands in it; the upstream judges the rest."""
    sent = forward({"messages": [{"role": "user", **fields}], "strata": CONTEXT})
    assert json.dumps(BLOCK)[1:-1] in json.dumps(json.loads(sent))


@pytest.mark.parametrize("content", [5, {"a": 1}, True])
def test_a_content_that_is_none_is_never_cut_into(content: object, forward: Forward) -> None:
    """It is odd, or what is sent is JSON."""
    with contextlib.suppress(Odd):
        assert json.loads(forward({"messages": [{"role": "user", "content": content}], "strata": CONTEXT}))


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        pytest.param([], 0, id="no messages"),
        pytest.param([{"role": "system", "content": "s"}], 1, id="only a system message"),
        pytest.param([{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}], 1, id="a greeting"),
        pytest.param([{"role": "assistant", "content": "a"}], 0, id="an assistant's message"),
    ],
)
def test_context_without_a_user_message_becomes_one(messages: list[object], place: int, forward: Forward) -> None:
    """It stands behind L1; the other messages keep their bytes and order."""
    sent = orjson.loads(forward({"messages": messages, "strata": CONTEXT}))["messages"]
    assert sent == [*messages[:place], {"role": "user", "content": BLOCK}, *messages[place:]]


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\x01", "é", "😀", "\u2028", "</script>"])
def test_what_is_put_in_is_quoted(text: str, forward: Forward) -> None:
    """Any text survives being spliced into a JSON string."""
    body = {"messages": [{"role": "user", "content": "W"}], "strata": {"context": [{"content": text}]}}
    assert orjson.loads(forward(body))["messages"][0]["content"] == f"<document>\n{text}\n</document>\n\nW"


def test_the_clients_spelling_stays_around_what_is_put_in(forward: Forward) -> None:
    """Escapes, numbers and white space outside the insertion are the client's own."""
    body = (
        b'{"messages":[ {"role":"user" , "content":"\\u00e9\\/ x"} ], "t":1.0,"strata":{"context":[{"content":"x"}]}}'
    )
    assert forward(body) == (
        b'{"messages":[ {"role":"user" , "content":"<document>\\nx\\n</document>\\n\\n\\u00e9\\/ x"} ], "t":1.0}'
    )
