"""A named conversation's prompt as a log: replayed within an epoch, compacted at its end."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import render
from proxy.core.history import written
from proxy.core.library import items
from proxy.core.request import Request

Messages = list[dict[str, Any]]
Open = Callable[[], Any]

WORDS = "word " * 100
SYSTEM = {"role": "system", "content": "You help."}
OK = {"role": "assistant", "content": "ok"}


def note(name: str, version: int = 1) -> str:
    return f"<note_context><path>{name}</path>{WORDS}{version}</note_context>"


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"model": "gpt-4o", "messages": [SYSTEM, *messages], **more}


def messages(sent: bytes) -> Messages:
    found: Messages = orjson.loads(sent)["messages"]
    return found


def above(name: str) -> str:
    return f"Context attached:\n- {name}\nFind them above in this conversation."


def in_library(name: str) -> str:
    return f"Context attached:\n- {name}\nFind them in the Context Library above."


FIRST = f"{note('a.md')}\n{note('b.md')}\n\nOne, please?"


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(FIRST, id="as it was"),
        pytest.param("One, please?", id="stripped"),
        pytest.param(f"{note('b.md')}\n\nOne, please?", id="of one item"),
        pytest.param(f"{note('b.md')}\n{note('a.md')}\n\nOne, please?", id="re-ordered"),
        pytest.param(f"One, please?\n{note('a.md')}", id="re-attached behind the words"),
        pytest.param(" One,\tplease? \n", id="white space"),
        pytest.param([{"type": "text", "text": "One, please?"}], id="as parts"),
        pytest.param([{"type": "text", "text": note("a.md")}, {"type": "text", "text": "One, please?"}], id="in parts"),
    ],
)
def test_a_turn_that_comes_back_is_forwarded_as_it_was(again: object, talk: Open) -> None:
    """Byte for byte, whatever form its client keeps it in."""
    named = talk()
    first = named.say(chat(user(FIRST)), "ok")
    sent = named.say(chat(user(again), OK, user("Two?")), "ok")
    assert sent.startswith(first.removesuffix(b"]}"))
    assert messages(sent)[2:] == [OK, user("Two?")]
    assert [made.began for made in named.plans] == ["first", None]


def test_an_answer_keeps_the_form_it_first_went_back_in(talk: Open) -> None:
    """A client's storage may trim it later."""
    named = talk()
    named.say(chat(user(FIRST)), " so it is \n")
    spaced = {"role": "assistant", "content": " so it is \n"}
    named.say(chat(user(FIRST), spaced, user("Two?")), "ok")
    sent = named.say(chat(user(FIRST), {**spaced, "content": "so it is"}, user("Two?"), OK, user("Three?")))
    assert messages(sent)[2] == spaced


@pytest.mark.parametrize(
    ("was", "now"),
    [
        pytest.param({"name": "alice"}, {"name": "carol"}, id="another name"),
        pytest.param({"prefix": True}, {}, id="a prefill that is none any more"),
        pytest.param({}, {"reasoning_content": "because"}, id="reasoning added"),
        pytest.param({"audio": {"id": "old"}}, {"audio": {"id": "new"}}, id="a reference"),
        pytest.param({"refusal": "no"}, {"refusal": "never"}, id="a refusal"),
        pytest.param({"images": [{"url": "a"}]}, {"images": [{"url": "b"}]}, id="pictures"),
    ],
)  # fmt: skip
def test_what_a_message_bears_beside_its_words_is_the_clients_to_say(
    was: dict[str, object], now: dict[str, object], talk: Open
) -> None:
    """Replay fills in what was left out, and no older form takes the place of what the client sends."""
    named = talk()
    named.say(chat(user(FIRST)), "ok")
    named.say(chat(user(FIRST), {**OK, **was}, user("Two?")), "ok")
    sent = messages(named.say(chat(user("One, please?"), {**OK, **now}, user("Two?"), OK, user("Three?"))))
    assert sent[1:3] == [user(FIRST), {**OK, **now}]


@pytest.mark.parametrize("empty", [None, [], {}, ""])
def test_members_that_hold_nothing_say_nothing(empty: object, talk: Open) -> None:
    """Clients send answers back as their SDK has them."""
    named = talk()
    named.say(chat(user(FIRST)), "ok")
    first = named.say(chat(user(FIRST), {**OK, "refusal": empty, "annotations": empty}, user("Two?")), "ok")
    again = named.say(chat(user("One, please?"), OK, user("Two?"), OK, user("Three?")))
    assert again.startswith(first.removesuffix(b"]}"))


@pytest.mark.parametrize(
    ("first", "older", "newest", "brought"),
    [
        pytest.param("a.md", [note("a.md", 2)], [], note("a.md", 2), id="a new version"),
        pytest.param("a.md", [note("a.md"), note("b.md")], [], note("b.md"), id="an item that was not there"),
        pytest.param("a.md", [note("a.md", 2)], [note("a.md", 2)], note("a.md", 2), id="that the newest turn has too"),
        pytest.param("a.md", [note("a.md", 2)], [note("a.md", 3)], note("a.md", 3), id="that the newest supersedes"),
        pytest.param("a.md", [note("a.md")], [note("a.md")], above("a.md"), id="what stands is referenced"),
    ],
)
def test_context_in_an_older_turn_that_stands_nowhere_is_brought_by_the_newest(
    first: str, older: list[str], newest: list[str], brought: str, talk: Open
) -> None:
    """Replay fills in and never replaces: what the client says anew is said, once, at the end."""
    named = talk()
    named.say(chat(user(f"{note(first)}\nOne?")), "ok")
    body = chat(user("\n".join([*older, "One?"])), OK, user("\n".join([*newest, "Two?"])))
    sent = messages(named.say(body, "ok"))
    assert sent[1:3] == [user(f"{note(first)}\nOne?"), OK]
    assert sent[3]["content"].split() == f"{brought} Two?".split()
    again = messages(named.say({**body, "messages": [*body["messages"], OK, user("Three?")]}, "ok"))
    assert again == [*sent, OK, user("Three?")]


def test_a_repeat_of_a_request_gives_the_same_bytes(talk: Open) -> None:
    """A retry, and a regeneration that keeps another answer: the newest turn is made from the request alone."""
    named = talk()
    named.say(chat(user(FIRST)), "ok")
    body = chat(user("One, please?"), OK, user(f"{note('a.md')}\n{note('c.md')}\nTwo?"))
    sent = named.say(body, None)
    assert named.say(body, "first") == sent == named.say(body, "second")
    for answer in ("first", "second"):
        then = [*body["messages"], {"role": "assistant", "content": answer}, user("Three?")]
        assert named.say({**body, "messages": then}, "ok").startswith(sent.removesuffix(b"]}"))


def test_tool_exchanges_come_back_as_they_went(talk: Open) -> None:
    """They are never stored; in a loop step k is a prefix of step k + 1."""
    named = talk()
    named.say(chat(user(FIRST)), "ok")
    talk_so_far = [user("One, please?"), OK, user(f"{note('a.md')}\nRead it.")]
    before = named.say(chat(*talk_so_far), None)
    for step in range(4):
        call = {"id": f"c{step}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}}
        talk_so_far.append({"role": "assistant", "content": None, "tool_calls": [call]})
        talk_so_far.append({"role": "tool", "tool_call_id": f"c{step}", "content": note("a.md")})
        sent = named.say(chat(*talk_so_far), None)
        assert sent.startswith(before.removesuffix(b"]}"))
        assert messages(sent)[4:] == talk_so_far[3:]
        before = sent
    assert {made.began for made in named.plans} == {"first", None}


CHANGED = {"role": "system", "content": "You help, and more."}
CONTEXT = {"strata": {"context": [{"id": "x", "content": "x"}]}}


def compacted(named: Any, *talk: dict[str, Any], attached: str = "", **more: object) -> Messages:
    """Say a turn under another system prompt, which ends the epoch."""
    body = {"model": "gpt-4o", "messages": [CHANGED, *talk, user(f"{attached}Now?")], **more}
    return messages(named.say(body, "ok"))


def begun(talk: Open, *attached: str) -> Any:
    """A conversation with something rewritten in it and a turn with each of the items."""
    named = talk()
    named.say(chat(user("Zero?"), **CONTEXT), "ok")
    turns: Messages = [user("Zero?"), OK]
    for place, item in enumerate(attached):
        named.say(chat(*turns, user(f"{item}\n{place}?")), "ok")
        turns += [user(f"{place}?"), OK]
    return named


def test_history_goes_back_to_bare_turns(talk: Open) -> None:
    """What the client no longer sends is left out, L1 is taken afresh."""
    named = begun(talk, note("a.md"), note("b.md"))
    turns = [user("Zero?"), OK, user("0?"), OK, user("1?"), OK]
    assert compacted(named, *turns) == [CHANGED, *turns, user("Now?")]
    epoch = named.plans[-1].epoch
    assert (named.plans[-1].began, epoch.number, epoch.library, epoch.dropped) == ("l1_changed", 1, (), ())


@pytest.mark.parametrize(
    ("again", "attached"),
    [
        pytest.param((note("a.md"), note("b.md")), "", id="in history"),
        pytest.param((), f"{note('a.md')}\n{note('b.md')}\n", id="with the newest turn"),
        pytest.param((note("a.md"), ""), f"{note('b.md')}\n", id="one here and one there"),
    ],
)
def test_items_in_use_go_to_l2(again: tuple[str, ...], attached: str, talk: Open) -> None:
    """In the order in which they first stood; the turns that held them say only their words."""
    named = begun(talk, note("a.md"), note("b.md"))
    asked = [f"{item}\n{place}?" for place, item in enumerate(again)] or ["0?", "1?"]
    sent = compacted(named, user("Zero?"), OK, user(asked[0]), OK, user(asked[1]), OK, attached=attached)
    assert sent[0]["content"].startswith("You help, and more.\n\n<context_library>\n")
    assert sent[0]["content"].endswith(f"\n\n{note('a.md')}\n\n{note('b.md')}\n</context_library>")
    assert [message["content"].strip() for message in sent[1:-1:2]] == ["Zero?", "0?", "1?"]
    assert note("a.md") not in sent[-1]["content"]
    assert [item.label for item in named.plans[-1].epoch.library] == ["a.md", "b.md"]


def test_only_the_newest_version_is_kept(talk: Open) -> None:
    """And one that arrives with the newest turn stays where it arrives."""
    named = begun(talk, note("a.md"), note("a.md", 2), note("b.md"))
    asked = [user(f"{note('a.md')}\n0?"), OK, user(f"{note('a.md', 2)}\n1?"), OK, user(f"{note('b.md')}\n2?"), OK]
    sent = compacted(named, user("Zero?"), OK, *asked, attached=f"{note('b.md', 2)}\n")
    assert sent[0]["content"].endswith(f"\n\n{note('a.md', 2)}\n</context_library>")
    assert note("a.md") not in str(sent)
    assert note("b.md") not in str(sent)
    assert sent[-1] == user(f"{note('b.md', 2)}\nNow?")


def test_a_turn_of_nothing_but_context_says_what_was_attached(talk: Open) -> None:
    """An empty message is refused by some upstreams."""
    named = talk()
    named.say(chat(user(f"{note('a.md')}\n{note('b.md')}"), **CONTEXT), "ok")
    sent = compacted(named, user(f"{note('a.md')}\n{note('b.md')}"), OK)
    assert sent[1] == user("[attached: a.md, b.md]")
    assert note("a.md") in sent[0]["content"]


def test_what_was_attached_to_an_unrewritten_history_stays_there(talk: Open) -> None:
    """Where nothing was ever rewritten a changed L1 begins an epoch with the client's own bytes."""
    named = talk()
    named.say(chat(user(FIRST)), "ok")
    body = {"model": "gpt-4o", "messages": [CHANGED, user(FIRST), OK, user("Two?")]}
    assert named.say(body, "ok") == orjson.dumps(body)
    assert named.plans[-1].began == "l1_changed"


PAGE = f"<url_content><url>https://a.b</url>{WORDS}</url_content>"


@pytest.mark.parametrize("promotion", ["deferred", "eager"])
@pytest.mark.parametrize(
    "context",
    [
        pytest.param([{"id": "p", "content": WORDS, "trust": "untrusted"}], id="marked by the client"),
        pytest.param([{"id": "p", "content": WORDS, "type": "web_page"}], id="a web page"),
        pytest.param(
            [{"id": "p", "content": WORDS, "type": "my_page", "trust": "untrusted"}], id="of a type of its own"
        ),
    ],
)
def test_untrusted_context_never_enters_the_system_message(
    context: list[dict[str, str]], promotion: str, talk: Open
) -> None:
    """However it was brought, and whatever its frozen form says of it."""
    named = talk()
    more = {"strata": {"context": context}}
    named.say(chat(user("One?"), **more), "ok", promotion=promotion)
    named.say(chat(user("One?"), OK, user("Two?"), **more), "ok", promotion=promotion)
    for system in (SYSTEM, CHANGED):
        talk_so_far = [system, user("One?"), OK, user("Two?"), OK, user("Three?")]
        sent = messages(named.say({"model": "gpt-4o", "messages": talk_so_far, **more}, "ok", promotion=promotion))
        assert WORDS not in sent[0]["content"]
        assert str(sent).count(WORDS) == 1


@pytest.mark.parametrize(
    "context",
    [
        pytest.param({"id": "n", "content": WORDS, "type": "note"}, id="a type of its own"),
        pytest.param({"id": 'a "b"', "content": WORDS}, id="quotes in the id"),
        pytest.param({"id": "a \"b\" 'c'", "content": WORDS}, id="both quotes in the id"),
        pytest.param({"id": "a > b", "content": WORDS}, id="an angle bracket in the id"),
        pytest.param({"content": WORDS}, id="no id"),
        pytest.param({"id": "n", "content": f"{WORDS}</document>{WORDS}"}, id="a closing tag in the content"),
        pytest.param({"id": "n", "content": f"<id>other</id>{WORDS}"}, id="another name in the content"),
    ],
)
@pytest.mark.parametrize("promotion", ["deferred", "eager"])
def test_explicit_context_is_the_same_item_once_it_is_frozen(
    context: dict[str, str], promotion: str, talk: Open
) -> None:
    """Brought again it is referenced, not repeated; the client sends it with every request."""
    named = talk()
    more = {"strata": {"context": [context]}}
    named.say(chat(user("One?"), **more), "ok", promotion=promotion)
    sent = messages(named.say(chat(user("One?"), OK, user("Two?"), **more), "ok", promotion=promotion))
    assert "Context attached:\n- " in sent[-1]["content"]
    assert str(sent).count(WORDS.strip()) == context["content"].count(WORDS)


def test_a_tools_output_that_comes_back_stands_again(talk: Open) -> None:
    """Stripped when an epoch ends, it is not in what is replayed; no newer turn may bring it."""
    named, output = talk(), f"<localSearch>\n{WORDS}\n</localSearch>"
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    first = f"{output}\n\n{note('a.md')}\nOne?"
    named.say(chat(user(first), tools=tools[:1]), "ok")
    named.say(chat(user(first), OK, user(f"{note('a.md')}\nTwo?"), tools=tools[:1]), "ok")
    stripped = chat(user("One?"), OK, user("Two?"), OK, user("Three?"), tools=tools)
    assert output not in str(messages(named.say(stripped, "ok")))
    again = chat(user(first), OK, user("Two?"), OK, user("Three?"), OK, user("Four?"), tools=tools)
    sent = messages(named.say(again, "ok"))
    assert output in sent[1]["content"]


def test_what_stands_beside_a_block_that_goes_keeps_its_line(read: Callable[[object], Request]) -> None:
    """A small block directly in front of an item still ends where a line ends; else nothing is left of the item."""
    small = "<attachment>\ntiny\n</attachment>"
    for content, left in (
        (f"{small}{note('a.md')}\n\nWhy?", f"{small}\n\nWhy?"),
        (f"{small}\n{note('a.md')}\n\nWhy?", f"{small}\nWhy?"),
        (f"{note('a.md')}\n\nWhy?", "Why?"),
        (f"See\n{note('a.md')}", "See"),
    ):
        request = read(chat(user(content)))
        gone = {item.key for item in items(request.messages[1]) if item.named}
        bare = render.bare(request.raw(1), request.messages[1], gone)
        assert orjson.loads(bare)["content"] == left


def test_what_is_written_is_what_was_forwarded(talk: Open, read: Callable[[object], Request]) -> None:
    """Of each turn with the answers that follow it in the request; tool exchanges are not written."""
    named = talk()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    tools += [{"role": "tool", "tool_call_id": "c", "content": "x"}]
    body = chat(user(FIRST), *tools, OK, user(f"{note('a.md')}\nTwo?"))
    sent = messages(named.say(body, "ok"))
    request = read(body)
    found = written(request, named.plans[-1].draft, at=2.0)
    assert sorted(found) == [1, 4, 5]
    assert [orjson.loads(found[index].raw) for index in sorted(found)] == [sent[1], sent[4], sent[5]]
    said = [message.said for message in request.messages]
    assert [found[index].replies for index in sorted(found)] == [{said[2], said[4]}, set(), set()]


def test_a_library_stands_behind_an_l1_that_changed_under_signed_reasoning(talk: Open) -> None:
    """No epoch ends for it, and what the frozen turns refer to is still there."""
    conversation = talk()
    attached = f'<document id="7">{WORDS}</document>\n\n'
    signed = {"role": "assistant", "content": "Fine.", "reasoning_details": [{"signature": "s"}]}
    fine = {"role": "assistant", "content": "Fine."}

    def ask(system: str, *said: dict[str, Any]) -> bytes:
        sent: bytes = conversation.say({"model": "gpt-4o", "messages": [{"role": "system", "content": system}, *said]})
        return sent

    ask("One.", user(f"{attached}a"))
    ask("One.", user("a"), fine, user(f"{attached}b"))
    third = ask("Two.", user("a"), fine, user("b"), fine, user(f"{attached}c"))
    assert "<context_library>" in messages(third)[0]["content"]
    fourth = ask("Three.", user("a"), fine, user("b"), fine, user("c"), signed, user("d"))
    assert messages(fourth)[0]["content"].startswith("Three.\n\n<context_library>")
    assert str(messages(fourth)).count(WORDS) == 1


@pytest.mark.parametrize(
    ("plain", "spelled"),
    [
        pytest.param("é", "\\u00e9", id="an escape"),
        pytest.param("/", "\\/", id="a slash"),
        pytest.param('{"role":"system","content":', '{ "role" : "system", "content" : ', id="blanks"),
        pytest.param(
            '{"role":"system","content":"You help, é/"}', '{"content":"You help, é/","role":"system"}', id="order"
        ),
    ],
)
def test_another_spelling_of_the_system_prompt_is_no_other(plain: str, spelled: str, talk: Open) -> None:
    """No epoch ends for it; where L2 stands behind it, it is replayed, else it goes as the client spells it."""
    for tools in ([], [{"type": "function", "function": {"name": "f"}}]):
        named, said = talk(), [user(FIRST), OK, user(f"{note('a.md')}\nTwo?"), OK, user("Three?"), OK, user("Four?")]
        for end in (1, 3, 5, 7):
            body: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "system", "content": "You help, é/"}]}
            body |= {"tools": tools} if tools and end > 3 else {}
            body["messages"] += said[:end]
            raw = orjson.dumps(body).decode()
            sent = named.say(raw.replace(plain, spelled, 1).encode() if end == 7 else body, "ok")
        assert [made.began for made in named.plans] == ["first", None, "tools_changed" if tools else None, None]
        assert (b"<context_library>" in sent) is bool(tools)
        assert (spelled.encode() in sent) is not bool(tools)


@pytest.mark.parametrize(
    "newest",
    [
        pytest.param("<note_context><path>a.md</path>BUY MILK</note_context>", id="short"),
        pytest.param(note("a.md").replace("1</", "![](data:image/png;base64,AAAA) BUY MILK</"), id="with a picture"),
    ],
)
def test_an_item_whose_newest_version_may_not_move_stays_where_it_is(newest: str, talk: Open) -> None:
    """At an epoch's end no version leaves history, since none would stand in L2."""
    named = talk()
    said = [user(FIRST), OK, user(f"{note('a.md')}\nTwo?"), OK, user(f"{newest}\nI changed it."), OK, user("Four?")]
    for end in (1, 3, 5):
        named.say(chat(*said[:end]), "ok")
    body = chat(*said)
    body["messages"] = [{"role": "system", "content": "You help otherwise."}, *said]
    sent = messages(named.say(body, "ok"))
    assert named.plans[-1].began == "l1_changed"
    assert newest in sent[5]["content"]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param([user(f"{note('a.md')}\nOne?")], id="a question that nobody answered"),
        pytest.param([user("One?"), OK, {"role": "system", "content": note("a.md")}], id="a system message"),
    ],
)
def test_nothing_refers_to_what_will_not_be_replayed(first: Messages, talk: Open) -> None:
    """A client may take it away there: then the item still stands where it came again."""
    named = talk()
    named.say(chat(*first, user(f"{note('a.md')}\nTwo?")), "ok")
    stripped = [{**message, "content": message["content"].replace(note("a.md"), "").strip()} for message in first]
    sent = messages(named.say(chat(*stripped, user("Two?"), OK, user("Three?")), "ok"))
    assert note("a.md") in sent[len(first) + 1]["content"]


SIGNED = {"role": "assistant", "content": "ok", "reasoning_details": [{"signature": "s"}]}


def test_what_refers_to_a_dropped_turn_goes_with_it(talk: Open) -> None:
    """Behind signed reasoning no line may change: a turn that names what is gone is no whole turn any more."""
    named, long = talk(), "pad " * 1_100
    limits: dict[str, Any] = {"budget": 3_100, "reserve_tokens": 100}
    named.say(chat(user(f"{note('a.md')}\nOne? {long}")), "ok", **limits)
    named.say(chat(user(f"One? {long}"), SIGNED, user(f"{note('a.md')}\nTwo?")), "ok", **limits)
    last = [user(f"One? {long}"), SIGNED, user("Two?"), SIGNED, user(f"Three? {long}{long}")]
    assert messages(named.say(chat(*last), "ok", **limits)) == [SYSTEM, last[-1]]


@pytest.mark.parametrize("again", [False, True])
def test_a_library_whose_message_is_dropped_stands_where_it_is_written(again: bool, talk: Open) -> None:
    """What stood at the head of that message is not taken for standing there: nothing refers to it but behind it."""
    named, long, page = talk(), "pad " * 1_100, f'<url_content id="a.md">{WORDS}</url_content>'
    limits: dict[str, Any] = {"budget": 3_100, "reserve_tokens": 100}
    said = [user(f"One? {long}"), OK, user(f"{page}\nTwo?"), OK, user(f"{page}\nThree?"), OK, user(f"{page}\nFour?")]
    for end in (1, 3, 5):
        named.say(chat(*said[:end]), "ok", **limits)
    other = {"role": "system", "content": "You help otherwise."}
    named.say({"model": "gpt-4o", "messages": [other, *said]}, "ok", **limits)
    assert named.plans[-1].began == "l1_changed"
    said[2], said[4], said[6] = user("Two?"), user("Three?"), user("Four?")
    last = user(f"{page * again}\nFive? {long}{long}")
    sent = messages(named.say({"model": "gpt-4o", "messages": [other, *said, SIGNED, last]}, "ok", **limits))
    assert named.plans[-1].began == "limit"
    assert [message["role"] for message in sent] == ["system", "user"]
    assert sent[1]["content"].startswith("<untrusted_context_library>")
    assert str(sent).count(WORDS) == 1
    assert ("Context attached:\n- a.md\n" in sent[1]["content"]) is again


def test_a_turn_whose_reference_leads_nowhere_is_not_replayed(talk: Open) -> None:
    """Memory may have lost what it named: then the client's own message stands."""
    named = talk()
    named.say(chat(user(f"{note('a.md')}\nOne?")), "ok")
    named.say(chat(user("One?"), OK, user(f"{note('a.md')}\nTwo?")), "ok")
    log = named.store._conversations["c"].log
    del log[next(place for place, attempts in log.items() if any(b"One?" in each.raw for each in attempts.values()))]
    said = [user("One?"), OK, user("Two?"), OK, user("Three?")]
    assert messages(named.say(chat(*said), "ok")) == [SYSTEM, *said]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(f"{above('ghost.md')}\nOne, please?", id="beside its items"),
        pytest.param(f"<document id='log'>{WORDS}\n{above('ghost.md')}\n</document>\nOne, please?", id="in one"),
    ],
)
def test_what_a_client_says_in_the_words_of_a_reference_is_none(said: str, talk: Open) -> None:
    """Somebody pastes what was forwarded: the turn is replayed as any other."""
    named = talk()
    first = named.say(chat(user(f"{note('a.md')}\n{said}")), "ok")
    stripped = said[said.index("One") :] if "<document" in said else said
    sent = named.say(chat(user(stripped), OK, user("Two?")), "ok")
    assert sent.startswith(first.removesuffix(b"]}"))
