"""One raw message → what planning needs to know of it."""

import contextlib

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.items import Tags
from proxy.core.message import Message, analyse, said
from proxy.errors import Odd
from proxy.memo import count

TABLE = Tags.of()
NOTE = "<file path='a'>x</file>"


def look(message: object) -> Message:
    raw = message if isinstance(message, bytes) else orjson.dumps(message)
    return analyse(raw, tags=TABLE, count=count)


def test_digest_and_size_are_of_the_raw_bytes() -> None:
    """Two spellings of one message are two messages."""
    one, two = look(b'{"role":"user","content":"\\u00e9"}'), look('{"role":"user","content":"é"}'.encode())
    assert one.digest != two.digest
    assert (one.size_bytes, two.size_bytes) == (34, 30)
    assert one.said == two.said


@pytest.mark.parametrize(
    ("role", "leads", "holds"),
    [
        ("system", True, True),
        ("developer", True, True),
        ("user", False, True),
        ("assistant", False, False),
        ("tool", False, False),
        ("function", False, False),
    ],
)
def test_only_user_and_system_text_holds_items(role: str, leads: bool, holds: bool) -> None:
    """Tags in an assistant's or a tool's text are plain text."""
    found = look({"role": role, "content": NOTE, "tool_call_id": "c"})
    assert (found.role, found.leads, bool(found.texts)) == (role, leads, holds)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        pytest.param(NOTE, [NOTE], id="a string"),
        pytest.param("plain", [], id="texts are kept only where blocks stand"),
        pytest.param([{"type": "text", "text": "a"}, {"type": "text", "text": NOTE}], ["a", NOTE], id="parts"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": NOTE}], [NOTE], id="an image"
        ),
        pytest.param(
            [{"type": "text", "text": None}, {"type": "text", "text": NOTE}], [NOTE], id="a part without text"
        ),
        pytest.param([], [], id="no parts"),
        pytest.param(None, [], id="null"),
        pytest.param(5, [], id="a number"),
    ],
)
def test_texts_are_found_where_they_stand(content: object, texts: list[str]) -> None:
    """Each text's span in the raw message holds exactly that JSON string."""
    raw = orjson.dumps({"role": "user", "content": content, "name": "n"})
    found = look(raw)
    assert [text.value for text in found.texts] == texts
    assert [orjson.loads(raw[text.start : text.end]) for text in found.texts] == texts


def test_white_space_around_spans_is_left_out() -> None:
    """Spans hold the quoted string and nothing more, however the client spaces its JSON."""
    raw = b'{ "role" : "user" ,\n "content" : [ { "type" : "text" , "text" : "<file>\\u00e9</file>" } ] }'
    (text,) = look(raw).texts
    assert raw[text.start : text.end] == b'"<file>\\u00e9</file>"'


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        pytest.param("a  b\n c", "a b c", True, id="white space"),
        pytest.param(f"{NOTE}\n\nWhy?", "Why?", True, id="blocks are left out"),
        pytest.param(f"Why?\n{NOTE}", f"{NOTE}\nWhy?", True, id="wherever they stand"),
        pytest.param([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a b", True, id="parts or string"),
        pytest.param("Why?", "why?", False, id="other words"),
        pytest.param("Why?", "", False, id="no words"),
    ],
)
def test_said_is_about_words(one: object, two: object, same: bool) -> None:
    """What was said does not depend on how a client stores it."""
    digests = [look({"role": "user", "content": content}).said for content in (one, two)]
    assert (digests[0] == digests[1]) is same


def call(name: str, arguments: object) -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        pytest.param(call("f", '{"a": 1}'), call("f", '{"a":1}'), True, id="spacing of arguments"),
        pytest.param(call("f", {"a": 1}), call("f", '{"a":1}'), True, id="arguments as an object"),
        pytest.param(call("f", "{}"), call("g", "{}"), False, id="another function"),
        pytest.param(call("f", '{"a":1}'), call("f", '{"a":2}'), False, id="other arguments"),
        pytest.param({**call("f", "{}"), "id": "c2"}, call("f", "{}"), True, id="another id"),
        pytest.param({"id": "c", "custom": {"name": "f", "input": "a"}}, {"id": "c"}, False, id="a custom tool's call"),
        pytest.param({"id": "c", "type": "unheard-of"}, {"id": "c"}, True, id="a call of neither kind"),
    ],
)
def test_calls_are_said_too(one: object, two: object, same: bool) -> None:
    """A tool call belongs to what an assistant said; ids do not."""
    digests = [look({"role": "assistant", "content": None, "tool_calls": [made]}).said for made in (one, two)]
    assert (digests[0] == digests[1]) is same


def test_roles_tell_words_apart() -> None:
    """The same words of another role are something else."""
    assert said("user", ["a"]) != said("assistant", ["a"])
    assert said("assistant", ["a f"]) != said("assistant", ["a"], [("f", "")])


def test_calls_are_read() -> None:
    """An assistant's call ids, in their order."""
    asked = look({"role": "assistant", "tool_calls": [call("f", "{}"), {**call("g", "{}"), "id": "c2"}]})
    assert asked.calls == ("c1", "c2")
    assert look({"role": "tool", "tool_call_id": "c2", "content": "x"}).calls == ()


@pytest.mark.parametrize(
    ("content", "form", "media"),
    [
        pytest.param("x", "string", 0, id="a string"),
        pytest.param([], "parts", 0, id="no parts"),
        pytest.param([{"type": "text", "text": "image"}, {"text": "untyped"}], "parts", 0, id="texts"),
        pytest.param([{"type": "image_url"}, {"type": "input_audio"}, {"type": "file"}], "parts", 3, id="media"),
        pytest.param([{"type": "text", "text": None}], "parts", 1, id="what is no text may weigh anything"),
        pytest.param(None, "none", 0, id="null"),
        pytest.param({"a": 1}, "none", 0, id="an object"),
    ],
)
def test_the_form_says_whether_text_can_be_put_in(content: object, form: str, media: int) -> None:
    """And parts that weigh more than their bytes are counted."""
    found = look({"role": "user", "content": content})
    assert (found.form, found.media) == (form, media)


@pytest.mark.parametrize(
    ("fields", "signed"),
    [
        pytest.param({}, False, id="plain"),
        pytest.param({"thinking_blocks": [{"type": "thinking", "signature": "s"}]}, True, id="thinking blocks"),
        pytest.param({"reasoning_details": [{"type": "x"}]}, True, id="reasoning details"),
        pytest.param({"thinking_blocks": None, "reasoning_details": []}, False, id="empty ones"),
        pytest.param({"extra": {"signature": "s"}}, True, id="a signature"),
        pytest.param({"extra": {"encrypted_content": "s"}}, True, id="encrypted content"),
        pytest.param({"content": 'the word "signature" in text'}, False, id="the word in a text"),
    ],
)
def test_signed_reasoning_is_noticed(fields: dict[str, object], signed: bool) -> None:
    """It is accepted back only while what stood before it is unchanged."""
    assert look({"role": "assistant", "content": "x", **fields}).signed is signed


def test_a_user_signs_nothing() -> None:
    """Only an assistant's message can carry signed reasoning by a bare field."""
    assert not look({"role": "user", "content": "x", "signature": "s"}).signed


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"[]", id="an array"),
        pytest.param(b"5", id="a number"),
        pytest.param(b"{}", id="no role"),
        pytest.param(b'{"role":5}', id="a role that is no string"),
        pytest.param(b'{"role":"user","content":"a","content":"b"}', id="a key twice"),
        pytest.param(b'{"role":"user","content":["a"]}', id="a part that is no object"),
        pytest.param(b'{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}', id="a key twice in a part"),
        pytest.param(b'{"role":"user","content":"\\ud800"}', id="a lone surrogate"),
        pytest.param(b'{"role":"assistant","tool_calls":[{"id":5}]}', id="an id that is no string"),
        pytest.param(b'{"role":"user","content":"\xff"}', id="no UTF-8"),
        pytest.param(b'{"role":"user","content":' + b"[" * 5_000 + b"]" * 5_000 + b"}", id="very deep"),
    ],
)
def test_what_is_no_message_is_odd(raw: bytes) -> None:
    """It is never refused here, only not touched."""
    with pytest.raises(Odd, match="odd_message"):
        look(raw)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.just(NOTE),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["type", "text", "role", "function", "id", "name"]), inner, max_size=4)
        ),
        max_leaves=6,
    ),
    st.sampled_from(["content", "tool_calls", "tool_call_id", "thinking_blocks", "function_call"]),
    st.sampled_from(["user", "assistant", "tool", "system", "other"]),
)
def test_any_shape_is_read_or_odd(value: object, key: str, role: str) -> None:
    """Nothing but Odd is ever raised, whatever a field holds."""
    with contextlib.suppress(Odd):
        assert look({"role": role, key: value}).role == role
