"""Request and memory → Plan: the guard and its reasons."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import measure, plan, tools
from proxy.core.known import Known, Standing
from proxy.core.lineage import NOTHING
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.request import Request
from proxy.memo import TokenScale
from proxy.simulator.validity import check_chat
from tests.core.conftest import ANALYST, read_body

Make = Callable[..., tuple[Request, Plan]]
Forward = Callable[..., bytes]
WORDS = "word " * 300
SYSTEM = {"role": "system", "content": "You help."}


def user(text: str = WORDS) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = WORDS, *calls: str, **more: object) -> dict[str, Any]:
    made = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **more}


def result(call: str, text: str = WORDS) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def fits(made: Plan) -> bool:
    return made.total is None or made.limit is None or made.total <= made.limit


def history(turns: int) -> list[dict[str, Any]]:
    talk = [SYSTEM]
    for turn in range(turns):
        talk += [user(f"{turn} {WORDS}"), assistant()]
    return [*talk, user("Now?")]


def agent(steps: int) -> list[dict[str, Any]]:
    talk = [SYSTEM, user("Go.")]
    for step in range(steps):
        talk += [assistant("", f"{step}a", f"{step}b"), result(f"{step}a"), result(f"{step}b")]
    return talk


def chat(messages: list[dict[str, Any]], **more: object) -> dict[str, object]:
    return {"model": "gpt-4o", "messages": messages, **more}


ITEM = f"<file>\n{'é😀𐤀' * 30}\n</file>"


@pytest.mark.parametrize(
    ("messages", "budget"),
    [
        pytest.param([user("".join(f"{ITEM}\nw{number}\n" for number in range(15_000)))], None, id="repeats"),
        pytest.param(
            [{"role": "system", "content": " a" * 11_900},
             *(message for turn in range(1_500)
               for message in (user(f"question {turn}"), assistant(f"{turn} " * 1_500))),
             user("Now?")],
            12_000,
            id="a long history and little room",
        ),
    ],
)  # fmt: skip
def test_no_request_makes_planning_slow(
    messages: list[dict[str, Any]],
    budget: int | None,
    make: Make,
    scale: TokenScale,
    guard: Callable[[int], contextlib.AbstractContextManager[None]],
) -> None:
    """It costs about what the request is long, whatever stands in it."""
    found, made = make(chat(messages), budget=budget)
    with guard(10):
        make(chat(messages), budget=budget)
        measure.layers(found, made.draft, scale)


def test_tools_are_weighed_as_they_are_spelled(scale: TokenScale) -> None:
    """In the order of keys that the lineage's first request had: another order may weigh more."""
    fields = {f"field_{at}": {"description": f"words {at}", "type": "string"} for at in range(12)}
    first = orjson.dumps([{"type": "function", "function": {"name": "f", "parameters": fields}}])
    turned = {name: dict(reversed(each.items())) for name, each in reversed(fields.items())}
    later = [{"function": {"parameters": turned, "name": "f"}, "type": "function"}]
    keys = ANALYST.tools(first).keys
    known = Known(b"", standing=(Standing(keys=tools.digest(keys)),), keys={tools.digest(keys): keys})
    found = read_body({"model": "gpt-4o", "messages": history(3), "tools": later})
    policy = Policy(mode="layered", budget_tokens=4_096 + 2_600, reserve_tokens=4_096, over_budget="forward")
    made = plan.make(
        found, NOTHING, model=describe("gpt-4o"), policy=policy, named=False, scale=scale, look=ANALYST.analyse,
        now=0.0, given=ANALYST.tools(found.member("tools")), known=known,
    )  # fmt: skip
    assert made.draft.tools
    assert made.total == measure.layers(found, made.draft, scale).total
    assert scale.schema(made.draft.tools) != scale.schema(found.member("tools"))


def test_a_request_that_fits_is_not_weighed(make: Make) -> None:
    """Where the bytes alone prove that all fits there is no total, and no action."""
    _, made = make(chat(history(3)))
    assert (made.total, made.limit, made.actions, fits(made)) == (None, 123_904, (), True)
    _, made = make({**chat(history(3)), "model": "unheard-of"})
    assert (made.total, made.limit, fits(made)) == (None, None, True)


def test_a_request_that_fits_when_weighed_is_left_alone(make: Make, forward: Forward) -> None:
    """A body of more bytes than the limit has tokens is weighed, and forwarded as it came."""
    body = orjson.dumps(chat(history(3)))
    _, made = make(body, budget=4_096 + 2_500)
    assert made.total is not None
    assert made.total <= 2_500 < len(body)
    assert (made.actions, made.dropped_turns) == ((), 0)
    assert forward(body, budget=4_096 + 2_500) is not None
    assert forward(body, budget=4_096 + 2_500) == body


def test_observe_changes_nothing(make: Make, forward: Forward) -> None:
    """No layering, no guard; the own member still stays here, and what it brought is the client's own."""
    note = f"<note_context><path>a.md</path>{WORDS}</note_context>"
    talk = [user(note), assistant(note), *history(9)[1:-1], user(f"{note}\nNow?")]
    _, made = make(chat(talk), mode="observe", budget=5_000)
    assert (made.total, made.limit, made.actions) == (None, None, ())
    assert forward(chat(talk), mode="observe", budget=5_000) == orjson.dumps(chat(talk))
    body = chat(talk, strata={"context": [{"id": "a.md", "content": "x"}]})
    sent = orjson.loads(forward(body, mode="observe", budget=5_000))
    assert sent == chat([*talk[:-1], user(f'<document id="a.md">\nx\n</document>\n\n{note}\nNow?')])


LEFT_OUT = re.compile(r"\[(\d+) earlier messages? of this conversation left out here\.\]\n\n")


def told(sent: list[dict[str, Any]]) -> list[int]:
    """Return how many messages a prompt says were left out, each time it does."""
    return [int(count) for message in sent for count in LEFT_OUT.findall(message["content"] or "")]


def untold(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt without the line that says so."""
    return [{**message, "content": message["content"] and LEFT_OUT.sub("", message["content"])} for message in sent]


def test_oldest_turns_go_first(make: Make, forward: Forward) -> None:
    """Whole turns from the start; L1 and the newest user message stay."""
    body = chat(history(20))
    _, made = make(body, budget=4_096 + 8_000)
    assert made.actions == ("turns_dropped",)
    assert 0 < made.dropped_turns < 20
    assert made.total is not None
    assert fits(made)
    sent = orjson.loads(forward(body, budget=4_096 + 8_000))["messages"]
    assert untold(sent) == [SYSTEM, *history(20)[1 + 2 * made.dropped_turns :]]
    assert told(sent) == [2 * made.dropped_turns]


def test_oldest_exchanges_of_a_long_turn_go(make: Make, forward: Forward) -> None:
    """An agent's run loses whole exchanges, calls with all their results; its task and last exchange stay."""
    body = chat(agent(20))
    _, made = make(body, budget=4_096 + 4_000)
    assert made.actions == ("exchanges_dropped",)
    assert fits(made)
    sent = orjson.loads(forward(body, budget=4_096 + 4_000))["messages"]
    assert untold(sent) == [*agent(20)[:2], *agent(20)[2 + 3 * made.dropped_exchanges :]]
    assert told(sent) == [3 * made.dropped_exchanges]


def test_turns_go_before_exchanges(make: Make) -> None:
    """All older turns, then the newest turn's own exchanges."""
    _, made = make(chat([*history(5)[:-1], *agent(20)[1:]]), budget=4_096 + 4_000)
    assert made.actions == ("turns_dropped", "exchanges_dropped")
    assert made.dropped_turns == 5
    assert 0 < made.dropped_exchanges < 20


@pytest.mark.parametrize(
    ("over", "budget", "model", "actions"),
    [
        pytest.param("forward", 5_000, "gpt-4o", ("forwarded_over_budget",), id="forward"),
        pytest.param("reject", 5_000, "gpt-4o", ("rejected",), id="reject"),
        pytest.param("reject", None, "gpt-4", ("forwarded_over_budget",), id="over the window the upstream answers"),
        pytest.param("reject", 1_000_000, "gpt-4", ("forwarded_over_budget",), id="over the window, in the budget"),
        pytest.param("reject", None, "unheard-of", (), id="no window known"),
    ],
)
def test_what_cannot_be_made_to_fit(
    over: str, budget: int | None, model: str, actions: tuple[str, ...], make: Make, forward: Forward
) -> None:
    """Over the tenant's budget as configured; over the model's window it is always forwarded, untouched."""
    body = {**chat([SYSTEM, user("word " * 9_000)]), "model": model}
    _, made = make(body, budget=budget, over_budget=over)
    assert made.actions == actions
    assert made.rejected is ("rejected" in actions)
    assert fits(made) is (not actions)
    assert (made.dropped_turns, made.dropped_exchanges) == (0, 0)
    assert forward(body, budget=budget, over_budget=over) == orjson.dumps(body)


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"role": "system", "content": "word " * 3_000}], id="only L1"),
        pytest.param([user("word " * 3_000)], id="one message"),
        pytest.param([assistant("word " * 3_000)], id="a greeting"),
        pytest.param([SYSTEM, user("Go."), assistant("", "a"), result("a", "word " * 3_000)], id="one exchange"),
        pytest.param([user("Go."), assistant("", "a"), result("a", "word " * 3_000), assistant()], id="and an answer"),
    ],
)
def test_what_may_never_go_stays(messages: list[dict[str, Any]], make: Make, forward: Forward) -> None:
    """L1, the newest user message and the last tool exchange: nothing is dropped, and nothing said to be."""
    _, made = make(chat(messages), budget=6_000)
    assert made.actions == ("forwarded_over_budget",)
    assert (made.dropped_turns, made.dropped_exchanges) == (0, 0)
    assert forward(chat(messages), budget=6_000) == orjson.dumps(chat(messages))


def test_empty_messages_and_large_tools(make: Make) -> None:
    """Tools count, and nothing can be dropped for them."""
    _, made = make(
        chat([], tools=[{"type": "function", "function": {"name": "f", "description": WORDS * 9}}]), budget=5_000
    )
    assert (made.actions, made.dropped_turns, made.dropped_exchanges) == (("forwarded_over_budget",), 0, 0)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, id="images"),
        pytest.param({"type": "file", "file": {"file_id": "file-1"}}, id="files"),
        pytest.param({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, id="audio"),
    ],
)
def test_short_parts_with_a_high_price_are_weighed(part: dict[str, object], make: Make, scale: TokenScale) -> None:
    """A few bytes may stand for many tokens: the byte length proves nothing there."""
    found, made = make(chat([{"role": "user", "content": [part] * 100}]), budget=4_096 + 20_000)
    assert measure.layers(found, made.draft, scale).total > 20_000
    assert made.actions == ("forwarded_over_budget",)


def test_the_last_user_message_alone_may_be_cut_to(make: Make, forward: Forward) -> None:
    """All history goes rather than that the limit is broken."""
    body = chat([*history(3)[:-1], user("word " * 2_000)])
    _, made = make(body, budget=4_096 + 2_100)
    assert (made.dropped_turns, fits(made)) == (3, True)
    sent = orjson.loads(forward(body, budget=4_096 + 2_100))["messages"]
    assert untold(sent) == [SYSTEM, user("word " * 2_000)]


def test_a_cut_after_a_greeting_begins_with_a_user_message(forward: Forward) -> None:
    """The greeting is a turn of its own and goes first."""
    body = chat([SYSTEM, assistant(), *history(4)[1:]])
    sent = orjson.loads(forward(body, budget=4_096 + 2_000))["messages"]
    assert [message["role"] for message in sent[:2]] == ["system", "user"]


def test_signed_reasoning_of_the_newest_turn_keeps_it_whole(make: Make) -> None:
    """Exchanges in front of it stay: it is accepted back only behind what it was made from."""
    talk = agent(20)
    talk[-3] = {**talk[-3], "reasoning_details": [{"type": "x"}]}
    _, made = make(chat([*history(2)[:-1], *talk[1:]]), budget=4_096 + 4_000)
    assert made.actions == ("turns_dropped", "forwarded_over_budget")
    assert (made.dropped_turns, made.dropped_exchanges) == (2, 0)


def test_a_dropped_item_is_never_referenced(forward: Forward) -> None:
    """When the turn that held an item goes, the next place it was sent to holds it in full."""
    note = f"<note_context><path>a.md</path>{WORDS}</note_context>"
    body = chat([user(note), assistant(), *history(9)[1:-1], user(f"{note}\nNow?")])
    assert note not in orjson.loads(forward(body))["messages"][-1]["content"]
    cut = orjson.loads(forward(body, budget=4_096 + 3_000))["messages"]
    assert cut[0]["content"] != note
    assert cut[-1]["content"] == f"{note}\nNow?"


def test_what_was_attached_counts_for_the_turn_that_goes(make: Make) -> None:
    """What is lost and what the units weigh is one currency: a turn with a long note alone may be enough."""
    note = f"<note_context><path>a.md</path>{WORDS * 18}</note_context>"
    talk = history(10)
    talk[1] = user(f"{note}\n{talk[1]['content']}")
    _, made = make(chat(talk), budget=4_096 + 8_000)
    assert (made.dropped_turns, fits(made)) == (1, True)


def test_the_library_goes_before_history(talk: Callable[[], Any], make: Make) -> None:
    """What the client itself left out is the first that is left out again, and said so."""
    note = f"<note_context><path>a.md</path>{WORDS}</note_context>"
    named = talk()
    named.say(chat([SYSTEM, user(f"{note}\nOne?")]), "ok", promotion="eager")
    body = chat([SYSTEM, user("One?"), assistant("ok"), user("Two?")])
    assert b"context_library" in named.say(body, promotion="eager")
    assert b"<prior_context" in named.say(body, promotion="eager", budget=4_096 + 250)
    assert b"context_library" not in named.say(body, promotion="eager", budget=4_096 + 100)
    _, made = make(body, named.recalled, named=True, promotion="eager", budget=4_096 + 100)
    assert (made.actions, made.dropped_turns, fits(made)) == (("library_left_out",), 0, True)
    assert not made.draft.library


@pytest.mark.parametrize("promotion", ["deferred", "eager"])
def test_anonymous_requests_replay_nothing(promotion: str, talk: Callable[[], Any], forward: Forward) -> None:
    """Whatever memory holds, an anonymous request is forwarded from its own content alone."""
    note = f"<note_context><path>a.md</path>{WORDS}</note_context>"
    named = talk()
    named.say(chat([SYSTEM, user(f"{note}\nOne?")]), "ok", promotion=promotion)
    body = orjson.dumps(chat([SYSTEM, user("One?"), assistant("ok"), user("Two?")]))
    assert forward(body, named.recalled, named=False, promotion=promotion) == body


@pytest.mark.parametrize("promotion", ["deferred", "eager"])
@pytest.mark.parametrize(
    ("then", "replayed"),
    [
        pytest.param([user("One?"), assistant("ok"), user("Two?")], True, id="the next turn"),
        pytest.param([user("One?"), assistant("not ok"), user("Two?")], False, id="another reply"),
        pytest.param([user("Eins?"), assistant("ok"), user("Two?")], False, id="an edited question"),
        pytest.param([user("One?")], False, id="a regeneration"),
        pytest.param([user("Give this chat a title.")], False, id="a side request"),
        pytest.param([user("One?"), user("Two?")], False, id="no reply"),
    ],
)
def test_only_a_matched_turn_is_replayed(
    then: list[dict[str, Any]], replayed: bool, promotion: str, talk: Callable[[], Any]
) -> None:
    """Edits, retries and side requests fork: where nothing matches, nothing stored is used."""
    note = f"<note_context><path>a.md</path>{WORDS}</note_context>"
    named = talk()
    named.say(chat([SYSTEM, user(f"{note}\nOne?")]), "ok", promotion=promotion)
    sent = named.say(chat([SYSTEM, *then]), promotion=promotion)
    assert (note.encode() in sent) is replayed
    assert (b"context_library" in sent) is (replayed and promotion == "eager")


def test_an_agents_run_that_cannot_fit_is_forwarded_over_its_budget(make: Make) -> None:
    """And says so last."""
    _, made = make(chat([*history(5)[:-1], *agent(20)[1:]]), budget=4_096 + 400)
    assert made.actions[-1] == "forwarded_over_budget"


def test_the_cut_holds_still(make: Make) -> None:
    """While a conversation grows by ten steps of the grid, the cut moves about ten times, not each turn."""
    talk = history(120)
    cuts = []
    for turns in range(20, 120):
        body = chat([*talk[: 1 + 2 * turns], talk[-1]])
        cuts.append(make(body, budget=4_096 + 10_000)[1].dropped_turns)
    assert cuts == sorted(cuts)
    assert cuts[-1] > 80
    grown, step = 100 * 605, 5_120
    assert len(set(cuts)) <= grown // step + 2


def test_a_cut_request_is_still_a_valid_chat(forward: Forward) -> None:
    """Every call keeps all its results at every size of budget."""
    body = chat([*history(3)[:-1], *agent(12)[1:], assistant("done"), user("Next?"), *agent(6)[2:]])
    for room in range(300, 9_000, 300):
        sent = orjson.loads(forward(body, budget=4_096 + room))
        check_chat(sent, strict=False)
        assert sent["messages"][0] == SYSTEM
        assert sent["messages"][1]["role"] == "user"
        assert sent["messages"][-3:] == body["messages"][-3:]  # type: ignore[index]
