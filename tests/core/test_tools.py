"""Whole tools in the tenant's first-seen order; inside a tool, and where the client marks its cache, nothing moves."""

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import tools
from proxy.core.tools import Order, arrange, read, spliced


def tool(name: str, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}, **more}


def array(names: str, **more: object) -> bytes:
    """Return a list with one tool for each letter."""
    return orjson.dumps([tool(name, **more) for name in names])


def order(names: str) -> Order:
    return read(array(names)).identities


def stands(names: str, *known: str) -> str:
    """Return the letters as they are forwarded when these sets were seen before."""
    return "".join(names[place] for place in arrange(read(array(names)), [order(each) for each in known]))


@pytest.mark.parametrize(
    ("sent", "known", "stand"),
    [
        pytest.param("cba", (), "cba", id="the first time, as sent"),
        pytest.param("cba", ("abc",), "abc", id="the same set, as first seen"),
        pytest.param("abc", ("cab",), "cab", id="first seen, not sorted"),
        pytest.param("dcba", ("abc",), "abcd", id="a new tool at the end"),
        pytest.param("edcba", ("abc",), "abced", id="new tools as they were sent"),
        pytest.param("ca", ("abc",), "ac", id="a tool left out"),
        pytest.param("dca", ("abc",), "acd", id="one for another"),
        pytest.param("zyxa", ("abcd",), "zyxa", id="another set that shares little"),
        pytest.param("ba", ("abcdef", "ba"), "ba", id="the very set before a larger one"),
        pytest.param("cba", ("ab", "bac"), "bac", id="the set that shares most"),
        pytest.param("aab", ("ba",), "baa", id="a tool sent twice"),
        pytest.param("", ("ab",), "", id="no tools"),
    ],
)
def test_tools_stand_as_first_seen(sent: str, known: tuple[str, ...], stand: str) -> None:
    """A tool server that reconnects and lists its tools in another order breaks nothing."""
    assert stands(sent, *known) == stand


@given(st.permutations("abcdef"), st.permutations("abcdef"))
def test_an_order_once_seen_is_kept(first: list[str], again: list[str]) -> None:
    """Whatever order the same set comes in later."""
    assert stands("".join(again), "".join(first)) == "".join(first)


@given(st.lists(st.text("abcdef", min_size=1, max_size=6), max_size=6), st.text("abcdef", max_size=6), st.randoms())
def test_replicas_that_know_the_same_sets_choose_the_same(known: list[str], sent: str, dice: random.Random) -> None:
    """In whatever order each of them holds what it knows."""
    shuffled = dice.sample(known, len(known))
    assert stands(sent, *known) == stands(sent, *shuffled)


def test_each_tool_keeps_its_own_bytes() -> None:
    """Odd white space, escapes and key order inside a tool are forwarded as they came."""
    one, two = b'{ "b":1.0 ,"a":"\\u00e9" }', b'{"type":"function","x":[1,\n2]}'
    found = read(b"[ %s ,\n%s]" % (one, two))
    assert found.raws == (one, two)
    assert spliced(found, (1, 0)) == b"[%s,%s]" % (two, one)


def test_what_stands_as_sent_is_not_written_again() -> None:
    """The client's own array, white space and all."""
    assert spliced(read(b"[ {} , {} ]"), (0, 1)) == b""
    assert spliced(tools.NONE, ()) == b""


def test_key_order_does_not_make_another_tool() -> None:
    """The same tool from a client that writes its keys in another order."""
    assert read(b'[{"a":1,"b":{"c":2,"d":3}}]').identities == read(b'[{"b":{"d":3,"c":2},"a":1}]').identities
    assert read(b'[{"a":[1,2]}]').identities != read(b'[{"a":[2,1]}]').identities


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
def test_the_clients_own_marks_stay_where_they_are(mark: str) -> None:
    """What stands before a mark is cached up to there: another order would move it."""
    sent: list[Any] = [tool("c"), tool("b"), tool("a", **{mark: {"type": "ephemeral"}})]
    found = read(orjson.dumps(sent))
    assert arrange(found, [read(orjson.dumps(sent[::-1])).identities, order("abc")]) == (0, 1, 2)


@pytest.mark.parametrize("odd", [b"", b"null", b"{}", b'"tools"', b"[1,", b"[{]}"])
def test_what_is_no_list_of_tools_is_left_alone(odd: bytes) -> None:
    """The upstream says what is wrong with it."""
    found = read(odd)
    assert spliced(found, arrange(found, [order("ab")])) == b""


def test_tools_of_any_json_are_told_apart() -> None:
    """Strings, numbers, broken text: each is somebody."""
    found = read(b'["a",1,{"x":"\xff"},{"x":1e999},[]]')
    assert len(set(found.identities)) == 5
