"""A JSON body as spans of the client's own bytes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.body import Edit, Member, add, elements, lenient, remove, splice, split
from proxy.errors import Odd, StrataError

SPACE = st.text(" \t\n\r", max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def spelled(draw: st.DrawFn, value: object) -> str:
    """One of the many ways to write a JSON value: any white space, escapes or none."""
    if isinstance(value, dict):
        pairs = [
            draw(SPACE) + draw(spelled(key)) + draw(SPACE) + ":" + draw(SPACE) + draw(spelled(inner)) + draw(SPACE)
            for key, inner in value.items()
        ]
        return "{" + (",".join(pairs) or draw(SPACE)) + "}"
    if isinstance(value, list):
        return "[" + (",".join(draw(SPACE) + draw(spelled(inner)) + draw(SPACE) for inner in value)) + "]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


@st.composite
def objects(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    value = draw(st.dictionaries(text, VALUES, max_size=5))
    return value, (draw(SPACE) + draw(spelled(value)) + draw(SPACE)).encode()


@settings(deadline=None)
@given(objects())
def test_split_finds_every_member_where_it_stands(given_object: tuple[dict[str, object], bytes]) -> None:
    """Keys come in their order, and each span holds the value as the client spelled it."""
    value, raw = given_object
    members = split(raw)
    assert list(members) == list(value)
    for key, member in members.items():
        assert json.loads(raw[member.value : member.end]) == value[key]
        assert json.loads(raw[member.start : member.value].strip().removesuffix(b":")) == key == member.key


@settings(deadline=None)
@given(objects())
def test_putting_every_value_in_its_own_place_changes_nothing(
    given_object: tuple[dict[str, object], bytes],
) -> None:
    """Splicing each span's own bytes back gives the body byte for byte."""
    _, raw = given_object
    edits = [Edit(member.value, member.end, raw[member.value : member.end]) for member in split(raw).values()]
    assert splice(raw, edits) == raw


@settings(deadline=None)
@given(objects(), st.data())
def test_removing_members_leaves_the_others(given_object: tuple[dict[str, object], bytes], data: st.DataObject) -> None:
    """Whichever members go, what remains is JSON with the other members in their order."""
    value, raw = given_object
    keys = set(data.draw(st.lists(st.sampled_from(sorted(value)))) if value else [])
    left = json.loads(splice(raw, remove(split(raw).values(), keys)))
    assert list(left.items()) == [(key, inner) for key, inner in value.items() if key not in keys]


@settings(deadline=None)
@given(objects())
def test_adding_a_member_puts_it_last(given_object: tuple[dict[str, object], bytes]) -> None:
    """A new member stands behind all others, whose bytes stay."""
    value, raw = given_object
    if not value or "a new key" in value:
        return
    added = splice(raw, [add(split(raw), "a new key", b"[1.0]")])
    assert list(json.loads(added)) == [*value, "a new key"]
    assert added.replace(b',"a new key":[1.0]', b"") == raw


@settings(deadline=None)
@given(st.lists(VALUES, max_size=6), st.data())
def test_elements_finds_every_element(values: list[object], data: st.DataObject) -> None:
    """Each span holds one element as it is spelled, wherever the array stands."""
    raw = ('{"a":' + data.draw(SPACE) + data.draw(spelled(values)) + "}").encode()
    member = split(raw)["a"]
    assert [json.loads(raw[start:end]) for start, end in elements(raw, member.value, member.end)] == values


def test_splice_without_edits_returns_the_same_object() -> None:
    """An untouched body is not even copied."""
    raw = b'{"a":1}'
    assert splice(raw, []) is raw


def test_splice_sorts_insertions_before_replacements() -> None:
    """Text put in front of a span that is replaced stands in front of the replacement."""
    assert splice(b"abc", [Edit(1, 2, b"B"), Edit(1, 1, b"+"), Edit(3, 3, b"!")]) == b"a+Bc!"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        pytest.param(b'{"a":1,"a":2}', "duplicate_key", id="a key twice"),
        pytest.param(b'{"a":1,"b":3,"a":2}', "duplicate_key", id="a key twice, apart"),
        pytest.param(b'{"a":[1,2],"a":2}', "duplicate_key", id="a key twice, shorter"),
        pytest.param(b'{"a":1,"a":[1,2,3]}', "duplicate_key", id="a key twice, longer"),
        pytest.param(b'{"a":1,"b":2,"a":"....."}', "duplicate_key", id="the last value reaches over the second"),
        pytest.param(b'{"a":1,"bbbbbbbb":2,"a":"xxxx"}', "duplicate_key", id="the last value ends inside a key"),
        pytest.param(b'{"a":1,"\\u0061":2}', "duplicate_key", id="a key twice, once in escapes"),
        pytest.param(b'{"b":1,"a":"x","a":",\\"c\\""}', "duplicate_key", id="a value that looks like a member"),
        pytest.param(b"[1]", "odd_json", id="an array"),
        pytest.param(b'"text"', "odd_json", id="a string"),
        pytest.param(b"1", "odd_json", id="a number"),
        pytest.param(b"null", "odd_json", id="null"),
        pytest.param(b'\xef\xbb\xbf{"a":1}', "odd_json", id="a byte order mark"),
        pytest.param(b'{"a":NaN}', "odd_json", id="NaN"),
        pytest.param(b'{"\\ud800":1}', "odd_json", id="a lone surrogate in a key"),
        pytest.param(b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "odd_json", id="very deep"),
        pytest.param(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}", "odd_json", id="deeper than any parser goes"),
    ],
)
def test_valid_json_that_is_not_for_us_is_odd(raw: bytes, cause: str) -> None:
    """What another parser would take is never refused, only left alone."""
    with pytest.raises(Odd) as caught:
        split(raw)
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="unfinished"),
        pytest.param(b'{"a":1,}', id="a trailing comma"),
        pytest.param(b"{'a':1}", id="single quotes"),
        pytest.param(b'{"a":1}{"b":2}', id="two objects"),
        pytest.param(b'{"a":01}', id="a leading zero"),
        pytest.param(b'{"\xff":1}', id="no UTF-8"),
    ],
)
def test_what_no_parser_takes_is_refused(raw: bytes) -> None:
    """Invalid JSON is the client's error, with a stable code and status 400."""
    with pytest.raises(StrataError) as caught:
        split(raw)
    assert (caught.value.fault.status, caught.value.fault.code) == (400, "invalid_json")


@pytest.mark.parametrize("raw", [b"{}", b" { } ", b'"x"', b"5", b"null", b"[1,"])
def test_elements_of_no_array_are_odd(raw: bytes) -> None:
    """Only an array has elements."""
    with pytest.raises(Odd, match="no_messages"):
        elements(raw, 0, len(raw))


@pytest.mark.parametrize(
    ("raw", "left"),
    [
        pytest.param(b'{"own":1,"own":2,"a":3}', b'{"a":3}', id="twice in front"),
        pytest.param(b'{"a":3,"own":1,"own":2}', b'{"a":3}', id="twice at the end"),
        pytest.param(b'{"own":1,"a":3,"own":2}', b'{"a":3}', id="around"),
        pytest.param(b'{"own":1,"own":2}', b"{}", id="nothing else"),
        pytest.param(b'\xef\xbb\xbf {"a":3 , "own":1 }', b'\xef\xbb\xbf {"a":3 }', id="behind a byte order mark"),
        pytest.param(b'{"a":NaN,"own":{"x":[Infinity]}}', b'{"a":NaN}', id="NaN"),
        pytest.param('{"é":"\\ud800","own":"ü"}'.encode(), '{"é":"\\ud800"}'.encode(), id="surrogates, multi-byte"),
        pytest.param(b'{"a":1,"a":2,"a":3}', b'{"a":1,"a":2,"a":3}', id="no own member"),
        pytest.param(b'{"\xff":1,"own":2}', b'{"\xff":1}', id="a key nobody can read"),
        pytest.param(b"{}", b"{}", id="empty"),
    ],
)
def test_the_own_member_is_found_in_odd_json(raw: bytes, left: bytes) -> None:
    """What is for the proxy alone is taken out even where nothing else is touched."""
    assert splice(raw, remove(lenient(raw), {"own"})) == left


@pytest.mark.parametrize(
    "raw", [b"[1]", b"", b"{", b'{"a"', b"\xff\xfe", b'{"a":' + b"[" * 500_000, b'{"a" 1 "b":2', b"{1:2}{"]
)
def test_lenient_gives_up_without_raising(raw: bytes) -> None:
    """It returns nothing for what holds no object, however broken."""
    assert all(isinstance(member, Member) for member in lenient(raw))
    assert lenient(raw) == () or raw.startswith(b"{")
