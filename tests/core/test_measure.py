"""What each layer of a forwarded prompt weighs."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.core import measure, tokens
from proxy.core.measure import Layers
from proxy.core.plan import Plan
from proxy.core.request import Request
from proxy.memo import TokenScale, count

Make = Callable[..., tuple[Request, Plan]]
WORDS = "word " * 80


def note(name: str, words: str = WORDS) -> str:
    return f"<note_context><path>{name}</path>{words}</note_context>"


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "You help."}


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


OK = {"role": "assistant", "content": "ok"}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("Hi")]},
    "no messages": {"messages": []},
    "tools and a format": {
        "messages": [SYSTEM, user("Hi")],
        "tools": TOOLS,
        "response_format": {"type": "json_object"},
    },
    "functions": {"messages": [user("Hi")], "functions": [{"name": "f"}]},
    "history": {"messages": [SYSTEM, user("a"), OK, user("b"), OK, user("c")]},
    "a new item": {"messages": [SYSTEM, user(note("a.md") + "\n\nWhy?")]},
    "a reference": {"messages": [SYSTEM, user(note("a.md") + "\n\nWhy?"), OK, user(note("a.md") + "\n\nAgain?")]},
    "both": {"messages": [user(note("a.md")), OK, user(note("a.md") + note("b.md") + "Again?")]},
    "parts": {"messages": [user([{"type": "text", "text": note("a.md")}, {"type": "text", "text": "Why?"}])]},
    "an image": {"messages": [user([{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "?"}])]},
    "context": {"messages": [SYSTEM, user("Why?")], "strata": {"context": [{"id": "a", "content": WORDS}]}},
    "context and no user": {"messages": [SYSTEM], "strata": {"context": [{"id": "a", "content": WORDS}]}},
    "adjacent items": {"messages": [user("".join(note(f"{n}.md") for n in range(20)))]},
    "a system item": {"messages": [{"role": "system", "content": note("a.md")}, user(note("a.md"))]},
    "a tool's output": {"messages": [user(f"<webSearch>{WORDS}</webSearch>\nWhy?")]},
    "an agent": {
        "messages": [
            user("Go."),
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ]
    },
}


def whole(sent: bytes) -> int:
    """The tokens of a forwarded body, counted from its bytes alone."""
    body = orjson.loads(sent)
    schemas = sum(
        tokens.schema(orjson.dumps(body[key]), count)
        for key in ("tools", "functions", "response_format")
        if key in body
    )
    return tokens.PRIMING + schemas + sum(tokens.message(orjson.dumps(said), count) for said in body["messages"])


@pytest.mark.parametrize("name", BODIES)
def test_layers_add_up_to_what_is_sent(name: str, make: Make, forward: Callable[..., bytes], scale: TokenScale) -> None:
    """No token of the forwarded body is counted twice or left out, and none is negative."""
    found, made = make(BODIES[name])
    layers = measure.layers(found, made.draft, scale)
    assert layers.total == whole(forward(BODIES[name]))
    assert min(layer.tokens for layer in layers.each) >= 0
    assert [layer.name for layer in layers.each] == list(measure.NAMES)


@pytest.mark.parametrize("cut", [False, True])
def test_a_library_is_weighed_in_its_layer(cut: bool, talk: Callable[[], Any], make: Make, scale: TokenScale) -> None:
    """L2 holds the library's tokens, wherever its halves stand; the sum stays exact."""
    page = f"<url_content><url>https://a.b</url>{WORDS}</url_content>"
    chat = talk()
    chat.say({"messages": [SYSTEM, user(f"{note('a.md')}\n{page}\nWhy?")]}, "ok", promotion="eager")
    body = {"messages": [SYSTEM, user("Why?"), OK, user(note("a.md") + "\n\nAgain?")]}
    how: dict[str, Any] = {"promotion": "eager", "budget": 4_300 if cut else None}
    found, made = make(body, chat.recalled, named=True, **how)
    layers = measure.layers(found, made.draft, scale)
    assert layers.total == whole(chat.say(body, **how))
    by_name = {layer.name: layer for layer in layers.each}
    assert (by_name["L2"].tokens > 160) is not cut
    assert by_name["L1"].tokens == tokens.message(orjson.dumps(SYSTEM), count)
    assert (by_name["L2"].sha256 == "") is cut


def weigh(body: dict[str, Any], make: Make, scale: TokenScale) -> dict[str, tuple[int, str]]:
    found, made = make(body)
    layers: Layers = measure.layers(found, made.draft, scale)
    return {layer.name: (layer.tokens, layer.sha256) for layer in layers.each}


def test_each_layer_holds_its_own(make: Make, scale: TokenScale) -> None:
    """Changing one layer moves its digest and no other's."""
    base: dict[str, Any] = {"messages": [SYSTEM, user("a"), OK, user(note("a.md") + "\n\nWhy?")], "tools": TOOLS}
    changes = {
        "tools": {**base, "tools": [*TOOLS, *TOOLS]},
        "L1": {**base, "messages": [{"role": "system", "content": "Help!"}, *base["messages"][1:]]},
        "L3": {**base, "messages": [*base["messages"][:3], user(note("b.md") + "\n\nWhy?")]},
        "L4": {**base, "messages": [SYSTEM, user("b"), OK, base["messages"][3]]},
        "L5": {**base, "messages": [*base["messages"][:3], user(note("a.md") + "\n\nHow?")]},
    }
    before = weigh(base, make, scale)
    assert all(before[name][0] > 0 for name in changes)
    for changed, body in changes.items():
        after = weigh(body, make, scale)
        assert {name for name in before if before[name][1] != after[name][1]} == {changed}


def test_what_is_packed_is_counted_as_lost(make: Make, scale: TokenScale) -> None:
    """What `strata.context` brings and the limit makes smaller: a double goes whole, a long item loses its end."""
    words = " ".join(f"Sentence number {number} says thing {number * 7}." for number in range(3_000))
    context = [
        {"id": "a", "content": words},
        {"id": "b", "content": words[:-50]},
        {"id": "c", "content": "Short. " * 40},
    ]
    found, made = make({"messages": [user("Why?")], "strata": {"context": context}}, budget=9_000)
    lost = measure.losses(found, made.draft, scale)
    assert made.actions == ("context_packed",)
    assert lost.shortened_items == 2
    kept = sum(layer.tokens for layer in measure.layers(found, made.draft, scale).each)
    whole = sum(scale.text(item.content) for item in found.hints.context)
    assert abs(whole - lost.shortened_tokens - kept) < 50


def test_an_empty_layer_has_no_digest(make: Make, scale: TokenScale) -> None:
    """The prime of the reply is L5's."""
    assert weigh({"messages": []}, make, scale) == {
        "tools": (0, ""), "L1": (0, ""), "L2": (0, ""), "L3": (0, ""), "L4": (0, ""), "L5": (tokens.PRIMING, ""),
    }  # fmt: skip
