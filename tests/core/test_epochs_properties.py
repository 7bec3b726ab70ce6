"""Rules 1 to 4, 9 and 10 of DESIGN section 8 over named conversations of a simulated client.

The client keeps, strips or re-attaches what it attached in earlier turns, stores words with other white space, edits,
regenerates, retries, asks side questions under the same id, changes its system prompt and tools, and pauses.
"""

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from proxy.core import plan, render, reply, request, tokens
from proxy.core.epoch import REASONS
from proxy.core.items import Tags
from proxy.core.lineage import Recalled
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.request import Request
from proxy.memo import Analyst, TokenScale, count
from proxy.memory.local import LocalStore
from proxy.memory.redis import RedisStore
from proxy.recall import log_entries
from proxy.simulator.validity import check_chat

Messages = list[dict[str, Any]]

WORDS = "several words that fill a note up to where it pays to refer to it instead of sending it " * 5
BLOCK = re.compile(r"<(note_context|url_content|document)(?: id=\"([^\"]*)\"|><(?:path|url)>([^<]*)<)[^\0]*?</\1>")
REFERENCE = re.compile(
    r"Context attached:\n((?:- [^\n]+\n)+)Find them (?:above in this conversation|in the Context Library above)\."
)
PROMOTIONS = st.sampled_from(["deferred", "deferred", "deferred", "eager"])


def block(name: str, version: int) -> str:
    tag, child = ("url_content", "url") if name.startswith("https") else ("note_context", "path")
    return f"<{tag}><{child}>{name}</{child}>\n{WORDS}{name} in version {version}.\n</{tag}>"


def words(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())


@dataclass(frozen=True)
class Asked:
    """A turn as its client made it. `stored` is how the client keeps it in its history."""

    question: str
    attached: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    steps: tuple[Messages, ...] = ()
    parts: bool = False
    image: bool = False
    marked: bool = False
    answer: str | None = None
    signed: bool = False
    gap: str = "\n"

    def message(self, attached: Sequence[str], *, spaced: bool = False) -> dict[str, Any]:
        gap = self.gap + "\n" * spaced
        question = self.question + "  " * spaced
        text = "\n".join([gap.join(attached), question] if attached else [question])
        if not (self.parts or self.image or self.marked):
            return {"role": "user", "content": text}
        mark = {"cache_control": {"type": "ephemeral"}} if self.marked else {}
        image = [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}] if self.image else []
        return {"role": "user", "content": [{"type": "text", "text": text, **mark}, *image]}

    def reply(self, *, spaced: bool) -> dict[str, Any]:
        text = (self.answer or "") + (" \n" if spaced else "")
        return {"role": "assistant", "content": text, **({"reasoning_details": [{"x": 1}]} if self.signed else {})}


@dataclass
class Sent:
    """One request: what the client sent, what was forwarded, and why."""

    body: dict[str, Any]
    raw: bytes
    forwarded: bytes
    made: Plan
    found: Request
    told: bytes | None = None
    recalled: Recalled = field(default_factory=Recalled)
    now: float = 0.0

    @property
    def messages(self) -> Messages:
        found: Messages = orjson.loads(self.forwarded)["messages"]
        return found

    @property
    def pieces(self) -> list[bytes]:
        return pieces(self.forwarded)

    def extends(self, other: "Sent") -> bool:
        """Whether it goes on where the answer to another ended."""
        at = len(other.made.places)
        return (
            other.told is not None
            and len(self.made.places) > at
            and self.found.messages[at].said == other.told
            and self.made.places[at - 1] == other.made.places[at - 1]
        )


def pieces(body: bytes) -> list[bytes]:
    return [orjson.dumps(message) for message in orjson.loads(body)["messages"]]


ANALYST = Analyst(Tags.of(), max_bytes=64_000_000)
SCALE = TokenScale("o200k_base", max_bytes=64_000_000)


def make_plan(body: bytes, recalled: Recalled, analyst: Analyst, scale: TokenScale, **how: Any) -> tuple[Request, Plan]:
    now, budget, promotion = how["now"], how["budget"], how["promotion"]
    found = request.read(body, analyst.analyse, count)
    policy = Policy(
        mode="layered", promotion=promotion, budget_tokens=budget, reserve_tokens=4_096, over_budget="forward"
    )
    made = plan.make(
        found, recalled, model=describe("gpt-4o"), policy=policy, named=True, scale=scale, look=analyst.analyse,
        now=now, given=analyst.tools(found.member("tools")),
    )  # fmt: skip
    return found, made


class Client:
    """Plays a conversation and keeps all that was sent and forwarded. `store` is what the proxy remembers."""

    def __init__(self, *, promotion: str = "deferred", budget: int | None = None) -> None:
        self.how: dict[str, Any] = {"promotion": promotion, "budget": budget}
        self.store = LocalStore(max_bytes=64_000_000, ttl_seconds=1e9, clock=lambda: 0.0)
        self.system: str | None = "You help."
        self.tools: list[str] = []
        self.turns: list[Asked] = []
        self.spaced = False
        self.now = 0.0
        self.serial = 0
        self.all: list[Sent] = []

    def play(self, script: Sequence["Op"]) -> "Client":
        for op in script:
            op.play(self)
        return self

    def new(self, words: str) -> str:
        self.serial += 1
        return f"{words} {self.serial}"

    # the client's side

    def body(self, newest: Messages, context: Sequence[str] = ()) -> dict[str, Any]:
        talk: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            talk.append(turn.message(turn.stored, spaced=self.spaced))
            talk += [message for step in turn.steps for message in step]
            talk.append(turn.reply(spaced=self.spaced))
        own = {"strata": {"context": [{"id": name, "content": WORDS + name} for name in context]}} if context else {}
        tools = {
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
                for name in self.tools
            ]
        }
        return {"model": "gpt-4o", "messages": [*talk, *newest], **(tools if self.tools else {}), **own}

    def ask(self, turn: Asked) -> Asked:
        """Ask with all its steps, each a request of its own."""
        newest = [turn.message(turn.attached)]
        for step in turn.steps:
            self.send(self.body(newest, turn.context), step[0])
            newest += step
        answer = turn.reply(spaced=False) if turn.answer is not None else None
        self.send(self.body(newest, turn.context), answer)
        return turn

    # the proxy's side

    def send(self, body: dict[str, Any], answer: dict[str, Any] | None) -> Sent:
        self.now += 1
        raw, recalled = orjson.dumps(body), self.store.copy("c")
        found, made = make_plan(raw, recalled, ANALYST, SCALE, now=self.now, **self.how)
        entries = log_entries(found, made, at=self.now) if made.places else {}
        self.store.put("c", list(entries.values()), made.epoch if made.began else None)
        sent = Sent(body, raw, render.body(found, made.draft, ask_usage=False), made, found)
        sent.recalled, sent.now = recalled, self.now
        entry = entries.get(made.draft.newest.start)
        if answer is not None:
            (sent.told,) = reply.of_answer(orjson.dumps({"choices": [{"message": answer}]}))
            if entry is not None:
                self.store.answer("c", entry, [sent.told])
        self.all.append(sent)
        return sent


class Op:
    """Something a client does."""

    def play(self, client: Client) -> None: ...


@dataclass(frozen=True)
class Ask(Op):
    """Ask the next question, with steps of tools, and keep it in the history in some form."""

    attached: tuple[str, ...] = ()
    kept: str = "stripped"
    steps: int = 0
    own: bool = False
    context: tuple[str, ...] = ()
    form: str = "string"
    long: int = 1
    fails: bool = False
    gap: str = "\n"

    def turn(self, client: Client, question: str | None = None) -> Asked:
        question = question or client.new("Question")
        attached = (*self.attached, *([block(f"own-{question.split()[-1]}.md", 1)] if self.own else []))
        steps = []
        for step in range(self.steps):
            call = {"id": f"c{step}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            steps.append([
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{step}", "content": client.new("found " * 40 * self.long)},
            ])  # fmt: skip
        stored = {"kept": attached, "stripped": (), "reversed": attached[::-1]}.get(self.kept, attached[:1])
        return Asked(
            question=question, attached=attached, stored=stored, context=self.context, steps=tuple(steps),
            parts=self.form == "parts", image=self.form == "image", marked=self.form == "marked",
            answer=client.new("Answer " + "so " * 60 * self.long), signed=self.form == "signed", gap=self.gap,
        )  # fmt: skip

    def play(self, client: Client) -> None:
        turn = self.turn(client)
        if self.fails:
            client.ask(replace(turn, answer=None))
        client.turns.append(client.ask(turn))


@dataclass(frozen=True)
class Edit(Op):
    """Go back to an earlier turn and ask another thing there."""

    back: int
    then: Ask

    def play(self, client: Client) -> None:
        del client.turns[max(0, len(client.turns) - self.back) :]
        self.then.play(client)


@dataclass(frozen=True)
class Regenerate(Op):
    """Ask the last question once more, with its attachments or with others, and keep the other answer."""

    then: Ask | None

    def play(self, client: Client) -> None:
        if client.turns:
            last = client.turns.pop()
            again = self.then.turn(client, last.question) if self.then else replace(last, answer=client.new("Rather"))
            client.turns.append(client.ask(again))


@dataclass(frozen=True)
class Side(Op):
    """Ask for a title or for tags under the same id: with other messages, or behind the same history."""

    behind: bool
    attached: tuple[str, ...]

    def play(self, client: Client) -> None:
        asking = [Asked(client.new("Give this chat a title.")).message(self.attached)]
        body = client.body(asking) if self.behind else {"model": "gpt-4o", "messages": asking}
        client.send(body, {"role": "assistant", "content": client.new("Title")})


@dataclass(frozen=True)
class Store(Op):
    """Keep earlier turns in another form from now on: stripped, as they were attached, in a newer version."""

    kept: str
    spaced: bool

    def play(self, client: Client) -> None:
        client.spaced = self.spaced
        forms: dict[str, Callable[[Asked], tuple[str, ...]]] = {
            "kept": lambda turn: turn.attached,
            "stripped": lambda _: (),
            "changed": lambda turn: tuple(one.replace("version 1", "version 3") for one in turn.attached),
        }
        client.turns = [replace(turn, stored=forms[self.kept](turn)) for turn in client.turns]


@dataclass(frozen=True)
class Change(Op):
    """Change the system prompt or the tools, or pause."""

    what: str

    def play(self, client: Client) -> None:
        if self.what == "system":
            client.system = client.new("You help, and more.")
        elif self.what == "tools":
            client.tools = [*client.tools, client.new("tool").replace(" ", "")]
        else:
            client.now += 10_000


names = st.sampled_from(["a.md", "b.md", "c.md", "https://d.e/f"])
blocks = st.builds(block, names, st.integers(1, 2))
attachments = st.lists(blocks, max_size=3).map(tuple)
contexts = st.lists(st.sampled_from(["x.txt", "y.txt"]), max_size=1).map(tuple)
kept_forms = st.sampled_from(["stripped", "stripped", "kept", "reversed", "first"])


@st.composite
def asks(draw: st.DrawFn, forms: Sequence[str] = ("string", "string", "parts", "image", "marked")) -> Ask:
    form = draw(st.sampled_from(forms))
    return Ask(
        attached=draw(attachments), kept=draw(kept_forms), steps=draw(st.sampled_from([0, 0, 0, 1, 2])),
        own=draw(st.booleans()), context=draw(contexts) if form in {"string", "parts"} else (), form=form,
        long=draw(st.sampled_from([1, 1, 4])), fails=draw(st.integers(0, 5)) == 0,
        gap=draw(st.sampled_from(["\n", "\n\n", "\nand\n"])),
    )  # fmt: skip


other = st.one_of(
    st.builds(Edit, st.integers(1, 3), asks()),
    st.builds(Regenerate, st.none() | asks()),
    st.builds(Side, st.booleans(), attachments),
    st.builds(Store, st.sampled_from(["kept", "stripped", "changed"]), st.booleans()),
    st.builds(Change, st.sampled_from(["system", "tools", "pause"])),
)
scripts = st.lists(st.one_of(asks(), asks(), other), min_size=2, max_size=9)
budgets = st.sampled_from([None, None, None, 4_096 + 1_500, 4_096 + 4_000])
rules = settings(deadline=None, max_examples=120)


def tell(client: Client) -> None:
    """Show with `--hypothesis-show-statistics` which epochs the examples had."""
    for sent in client.all:
        if sent.made.began:
            event(f"began {sent.made.began}")


@rules
@given(script=scripts, promotion=PROMOTIONS, budget=budgets)
def test_another_process_gives_the_same_bytes(script: Sequence[Op], promotion: str, budget: int | None) -> None:
    """Rule 1: from the same request and memory, with nothing analysed or counted before."""
    client = Client(promotion=promotion, budget=budget).play(script)
    tell(client)
    analyst, scale = Analyst(Tags.of(), max_bytes=1), TokenScale("o200k_base", max_bytes=1)
    for sent in client.all:
        found, made = make_plan(sent.raw, sent.recalled, analyst, scale, now=sent.now, **client.how)
        assert render.body(found, made.draft, ask_usage=False) == sent.forwarded
        assert (made.epoch, made.began) == (sent.made.epoch, sent.made.began)


@rules
@given(
    turns=st.lists(st.tuples(asks(("string", "parts", "image", "marked", "signed")), st.booleans()), max_size=6),
    promotion=PROMOTIONS,
)
def test_a_client_that_repeats_nothing_is_forwarded_byte_for_byte(
    turns: Sequence[tuple[Ask, bool]], promotion: str
) -> None:
    """Rule 2: every item where the client put it, after any idle time, and its first epoch goes on."""
    client = Client(promotion=promotion)
    for place, (ask, pause) in enumerate(turns):
        attached = tuple(
            f"{one.partition('.')[0]}{place}.{one.partition('.')[2]}" for one in dict.fromkeys(ask.attached)
        )
        replace(ask, attached=attached, kept="kept", context=()).play(client)
        if pause:
            Change("pause").play(client)
    for sent in client.all:
        assert sent.forwarded == sent.raw
    assert {sent.made.began for sent in client.all[1:]} <= {None}


def comparable(sent: Sent, before: Sent) -> bool:
    """Whether the client sends what is never frozen (media, its own marks, tools' results) as it sent it before."""
    for index, message in enumerate(before.found.messages):
        held = message.freezes or index < before.made.draft.leading
        if not held and sent.found.raw(index) != before.found.raw(index):
            return False
    return True


@rules
@given(script=scripts, budget=budgets)
def test_within_an_epoch_the_prompt_only_grows(script: Sequence[Op], budget: int | None) -> None:
    """Rule 3: the messages forwarded for a turn or a step are a prefix of those of the one that extends it."""
    client = Client(budget=budget).play(script)
    tell(client)
    for place, sent in enumerate(client.all):
        before = next((other for other in reversed(client.all[:place]) if sent.extends(other)), None)
        if before is None or sent.made.began or before.made.epoch != sent.made.epoch:
            continue
        if comparable(sent, before):
            assert sent.pieces[: len(before.pieces)] == before.pieces


@rules
@given(script=scripts, promotion=PROMOTIONS)
def test_epochs_end_for_a_reason(script: Sequence[Op], promotion: str) -> None:
    """Without a limit, a change or a pause only dead weight ends one; only a rewritten one is ever compacted."""
    client = Client(promotion=promotion).play(script)
    changed = {op.what for op in script if isinstance(op, Change)}
    for sent in client.all:
        made = sent.made
        assert (made.epoch is None) is (promotion == "eager")
        assert made.began is None or (made.began in REASONS and made.epoch is not None)
        if made.began in {None, "first"}:
            continue
        assert made.began in {"dead_weight", *({"l1_changed"} if "system" in changed else set()),
                              *({"tools_changed"} if "tools" in changed else set()),
                              *({"cold"} if "pause" in changed else set())}  # fmt: skip
        old = [epoch for epoch in sent.recalled.epochs.values() if epoch.place in made.places]
        before = max(old, key=lambda epoch: made.places.index(epoch.place))
        assert made.epoch is not None
        assert made.epoch.number == before.number + 1


@rules
@given(script=scripts, promotion=PROMOTIONS, room=st.integers(200, 6_000))
def test_the_limit_is_held_or_said(script: Sequence[Op], promotion: str, room: int) -> None:
    """Rule 4: what is forwarded holds its limit, or says that it does not; calls keep results, the newest is whole."""
    client = Client(promotion=promotion, budget=4_096 + room).play(script)
    tell(client)
    for sent in client.all:
        body = orjson.loads(sent.forwarded)
        check_chat(body, strict=False)
        weight = tokens.PRIMING + sum(tokens.message(orjson.dumps(message), count) for message in body["messages"])
        weight += tokens.schema(orjson.dumps(body["tools"]), count) if "tools" in body else 0
        assert weight <= room or "forwarded_over_budget" in sent.made.actions
        newest = max(place for place, message in enumerate(sent.body["messages"]) if message["role"] == "user")
        own = sent.body["messages"][newest:]
        asked = max(place for place, message in enumerate(body["messages"]) if message["role"] == "user")
        kept = body["messages"][asked:]
        assert text_of(own[0]).splitlines()[-1] in text_of(kept[0])
        assert kept[1:] == own[1:][len(own) - len(kept) :]
        assert own[-1] == kept[-1] or len(own) == 1


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Reader:
    """Reads a forwarded prompt as a model would: a reference means the newest version that stands before it."""

    def __init__(self) -> None:
        self.standing: dict[str, str] = {}

    def read(self, text: str) -> list[str]:
        """Return the items a text holds or names, each whole."""
        held = []
        for found in sorted([*BLOCK.finditer(text), *REFERENCE.finditer(text)], key=lambda found: found.start()):
            if found.re is BLOCK:
                self.standing[found[2] or found[3]] = found[0]
                held.append(found[0])
            else:
                held += [self.standing[re.sub(r" \(\w+\)$", "", line[2:])] for line in found[1].splitlines()]
        return held


def items_of(messages: Messages) -> list[str]:
    return [
        found[0] for message in messages if message["role"] != "assistant" for found in BLOCK.finditer(text_of(message))
    ]


def newest_versions(messages: Messages) -> dict[str, str]:
    return {found[2] or found[3]: found[0] for one in items_of(messages) for found in BLOCK.finditer(one)}


def brought(sent: Sent) -> list[str]:
    own = sent.body.get("strata", {}).get("context", [])
    return [f'<document id="{one["id"]}">\n{one["content"]}\n</document>' for one in own]


@rules
@given(script=scripts, promotion=PROMOTIONS, budget=budgets)
def test_references_name_what_stands_and_nothing_is_lost(
    script: Sequence[Op], promotion: str, budget: int | None
) -> None:
    """Rules 9 and 10: each reference finds its item; what the newest turn brings is in it, whole or by reference."""
    client = Client(promotion=promotion, budget=budget).play(script)
    for sent in client.all:
        reader, body = Reader(), sent.messages
        asked = max(place for place, message in enumerate(body) if message["role"] == "user")
        held: list[str] = []
        for place, message in enumerate(body):
            found = reader.read(text_of(message)) if message["role"] in {"user", "system"} else []
            held = found if place == asked else held
        newest = max(place for place, message in enumerate(sent.body["messages"]) if message["role"] == "user")
        own = [*brought(sent), *items_of([sent.body["messages"][newest]])]
        assert set(own) <= set(held)
        left = BLOCK.sub("", text_of(sent.body["messages"][newest]))
        assert all(words(line) in words(text_of(body[asked])) for line in left.splitlines())
        if not sent.made.draft.dropped:
            # In some version: of two turns' versions the later one stands, whichever of them its client strips.
            assert newest_versions(sent.body["messages"]).keys() <= newest_versions(body).keys()


@rules
@given(script=scripts, promotion=PROMOTIONS, budget=budgets)
def test_in_an_epoch_no_item_stands_twice_in_the_same_version(
    script: Sequence[Op], promotion: str, budget: int | None
) -> None:
    """What the newest turn brings stands once; a version that stands newest is referenced, not repeated."""
    client = Client(promotion=promotion, budget=budget).play(script)
    for sent in client.all:
        body = sent.messages
        asked = max(place for place, message in enumerate(body) if message["role"] == "user")
        standing: dict[str, str] = {}
        for message in body[:asked]:
            # What stands in a message that is the client's to spell may yet be taken away: nothing refers to it.
            own = not isinstance(message.get("content"), str)
            for found in BLOCK.finditer(text_of(message)):
                name = found[2] or found[3]
                standing[name] = "" if own and standing.get(name) != found[0] else found[0]
        for found in BLOCK.finditer(text_of(body[asked])):
            assert standing.get(found[2] or found[3]) != found[0]
            standing[found[2] or found[3]] = found[0]


@rules
@example(
    script=[
        Ask(), Ask(attached=(block("a.md", 1),), kept="first", own=True, gap="\nand\n"), Ask(),
        Store("stripped", spaced=False), Edit(back=1, then=Ask()),
    ],
    promotion="deferred", budget=None,
)  # fmt: skip
@given(script=scripts, promotion=PROMOTIONS, budget=budgets)
def test_an_abandoned_branch_never_shows_up(script: Sequence[Op], promotion: str, budget: int | None) -> None:
    """What is forwarded was sent in this request, in one it extends, or in a turn that both have, answer and all."""
    client = Client(promotion=promotion, budget=budget).play(script)
    for place, sent in enumerate(client.all):
        line = [sent, *(other for other in client.all[:place] if sent.extends(other))]
        allowed = {one for other in line for one in [*items_of(other.body["messages"]), *brought(other)]}
        places = sent.made.places
        for other in client.all[:place]:
            both = zip(other.made.places[1:], places[1:], strict=False)
            common = [index for index, (one, two) in enumerate(both) if one == two]
            allowed |= set(items_of([other.body["messages"][index] for index in common]))
        assert set(items_of(sent.messages)) <= allowed
        said = {words(BLOCK.sub("", text_of(message))) for other in line for message in other.body["messages"]}
        for message in sent.messages:
            if message["role"] in {"assistant", "tool"}:
                assert words(text_of(message)) in said


def weigh(prompt: Sequence[bytes]) -> int:
    return sum(SCALE.message(raw, raw) for raw in prompt)


def unshared(prompt: Sequence[bytes], earlier: Sequence[Sequence[bytes]]) -> Sequence[bytes]:
    """What of a prompt stands behind the longest start that any earlier one shares."""
    shared = 0
    for other in earlier:
        same = next((at for at, (one, two) in enumerate(zip(prompt, other, strict=False)) if one != two), None)
        shared = max(shared, min(len(prompt), len(other)) if same is None else same)
    return prompt[shared:]


def as_sent(sent: Sent) -> list[bytes]:
    """The client's own messages, its `strata.context` put in front of the newest words as it would do itself."""
    own = pieces(sent.raw)
    if context := brought(sent):
        newest = max(place for place, message in enumerate(sent.body["messages"]) if message["role"] == "user")
        message = orjson.loads(own[newest])
        text = "\n\n".join(context) + "\n\n"
        parts = message["content"]
        message["content"] = text + parts if isinstance(parts, str) else [{"type": "text", "text": text}, *parts]
        own[newest] = orjson.dumps(message)
    return own


def filled_in(read: Sequence[bytes], sent: Sent) -> int:
    """The tokens among those read anew of what replay filled in and the client left out.

    Of a message that is the client's to spell, also what once came beside it: when the client spells it another way,
    that is read again with it.
    """
    own = {*items_of(sent.body["messages"]), *brought(sent)}
    texts = [text_of(orjson.loads(raw)) for raw in read]
    extra = [
        found[0]
        for raw, text in zip(read, texts, strict=True)
        for found in BLOCK.finditer(text)
        if found[0] not in own or b'"image_url"' in raw or b'"cache_control"' in raw
    ]
    return sum(count(one) + 2 for one in [*extra, *(found[0] for text in texts for found in REFERENCE.finditer(text))])


@rules
@given(script=scripts, budget=st.sampled_from([None, None, 4_096 + 4_000]))
def test_no_more_is_read_anew_than_the_clients_own_bytes_would_cost(script: Sequence[Op], budget: int | None) -> None:
    """But for the epochs that were recorded as ended: each costs at most one read of the prompt it begins with.

    At equal content: what replay fills in, where the client itself breaks the prefix, is not the client's to pay.
    """
    client = Client(budget=budget).play(script)
    ours = theirs = price = 0
    for place, sent in enumerate(client.all):
        earlier = client.all[:place]
        read = unshared(sent.pieces, [other.pieces for other in earlier])
        ours += weigh(read) - filled_in(read, sent)
        theirs += weigh(unshared(as_sent(sent), [as_sent(other) for other in earlier]))
        price += weigh(sent.pieces) if sent.made.began not in {None, "first"} else 0
        assert ours <= theirs + price


@settings(deadline=None, max_examples=25)
@given(script=scripts, promotion=PROMOTIONS, budget=budgets, replicas=st.lists(st.booleans(), min_size=60, max_size=60))
def test_two_replicas_give_the_bytes_that_one_process_gives(
    script: Sequence[Op], promotion: str, budget: int | None, replicas: list[bool], redis_url: str
) -> None:
    """Whichever of them served the earlier turns."""
    client = Client(promotion=promotion, budget=budget).play(script)

    async def play() -> None:
        conversation = uuid.uuid4().hex
        stores = [
            RedisStore(
                redis_url, copy=LocalStore(max_bytes=64_000_000, ttl_seconds=1e9, clock=lambda: 0.0),
                ttl_seconds=600, on_error=lambda _: None, on_state=lambda _: None,
            )
            for _ in range(2)
        ]  # fmt: skip
        try:
            for place, sent in enumerate(client.all):
                store = stores[replicas[place % len(replicas)]]
                answer = await store.recall(conversation)
                if answer.degraded:
                    return
                found, made = make_plan(sent.raw, answer.recalled, ANALYST, SCALE, now=sent.now, **client.how)
                assert render.body(found, made.draft, ask_usage=False) == sent.forwarded
                entries = log_entries(found, made, at=sent.now) if made.places else {}
                await store.remember(conversation, list(entries.values()), made.epoch if made.began else None)
                entry = entries.get(made.draft.newest.start)
                if entry is not None and sent.told is not None:
                    await store.answered(conversation, entry, [sent.told])
        finally:
            for store in stores:
                await store.close()

    asyncio.run(play())


@pytest.mark.parametrize("form", ["image", "marked"])
def test_context_of_a_message_that_is_not_frozen_stays(form: str) -> None:
    """Rule 3 for explicit context: media and the client's own marks are its own, what was brought with them is kept."""
    client = Client().play([Ask(context=("x.txt",), form=form), Ask()])
    before, sent = client.all
    assert sent.made.began is None
    assert sent.pieces[: len(before.pieces)] == before.pieces


@pytest.mark.parametrize("attached", [("a.md", "a.md"), ("b.md", "a.md"), ("a.md", "b.md")], ids=" ".join)
def test_an_item_beside_a_reference_is_still_an_item(attached: tuple[str, ...]) -> None:
    """Blocks may stand on one line: what one of them is replaced by does not hide the other in the frozen message."""
    asked = tuple(block(name, 1) for name in attached)
    client = Client().play([Ask(attached=(block("b.md", 1),)), Ask(attached=asked, gap=""), Ask(attached=asked)])
    last = client.all[-1].messages
    assert sorted(items_of(last)) == [block("a.md", 1), block("b.md", 1)]
    assert "Context attached:" in last[-1]["content"]
    Store("kept", spaced=False).play(client)
    Ask().play(client)
    assert items_of(client.all[-1].messages[-1:]) == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_version_that_compaction_left_out_does_not_come_back(steps: int) -> None:
    """The newest turn superseded what history still holds: neither its next step nor the next turn brings it again."""
    old, new = block("a.md", 2), block("a.md", 1)
    client = Client().play([Ask(context=("x.txt",)), Ask(attached=(old,), kept="kept"), Change("system")])
    client.play([Ask(attached=(new,), steps=steps), Ask()])
    assert [sent.made.began for sent in client.all] == ["first", None, "l1_changed", *[None] * (steps + 1)]
    for before, sent in zip(client.all[2:], client.all[3:], strict=False):
        assert sent.pieces[: len(before.pieces)] == before.pieces
        assert items_of(sent.messages) == [new]


@pytest.mark.parametrize("form", ["image", "marked"])
def test_a_message_that_is_not_frozen_is_compacted_as_it_will_be_sent(form: str) -> None:
    """Rule 3 behind a compaction: what is left to the client has the same form in the next step."""
    client = Client().play([Ask(context=("x.txt",)), Ask(attached=(block("a.md", 1),), kept="kept", form=form)])
    client.play([Change("system"), Ask(steps=1)])
    before, sent = client.all[-2:]
    assert (before.made.began, sent.made.began) == ("l1_changed", None)
    assert sent.pieces[: len(before.pieces)] == before.pieces


@pytest.mark.parametrize("form", ["image", "marked"])
@pytest.mark.parametrize("system", [None, "You help."])
def test_a_library_at_the_head_of_a_message_that_is_not_frozen_stays(form: str, system: str | None) -> None:
    """Rules 3 and 9: what is said to stand in the Context Library above does, in every step of the epoch."""
    page = block("https://d.e/f", 1)
    client = Client()
    client.system = system
    client.play([Ask(form=form, context=("x.txt",)), Ask(attached=(page,)), Ask(attached=(page,), kept="kept")])
    client.tools = ["find"]
    client.play([Ask(attached=(page,), steps=1), Ask()])
    assert [sent.made.began for sent in client.all] == ["first", None, None, "tools_changed", None, None]
    for before, sent in zip(client.all[3:], client.all[4:], strict=False):
        assert sent.pieces[: len(before.pieces)] == before.pieces
        assert items_of(sent.messages).count(page) == 1


@pytest.mark.parametrize("form", ["image", "marked"])
def test_nothing_refers_to_what_the_client_may_take_away(form: str) -> None:
    """Rule 9: a message that is not frozen may come back without the item that stood in it."""
    note = block("a.md", 1)
    client = Client().play([Ask(), Ask(attached=(note,), kept="kept", form=form), Ask(attached=(note,))])
    client.play([Store("stripped", spaced=False), Ask()])
    reader = Reader()
    for message in client.all[-1].messages:
        if message["role"] in {"system", "user"}:
            reader.read(text_of(message))
    assert reader.standing == {"a.md": note}


def test_context_sent_late_with_a_message_that_is_not_frozen_stays() -> None:
    """An older turn's new version, brought by a turn with an image, is still there in the turn after."""
    client = Client().play([Ask(attached=(block("a.md", 1),), kept="kept"), Store("changed", spaced=False)])
    client.play([Ask(form="image"), Ask()])
    before, sent = client.all[1:]
    assert items_of(before.messages) == items_of(sent.messages) == [block("a.md", 1), block("a.md", 3)]
    assert sent.pieces[: len(before.pieces)] == before.pieces


@pytest.mark.parametrize("first", [Ask(), Ask(context=("x.txt",))], ids=["as it came", "rewritten"])
@pytest.mark.parametrize("why", ["dead_weight", "cold", "tools"])
def test_an_epoch_that_began_as_it_came_ends_like_another(why: str, first: Ask) -> None:
    """What counts is that something was rewritten since: its first request may have been forwarded byte for byte."""
    notes = tuple(block(f"{number}.md", 1) for number in range(8))
    client = Client().play([replace(first, long=2), Ask(attached=notes, long=2), Ask()])
    if why == "dead_weight":
        client.play([Ask() for _ in range(20)])
    else:
        client.play([Change("pause" if why == "cold" else why), Ask()])
    assert [sent.made.began for sent in client.all[:3]] == ["first", None, None]
    expected = "tools_changed" if why == "tools" else why
    assert expected in {sent.made.began for sent in client.all}
    assert set(notes).isdisjoint(items_of(client.all[-1].messages))


def test_an_epoch_that_began_within_a_turn_replays_that_turn() -> None:
    """The turn's earlier steps were answered in the epoch before: it is replayed all the same once it is history."""
    client = Client(budget=4_096 + 1_500).play([Ask(long=16), Ask(own=True, steps=1, long=10), Ask()])
    assert [sent.made.began for sent in client.all] == ["first", None, "limit", None]
    before, sent = client.all[2:]
    assert items_of(sent.messages) == items_of(before.messages) != []
    assert sent.pieces[: len(before.pieces)] == before.pieces
