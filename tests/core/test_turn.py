"""Messages → L1, turns and exchanges."""

from collections.abc import Callable

import pytest

from proxy.core.request import Request
from proxy.core.turn import Span, exchanges, shape

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool", "f": "function"}


def messages(roles: str) -> dict[str, object]:
    return {"messages": [{"role": ROLES[role], "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("roles", "leading", "turns"),
    [
        pytest.param("", 0, [], id="nothing"),
        pytest.param("s", 1, [], id="only L1"),
        pytest.param("sd", 2, [], id="two system messages"),
        pytest.param("u", 0, ["u"], id="one user message"),
        pytest.param("suau", 1, ["ua", "u"], id="two turns"),
        pytest.param("saua", 1, ["a", "ua"], id="a greeting is a turn of its own"),
        pytest.param("sa", 1, ["a"], id="no user message"),
        pytest.param("suattau", 1, ["uatta", "u"], id="a tool exchange belongs to its turn"),
        pytest.param("suasu", 1, ["uas", "u"], id="a system message in mid-conversation stays in its turn"),
        pytest.param("uu", 0, ["u", "u"], id="two user messages in a row"),
    ],
)
def test_a_conversation_is_cut_before_each_user_message(
    roles: str, leading: int, turns: list[str], read: Callable[[object], Request]
) -> None:
    """Turns follow one another without a gap behind the leading system messages."""
    found = shape(read(messages(roles)).messages)
    assert found.leading == leading
    assert [roles[turn.start : turn.end] for turn in found.turns] == turns
    assert roles[:leading] + "".join(turns) == roles
    assert roles[found.newest.start : found.newest.end] == (turns[-1] if turns else "")


@pytest.mark.parametrize(
    ("roles", "units"),
    [
        pytest.param("u", [], id="no answer yet"),
        pytest.param("ua", ["a"], id="an answer"),
        pytest.param("uattatt", ["att", "att"], id="calls with all their results"),
        pytest.param("uaffa", ["aff", "a"], id="legacy functions"),
        pytest.param("uaata", ["a", "at", "a"], id="mixed"),
        pytest.param("uta", ["t", "a"], id="a result nobody asked for"),
        pytest.param("a", ["a"], id="a greeting"),
    ],
)
def test_exchanges_keep_calls_and_results_together(
    roles: str, units: list[str], read: Callable[[object], Request]
) -> None:
    """What follows the user message is cut in front of every message that is no result."""
    found = exchanges(read(messages(roles)).messages, Span(0, len(roles)))
    assert [roles[unit.start : unit.end] for unit in found] == units


def test_an_empty_turn_has_no_exchanges(read: Callable[[object], Request]) -> None:
    """Nothing but L1 has no newest turn to take apart."""
    assert exchanges(read(messages("s")).messages, Span(1, 1)) == ()


def called(script: str) -> dict[str, object]:
    """Return messages: `u a1,2 d t2 t1`, each by its role, with the ids it calls or answers."""
    made: list[dict[str, object]] = []
    for word in script.split():
        role, ids = ROLES[word[0]], [each for each in word[1:].split(",") if each]
        more: dict[str, object] = {}
        if role == "tool":
            more["tool_call_id"] = ids[0] if ids else "?"
        elif ids:
            more["tool_calls"] = [{"id": each, "type": "function", "function": {"name": "f"}} for each in ids]
        made.append({"role": role, "content": "x", **more})
    return {"messages": made}


@pytest.mark.parametrize(
    ("script", "turns"),
    [
        pytest.param("s u a1 u t1 a u", ["u a1 u t1", "a", "u"], id="a user message between call and result"),
        pytest.param("u a1 u t1 a2 u t2 u a", ["u a1 u t1", "a2 u t2", "u a"], id="in each exchange"),
        pytest.param("u a1 u t1 a2 u t2", ["u a1 u t1 a2 u t2"], id="in the newest turn"),
        pytest.param("u a1 d t1 u", ["u a1 d t1", "u"], id="a developer message there"),
        pytest.param("u a1 u a", ["u a1", "u a"], id="a call without a result"),
        pytest.param("u a1 t1 u a1 u t1 a u", ["u a1 t1", "u a1 u t1", "a", "u"], id="ids that come back"),
    ],
)
def test_no_turn_begins_between_a_call_and_its_result(
    script: str, turns: list[str], read: Callable[[object], Request]
) -> None:
    """Lenient servers take such conversations, and a cut must not part them."""
    found, words = shape(read(called(script)).messages), script.split()
    assert [" ".join(words[turn.start : turn.end]) for turn in found.turns] == turns


@pytest.mark.parametrize(
    ("script", "units"),
    [
        pytest.param("u a1 d t1 a2 t2", ["a1 d t1", "a2 t2"], id="a developer message between"),
        pytest.param("u a1 a2 t1 t2 a3 t3", ["a1 a2 t1 t2", "a3 t3"], id="parallel calls in two messages"),
        pytest.param("u a1,2 t2 u t1 a", ["a1,2 t2 u t1", "a"], id="a picture between two results"),
        pytest.param("u a1 t1 a1 t1", ["a1 t1", "a1 t1"], id="ids that come back"),
        pytest.param("u a1 a2 t2 a", ["a1", "a2 t2", "a"], id="a call without a result"),
        pytest.param("u a1 t a2 t2", ["a1 t", "a2 t2"], id="a result of nothing that was called"),
    ],
)
def test_what_stands_between_a_call_and_its_result_is_of_the_exchange(
    script: str, units: list[str], read: Callable[[object], Request]
) -> None:
    """None of them goes without the others."""
    words = script.split()
    found = exchanges(read(called(script)).messages, Span(0, len(words)))
    assert [" ".join(words[unit.start : unit.end]) for unit in found] == units
