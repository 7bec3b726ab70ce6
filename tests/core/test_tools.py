"""Whole tools in the tenant's first-seen order; inside a tool, and where the client marks its cache, nothing moves."""

import contextlib
import random
from collections.abc import Callable
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


def schema(*keys: str, inner: str = "ab", **values: object) -> bytes:
    """Return one tool whose parameters have these properties, each with `inner` members, spelled oddly."""
    properties = ", ".join(
        f'"{key}" : {{{",".join(f"{name!r}: 1.0".replace(chr(39), chr(34)) for name in inner)}}}' for key in keys
    )
    return f'{{"type":"function", "function":{{"name":"f","parameters":{{"properties":{{ {properties} }}}}}}}}'.encode()


def spelled(now: bytes, first: bytes) -> bytes:
    """Return how a tool is forwarded in a lineage that first had it in another spelling."""
    toolset = tools.respell(read(b"[" + now + b"]"), read(b"[" + first + b"]").keys)
    return tools.spliced(toolset, (0,)) or b"[" + now + b"]"


@pytest.mark.parametrize(
    ("now", "first"),
    [
        pytest.param(schema("x", "y"), schema("x", "y"), id="as it was"),
        pytest.param(schema("y", "x"), schema("x", "y"), id="properties"),
        pytest.param(schema("x", "y", inner="ba"), schema("x", "y"), id="further in"),
        pytest.param(schema("z", "y", "x", inner="cba"), schema("x", "y", "z", inner="abc"), id="everywhere"),
    ],
)
def test_keys_stand_in_the_order_of_the_lineages_first_request(now: bytes, first: bytes) -> None:
    """Values, escapes and blanks as they are spelled now."""
    assert spelled(now, first) == b"[" + first + b"]"


def test_another_tool_keeps_its_own_order() -> None:
    """What is not the same but for its keys' order is another tool."""
    assert spelled(schema("y", "x"), schema("x", "y", "z")) == b"[" + schema("y", "x") + b"]"


def test_elements_of_lists_never_move() -> None:
    """The order of an enum or of what is required is its meaning."""
    first, now = b'{"required":["a","b"],"enum":[{"x":1,"y":2}]}', b'{"enum":[{"y":2,"x":1}],"required":["a","b"]}'
    assert spelled(now, first) == b'[{"required":["a","b"],"enum":[{"x":1,"y":2}]}]'
    swapped = b'{"required":["b","a"]}'
    assert spelled(swapped, b'{"required":["a","b"]}') == b"[" + swapped + b"]"


def test_marked_tools_keep_their_keys() -> None:
    """What stands before a mark is the client's to say."""
    now = b'{"b":1,"a":2,"cache_control":{}}'
    assert spelled(now, b'{"a":2,"b":1,"cache_control":{}}') == b"[" + now + b"]"


def test_a_lineages_order_grows_at_its_end() -> None:
    """What came first stays first; a lineage without a first takes what it is given."""
    assert tools.joined((b"a", b"b"), (b"c", b"b", b"a")) == (b"a", b"b", b"c")
    assert tools.joined((b"a", b"b"), (b"c", b"b")) == (b"b", b"c")
    assert tools.joined((), (b"c", b"b")) == (b"c", b"b")


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def shuffled(value: Any, rng: random.Random) -> Any:
    """Return the same value with its keys in another order, everywhere."""
    if isinstance(value, dict):
        keys = rng.sample(list(value), len(value))
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(one, rng) for one in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=3), trees, max_size=4), st.randoms(use_true_random=False))
def test_whatever_the_order_a_tool_is_sent_as_it_first_was(tool: dict[str, Any], rng: random.Random) -> None:
    """And means what it meant."""
    first, now = orjson.dumps(tool), orjson.dumps(shuffled(tool, rng))
    assert spelled(now, first) == b"[" + first + b"]"


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(b"[[" + b"1," * 500_000 + b"1]]", id="numbers without end"),
        pytest.param(b"[" + b'{"a":' * 200 + b'"' + b"x" * 500_000 + b'"' + b"}" * 200 + b"]", id="deep"),
        pytest.param(orjson.dumps([{f"k{number}": number for number in range(100_000)}]), id="keys without end"),
    ],
)
def test_odd_tools_take_bounded_time(
    array: bytes, guard: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    """They are left as they are."""
    with guard(5):
        found = read(array)
        assert len(found.keys) <= 4_096
        assert tools.respell(found, (b"x", *reversed(found.keys))).identities == found.identities
