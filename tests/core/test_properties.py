"""Rules 1 to 5 and 9 of DESIGN section 8, on made-up conversations."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core import measure, plan, render, request
from proxy.core.budget import step as step_of
from proxy.core.draft import Draft
from proxy.core.items import Tags
from proxy.core.lineage import NOTHING
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.request import Request
from proxy.memo import Analyst, TokenScale, count
from proxy.simulator.validity import check_chat

Make = Callable[..., tuple[Request, Plan]]
Messages = list[dict[str, Any]]

WORDS = "several words that fill a note up to where it pays to refer to it instead of sending it " * 4
BLOCK = re.compile(r"<(note_context|url_content)><(path|url)>([^<]*)</\2>.*?</\1>", re.DOTALL)
REFERENCE = re.compile(
    r"Context attached:\n((?:- [^\n]+\n)+)Find them (?:above in this conversation|in the Context Library above)\."
)
LEFT_OUT = re.compile(r"\[\d+ earlier messages? of this conversation left out here\.\]")
NAMED = re.compile(r"- (a\.md|b\.md|https://c\.d/e)( \((note_context|url_content|document)\))?")
FIXED = {
    "Context attached:",
    "Find them above in this conversation.",
    "Find them in the Context Library above.",
}

names = st.sampled_from(["a.md", "b.md", "https://c.d/e"])


def block(name: str, version: int) -> str:
    tag, child = ("url_content", "url") if name.startswith("https") else ("note_context", "path")
    return f"<{tag}><{child}>{name}</{child}>{WORDS}{version}</{tag}>"


blocks = st.builds(block, names, st.integers(1, 2))
questions = st.sampled_from(["Why?", "And then?", "Sum it up, é 😀.", '<b>\\ "quoted"</b>', ""])


@st.composite
def user_messages(draw: st.DrawFn) -> dict[str, Any]:
    pieces = draw(st.lists(blocks, max_size=3))
    gap, seam = draw(st.sampled_from(["", "\n", "\n\n", "\nand\n"])), draw(st.sampled_from(["\n", "\n\n"]))
    attached = [gap.join(pieces)] if pieces else []
    text = seam.join([*attached, draw(questions)] if draw(st.booleans()) else [draw(questions), *attached])
    if draw(st.integers(0, 3)) == 0:
        parts = [{"type": "text", "text": piece} for piece in [*pieces, text]]
        return {"role": "user", "content": parts}
    return {"role": "user", "content": text}


@st.composite
def turns(draw: st.DrawFn) -> Messages:
    turn = [draw(user_messages())]
    for step in range(draw(st.integers(0, 4))):
        calls = [f"c{step}{place}" for place in range(draw(st.integers(1, 2)))]
        made = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{ }"}} for call in calls]
        turn.append({"role": "assistant", "content": None, "tool_calls": made})
        size = draw(st.integers(1, 200))
        turn += [{"role": "tool", "tool_call_id": call, "content": "found " * size} for call in calls]
    return [*turn, {"role": "assistant", "content": "An answer. " * draw(st.integers(1, 100))}]


@st.composite
def chats(draw: st.DrawFn, *, longest: int = 6) -> Messages:
    talk: Messages = draw(st.sampled_from([[], [{"role": "system", "content": "You help."}]]))
    greeting: Messages = draw(st.sampled_from([[], [], [{"role": "assistant", "content": "Hello!"}]]))
    talk = [*talk, *greeting]
    for turn in draw(st.lists(turns(), min_size=1, max_size=longest)):
        talk += turn
    return talk if draw(st.booleans()) else talk[:-1]


def spell(messages: Messages, style: int, **fields: object) -> bytes:
    """One of four spellings of a body."""
    body = {"model": "gpt-4o", **fields, "messages": messages, "temperature": 1.0}
    text = json.dumps(body, ensure_ascii=bool(style & 1), indent=2 if style & 2 else None)
    return text.replace('"temperature": 1.0', '"temperature" : 1.00').encode()


styles = st.integers(0, 3)
promotions = st.sampled_from(["deferred", "eager"])


def texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [content or ""]


class Reader:
    """Reads a forwarded prompt as a model would: a reference means the newest version that stands before it."""

    def __init__(self) -> None:
        self.standing: dict[str, str] = {}

    def expand(self, text: str) -> str:
        pieces, at = [], 0
        for found in sorted([*BLOCK.finditer(text), *REFERENCE.finditer(text)], key=lambda found: found.start()):
            pieces.append(text[at : found.start()])
            if found.re is BLOCK:
                self.standing[found[3]] = found[0]
                pieces.append(found[0])
            else:
                pieces += [self.standing[line.removeprefix("- ")] for line in found[1].splitlines()]
            at = found.end()
        return "".join([*pieces, text[at:]])


def words(text: str) -> str:
    """A text without white space and without the seams between blocks."""
    return "".join(text.split())


def read_back(sent: Messages) -> list[list[str]]:
    reader = Reader()
    return [[words(reader.expand(text)) for text in texts(message)] for message in sent]


def messages_of(body: bytes) -> Messages:
    found: Messages = orjson.loads(body)["messages"]
    return found


def raw_messages(body: bytes, read: Callable[[object], Request]) -> list[bytes]:
    found = read(body)
    return [found.raw(index) for index in range(len(found.placed))]


@settings(deadline=None, max_examples=60)
@given(messages=chats(), style=styles, budget=st.sampled_from([None, 5_000, 4_500]))
def test_the_same_request_gives_the_same_bytes(
    messages: Messages, style: int, budget: int | None, forward: Callable[..., bytes]
) -> None:
    """Rule 1: in another process, which has analysed and counted nothing before, too."""
    body = spell(messages, style)
    analyst, scale = Analyst(Tags.of(), max_bytes=1), TokenScale("o200k_base", max_bytes=1)
    found = request.read(body, analyst.analyse, count)
    policy = Policy(mode="layered", budget_tokens=budget, reserve_tokens=4_096, over_budget="forward")
    made = plan.make(
        found, NOTHING, model=describe("gpt-4o"), policy=policy, named=False, scale=scale, look=analyst.analyse, now=9.0
    )
    assert render.body(found, made.draft, ask_usage=False) == forward(body, budget=budget)


@settings(deadline=None, max_examples=60)
@given(messages=chats(), style=styles)
def test_a_request_without_repeats_is_forwarded_byte_for_byte(
    messages: Messages, style: int, forward: Callable[..., bytes]
) -> None:
    """Rule 2: do no harm; numbers, escapes and white space are the client's own."""
    attached = [found[0] for message in messages if message["role"] == "user" for text in texts(message)
                for found in BLOCK.finditer(text)]  # fmt: skip
    body = spell(messages, style)
    sent = forward(body)
    if len(attached) == len(set(attached)):
        assert sent is body
    else:
        assert len(sent) <= len(body)


@settings(deadline=None, max_examples=60)
@given(messages=chats(), style=styles)
def test_a_longer_conversation_begins_with_the_shorter_one(
    messages: Messages, style: int, forward: Callable[..., bytes], read: Callable[[object], Request]
) -> None:
    """Rule 3: appending to a conversation changes no byte of a message forwarded before, step by step."""
    whole = raw_messages(forward(spell(messages, style)), read)
    for end in range(1, len(messages)):
        assert raw_messages(forward(spell(messages[:end], style)), read) == whole[:end]


@settings(deadline=None, max_examples=60)
@given(messages=chats(), style=styles)
def test_references_give_back_what_the_client_sent(
    messages: Messages, style: int, forward: Callable[..., bytes]
) -> None:
    """Rule 9: each names an item whose newest version stands whole and earlier, and it is the one the client sent."""
    sent = messages_of(forward(spell(messages, style)))
    assert [message["role"] for message in sent] == [message["role"] for message in messages]
    plain = [[words(text) for text in texts(message)] for message in messages]
    assert read_back(sent) == plain


@settings(deadline=None, max_examples=60)
@given(messages=chats(), style=styles, room=st.integers(50, 3_000), notes=st.lists(names, max_size=2))
def test_every_string_forwarded_occurs_in_the_request(
    messages: Messages, style: int, room: int, notes: list[str], forward: Callable[..., bytes]
) -> None:
    """Rule 5: an anonymous request's own content, and the proxy's fixed phrases; nothing else."""
    context = {"context": [{"id": name, "content": WORDS} for name in notes]}
    body = spell(messages, style, **({"strata": context} if notes else {}))
    given_lines = {line for message in messages for text in texts(message) for line in text.split("\n")}
    given_lines |= {WORDS, "</document>", *(f'<document id="{name}">' for name in notes)}
    for message in messages_of(forward(body, budget=4_096 + room)):
        for line in (line for text in texts(message) for line in text.split("\n")):
            rest = LEFT_OUT.sub("", line)
            for phrase in FIXED:
                rest = rest.replace(phrase, "")
            named = NAMED.fullmatch(line) is not None
            assert named or any(rest in given_line for given_line in given_lines)


@settings(deadline=None, max_examples=100)
@given(messages=chats(longest=5), style=styles, room=st.integers(50, 4_000))
def test_no_plan_exceeds_its_limit_unsaid(
    messages: Messages, style: int, room: int, make: Make, scale: TokenScale
) -> None:
    """Rule 4: what is forwarded holds the limit, or the plan says that it does not, and why."""
    found, made = make(spell(messages, style), budget=4_096 + room)
    total = measure.layers(found, made.draft, scale).total
    assert made.limit == room
    fits = made.total is None or made.total <= room
    assert fits is (total <= room)
    assert made.total is None or made.total == total
    assert ("forwarded_over_budget" in made.actions) is not fits
    assert (made.dropped_turns > 0) is ("turns_dropped" in made.actions)
    assert (made.dropped_exchanges > 0) is ("exchanges_dropped" in made.actions)
    if fits and made.total is None:
        assert not made.draft.dropped


@settings(deadline=None, max_examples=100)
@given(messages=chats(longest=5), style=styles, room=st.integers(50, 4_000))
def test_after_any_cut_the_chat_is_whole(
    messages: Messages, style: int, room: int, make: Make, forward: Callable[..., bytes]
) -> None:
    """Rule 4: calls keep their results, the newest user message and the last exchange stand, a user message leads."""
    body = spell(messages, style)
    _, made = make(body, budget=4_096 + room)
    sent = orjson.loads(forward(body, budget=4_096 + room))
    check_chat(sent, strict=False)
    kept = [message for index, message in enumerate(messages) if made.draft.keeps(index)]
    assert [message["role"] for message in sent["messages"]] == [message["role"] for message in kept]
    last_user = max(place for place, message in enumerate(messages) if message["role"] == "user")
    tail = max((place for place, said in enumerate(messages) if said.get("tool_calls")), default=last_user)
    must = [message for place, message in enumerate(messages) if place >= max(tail, last_user) or place == last_user]
    assert all(message in kept for message in must)
    leading = [message for message in sent["messages"] if message["role"] != "system"]
    assert leading[0]["role"] == "user" or not made.draft.dropped
    assert kept[: len(messages) - len(leading)][:1] == messages[:1] or messages[0]["role"] != "system"
    plain = [[words(text) for text in texts(message)] for message in kept]
    assert read_back(untold(sent["messages"])) == plain


LINE = rb"\[\d+ earlier messages? of this conversation left out here\.\](?:\\n)*"


def untold(sent: Messages) -> Messages:
    """Return a prompt without the line that says what was left out."""
    raw = re.sub(rb'\{"type":"text","text":"' + LINE + rb'"\},', b"", orjson.dumps(sent))
    found: Messages = orjson.loads(re.sub(LINE, b"", raw))
    return found


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(40, 400),
    answers=st.integers(20, 300),
    budget=st.integers(6_000, 14_000),
    extra=st.integers(0, 900),
)
def test_the_cut_holds_still_while_a_conversation_grows(
    size: int, answers: int, budget: int, extra: int, make: Make, scale: TokenScale
) -> None:
    """Over a growth of n steps it moves at most n + 1 times, and between two moves the kept start is the same."""
    system = {"role": "system", "content": "rule " * extra}
    talk: Messages = []
    cuts, totals = [], []
    for turn in range(40):
        talk.append({"role": "user", "content": f"{turn} " + "ask " * size})
        found, made = make({"model": "gpt-4o", "messages": [system, *talk]}, budget=budget, reserve_tokens=256)
        cuts.append(made.dropped_turns)
        whole = Draft(leading=1, newest=made.draft.newest, library=made.draft.library)
        totals.append(measure.layers(found, whole, scale).total)
        talk.append({"role": "assistant", "content": "answer " * answers})
    step = step_of(budget, totals[0] - size - 12)
    assert cuts == sorted(cuts)
    moves = sum(one != two for one, two in pairwise(cuts))
    assert moves <= max(0, totals[-1] - (budget - 256)) // step + 2


@settings(deadline=None, max_examples=60)
@given(
    talk_of=st.lists(st.tuples(st.lists(blocks, max_size=3), questions), min_size=1, max_size=6),
    keeps=st.lists(st.booleans(), min_size=6, max_size=6),
    style=styles,
    promotion=promotions,
)
def test_a_named_conversation_loses_nothing(
    talk_of: Sequence[tuple[list[str], str]], keeps: list[bool], style: int, promotion: str, talk: Callable[[], Any]
) -> None:
    """Rules 9 and 10: with a client that keeps context in history or not, each reference is what was attached."""
    named = talk()
    history: Messages = [{"role": "system", "content": "You help."}]
    for place, (attached, question) in enumerate(talk_of):
        ask = f"{place} {question}"
        full = {"role": "user", "content": "\n".join([*attached, ask])}
        sent = messages_of(named.say(spell([*history, full], style), f"Answer {place}.", promotion=promotion))
        assert read_back(sent)[-1] == [words(full["content"])]
        assert [message["role"] for message in sent] == [message["role"] for message in [*history, full]]
        again = messages_of(named.say(spell([*history, full], style), f"Answer {place}.", promotion=promotion))
        assert again == sent
        history += [full if keeps[place] else {"role": "user", "content": ask}]
        history += [{"role": "assistant", "content": f"Answer {place}."}]


@settings(deadline=None, max_examples=60)
@given(attached=st.lists(st.lists(blocks, max_size=3), min_size=2, max_size=6))
def test_the_library_only_grows_at_its_end(attached: list[list[str]], talk: Callable[[], Any]) -> None:
    """Under eager what stands in L2 never changes: each system message begins with the one before, less its end."""
    named = talk()
    history: Messages = [{"role": "system", "content": "You help."}]
    before = ""
    for place, items in enumerate(attached):
        pages = [item for item in items if item.startswith("<note_context>")]
        full = {"role": "user", "content": "\n".join([*pages, f"{place}?"])}
        system = messages_of(named.say(spell([*history, full], 0), f"{place}.", promotion="eager"))[0]["content"]
        assert system.startswith(before.removesuffix("\n</context_library>"))
        before = system
        history += [{"role": "user", "content": f"{place}?"}, {"role": "assistant", "content": f"{place}."}]
