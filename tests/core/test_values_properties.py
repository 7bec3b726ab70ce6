"""Current values: properties over the simulated clients of one tenant, whose system prompts hold what changes.

A client's system prompt has policies, a clock, a nonce, its user's name, a tagged memory block and a fact without tags;
it chats, runs tools, asks again, edits earlier turns, and its operator edits the policies. Everyone's traffic is mixed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from proxy.core import lineage, plan, render, reply, request
from proxy.core.items import Tags
from proxy.core.known import Known, known
from proxy.core.lineage import NOTHING, Recalled
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.profile import Profile
from proxy.memo import Analyst, TokenScale, count
from proxy.memory.local import LocalStore
from proxy.recall import log_entries
from proxy.simulator.validity import check_chat

Messages = list[dict[str, Any]]

WORDS = ["amber", "brick", "cedar", "dune", "ember", "flint", "grove", "hazel", "iris", "jade", "kelp", "lotus"]
POLICIES = [f"Policy {word} holds for every customer, every order and every return there is." for word in WORDS]
LAYOUTS = {
    "head": ["user", "clock", *POLICIES[:4], "memory", *POLICIES[4:8], "fact", *POLICIES[8:], "nonce"],
    "split": [*POLICIES[:6], "user", "clock", "nonce", "memory", *POLICIES[6:], "fact"],
    "tail": [*POLICIES[:9], "nonce", *POLICIES[9:], "fact", "memory", "clock", "user"],
}
FORMS = ("string", "crlf", "parts", "two", "line")
USERS = ("Ada", "Bob", "Cleo", "Dan")
ALL = frozenset({"user", "clock", "memory", "fact", "nonce"})
FRAME = re.compile(r'<current_values key="[0-9a-f]{8}">\n(.*?)\n</current_values>(?:\n\n)?', re.DOTALL)
MARKER = re.compile(r'\[current value (\d+): in the newest <current_values key="[0-9a-f]{8}">\]')
ANALYST, SCALE = Analyst(Tags.of(), max_bytes=64_000_000), TokenScale("o200k_base", max_bytes=64_000_000)


def spell(number: int) -> str:
    """Say a number in words: no digit that could count."""
    return f"{WORDS[number % 12]} {WORDS[number // 12 % 12]}"


def texts(messages: Messages) -> list[str]:
    held = [message["content"] for message in messages if message.get("content")]
    return [part["text"] for content in held for part in ([{"text": content}] if isinstance(content, str) else content)]


def squeeze(text: str) -> str:
    return "".join(text.split())


def balanced(text: str) -> bool:
    opened: list[str] = []
    for closes, name in re.findall(r"<(/?)(\w+)[^<>]*>", text):
        if not closes:
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    return not opened


@dataclass(kw_only=True)
class Sent:
    """One request and what became of it. `before` is the request it extends."""

    body: dict[str, Any]
    answer: dict[str, Any]
    policy: Policy
    named: bool
    recalled: Recalled
    known: Known
    now: float
    user: str = ""
    before: "Sent | None" = None
    made: Plan = field(init=False)
    forwarded: bytes = b""

    def planned(self, analyst: Analyst = ANALYST) -> tuple[Plan, bytes]:
        found = request.read(orjson.dumps(self.body), analyst.analyse, count)
        made = plan.make(
            found, self.recalled, model=describe("gpt-4o"), policy=self.policy, named=self.named, scale=SCALE,
            look=analyst.analyse, now=self.now, known=self.known,
        )  # fmt: skip
        return made, render.body(found, made.draft, ask_usage=False)

    @property
    def asked(self) -> Messages:
        return list(self.body["messages"])

    @property
    def talk(self) -> Messages:
        return [message for message in self.asked if message["role"] != "system"]

    @property
    def leading(self) -> int:
        return len(self.asked) - len(self.talk)

    def turned(self) -> bytes:
        """Return what another process forwards, whose memory holds the same in another order."""
        held = replace(self.known, standing=self.known.standing[::-1], templates=self.known.templates[::-1])
        return replace(self, known=held).planned(Analyst(Tags.of(), max_bytes=1))[1]

    def extends(self, other: "Sent") -> bool:
        return self.user == other.user and self.talk[: len(other.talk) + 1] == [*other.talk, other.answer]

    @property
    def messages(self) -> Messages:
        return list(orjson.loads(self.forwarded)["messages"])

    @property
    def frames(self) -> list[tuple[int, dict[str, str]]]:
        """Each frame's place, and what it tells by slot."""
        found = []
        for index, message in enumerate(self.messages[self.leading :], self.leading):
            for told in (told for text in texts([message]) for told in FRAME.findall(text)):
                pieces = re.split(r"^\[[0-9a-f]{8}:(\d+)\]\n", told, flags=re.MULTILINE)
                pieces = pieces if len(pieces) > 1 else ["", "1", told]
                assert len(set(pieces[1::2])) == len(pieces[1::2])
                found.append((index, dict(zip(pieces[1::2], pieces[2::2], strict=True))))
        return found

    def system(self, *, filled: bool) -> str:
        """Return what is forwarded as L1, without markers or with what they stand for."""
        values = {slot: value for _, told in self.frames for slot, value in told.items()} if filled else {}
        once = dict.fromkeys(values, "")
        shown = {slot: "" if value.strip() == "(none)" else value for slot, value in values.items()}
        text = "\n".join(texts(self.messages[: self.leading]))
        return MARKER.sub(lambda marker: (shown if filled else once).pop(marker[1], ""), text)


class Proxy:
    """One tenant's, driven as `bench/savings.py` drives it."""

    def __init__(self, *, promotion: str = "deferred", system_last: bool = True) -> None:
        self.policy = Policy(
            mode="layered", promotion="eager" if promotion == "eager" else "deferred", budget_tokens=None,
            reserve_tokens=4_096, over_budget="forward", profile=Profile(system_last=system_last),
        )  # fmt: skip
        self.store = LocalStore(max_bytes=64_000_000, ttl_seconds=1e9, clock=lambda: 0.0)
        self.all: list[Sent] = []

    def send(self, messages: Messages, name: str | None, answer: dict[str, Any], user: str = "") -> Sent:
        body = {"model": "gpt-4o", "messages": messages}
        found = request.read(orjson.dumps(body), ANALYST.analyse, count)
        places, now = [(name or "").encode() + place for place in found.places], float(len(self.all))
        earlier = [(name or "").encode() + place for place in lineage.earlier(found)]
        learned = self.store.book.learned("t", (*earlier, places[-1]))
        sent = Sent(
            body=body, answer=answer, policy=self.policy, named=name is not None, now=now, user=user,
            recalled=self.store.copy(name) if name else NOTHING,
            known=known(
                earlier, places[-1], learned, key=b"t",
                lines=ANALYST.lines(found.messages[: found.parts.leading], b"t"),
            ),
        )  # fmt: skip
        sent.before = max(
            (other for other in self.all if sent.extends(other)), key=lambda other: (len(other.talk), other.now),
            default=None,
        )  # fmt: skip
        made, sent.forwarded = sent.planned()
        sent.made = made
        if made.teaches:
            lesson = made.lesson(now)
            self.store.note_learned("t", places[-1], made.standing, lesson)
        if name is not None and made.places:
            entries = log_entries(found, made, at=now)
            self.store.put(name, tuple(entries.values()), made.epoch if made.began else None)
            if (newest := entries.get(made.draft.newest.start)) is not None:
                self.store.answer(name, newest, reply.of_answer(orjson.dumps({"choices": [{"message": answer}]})))
        self.all.append(sent)
        return sent


@dataclass
class Client:
    """One user with one conversation; what is in `moves` changes by itself from request to request.

    `alike`: it begins with the words others begin with.
    """

    proxy: Proxy
    user: str
    name: str | None = None
    layout: str = "head"
    holds: frozenset[str] = ALL
    moves: frozenset[str] = frozenset()
    form: str = "string"
    alike: bool = False
    memory: list[str] | None = field(default_factory=lambda: ["Likes amber."])
    edits: dict[str, str] = field(default_factory=dict)
    fact: int = 0
    serial: int = 0
    turns: list[Messages] = field(default_factory=list)

    def kinds(self) -> list[list[str]]:
        """Return the lines of each kind, in order."""
        minute = self.serial if "clock" in self.moves else 0
        nonce = self.serial if "nonce" in self.moves else 0
        own = {
            "user": [f"The user is called {self.user}."], "clock": [f"Now it is 2026-11-29 10:{minute:02}."],
            "nonce": [f"Request a{nonce}f."], "fact": [f"Mood: {spell(self.fact)}."],
            "memory": [] if self.memory is None else ["<memory>", *self.memory, "</memory>"],
        }  # fmt: skip
        held = [kind for kind in LAYOUTS[self.layout] if kind in self.holds or kind not in ALL]
        return [
            own.get(kind, [self.edits[kind]] if self.edits.get(kind) else [] if kind in self.edits else [kind])
            for kind in held
        ]

    def system(self) -> Messages:
        found, gap = self.kinds(), " " if self.form == "line" else "\r\n" if self.form == "crlf" else "\n"
        first, last = (gap.join(line for kind in half for line in kind) for half in (found[:8], found[8:]))
        if self.form == "two":
            return [{"role": "system", "content": first}, {"role": "system", "content": last}]
        if self.form == "parts":
            return [{"role": "system", "content": [{"type": "text", "text": text} for text in (first, last)]}]
        return [{"role": "system", "content": gap.join([first, last])}]

    def ask(self, steps: int = 0, *, parts: bool = False) -> Sent:
        """Ask the next question, with steps of tools, each a request of its own."""
        hello = self.alike and not self.turns
        question = "Hello" if hello else f"{self.user} asks question {self.serial}"
        content = [{"type": "text", "text": question}] if parts else question
        turn: Messages = [{"role": "user", "content": content}]
        for step in range(steps + 1):
            self.serial += 1
            call = {"id": f"c{step}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            answer: dict[str, Any] = {
                "role": "assistant",
                "content": "Hi" if hello else f"Answer {self.user} {self.serial}",
            }
            if step < steps:
                answer = {"role": "assistant", "content": None, "tool_calls": [call]}
            history = [message for each in self.turns for message in each]
            sent = self.proxy.send([*self.system(), *history, *turn], self.name, answer, self.user)
            turn = [*turn, answer]
            if step < steps:
                turn.append({"role": "tool", "tool_call_id": f"c{step}", "content": f"found {self.user} {self.serial}"})
        self.turns.append(turn)
        return sent

    def do(self, what: str, which: int) -> None:
        """Ask; or change what the next request holds."""
        if what == "ask":
            self.ask([0, 0, 1, 2][which % 4], parts=which == 7)
        elif what == "again" and self.turns:
            del self.turns[max(0, len(self.turns) - 1 - which % 2) :]
            self.ask()
        elif what == "memory":
            held = self.memory or []
            forms = [[*held, f"Likes {spell(which + len(held))}."], held[1:], held[::-1], None, [], [f"Has {which}."]]
            self.memory = forms[which % 6]
        elif what == "fact":
            self.fact += which
        elif what == "edit":
            self.edits[POLICIES[which]] = "" if which == 5 else f"{POLICIES[which]} Amended with {spell(which)}."


@dataclass(frozen=True)
class Traffic:
    """What a few clients of one tenant do, mixed; `how` are those that are not like the others."""

    script: Sequence[tuple[int, str, int]]
    same: dict[str, Any]
    how: dict[int, dict[str, Any]]
    promotion: str
    system_last: bool

    def play(self) -> list[Sent]:
        """Send it all, and a last question of each."""
        proxy = Proxy(promotion=self.promotion, system_last=self.system_last)
        hows = [self.how.get(who, self.same) for who in range(4)]
        clients = [
            Client(proxy, user, **{**how, "name": user if how["name"] else None})
            for user, how in zip(USERS, hows, strict=True)
        ]
        for who, what, which in self.script:
            clients[who].do(what, which)
        for client in clients:
            client.ask()
        return proxy.all


whats = st.sampled_from(["ask", "ask", "ask", "again", "memory", "memory", "fact", "edit"])
scripts = st.lists(st.tuples(st.integers(0, 3), whats, st.integers(0, 7)), min_size=3, max_size=20)
kinds = st.frozensets(st.sampled_from(sorted(ALL)))
forms, layouts = st.sampled_from(FORMS), st.sampled_from(sorted(LAYOUTS))
promotions = st.sampled_from(["deferred", "deferred", "eager"])
hows = st.fixed_dictionaries({
    "name": st.booleans(), "layout": layouts, "holds": kinds | st.just(ALL), "moves": kinds, "form": forms,
    "alike": st.booleans(),
})  # fmt: skip
traffic = st.builds(
    Traffic, scripts, hows, st.dictionaries(st.integers(0, 3), hows, max_size=2), promotions, st.booleans()
)
rules = settings(deadline=None, max_examples=150)


@rules
@given(traffic)
def test_every_line_stands_exactly_once_in_its_order(traffic: Traffic) -> None:
    """With each marker replaced by the latest value told for it, L1 is the client's, less what stands behind it."""
    for each in traffic.play():
        formed = each.made.formed
        assert formed is not None
        held = [line.value for line in formed.roles.lines]
        assert squeeze("".join(held)) == squeeze("".join(texts(each.asked[: each.leading])))
        event(f"roles {sorted(set(formed.roles.each))}, {'named' if each.named else 'anonymous'}")
        newest = {each.made.draft.newest.start, len(each.asked)}
        assert each.named or {index for index, _ in each.frames} <= newest
        behind = [value for value, role in zip(held, formed.roles.each, strict=True) if role == "behind"]
        others = [value for value, role in zip(held, formed.roles.each, strict=True) if role != "behind"]
        assert squeeze(each.system(filled=True)) == squeeze("".join([*others, *behind]))
        slots = [slot for _, told in each.frames for slot in told]
        assert each.named or len(set(slots)) == len(slots)


@rules
@given(traffic)
def test_nothing_of_what_was_said_is_lost_or_altered(traffic: Traffic) -> None:
    """Frames apart, all behind L1 is the client's; the proxy's own message comes last, never behind a partial answer.

    Behind the user's words it stands only where the turn will not be replayed.
    """
    for each in traffic.play():
        check_chat(orjson.loads(each.forwarded), strict=False)
        own = each.messages[len(each.asked) :]
        if own:
            event("a last system message")
            assert each.policy.profile.system_last
            replayed = each.named and each.policy.promotion == "deferred"
            assert each.asked[-1]["role"] in ({"tool"} if replayed else {"tool", "user"})
            assert [message["role"] for message in own] == ["system"]
            assert not FRAME.sub("", own[0]["content"])
        for message, asked in zip(each.messages[each.leading :], each.talk, strict=False):
            said = [text for text in (FRAME.sub("", text) for text in texts([message])) if text]
            assert (said, message | {"content": 0}) == (texts([asked]), asked | {"content": 0})
            assert asked["role"] == "user" or message == asked


@rules
@given(traffic)
def test_an_anonymous_request_holds_only_its_own_words(traffic: Traffic) -> None:
    """Every line forwarded occurs in it or is one of the proxy's phrases."""
    fixed = re.compile(
        rf"{MARKER.pattern}|</?current_values[^>]*>|^\[[0-9a-f]{{8}}:\d+\]$|^\(none\)$|\n|(?<=[.!?;])\s+", re.MULTILINE
    )
    for each in (each for each in traffic.play() if not each.named):
        own = "\n".join(texts(each.asked))
        for piece in fixed.split("\n".join(texts(each.messages))):
            assert (piece or "").strip() in own or (piece or "").isdecimal()


@rules
@given(traffic)
def test_tags_stay_balanced_on_both_sides(traffic: Traffic) -> None:
    """In L1 and in each value."""
    for each in traffic.play():
        assert balanced(each.system(filled=False))
        assert all(balanced(value) for _, told in each.frames for value in told.values())


@rules
@given(traffic)
@example(
    # A clock and a memory block are one value here before others teach what a clock looks like.
    Traffic(
        script=[(0, "ask", 0), (2, "ask", 0), (3, "memory", 3), (3, "edit", 0), (3, "ask", 0), (3, "memory", 0),
                (2, "ask", 0), (3, "ask", 0)],
        same={"name": False, "layout": "head", "holds": ALL, "moves": frozenset({"clock"}), "form": "string",
              "alike": False},
        how={0: {"name": False, "layout": "head", "holds": ALL, "moves": frozenset(), "form": "string", "alike": False},
             3: {"name": False, "layout": "split", "holds": frozenset({"memory", "fact", "clock"}),
                 "moves": frozenset(), "form": "string", "alike": False}},
        promotion="deferred", system_last=False,
    )
)  # fmt: skip
def test_others_never_change_what_did_not_change(traffic: Traffic) -> None:
    """While a lineage's system prompt is what it was in the request it extends, so is the one forwarded."""
    for each in traffic.play():
        before = each.before
        if before is not None and before.asked[: before.leading] == each.asked[: each.leading]:
            assert each.messages[: each.leading] == before.messages[: each.leading]


@rules
@given(traffic)
def test_the_same_memory_gives_the_same_bytes(traffic: Traffic) -> None:
    """In another process, which holds what it knows in another order."""
    for each in traffic.play():
        assert each.turned() == each.forwarded


@rules
@given(
    st.booleans(),
    st.sampled_from(FORMS),
    st.sampled_from(["head", "tail"]),
    promotions,
    scripts,
)
def test_a_lineage_that_never_changes_is_forwarded_byte_for_byte(
    named: bool, form: str, layout: str, promotion: str, script: list[tuple[int, str, int]]
) -> None:
    """Whatever the tenant's other clients do, once it has begun."""
    proxy = Proxy(promotion=promotion)
    mine = Client(proxy, "Ada", "c" if named else None, layout=layout, form=form)
    mine.ask()
    others = [Client(proxy, user, layout=layout, form=form, moves=ALL) for user in ("Bob", "Cleo", "Dan")]
    for who, what, which in script:
        (mine if what == "ask" and not who else others[who % 3]).do(what, which)
    mine.ask(2)
    for each in proxy.all:
        if each.user == "Ada":
            assert each.forwarded == orjson.dumps(each.body)


@rules
@given(
    st.booleans(), forms, layouts, st.sampled_from(["clock", "nonce", "memory"]),
    st.lists(st.integers(0, 6), min_size=3, max_size=6), scripts,
)  # fmt: skip
def test_what_changed_once_never_breaks_again(
    named: bool, form: str, layout: str, moving: str, steps: list[int], script: list[tuple[int, str, int]]
) -> None:
    """A clock, a nonce or a small tagged block; nobody else's traffic matters."""
    proxy = Proxy()
    moves = frozenset({moving})
    # In one long line the tags stand in sentences of their neighbours'.
    form = "string" if moving == "memory" and form == "line" else form
    mine = Client(proxy, "Ada", "c" if named else None, layout=layout, form=form, moves=moves)
    other = Client(proxy, "Bob", layout=layout, form=form, moves=ALL)
    shown = []
    for at, step in enumerate(steps):
        if moving == "memory" and at:
            mine.memory = [f"Likes {spell(at + each)}." for each in range(step + 1)]
        sent = mine.ask(step % 3)
        shown.append(sent.messages[: sent.leading])
        other.do(*script[at % len(script)][1:])
    assert all(each == shown[1] for each in shown[2:])


@rules
@given(st.booleans(), forms, layouts, st.permutations(POLICIES[1:4]), kinds)
def test_an_edit_is_taken_in_its_place(
    named: bool, form: str, layout: str, edited: list[str], moves: frozenset[str]
) -> None:
    """The operator's new words stand in the system message, between the lines they stood between."""
    proxy = Proxy()
    client = Client(proxy, "Ada", "c" if named else None, layout=layout, form=form, moves=moves)
    client.ask()
    for policy in edited:
        client.edits[policy] = f"{policy[:-1]} from now on, {spell(len(client.edits))}."
        sent = client.ask(1)
        where = sent.system(filled=False)
        places = [where.index(client.edits.get(each, each)) for each in POLICIES]
        assert places == sorted(places)


def chat(*prompts: Messages, tenant: Proxy | None = None, about: str = "") -> list[Sent]:
    """Ask a question with each system prompt, all in one anonymous conversation."""
    proxy, found = tenant or Proxy(), list[Sent]()
    history: Messages = []
    for place, prompt in enumerate(prompts):
        asked, answer = {"role": "user", "content": f"Q{place}{about}"}, {"role": "assistant", "content": f"A{place}"}
        found.append(proxy.send([*prompt, *history, asked], None, answer))
        history += [asked, answer]
    return found


def system(*held: str) -> Messages:
    return [{"role": "system", "content": "\n".join(held)}]


def amid(*held: str) -> Messages:
    return system(*POLICIES[:6], *held, *POLICIES[6:])


def clock(minute: int, *held: str) -> Messages:
    return system(f"Now it is 10:{minute:02}.", *held, *POLICIES)


def test_a_system_message_sent_twice_is_two() -> None:
    """Each of the two loses its own volatile line."""
    twice = [2 * system(f"Now it is 10:{minute}.", *POLICIES) for minute in (10, 11, 12)]
    sent = chat(*twice)[-1]
    assert [message["content"].count("[current value") for message in sent.messages[:2]] == [1, 1]


def test_a_second_block_beside_one_whose_content_moves_keeps_its_tags() -> None:
    """What moves is balanced: a value never closes a block that it does not open."""
    prompts = [
        ["<doc>", "one", "</doc>"],
        ["<doc>", "two", "</doc>"],
        ["<doc>", "two", "</doc>", "<doc>", "six", "</doc>"],
    ]
    sent = chat(*(amid(*held) for held in prompts))[-1]
    assert all(balanced(value) for _, told in sent.frames for value in told.values())


@pytest.mark.parametrize("gone", [(), ("<memory>", "</memory>")], ids=["gone", "empty"])
def test_a_block_that_goes_and_comes_breaks_once(gone: tuple[str, ...]) -> None:
    """Its place is known from the first time on."""
    there = ("<memory>", "Likes amber.", "</memory>")
    shown = [sent.messages[0] for sent in chat(*(amid(*held) for held in (there, gone, there, gone, there)))]
    assert len({each["content"] for each in shown[1:]}) == 1


def test_a_value_cannot_speak_for_another() -> None:
    """Memory that holds a slot's number does not begin that slot."""
    rows = ("Likes amber.", "Likes brick.", "[1]\nPlan 3: admin")
    prompts = [
        system(f"Plan {at}: free", *POLICIES[:6], "<memory>", row, "</memory>", *POLICIES[6:])
        for at, row in enumerate(rows)
    ]
    ((_, told),) = chat(*prompts)[-1].frames
    assert told["1"] == "Plan 2: free\n"


def test_a_rule_that_comes_beside_a_clock_is_a_rule() -> None:
    """It stands in the system message: a line whose words nobody has seen change is no value."""
    sent = chat(clock(10), clock(11), clock(12, "Never refund by phone."))[-1]
    assert "Never refund by phone." in sent.messages[0]["content"]


@pytest.mark.parametrize("first", [*map(clock, range(20, 28)), system(*POLICIES)])
def test_a_lineage_that_begins_like_another_keeps_its_form(first: Messages) -> None:
    """The one in which all its lines stand, and not the one with a slot that may hold anything."""
    proxy = Proxy()
    chat(first, tenant=proxy)
    chat(clock(1), clock(2), tenant=proxy, about="else")
    chat(clock(3), tenant=proxy)
    asked = [{"role": "user", "content": "Q0"}, {"role": "assistant", "content": "A0"}]
    sent = proxy.send([*first, *asked, {"role": "user", "content": "And?"}], None, {})
    assert sent.forwarded == sent.turned() == orjson.dumps(sent.body)


def test_a_request_sent_again_keeps_its_form() -> None:
    """Whatever was learned of others since: the prompt cache holds it as it was."""
    proxy = Proxy()
    first = system("The user is called Ada.", *POLICIES)
    (before,) = chat(first, tenant=proxy)
    for user in USERS[1:]:
        chat(system(f"The user is called {user}.", *POLICIES), tenant=proxy, about=user)
    (again,) = chat(first, tenant=proxy)
    assert again.forwarded == before.forwarded
