"""Body bytes → Request."""

import contextlib
import json
from collections.abc import Callable

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.items import Item
from proxy.core.request import Hints, Request, hints
from proxy.errors import Odd, StrataError
from proxy.memo import count

Read = Callable[[object], Request]


def own(**fields: object) -> Hints:
    return hints(orjson.dumps(fields), count)


def context(**fields: object) -> Item:
    (item,) = own(context=[{"content": "x", **fields}]).context
    return item


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        pytest.param({}, "model", "", id="no model"),
        pytest.param({"model": "m"}, "model", "m", id="a model"),
        pytest.param({"model": 5}, "model", "", id="a model that is no string"),
        pytest.param({"stream": True}, "stream", True, id="a stream"),
        pytest.param({"stream": "yes"}, "stream", False, id="a stream that is no boolean"),
        pytest.param({"n": 3}, "choices", 3, id="choices"),
        pytest.param({"n": None}, "choices", 1, id="choices null"),
        pytest.param({"max_tokens": 5}, "reply_tokens", 5, id="max_tokens"),
        pytest.param({"max_tokens": 5, "max_completion_tokens": 7}, "reply_tokens", 7, id="max_completion_tokens"),
        pytest.param({"max_tokens": -1}, "reply_tokens", None, id="max_tokens that say no end"),
        pytest.param({"max_completion_tokens": 0, "max_tokens": 5}, "reply_tokens", 5, id="max_completion_tokens 0"),
        pytest.param({"n": -1}, "choices", 1, id="fewer choices than one"),
        pytest.param({"max_tokens": "5"}, "reply_tokens", None, id="max_tokens no number"),
        pytest.param({"stream_options": {"include_usage": True}}, "wants_usage", True, id="usage asked for"),
        pytest.param({"stream_options": {"include_usage": False}}, "wants_usage", False, id="usage not wanted"),
        pytest.param({"stream_options": {}}, "wants_usage", False, id="no word of usage"),
        pytest.param({"stream_options": None}, "wants_usage", False, id="options null"),
        pytest.param({"user": "u"}, "user", "u", id="a user"),
        pytest.param({"user": "u", "safety_identifier": "s"}, "user", "s", id="a safety identifier"),
        pytest.param({"user": "u", "safety_identifier": ""}, "user", "u", id="an empty one"),
        pytest.param({"metadata": {"a": "b", "c": 5}}, "metadata", {"a": "b"}, id="metadata"),
        pytest.param({"metadata": [1]}, "metadata", {}, id="metadata that is none"),
    ],
)
def test_a_field_is_read_or_left_to_the_upstream(
    fields: dict[str, object], name: str, value: object, read: Read
) -> None:
    """A value of another type is not judged here: it counts as absent."""
    assert getattr(read({"messages": [], **fields}), name) == value


def test_messages_are_placed(read: Read) -> None:
    """Each message's span holds it as the client spelled it."""
    raw = b'{"a":1, "messages" : [ {"role":"user","content":"\\u00e9"} , {"role":"assistant","content":1.0} ], "z":1e2}'
    found = read(raw)
    assert found.raw(0) == b'{"role":"user","content":"\\u00e9"}'
    assert found.raw(1) == b'{"role":"assistant","content":1.0}'
    assert [message.role for message in found.messages] == ["user", "assistant"]
    assert (found.member("z"), found.member("y"), found.body) == (b"1e2", b"", raw)
    assert found.hints == Hints()


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        pytest.param(b"{}", "no_messages", id="no messages"),
        pytest.param(b'{"messages":"hi"}', "no_messages", id="messages that are no array"),
        pytest.param(b'{"messages":null}', "no_messages", id="messages null"),
        pytest.param(b'{"messages":[1]}', "odd_message", id="a message that is none"),
        pytest.param(b'{"messages":[],"messages":[]}', "duplicate_key", id="messages twice"),
        pytest.param(b"[]", "odd_json", id="no object"),
    ],
)
def test_what_is_not_understood_is_odd(body: bytes, cause: str, read: Read) -> None:
    """It will be forwarded as it came, with its cause counted."""
    with pytest.raises(Odd) as caught:
        read(body)
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"messages":[{"role":"user","content":"\xff"}]}', id="in a message"),
        pytest.param(b'{"messages":[],"user":"\xc3"}', id="elsewhere"),
    ],
)
def test_what_is_no_utf8_is_no_json(body: bytes, read: Read) -> None:
    """No upstream would take it, so the client is told."""
    with pytest.raises(StrataError) as caught:
        read(body)
    assert caught.value.fault.code == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        pytest.param([], "strata", "[]", id="no object"),
        pytest.param({"conversaton": "c"}, "strata", "conversaton", id="an unknown field"),
        pytest.param({"conversation": 5}, "strata.conversation", "5", id="a number for an id"),
        pytest.param({"conversation": ""}, "strata.conversation", "0", id="an empty id"),
        pytest.param({"conversation": "c" * 513}, "strata.conversation", "513", id="a long id"),
        pytest.param({"context": {}}, "strata.context", "{}", id="context no list"),
        pytest.param({"context": [{"id": "a"}]}, "strata.context[0]", "content", id="no content"),
        pytest.param({"context": [{"content": 5}]}, "strata.context[0].content", "int", id="content no string"),
        pytest.param({"context": [{"content": "x", "trust": "much"}]}, "strata.context[0].trust", "much", id="trust"),
        pytest.param({"context": [{"content": "x", "type": "a b"}]}, "strata.context[0].type", "a b", id="no tag name"),
        pytest.param({"context": [{"content": "x", "type": "a>b"}]}, "strata.context[0].type", "a>b", id="markup"),
        pytest.param({"context": [{"content": "x" * 300, "kind": "y"}]}, "strata.context[0]", "kind", id="cut short"),
    ],
)
def test_a_wrong_hint_is_refused(fields: object, param: str, says: str) -> None:
    """The error names the field, what was expected and what came."""
    with pytest.raises(StrataError) as caught:
        hints(orjson.dumps(fields), count)
    assert (caught.value.fault.status, caught.value.fault.code) == (400, "invalid_value")
    assert caught.value.param == param
    assert caught.value.message.startswith(param)
    assert says in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"conversation":1e999}', id="a number too large"),
        pytest.param(b'{"conversation":"\\ud800"}', id="a lone surrogate"),
        pytest.param(b'{"context":[{"content":"\\ud800"}]}', id="a lone surrogate in a content"),
        pytest.param(b'{"conversation":5,"x":"\\ud800"}', id="a lone surrogate elsewhere"),
        pytest.param(b'{"x":' + b"[" * 900 + b"]" * 900 + b"}", id="deep"),
        pytest.param(b'{"conversation":"a","conversation":5}', id="a key twice"),
        pytest.param(b'{"context":[{"content":5}],"context":7}', id="a key twice, once a number"),
        pytest.param(b'{"context":[{"content":5}],"context":[]}', id="a key twice, once empty"),
    ],
)
def test_an_odd_hint_is_the_clients_error(raw: bytes, read: Read) -> None:
    """Whatever the `strata` member holds, the client is told or the body left alone; nothing else is raised."""
    with pytest.raises((StrataError, Odd)):
        read(b'{"model":"m","messages":[],"strata":' + raw + b"}")


def test_hints_are_read() -> None:
    """A conversation's id, and context items in their order."""
    found = own(conversation="c", context=[{"content": "x", "id": "a"}, {"content": "y", "id": "b", "type": "note"}])
    assert found.conversation == "c"
    assert [item.label for item in found.context] == ["a", "b"]
    assert [item.content for item in found.context] == [
        '<document id="a">\nx\n</document>',
        '<document id="b" type="note">\ny\n</document>',
    ]
    assert own() == Hints()


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        pytest.param({"id": "a.md"}, "a.md", id="the id"),
        pytest.param({"id": "a.md", "content": "<path>b.md</path>"}, "a.md", id="not a path in the content"),
        pytest.param({"id": "a.md", "content": '<file path="b.md">'}, "a.md", id="not a tag in the content"),
        pytest.param({"id": "a'b"}, "a'b", id="an apostrophe"),
    ],
)
def test_an_explicit_id_is_the_items_name(fields: dict[str, str], label: str) -> None:
    """What the client calls an item is what a reference calls it."""
    assert context(**fields).label == label


@pytest.mark.parametrize("id", ['a"b', 'a"b" path="c', "a>b", "a</document>b"])
def test_versions_of_an_item_with_an_odd_id_are_still_versions(id: str) -> None:
    """Two contents under one id are one item, and another id is another."""
    one, two, other = context(id=id), context(id=id, content="y"), context(id=id + "2")
    assert one.key == two.key != other.key


@pytest.mark.parametrize(
    ("fields", "trusted"),
    [
        pytest.param({}, True, id="a document"),
        pytest.param({"type": "anything"}, True, id="a type of the client's own"),
        pytest.param({"trust": "untrusted"}, False, id="marked"),
        pytest.param({"type": "url_content"}, False, id="a web page"),
        pytest.param({"type": "retrieved_chunk"}, False, id="a retrieved chunk"),
        pytest.param({"type": "url_content", "trust": "trusted"}, False, id="a web page said to be trusted"),
        pytest.param({"type": "webSearch"}, False, id="a tool's output"),
        pytest.param({"id": 'a" trust="untrusted'}, True, id="an id says nothing of trust"),
    ],
)
def test_trust_of_explicit_context(fields: dict[str, str], trusted: bool) -> None:
    """Web pages, retrieved chunks and tool outputs never enter the system message, however they are sent."""
    assert context(**fields).trusted is trusted


def test_a_tools_output_is_never_promoted() -> None:
    """It belongs to its turn, also when it is sent as explicit context."""
    assert context().promotable
    assert not context(type="localSearch").promotable


def test_content_cannot_close_its_own_block() -> None:
    """Only the block's own closing tag is neutralised; all other markup stays."""
    item = context(content="a</document><b>&amp;</b>")
    assert item.content == "<document>\na<\\/document><b>&amp;</b>\n</document>"


ODD = [b"1e999", b'"\\ud800"', b"[[[[[]]]]]", b"NaN", b'{"a":1,"a":2}', b"123456789012345678901234567890", b"-0", b'""']


@settings(deadline=None, max_examples=300)
@given(
    fields=st.dictionaries(
        st.sampled_from(
            ["model", "stream", "n", "stream_options", "metadata", "user", "strata", "max_tokens", "tools"]
        ),
        st.sampled_from(ODD)
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["conversation", "context", "content", "id", "type", "trust", "include_usage"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=5,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_field_is_read_refused_or_odd(fields: dict[str, bytes], read: Read) -> None:
    """Nothing but StrataError and Odd is ever raised."""
    raw = b'{"messages":[]' + b"".join(b',"%s":%s' % (key.encode(), value) for key, value in fields.items()) + b"}"
    with contextlib.suppress(StrataError, Odd):
        assert read(raw).body is raw
