"""L1…L5 of one request: where things stand, and what is referenced instead."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest

Forward = Callable[..., bytes]
WORDS = "word " * 80
A, A2, B, SHORT = (
    f"<note_context><path>{name}</path>{words}</note_context>"
    for name, words in [("a.md", WORDS), ("a.md", WORDS + "2"), ("b.md", WORDS), ("s.md", "short")]
)
FILE_A = f'<file path="a.md">{WORDS}</file>'
U1, U2, U3 = (f"<document>{words}</document>" for words in (WORDS + "1", WORDS + "2", "other " + WORDS))


def above(*names: str) -> str:
    return "\n".join(["Context attached:", *(f"- {name}" for name in names), "Find them above in this conversation."])


def users(texts: Sequence[str]) -> list[dict[str, str]]:
    talk: list[dict[str, str]] = []
    for text in texts:
        talk += [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    return talk[:-1]


@pytest.mark.parametrize(
    ("sent", "forwarded"),
    [
        pytest.param([A, A], [A, above("a.md")], id="a repeat"),
        pytest.param([A, "x", A], [A, "x", above("a.md")], id="a repeat, later"),
        pytest.param([A, A, A], [A, above("a.md"), above("a.md")], id="again and again"),
        pytest.param([A, A2], [A, A2], id="a new version stands in full"),
        pytest.param([A, A2, A2], [A, A2, above("a.md")], id="the newest version is referenced"),
        pytest.param([A, A2, A], [A, A2, A], id="an old version that comes back stands in full"),
        pytest.param([SHORT, SHORT], [SHORT, SHORT], id="short blocks are left alone"),
        pytest.param([A, f"{A}\n{B}"], [A, f"{above('a.md')}\n{B}"], id="only the repeat"),
        pytest.param([A + B, f"{B}\n\n{A}\nx"], [A + B, f"{above('b.md', 'a.md')}\nx"], id="neighbours share a frame"),
        pytest.param([A + B, f"{B}\nand\n{A}"], [A + B, f"{above('b.md')}\nand\n{above('a.md')}"], id="words between"),
        pytest.param(
            [A + B, f"{A}{SHORT}{B}"], [A + B, f"{above('a.md')}\n{SHORT}\n{above('b.md')}"], id="a block between"
        ),
        pytest.param([f"{A}\n{A}"], [f"{A}\n{above('a.md')}"], id="twice in one message"),
        pytest.param([A, FILE_A], [A, FILE_A], id="another tag is another item"),
        pytest.param(
            [A + FILE_A, A, FILE_A],
            [A + FILE_A, above("a.md (note_context)"), above("a.md (file)")],
            id="the tag tells namesakes apart",
        ),
        pytest.param([U3, U3], [U3, above(f'"other {WORDS[:54]}…"')], id="a block without a name, by its first words"),
        pytest.param([U1, U2, U1, U2], [U1, U2, U1, U2], id="two without a name that begin alike stand in full"),
        pytest.param([A, f"<webSearch>{A}</webSearch>"], [A, f"<webSearch>{A}</webSearch>"], id="in a tool's output"),
        pytest.param([f"<webSearch>{A}</webSearch>", A], [f"<webSearch>{A}</webSearch>", A], id="a tool's is no item"),
    ],
)
def test_only_repeats_are_replaced(sent: list[str], forwarded: list[str], forward: Forward) -> None:
    """In place, by a reference to what stands earlier in this very request."""
    body = forward({"model": "gpt-4o", "messages": users(sent)})
    assert orjson.loads(body)["messages"] == users(forwarded)


def test_items_of_assistants_are_plain_text(forward: Forward) -> None:
    """A note an assistant quotes does not stand; the client's own next one does."""
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": A}, *users([A, A])]}
    assert orjson.loads(forward(body))["messages"][2:] == users([A, above("a.md")])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_keep_their_bytes(role: str, forward: Forward) -> None:
    """Their items are referenced, leading or in mid-conversation, and what repeats in them stays."""
    system = {"role": role, "content": f"<webSearch>{B}</webSearch>{A}\n{A}"}
    middle = {"role": role, "content": f"{A}{B}"}
    talk = [system, *users([A]), {"role": "assistant", "content": "ok"}, middle, *users([B])]
    sent = orjson.loads(forward({"messages": talk}))["messages"]
    assert sent == [
        system, *users([above("a.md")]), {"role": "assistant", "content": "ok"}, middle, *users([above("b.md")]),
    ]  # fmt: skip


def context(name: str, words: str = WORDS) -> dict[str, str]:
    return {"id": name, "content": words, "type": "note"}


def block(name: str, words: str = WORDS) -> str:
    return f'<document id="{name}" type="note">\n{words}\n</document>'


@pytest.mark.parametrize(
    ("given", "before"),
    [
        pytest.param([context("a")], [block("a")], id="one"),
        pytest.param([context("a"), context("b")], [block("a"), block("b")], id="two"),
        pytest.param([context("a"), context("a", WORDS + "2")], [block("a"), block("a", WORDS + "2")], id="versions"),
        pytest.param([], [], id="none"),
    ],
)
def test_explicit_context_stands_before_the_users_words(
    given: list[dict[str, str]], before: list[str], forward: Forward
) -> None:
    """In L3 of the newest user message, separated by one blank line."""
    sent = orjson.loads(forward({"messages": users(["x", "Why?"]), "strata": {"context": given}}))
    assert sent["messages"][-1]["content"] == "\n\n".join([*before, "Why?"])
    assert sent["messages"][:-1] == users(["x", "Why?"])[:-1]


def test_context_given_twice_stands_once(forward: Forward) -> None:
    """A reference to it, if any, stands behind it and never before."""
    body = {"messages": users(["Why?"]), "strata": {"context": [context("a"), context("b"), context("a")]}}
    text = orjson.loads(forward(body))["messages"][0]["content"]
    assert (text.count(block("a")), text.count(block("b"))) == (1, 1)
    assert text.rfind(block("a")) < text.find("Context attached:") or "Context attached:" not in text


def test_a_reference_never_looks_forward(forward: Forward) -> None:
    """Context put in front, for want of a user message, does not refer to what stands behind it."""
    note = f'<document id="a">\n{WORDS}\n</document>'
    talk = [{"role": "assistant", "content": "Hi"}, {"role": "system", "content": note}]
    body = {"messages": talk, "strata": {"context": [{"id": "a", "content": WORDS}]}}
    sent = orjson.loads(forward(body))["messages"]
    assert sent == [{"role": "user", "content": note}, *talk]


SYSTEM = {"role": "system", "content": "You help."}
PAGE = f"<url_content><url>https://a.b</url>{WORDS}</url_content>"


def eager(chat: Any) -> Callable[..., bytes]:
    return functools.partial(chat.say, promotion="eager")


def in_library(*names: str) -> str:
    return "\n".join(["Context attached:", *(f"- {name}" for name in names), "Find them in the Context Library above."])


def test_what_a_named_client_left_out_stands_in_the_library(talk: Callable[[], Any]) -> None:
    """Trusted items join L1, one blank line behind it; others stand at the head of the first user message."""
    chat = eager(talk())
    chat({"messages": [SYSTEM, *users([f"{A}\n{PAGE}\n\nOne?"])]}, "ok")
    sent = orjson.loads(chat({"messages": [SYSTEM, *users(["One?", f"{A}\n{PAGE}\n\nTwo?"])]}))["messages"]
    assert sent[0]["content"].startswith("You help.\n\n<context_library>\n")
    assert sent[0]["content"].endswith(f"\n\n{A}\n</context_library>")
    assert PAGE not in sent[0]["content"]
    assert sent[1]["content"].startswith("<untrusted_context_library>\n")
    assert sent[1]["content"].endswith(f"\n\n{PAGE}\n</untrusted_context_library>\n\nOne?")
    assert sent[3]["content"] == f"{in_library('a.md', 'https://a.b')}\n\nTwo?"


def test_without_a_system_message_the_library_stands_in_the_first_user_message(talk: Callable[[], Any]) -> None:
    """No message is added for it, and nothing enters a role that the client did not use."""
    chat = eager(talk())
    chat({"messages": users([f"{A}\n{PAGE}\n\nOne?"])}, "ok")
    sent = orjson.loads(chat({"messages": users(["One?", "Two?"])}))["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[0]["content"].startswith("<context_library>\n")
    assert sent[0]["content"].index("</context_library>\n\n<untrusted_context_library>") > 0
    assert sent[0]["content"].endswith("\n\nOne?")
    assert sent[2]["content"] == "Two?"


def test_a_library_item_and_one_in_history_are_referred_to_as_above(talk: Callable[[], Any]) -> None:
    """One frame for both places says where to look."""
    chat = eager(talk())
    chat({"messages": [SYSTEM, *users([f"{A}\n\nOne?"])]}, "ok")
    sent = orjson.loads(chat({"messages": [SYSTEM, *users(["One?", f"{B}\n\nTwo?", f"{A}\n{B}\n\nThree?"])]}))
    assert sent["messages"][-1]["content"] == f"{above('a.md', 'b.md')}\n\nThree?"


def test_the_library_stands_in_the_first_user_message_that_can_take_it(talk: Callable[[], Any]) -> None:
    """One without any text is passed over."""
    chat = eager(talk())
    empty = [{"role": "user", "content": None}, {"role": "assistant", "content": "ok"}]
    chat({"messages": [*empty, *users([f"{A}\n\nOne?"])]}, "ok")
    sent = orjson.loads(chat({"messages": [*empty, *users(["One?", "Two?"])]}))["messages"]
    assert sent[:2] == empty
    assert sent[2]["content"].startswith("<context_library>\n")
    assert sent[2]["content"].endswith("</context_library>\n\nOne?")


def test_parts_get_the_library_as_a_part(talk: Callable[[], Any]) -> None:
    """A system message in parts stays one, its own parts and their cache_control untouched."""
    part = {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}
    system = {"role": "system", "content": [part]}
    chat = eager(talk())
    chat({"messages": [system, *users([f"{A}\n\nOne?"])]}, "ok")
    sent = orjson.loads(chat({"messages": [system, *users(["One?", "Two?"])]}))["messages"]
    assert sent[0]["content"][0] == part
    assert sent[0]["content"][1]["type"] == "text"
    assert sent[0]["content"][1]["text"].startswith("\n\n<context_library>\n")


@pytest.mark.parametrize("content", [None, [], ""])
def test_a_system_message_without_text_still_makes_json(content: object, talk: Callable[[], Any]) -> None:
    """Whatever its content is, the forwarded body is JSON and the library stands somewhere in it."""
    chat = eager(talk())
    system = {"role": "system", "content": content}
    chat({"messages": [system, *users([f"{A}\n\nOne?"])]}, "ok")
    sent = chat({"messages": [system, *users(["One?", "Two?"])]})
    assert orjson.dumps(A)[1:-1] in orjson.dumps(orjson.loads(sent))
