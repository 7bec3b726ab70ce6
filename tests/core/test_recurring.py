"""L2 of anonymous requests: what their clients take out of the history and send again, from their own bytes alone."""

from typing import Any

import pytest

from proxy.core.library import Recurring, Sent, recurring, sent
from proxy.core.template import Known, Standing
from tests.core.conftest import read_body
from tests.core.test_values import OK, Client, Messages, user

WORDS = "several words that fill a note up to where it pays to refer to it " * 8
SYSTEM = "You help."


def note(name: str, version: int = 1, tag: str = "note_context") -> str:
    return f"<{tag}>\n<path>{name}</path>\n{WORDS}{name} {version}\n</{tag}>"


def asked(words: str, *notes: str) -> dict[str, Any]:
    return user("\n\n".join([*notes, words]))


def stripped(turns: int) -> Messages:
    return [message for turn in range(turns) for message in (user(f"q{turn}"), OK)]


def shelved(sent: Messages) -> list[str]:
    """Return the names of what stands in L2, in order."""
    whole = "".join(str(message["content"]) for message in sent[:2])
    if "context_library>" not in whole:
        return []
    library = whole.split("context_library>")[1]
    return [part.split("</path>")[0] for part in library.split("<path>")[1:]]


def test_what_is_sent_again_moves_to_the_library_once() -> None:
    """The first request goes as it came; from the second on only what is new is new."""
    client, notes = Client(), [note("a.md"), note("b.md")]
    first = client.say(SYSTEM, asked("q0", *notes))
    second = client.say(SYSTEM, *stripped(1), asked("q1", *notes))
    third = client.say(SYSTEM, *stripped(2), asked("q2", *notes))
    assert first[1] == asked("q0", *notes)
    assert shelved(second) == ["a.md", "b.md"]
    assert third[: len(second) - 1] == second[:-1]
    assert third[-1]["content"].startswith("Context attached:\n- a.md\n- b.md\nFind them in the Context Library above.")


def test_all_that_is_forwarded_was_sent_in_this_request() -> None:
    """What a client does not send any more is gone, whatever memory knows of it."""
    client = Client()
    for turn in range(3):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md"), note("b.md")))
    sent = client.say(SYSTEM, *stripped(3), asked("q3", note("b.md")))
    assert "a.md" not in str(sent)
    assert str(sent).count(WORDS) == 1


def test_a_new_item_joins_where_the_client_is_known_to_send_all_again() -> None:
    """At the library's end, so that what stood there stays where it is."""
    client = Client()
    for turn in range(3):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md")))
    sent = client.say(SYSTEM, *stripped(3), asked("q3", note("b.md"), note("a.md")))
    assert shelved(sent) == ["a.md", "b.md"]


def test_a_client_that_sends_only_some_again_keeps_them_in_its_turn() -> None:
    """Retrieved passages come and go: a library of them would be read again each time."""
    client = Client()
    for turn, names in enumerate(("abc", "bcd", "cde", "dea", "eab")):
        messages = [*stripped(turn), asked(f"q{turn}", *[note(f"{name}.md") for name in names])]
        assert client.say(SYSTEM, *messages)[1:] == messages


def test_a_client_that_keeps_its_attachments_is_left_alone() -> None:
    """Its history is a prefix already; what it sends again is referenced in its turn."""
    client = Client()
    messages = [asked("q0", note("a.md"))]
    client.say(SYSTEM, *messages)
    messages += [OK, asked("q1", note("a.md"))]
    sent = client.say(SYSTEM, *messages)
    assert sent[1:3] == messages[:2]
    assert shelved(sent) == []
    assert sent[3]["content"].startswith("Context attached:")


def test_a_turn_that_goes_on_brings_nothing_again() -> None:
    """In an agent's loop what was attached at the turn's start is still there: each step is a prefix of the next."""
    client = Client()
    asked_first = [asked("q0", note("a.md"), note("b.md"))]
    steps: Messages = []
    before: Messages = []
    for step in range(4):
        sent = client.say(SYSTEM, *asked_first, *steps)
        assert sent[: len(before)] == before
        before = sent
        function = {"name": "look", "arguments": "{}"}
        calls = [{"id": f"c{step}", "type": "function", "function": function}]
        steps += [{"role": "assistant", "content": None, "tool_calls": calls},
                  {"role": "tool", "tool_call_id": f"c{step}", "content": "found"}]  # fmt: skip
    assert shelved(sent) == []


def test_a_changed_item_is_another_one() -> None:
    """Its old version leaves the library, the new one stays in its turn until it comes again."""
    client = Client()
    for turn in range(3):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md"), note("b.md")))
    sent = client.say(SYSTEM, *stripped(3), asked("q3", note("a.md"), note("b.md", 2)))
    assert shelved(sent) == ["a.md"]
    assert note("b.md", 2) in sent[-1]["content"]


def test_a_new_conversation_of_the_tenant_begins_with_what_others_sent_again() -> None:
    """In one order, whatever order it comes in: that is what conversations share."""
    client = Client()
    for turn in range(2):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("b.md"), note("a.md")))
    other = Client(store=client.store)
    sent = other.say(SYSTEM, asked("else", note("a.md"), note("new.md"), note("b.md")))
    assert shelved(sent) == ["b.md", "a.md"]
    assert note("new.md") in sent[1]["content"]
    again = other.say(SYSTEM, user("else"), OK, asked("more", note("a.md"), note("b.md")))
    assert again[0] == sent[0]


def test_what_anybody_may_have_written_stands_with_the_user() -> None:
    """The library of web pages never enters the system message."""
    client = Client()
    for turn in range(2):
        sent = client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("https://a", tag="url_content")))
    assert sent[0]["content"] == SYSTEM
    assert sent[1]["content"].startswith("<untrusted_context_library>")


def test_two_that_begin_with_the_same_words_are_two() -> None:
    """Each keeps what it attached."""
    one = Client()
    two = Client(store=one.store)
    one.say(SYSTEM, asked("Summarize this.", note("a.md")))
    two.say(SYSTEM, asked("Summarize this.", note("b.md")))
    begun = [user("Summarize this."), OK]
    assert shelved(one.say(SYSTEM, *begun, asked("more", note("a.md")))) == ["a.md"]
    assert shelved(two.say(SYSTEM, *begun, asked("more", note("b.md")))) == ["b.md"]


def test_a_library_without_a_system_message() -> None:
    """It stands at the head of the first user message."""
    client = Client()
    for turn in range(2):
        sent = client.say(None, *stripped(turn), asked(f"q{turn}", note("a.md")))
    assert sent[0]["content"].startswith("<context_library>")


def sent_by(*messages: dict[str, Any]) -> Sent:
    request = read_body({"messages": [{"role": "system", "content": SYSTEM}, *messages]})
    return sent(request, b"key")


def digests(*notes: str) -> tuple[bytes, ...]:
    return tuple(sent_by(asked("q", *notes)).brought)


A, B = note("a.md"), note("b.md")


@pytest.mark.parametrize(
    ("stood", "messages", "shelf", "calm"),
    [
        pytest.param(Standing(), [asked("q", A)], (), 0, id="nothing was brought before"),
        pytest.param(Standing(brought=digests(A)), [asked("q", A)], digests(A), 1, id="sent again"),
        pytest.param(Standing(brought=digests(A)), [asked("q")], (), -2, id="not sent again"),
        pytest.param(Standing(brought=digests(A, B)), [asked("q", A)], (), -2, id="some sent again"),
        pytest.param(Standing(brought=digests(A), calm=-2), [asked("q", A)], (), -1, id="not believed yet"),
        pytest.param(Standing(brought=digests(A), calm=0), [asked("x" * 9_000), OK, asked("q", A)], (), 1,
                     id="too much behind it"),
        pytest.param(Standing(brought=digests(A), calm=20), [asked("x" * 9_000), OK, asked("q", A)], digests(A), 21,
                     id="not too much, as often as it has come"),
        pytest.param(Standing(shelf=digests(A, B)), [asked("q", B)], (), -2, id="the library ends where one has gone"),
        pytest.param(Standing(shelf=digests(A, B)), [asked("p", A), OK, asked("q", B)], digests(A, B), 1,
                     id="anywhere in the request"),
        pytest.param(Standing(shelf=digests(A), calm=5), [asked("q", A)], digests(A), 6, id="it goes on"),
    ],
)  # fmt: skip
def test_the_shelf(stood: Standing, messages: Messages, shelf: tuple[bytes, ...], calm: int) -> None:
    """What stands in L2, and how long all has come again."""
    found = recurring(sent_by(*messages), stood, Known(b"key"), frozen=False)
    assert (found.shelf, found.calm) == (shelf, calm)
    assert len(found.library.items) == len(shelf)


def test_signed_reasoning_keeps_its_place() -> None:
    """Nothing is added in front of it."""
    found = recurring(sent_by(asked("q", A)), Standing(brought=digests(A)), Known(b"key"), frozen=True)
    assert found == Recurring(brought=digests(A), calm=1)
    begun = recurring(sent_by(asked("q", A)), None, Known(b"key", recurring=digests(A)), frozen=True)
    assert begun.shelf == ()


def test_an_image_is_no_matter() -> None:
    """What may not move is not counted as sent again."""
    image = "<note_context><path>i.md</path>data:image/png;base64," + "A" * 2_000 + "</note_context>"
    assert digests(image) == ()


def test_items_go_with_their_turns() -> None:
    """Over a budget an item of a turn that is cut does not stay in L2 and keep the prompt too long."""
    client = Client()
    client.say(SYSTEM, asked("q0", A))
    client.say(SYSTEM, user("q0"), OK, asked("q1", A))
    long = asked("q0", note("a.md") + "\n\n" + "<document id='x'>" + WORDS * 40 + "</document>")
    messages = [long, OK, user("q1"), OK, user("word " * 300)]
    sent = client.say(SYSTEM, *messages, budget=4_096 + 1_500)
    assert client.made is not None
    assert (client.made.dropped_turns, client.made.actions) == (1, ("turns_dropped",))
    assert "a.md" not in str(sent)


def test_an_item_that_stands_in_l1_is_not_copied() -> None:
    """L1 has it already."""
    client = Client()
    for turn in range(3):
        sent = client.say(f"{SYSTEM}\n\n{A}", *stripped(turn), asked(f"q{turn}", A))
        assert str(sent).count(WORDS) == 1


def test_a_version_in_the_history_keeps_the_other_out_of_the_library() -> None:
    """It would stand behind it, and be taken for the newer one; the newest version stands once."""
    client = Client()
    for turn in range(4):
        sent = client.say(SYSTEM, asked("q", note("a.md", 1)), OK, *stripped(turn), asked(f"q{turn}", note("a.md", 2)))
        assert str(sent).count("a.md 2\\n") == 1
