"""Anonymous requests: what their clients take out of the history and send again, from their own bytes alone."""

from typing import Any

import pytest

from proxy.core.known import Known, Standing
from proxy.core.recipe import Recipe, Words, keyed
from proxy.core.recurring import Recurring, sent, stands
from proxy.core.request import Request
from tests.core.conftest import read_body
from tests.core.test_values import OK, Client, Messages, user

WORDS = "several words that fill a note up to where it pays to refer to it " * 8
SYSTEM = "You help."


def note(name: str, version: int = 1, tag: str = "note_context") -> str:
    return f"<{tag}>\n<path>{name}</path>\n{WORDS}{name} {version}\n</{tag}>"


A, B = note("a.md"), note("b.md")
A_PART = {"type": "text", "text": A}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


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


def referenced(words: str, *names: str) -> dict[str, Any]:
    named = "".join(f"- {name}\n" for name in names)
    return asked(words, f"Context attached:\n{named}Find them above in this conversation.")


def test_what_is_sent_again_stands_where_it_stood() -> None:
    """Each request holds all of the one before, as if the client had kept what it attached."""
    client, notes = Client(), [note("a.md"), note("b.md")]
    first = client.say(SYSTEM, asked("q0", *notes))
    second = client.say(SYSTEM, *stripped(1), asked("q1", *notes))
    third = client.say(SYSTEM, *stripped(2), asked("q2", *notes))
    assert first[1] == asked("q0", *notes)
    assert second == [*first, OK, referenced("q1", "a.md", "b.md")]
    assert third == [*second, OK, referenced("q2", "a.md", "b.md")]


def test_what_is_sent_again_after_too_much_was_said_stands_in_its_turn() -> None:
    """To put it back would cost more, when it ends, than it has saved. The next turn is another matter."""
    client, said = Client(), {"role": "assistant", "content": "x" * 3 * len(A)}
    client.say(SYSTEM, asked("q0", A), answer=said)
    messages = [user("q0"), said, asked("q1", A)]
    assert client.say(SYSTEM, *messages)[1:] == messages
    sent = client.say(SYSTEM, *messages[:2], user("q1"), OK, asked("q2", A))
    assert sent[1:] == [*messages, OK, referenced("q2", "a.md")]


@pytest.mark.parametrize(
    ("whole", "bare"),
    [
        pytest.param("A\n\nWhy is that so?", "Why is that so?", id="in front"),
        pytest.param("  Why is\n that so?\n\nA\nB\n", "Why is\n that so?", id="behind, other white space around it"),
        pytest.param("See A:\nA\n\nand B:\nB\nWhy?", "See A: and B: Why?", id="between words"),
        pytest.param('A\n\nCaf\u00e9 \U0001f600 "so"?', 'Caf\u00e9 \U0001f600 "so"?', id="with escapes"),
        pytest.param(["A", "B", "Why?"], ["Why?"], id="parts of their own"),
        pytest.param(["Why?", "A", "B"], ["Why?"], id="parts behind"),
        pytest.param(["A\n\nWhy?"], ["Why?"], id="one part"),
        pytest.param(["A\n\nWhy?"], "Why?", id="a part that became a string"),
    ],
)
def test_a_message_is_made_again_as_it_was(whole: str | list[str], bare: str | list[str]) -> None:
    """To the character, whatever stood between items and words, and in whatever form."""

    def message(held: str | list[str]) -> dict[str, Any]:
        filled = [each.replace("\nA", f"\n{A}").replace("\nB", f"\n{B}") if each.count("\n") else each
                  for each in ([held] if isinstance(held, str) else held)]  # fmt: skip
        filled = [A + each[1:] if each[:1] == "A" else B if each == "B" else each for each in filled]
        return user(filled[0] if isinstance(held, str) else [{"type": "text", "text": each} for each in filled])

    client = Client()
    first = client.say(SYSTEM, message(whole))
    second = client.say(SYSTEM, message(bare), OK, asked("q1", A, B))
    said = [message(whole)["content"]] if isinstance(whole, str) else [part["text"] for part in first[1]["content"]]
    again = second[1]["content"]
    assert ([again] if isinstance(again, str) else [part["text"] for part in again]) == said


@pytest.mark.parametrize(
    ("whole", "bare"),
    [
        pytest.param([A_PART, IMAGE, "Why?"], ["Why?"], id="an image"),
        pytest.param([A_PART, "Why?"], "Why?", id="parts that became a string"),
        pytest.param(["Why?", A_PART, "And then?"], ["Why? And then?"], id="words in two parts"),
        pytest.param([A_PART], [], id="no words"),
    ],
)
def test_what_only_its_client_can_spell_is_left_as_it_came(whole: list[Any], bare: str | list[str]) -> None:
    """What it attached then stands in the newest turn."""

    def message(held: str | list[Any]) -> dict[str, Any]:
        parts = [each if isinstance(each, dict) else {"type": "text", "text": each} for each in held]
        return user(held if isinstance(held, str) else parts)

    client = Client()
    client.say(SYSTEM, message(whole))
    messages = [message(bare), OK, asked("q1", A)]
    assert client.say(SYSTEM, *messages)[1:] == messages


def test_all_that_is_forwarded_was_sent_in_this_request() -> None:
    """What a client does not send any more is gone, whatever memory knows of it."""
    client = Client()
    for turn in range(3):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md"), note("b.md")))
    sent = client.say(SYSTEM, *stripped(3), asked("q3", note("b.md")))
    assert sent[1] == asked("q0", note("b.md"))
    assert "a.md" not in str(sent)
    assert str(sent).count(WORDS) == 1


def test_a_new_item_stands_in_its_turn_and_stays_there() -> None:
    """What stood before it stays where it is."""
    client = Client()
    for turn in range(3):
        before = client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md")))
    sent = client.say(SYSTEM, *stripped(3), asked("q3", note("b.md"), note("a.md")))
    assert sent[:-1] == [*before, OK]
    assert sent[-1]["content"].startswith(f"{note('b.md')}\n\nContext attached:")
    again = client.say(SYSTEM, *stripped(4), asked("q4", note("b.md"), note("a.md")))
    assert again == [*sent, OK, referenced("q4", "b.md", "a.md")]


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
    """Its old version is gone from where it stood; what came again stands where it stood."""
    client = Client()
    for turn in range(3):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md"), note("b.md")))
    notes = [note("a.md"), note("b.md", 2)]
    sent = client.say(SYSTEM, *stripped(3), asked("q3", *notes))
    assert sent[1] == asked("q0", note("a.md"))
    assert sent[-1]["content"].endswith(f"conversation.\n\n{note('b.md', 2)}\n\nq3")
    again = client.say(SYSTEM, *stripped(4), asked("q4", *notes))
    assert again == [*sent, OK, referenced("q4", "a.md", "b.md")]


def test_where_most_have_changed_the_log_begins_anew() -> None:
    """With the turn that brings others; the client is still believed to send all again."""
    client = Client()
    for turn in range(3):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("a.md"), note("b.md")))
    notes = [note("a.md", 2), note("b.md", 2)]
    third = [*stripped(3), asked("q3", *notes)]
    assert client.say(SYSTEM, *third)[1:] == third
    sent = client.say(SYSTEM, *stripped(4), asked("q4", *notes))
    assert sent[1:] == [*third, OK, referenced("q4", "a.md", "b.md")]


def test_a_new_conversation_of_the_tenant_begins_with_what_others_sent_again() -> None:
    """In one order, whatever order it comes in: that is what conversations share."""
    client = Client()
    for turn in range(2):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("b.md"), note("a.md")))
    other = Client(store=client.store)
    sent = other.say(SYSTEM, asked("else", note("a.md"), note("new.md"), note("b.md")))
    assert shelved(sent) == ["b.md", "a.md"]
    assert note("new.md") in sent[1]["content"]
    again = other.say(SYSTEM, user("else"), OK, asked("more", note("new.md"), note("a.md"), note("b.md")))
    assert again[: len(sent)] == sent
    third = [user("else"), OK, user("more"), OK, asked("and", note("a.md"), note("new.md"), note("b.md"))]
    assert other.say(SYSTEM, *third)[: len(again)] == again


def test_turns_about_what_stands_in_the_library_are_put_back_too() -> None:
    """They only refer; that nothing else stands in them is no reason to begin anew."""
    client = Client()
    for turn in range(2):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", A, B))
    other, before = Client(store=client.store), Messages()
    for turn in range(5):
        sent = other.say(SYSTEM, user("else"), OK, *stripped(turn), asked(f"q{turn}", B, A))
        assert shelved(sent) == ["a.md", "b.md"]
        assert sent[: len(before)] == before
        before = sent


def test_what_anybody_may_have_written_stands_with_the_user() -> None:
    """The library of web pages never enters the system message."""
    client = Client()
    for turn in range(2):
        client.say(SYSTEM, *stripped(turn), asked(f"q{turn}", note("https://a", tag="url_content")))
    sent = Client(store=client.store).say(SYSTEM, asked("else", note("https://a", tag="url_content")))
    assert sent[0]["content"] == SYSTEM
    assert sent[1]["content"].startswith("<untrusted_context_library>")


def test_two_that_begin_with_the_same_words_are_two() -> None:
    """Each keeps what it attached."""
    one = Client()
    two = Client(store=one.store)
    one.say(SYSTEM, asked("Summarize this.", note("a.md")))
    two.say(SYSTEM, asked("Summarize this.", note("b.md")))
    begun = [user("Summarize this."), OK]
    for client, name in ((one, "a.md"), (two, "b.md")):
        sent = client.say(SYSTEM, *begun, asked("more", note(name)))
        assert sent[1:] == [asked("Summarize this.", note(name)), OK, referenced("more", name)]


def test_another_conversation_that_begins_with_the_same_words_takes_nothing_over() -> None:
    """What was attached there was not attached here: who was given another answer is somebody else."""
    one = Client()
    for first, later in ((note("b.md"), note("c.md")), ("", note("d.md"))):
        two = Client(store=one.store)
        one.say(None, asked("Hi", A), answer={"role": "assistant", "content": "Hello, a.md."})
        two.say(None, asked("Hi", *[first] * bool(first)))
        messages = [user("Hi"), OK, asked("What of it?", A, later)]
        assert two.say(None, *messages) == messages


def test_a_library_without_a_system_message() -> None:
    """It stands at the head of the first user message."""
    client = Client()
    for turn in range(2):
        client.say(None, *stripped(turn), asked(f"q{turn}", note("a.md")))
    assert Client(store=client.store).say(None, asked("else", A))[0]["content"].startswith("<context_library>")


def requested(*messages: dict[str, Any]) -> Request:
    return read_body({"messages": [{"role": "system", "content": SYSTEM}, *messages]})


def stand(messages: Messages, stood: Standing | None, known: Known, *, frozen: bool = False) -> Recurring:
    request = requested(*messages)
    return stands(request, sent(request, b"key"), stood, known, frozen=frozen)


def digests(*notes: str) -> tuple[bytes, ...]:
    return tuple(sent(requested(asked("q", *notes)), b"key").brought)


def logged(*places: bytes) -> tuple[Recipe, ...]:
    return tuple(Recipe(place, ((b"item", Words("", 1, "")),)) for place in places)


LONG = [asked("x" * 9_000), OK]
FIRST, HERE = keyed(requested(*LONG, asked("q")).places[1], b"key"), b"elsewhere"
ONE, TWO = logged(HERE), logged(HERE, FIRST)


@pytest.mark.parametrize(
    ("stood", "messages", "shelf", "calm", "goes_on"),
    [
        pytest.param(Standing(log=ONE), [asked("q", A)], (), 0, False, id="nothing was brought before"),
        pytest.param(Standing(brought=digests(A), log=ONE), [asked("q", A)], (), 1, True, id="sent again"),
        pytest.param(Standing(brought=digests(A), log=TWO), [asked("q")], (), -2, False, id="not sent again"),
        pytest.param(Standing(brought=digests(A, B), log=TWO), [asked("q", A)], (), -2, False, id="some sent again"),
        pytest.param(Standing(brought=digests(A), calm=-2, log=ONE), [asked("q", A)], (), -1, False,
                     id="not believed yet"),
        pytest.param(Standing(brought=digests(A), log=logged(FIRST)), [*LONG, asked("q", A)], (), 1, False,
                     id="too much behind it"),
        pytest.param(Standing(brought=digests(A), calm=20, log=logged(FIRST)), [*LONG, asked("q", A)], (), 21, True,
                     id="not too much, as often as it has come"),
        pytest.param(Standing(brought=digests(A), log=logged(FIRST, HERE)), [*LONG, asked("q", A)], (), 1, True,
                     id="what goes on goes on"),
        pytest.param(Standing(brought=digests(A, B), calm=5, log=TWO), [asked("q", A)], (), 5, True,
                     id="some may go where all came again"),
        pytest.param(Standing(brought=digests(A), calm=5, log=TWO), [asked("q", B)], (), 0, False,
                     id="it begins anew where all have gone"),
        pytest.param(Standing(shelf=digests(A, B)), [asked("q", B)], (), -2, False,
                     id="the library ends where one has gone"),
        pytest.param(Standing(shelf=digests(A, B)), [asked("p", A), OK, asked("q", B)], digests(A, B), 1, False,
                     id="anywhere in the request"),
        pytest.param(Standing(shelf=digests(A), calm=5), [asked("q", A)], digests(A), 6, False, id="it goes on"),
    ],
)  # fmt: skip
def test_what_stands_again(
    stood: Standing, messages: Messages, shelf: tuple[bytes, ...], calm: int, goes_on: bool
) -> None:
    """What stands in L2, whether earlier turns are put back, and how long all has come again."""
    found = stand(messages, stood, Known(b"key", answered=True))
    assert stand(messages, stood, Known(b"key")).log == ()
    assert (found.shelf, found.calm, found.log) == (shelf, calm, stood.log if goes_on else ())
    assert len(found.library.items) == len(shelf)


def test_signed_reasoning_keeps_its_place() -> None:
    """Nothing is added in front of it, and what stood there when it was made stands there again."""
    begun = stand([asked("q", A)], None, Known(b"key", recurring=digests(A)), frozen=True)
    assert begun.shelf == ()
    client, signed = Client(), {**OK, "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}
    first = client.say(SYSTEM, asked("q0", A))
    assert client.say(SYSTEM, user("q0"), signed, asked("q1", A)) == [*first, signed, referenced("q1", "a.md")]


def test_an_image_is_no_matter() -> None:
    """What may not move is not counted as sent again."""
    image = "<note_context><path>i.md</path>data:image/png;base64," + "A" * 2_000 + "</note_context>"
    assert digests(image) == ()


SMALL = "<file>\n{}\n</file>"
ALIKE = "<document>\n" + WORDS + "{}\n</document>"


@pytest.mark.parametrize(
    "notes",
    [
        pytest.param([A, *[SMALL.format(number) for number in range(20)]], id="short ones"),
        pytest.param([A, ALIKE.format(1), ALIKE.format(2)], id="two that name themselves nowhere and begin alike"),
        pytest.param([A, note("b.md", 1), note("b.md", 2)], id="two versions of one"),
    ],
)
def test_a_prompt_does_not_grow_by_what_comes_again(notes: list[str]) -> None:
    """What no line could refer to stands in the newest turn, and nowhere else."""
    client = Client()
    for turn in range(8):
        messages = [*stripped(turn), asked(f"q{turn}", *notes)]
        sent = client.say(SYSTEM, *messages)
        for each in notes:
            assert str(sent).count(str([each])[2:-2]) == 1
    assert sent[1]["content"].startswith(A)


def test_a_body_of_many_blocks_is_its_clients_to_spell() -> None:
    """Of thousands nothing is noted, and nothing takes long."""
    client, many = Client(), [A, *[SMALL.format(number) for number in range(4_000)]]
    client.say(SYSTEM, asked("q0", *many))
    messages = [user("q0"), OK, asked("q1", *many)]
    assert client.say(SYSTEM, *messages)[1:] == messages


@pytest.mark.parametrize(("model", "most"), [("gpt-4o", 2.1), ("nobody-knows-it", 1.2)])
def test_lines_that_refer_do_not_pile_up(model: str, most: float) -> None:
    """They weigh no more than what they refer to, and little where nobody knows how much the model takes."""
    client, notes = Client(model=model), [note(f"{number} {'long name ' * 25}.md")[:700] for number in range(10)]
    notes = [f"{text}\n</note_context>" for text in notes]
    for turn in range(40):
        messages = [*stripped(turn), asked(f"q{turn}", *notes)]
        sent = client.say(SYSTEM, *messages)
        assert len(str(sent)) < most * len(str(messages)) + 2_000


def test_nothing_is_dropped_for_what_is_put_back() -> None:
    """Where all would not fit the budget, turns stand as the client sends them, and the log begins anew."""
    client, notes = Client(), [note(f"{number} {'long name ' * 12}.md") for number in range(12)]
    longest = 0
    for turn in range(30):
        messages = [*stripped(turn), asked(f"q{turn}", *notes)]
        sent = client.say(SYSTEM, *messages, budget=4_096 + 6_000)
        assert client.made is not None
        assert client.made.actions == ()
        longest = max(longest, len(client.made.draft.forms))
    assert 2 < longest < 28
    assert len(sent) == 60


def test_a_loop_of_another_conversation_takes_nothing_over() -> None:
    """The answer decides there as well: a call is one."""
    function = {"name": "look", "arguments": "{}"}

    def called(name: str) -> Messages:
        calls = [{"id": name, "type": "function", "function": {**function, "name": name}}]
        return [{"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": name, "content": "found"}]  # fmt: skip

    one = Client()
    one.say(SYSTEM, asked("Hi", A), answer=called("a")[0])
    one.say(SYSTEM, asked("Hi", A), *called("a"))
    two = Client(store=one.store)
    two.say(SYSTEM, user("Hi"), answer=called("b")[0])
    two.say(SYSTEM, user("Hi"), *called("b"))
    messages = [user("Hi"), *called("b"), OK, asked("And now?", A)]
    assert two.say(SYSTEM, *messages)[1:] == messages


def test_values_come_last_in_the_role_that_l1_has() -> None:
    """Some models take `developer` only."""
    client = Client()
    for turn in range(3):
        first = {"role": "developer", "content": f"Time: 10:0{turn}\n{WORDS}"}
        sent = client.say(None, first, *stripped(turn), user(f"q{turn}"))
    assert (sent[0]["role"], sent[-1]["role"]) == ("developer", "developer")
    assert "10:02" in sent[-1]["content"]


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


def test_a_library_stands_while_its_version_is_in_the_request() -> None:
    """A new version of an item in a later turn takes nothing out of what stands in front."""
    other = Client()
    for turn in range(4):
        other.say(SYSTEM, *stripped(turn), asked(f"q{turn}", A, B))
    client, said = Client(store=other.store), [asked("one", A, B)]
    first = client.say(SYSTEM, *said)
    assert shelved(first) == ["a.md", "b.md"]
    before = first
    for turn in (asked("two", note("a.md", 2)), user("three"), user("four")):
        said += [OK, turn]
        now = client.say(SYSTEM, *said)
        assert now[: len(before)] == before
        before = now
