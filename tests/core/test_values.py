"""Current values on the wire: a marker in L1, the values before the user's words, each exactly once."""

from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from proxy.core import chain, lineage, lines, plan, render, reply
from proxy.core.items import BUILTIN
from proxy.core.known import known
from proxy.core.message import analyse
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.profile import Profile
from proxy.memo import count
from proxy.memory.local import LocalStore
from proxy.recall import log_entries
from tests.core.conftest import ANALYST, SCALE, as_bytes, read_body

Messages = list[dict[str, Any]]
POLICY = "\n".join(f"Rule {number} stands for every customer and order." for number in ("one", "two", "three", "four"))
LAST = Profile(system_last=True)


@dataclass
class Client:
    """One conversation, named or not; `say` forwards a request and remembers what the pipeline would."""

    name: str | None = None
    profile: Profile = LAST
    promotion: str = "deferred"
    store: LocalStore = field(default_factory=lambda: LocalStore(max_bytes=10**8, ttl_seconds=1e9, clock=lambda: 0.0))
    now: float = 0.0
    model: str = "gpt-4o"
    made: Plan | None = None

    def say(
        self,
        system: object,
        *messages: dict[str, Any],
        answer: dict[str, Any] | None = None,
        budget: int | None = None,
    ) -> Messages:
        self.now += 1
        sent = [*([{"role": "system", "content": system}] if system is not None else []), *messages]
        request = read_body({"model": self.model, "messages": sent})
        parts, places = request.parts, request.places
        earlier = lineage.earlier(request)
        leading = [request.raw(index) for index in range(parts.leading)]
        answers = [] if self.name else [*filter(None, [lineage.answer(request)])]
        made = self.made = plan.make(
            request,
            self.store.copy(self.name or ""),
            model=describe(request.model),
            policy=Policy(
                mode="layered", promotion=self.promotion, budget_tokens=budget, reserve_tokens=4_096,  # type: ignore[arg-type]
                over_budget="forward", profile=self.profile,
            ),
            named=self.name is not None,
            scale=SCALE,
            look=ANALYST.analyse,
            now=self.now,
            known=known(
                earlier, places[-1], self.store.book.learned("t", (*answers, *earlier, places[-1])),
                answers=answers, key=b"tenant",
                # Analysed once more: a process forgets messages and lines each in its own time.
                lines=lines.read([analyse(raw, tags=BUILTIN, count=count) for raw in leading], b"tenant"),
            ),
        )  # fmt: skip
        assert made.formed is not None or system is None
        lesson = made.lesson(self.now)
        self.store.note_learned("t", places[-1], made.standing, lesson)
        given = reply.of_answer(orjson.dumps({"choices": [{"message": answer or OK}]}))
        if made.recurring.log:
            self.store.note_learned("t", chain.after(places[-1], given[0]), made.standing, lesson)
        if self.name is not None:
            entries = log_entries(request, made, at=self.now)
            self.store.put(self.name, tuple(entries.values()), made.epoch if made.began else None)
            if (entry := entries.get(made.draft.newest.start)) is not None:
                self.store.answer(self.name, entry, given)
        forwarded = render.body(request, made.draft, ask_usage=False)
        found: Messages = orjson.loads(forwarded)["messages"]
        if found == sent:
            assert forwarded == as_bytes({"model": self.model, "messages": sent})
        return found


OK = {"role": "assistant", "content": "ok"}


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def timed(minute: int) -> str:
    return f"Time: 10:{minute:02}\n{POLICY}"


def memory(text: str) -> str:
    return f"<memory>\n{text}\n</memory>\n{POLICY}"


def marked(rest: str = POLICY) -> str:
    return f"[current value 1: in the newest <current_values {key()}>]\n{rest}"


def key() -> str:
    client = Client()
    client.say(timed(1), user("a"))
    sent = client.say(timed(2), user("a"), OK, user("b"))
    text: str = sent[-1]["content"]
    return text.split("<current_values ")[1].split(">", maxsplit=1)[0]


def told(value: str, words: str) -> str:
    return f"<current_values {key()}>\n{value}\n</current_values>\n\n{words}"


def last(value: str) -> dict[str, Any]:
    return {"role": "system", "content": told(value, "").strip()}


def call(number: int) -> Messages:
    function = {"name": "look", "arguments": "{}"}
    asked = {"role": "assistant", "content": None,
             "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}  # fmt: skip
    return [asked, {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"}]


def test_a_clock_moves_to_the_very_end_when_it_has_changed() -> None:
    """The first request goes as it came; then L1 is the same in each, and all but the time is the next one's prefix."""
    client = Client()
    assert client.say(timed(1), user("a"))[0]["content"] == timed(1)
    assert client.say(timed(2), user("a"), OK, user("b")) == [
        {"role": "system", "content": marked()}, user("a"), OK, user("b"), last("Time: 10:02"),
    ]  # fmt: skip
    assert client.say(timed(3), user("a"), OK, user("b"), OK, user("c")) == [
        {"role": "system", "content": marked()}, user("a"), OK, user("b"), OK, user("c"), last("Time: 10:03"),
    ]  # fmt: skip


def test_without_a_place_at_the_end_a_clock_moves_to_the_users_message() -> None:
    """It stands once, before the user's words."""
    client = Client(profile=Profile())
    client.say(timed(1), user("a"))
    client.say(timed(2), user("a"), OK, user("b"))
    assert client.say(timed(3), user("a"), OK, user("b"), OK, user("c")) == [
        {"role": "system", "content": marked()}, user("a"), OK, user("b"), OK, user(told("Time: 10:03", "c")),
    ]  # fmt: skip


def test_of_several_values_each_has_a_head() -> None:
    """Which is which is told by the tenant's key, which no value can hold by chance."""
    client = Client()
    for minute in (1, 2, 3):
        sent = client.say(f"{timed(minute)}\nBuild: {minute}", user("a"), *[OK, user("b")] * (minute - 1))
    name = key()[5:-1]
    assert sent[-1]["content"] == (
        f"<current_values {key()}>\n[{name}:1]\nTime: 10:03\n[{name}:2]\nBuild: 3\n</current_values>"
    )


def test_another_conversation_of_the_tenant_shares_l1_at_once() -> None:
    """What one lineage learned, the next begins with; the time may even stand still."""
    client = Client()
    client.say(timed(1), user("a"))
    client.say(timed(2), user("a"), OK, user("b"))
    other = Client(store=client.store)
    assert other.say(timed(2), user("hi"))[0]["content"] == marked()


def test_a_named_turn_is_frozen_with_its_values() -> None:
    """Later turns tell only what has changed since; the prompt only grows."""
    client = Client(name="chat")
    client.say(timed(1), user("a"))
    second = client.say(timed(2), user("a"), OK, user("b"))
    third = client.say(timed(2), user("a"), OK, user("b"), OK, user("c"))
    fourth = client.say(timed(4), user("a"), OK, user("b"), OK, user("c"), OK, user("d"))
    assert second[-1] == user(told("Time: 10:02", "b"))
    assert third == [*second, OK, user("c")]
    assert fourth == [*third, OK, user(told("Time: 10:04", "d"))]


def test_an_epochs_end_takes_old_values_away() -> None:
    """And tells all that hold now."""
    client = Client(name="chat")
    client.say(timed(1), user("a"))
    client.say(timed(2), user("a"), OK, user("b"))
    edited = timed(3).replace("Rule two", "The second rule")
    sent = client.say(edited, user("a"), OK, user("b"), OK, user("c"))
    assert client.made is not None
    assert client.made.began == "l1_changed"
    assert sent[1:] == [user("a"), OK, user("b"), OK, user(told("Time: 10:03", "c"))]


@pytest.mark.parametrize("name", [None, "chat"])
def test_in_a_loop_what_has_changed_comes_last(name: str | None) -> None:
    """In a system message of its own: the loop's own messages stay a prefix."""
    client = Client(name=name)
    client.say(timed(1), user("x"))
    asked = [user("x"), OK, user("a")]
    first = client.say(timed(2), *asked, answer=call(1)[0])
    second = client.say(timed(3), *asked, *call(1), answer=call(2)[0])
    third = client.say(timed(4), *asked, *call(1), *call(2))
    assert second[-1] == last("Time: 10:03")
    assert third[-1] == last("Time: 10:04")
    assert third[: len(second) - 1] == second[:-1]
    assert second[-3:-1] == call(1)
    if name is not None:
        assert second[: len(first)] == first


def test_in_a_named_loop_what_has_not_changed_stays() -> None:
    """A value as it was when the turn began needs no second telling."""
    client = Client(name="chat")
    client.say(timed(1), user("x"))
    asked = [user("x"), OK, user("a")]
    first = client.say(timed(2), *asked, answer=call(1)[0])
    assert client.say(timed(2), *asked, *call(1)) == [*first, *call(1)]


@pytest.mark.parametrize("minute", [2, 3])
def test_in_an_anonymous_loop_values_come_last(minute: int) -> None:
    """Changed or not: what stands in front of them is a prefix of the next step."""
    client = Client()
    client.say(timed(1), user("x"))
    asked = [user("x"), OK, user("a")]
    first = client.say(timed(2), *asked)
    assert client.say(timed(minute), *asked, *call(1)) == [*first[:-1], *call(1), last(f"Time: 10:0{minute}")]


@pytest.mark.parametrize("name", [None, "chat"])
def test_an_upstream_that_takes_no_last_system_message_gets_none(name: str | None) -> None:
    """The values stand in the turn's user message, and the loop is read again."""
    client = Client(name=name, profile=Profile())
    client.say(timed(1), user("x"))
    asked = [user("x"), OK, user("a")]
    client.say(timed(2), *asked, answer=call(1)[0])
    sent = client.say(timed(3), *asked, *call(1))
    assert sent[-3:] == [user(told("Time: 10:03", "a")), *call(1)]


def test_a_partial_answer_stays_last() -> None:
    """A prefill is the model's to continue."""
    client = Client()
    client.say(timed(1), user("a"))
    begun = {"role": "assistant", "content": "{"}
    sent = client.say(timed(2), user("a"), OK, user("b"), begun)
    assert sent[-2:] == [user(told("Time: 10:02", "b")), begun]


def test_values_stand_behind_attachments() -> None:
    """So that what was attached is read once, however the time changes."""
    document = "<document id='a'>\n" + "words " * 80 + "\n</document>"
    client = Client(profile=Profile())
    client.say(timed(1), user("a"))
    sent = client.say(timed(2), user("a"), OK, user(f"{document}\n\nWhy?"))
    assert sent[-1]["content"] == f"{document}\n\n{told('Time: 10:02', 'Why?')}"


def test_a_document_among_the_values_is_no_place_to_refer_to() -> None:
    """It stands behind the history, and only in this request."""
    document = "<document id='a'>\n" + "words " * 80 + "{}\n</document>"
    client, attached = Client(), user(document.format(1) + "\n\nWhy?")
    client.say(f"{document.format(1)}\n{POLICY * 9}", user("a"))
    client.say(f"{document.format(2)}\n{POLICY * 9}", user("a"), OK, user("b"))
    sent = client.say(f"{document.format(1)}\n{POLICY * 9}", user("a"), OK, user("b"), OK, attached)
    assert "current value 1" in sent[0]["content"]
    assert "Context attached" not in str(sent)


def test_a_value_cannot_close_its_frame() -> None:
    """Whatever a memory says."""
    client = Client()
    client.say(f"Note 1: </current_values> {POLICY}", user("a"))
    sent = client.say(f"Note 2: </current_values>\n{POLICY}", user("a"), OK, user("b"))
    sent = client.say(f"Note 3: </current_values>\n{POLICY}", user("a"), OK, user("b"), OK, user("c"))
    assert sent[-1]["content"].count("</current_values>") == 1


@pytest.mark.parametrize(
    ("first", "then", "now", "l1", "value"),
    [
        pytest.param(
            [{"type": "text", "text": "x-meta: build=9; nonce=a1b2;"}, {"type": "text", "text": POLICY}],
            [{"type": "text", "text": "x-meta: build=9; nonce=c3d4;"}, {"type": "text", "text": POLICY}],
            [{"type": "text", "text": "x-meta: build=9; nonce=e5f6;"}, {"type": "text", "text": POLICY}],
            [{"type": "text", "text": "MARK"}, {"type": "text", "text": POLICY}],
            "x-meta: build=9; nonce=e5f6;",
            id="a part of its own",
        ),
        pytest.param(
            [{"type": "text", "text": f"{POLICY} It is 1.", "cache_control": {"type": "ephemeral"}}],
            [{"type": "text", "text": f"{POLICY} It is 2.", "cache_control": {"type": "ephemeral"}}],
            [{"type": "text", "text": f"{POLICY} It is 3.", "cache_control": {"type": "ephemeral"}}],
            [{"type": "text", "text": "SPLIT", "cache_control": {"type": "ephemeral"}}],
            None,
            id="marks stay where they are",
        ),
        pytest.param(
            f"It is 10:01. {POLICY.replace(chr(10), ' ') * 3}", f"It is 10:02. {POLICY.replace(chr(10), ' ') * 3}",
            f"It is 10:03. {POLICY.replace(chr(10), ' ') * 3}", f"MARK {POLICY.replace(chr(10), ' ') * 3}",
            "It is 10:03.", id="a sentence of one long line",
        ),
        pytest.param(
            memory("a"), memory("b"), f"<memory>\n</memory>\n{POLICY}", memory("MARK"), "(none)", id="an empty block",
        ),
        pytest.param(
            memory("a"), memory("b"), memory("c\n\nd"), memory("MARK"), "c\n\nd", id="a block as a whole",
        ),
    ],
)  # fmt: skip
def test_l1_keeps_its_form(first: object, then: object, now: object, l1: Any, value: str | None) -> None:
    """A string stays a string, parts stay parts, and only what changed has gone."""
    client = Client()
    client.say(first, user("a"))
    client.say(then, user("a"), OK, user("b"))
    sent = client.say(now, user("a"), OK, user("b"), OK, user("c"))
    mark = f"[current value 1: in the newest <current_values {key()}>]"
    shown = orjson.loads(orjson.dumps(l1).replace(b"MARK", orjson.dumps(mark)[1:-1]))
    if value is None:
        shown[0]["text"] = f"{POLICY.rsplit(chr(10), 1)[0]}\n{mark}"
        value = f"{POLICY.rsplit(chr(10), 1)[1]} It is 3."
    assert sent[0]["content"] == shown
    assert sent[-2:] == [user("c"), last(value)]


def test_of_many_that_began_alike_one_that_has_not_changed_goes_on() -> None:
    """Whatever the others' forms are."""
    client = Client()
    first = client.say(f"The user is Ada.\n{POLICY * 4}", user("Hi"))
    for name in ("Bob", "Cleo", "Dan", "Eve", "Finn"):
        Client(store=client.store).say(f"The user is {name}.\n{POLICY * 4}", user("Hi"))
    assert client.say(f"The user is Ada.\n{POLICY * 4}", user("Hi"), OK, user("b"))[:2] == first


def test_a_name_stands_at_the_end_of_the_system_message() -> None:
    """It keeps the system role; the values of the others are nobody's business."""
    client = Client()
    for name in ("Ada", "Bob", "Cleo"):
        sent = Client(store=client.store).say(f"The user is {name}.\n{POLICY * 4}", user(name))
    assert sent == [{"role": "system", "content": f"{POLICY * 4}\n\nThe user is Cleo."}, user("Cleo")]


@pytest.mark.parametrize("promotion", ["eager", "deferred"])
def test_a_library_joins_l1_without_its_values(promotion: str) -> None:
    """L2 stands behind the core; what belongs to this lineage only stands behind L2."""
    store = Client().store
    for name in ("Ada", "Bob", "Cleo"):
        Client(store=store).say(f"The user is {name}.\n{timed(1)}{POLICY * 4}", user(name))
    note = "<note_context><path>a.md</path>" + "words " * 100 + "</note_context>"
    client = Client(name="chat", store=store, promotion=promotion)
    client.say(f"The user is Dan.\n{timed(1)}{POLICY * 4}", user(f"{note}\n\na"))
    client.say(f"The user is Dan.\n{timed(2)}{POLICY * 4}", user("a"), OK, user("b"))
    sent = client.say(f"The user is Dan.\n{timed(3)}{POLICY * 4}", user("a"), OK, user("b"), OK, user("c"))
    system: str = sent[0]["content"]
    assert system.startswith(marked()[:40])
    assert system.endswith("\n\nThe user is Dan.")
    assert ("context_library" in system) is (promotion == "eager")
    # What is replayed holds its turn's values; what is not would be another message in the next turn.
    assert sent[-1] == (last("Time: 10:03") if promotion == "eager" else user(told("Time: 10:03", "c")))


def test_what_no_user_message_can_take_stays_in_l1() -> None:
    """Without a place for its value nothing is taken out."""
    client = Client()
    client.say(timed(1), user("a"))
    client.say(timed(2), user("a"), OK, user("b"))
    request = read_body({"messages": [{"role": "system", "content": timed(3)}, OK]})
    made = plan.make(
        request, lineage.NOTHING, model=describe(""), policy=Policy(
            mode="layered", budget_tokens=None, reserve_tokens=1, over_budget="forward"),
        named=False, scale=SCALE, look=ANALYST.analyse, now=0.0,
        known=known((), b"", client.store.book.learned("t", ()), key=b"tenant",
                    lines=ANALYST.lines(request.messages[:1], b"tenant")),
    )  # fmt: skip
    assert render.body(request, made.draft, ask_usage=False) == request.body


def test_a_value_that_was_told_in_a_turn_which_is_not_replayed_is_told_again() -> None:
    """A client may send a turn with another member beside its words: what had been put there does not stand there."""
    client = Client(name="c")
    client.say(timed(1), user("a"))
    client.say(timed(2), user("a"), OK, user("b"))
    client.say(timed(3), user("a"), OK, user("b"), OK, user("c"))
    sent = client.say(timed(3), user("a"), OK, user("b"), OK, {**user("c"), "name": "ada"}, OK, user("d"))
    assert sent[5] == {**user("c"), "name": "ada"}
    assert str(sent).count("10:03") == 1
