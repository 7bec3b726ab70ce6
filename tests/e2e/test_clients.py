"""A session of the real SDK for each kind of client: every answer comes, and more of it is read from the prompt cache.

The provider's own accounting is the witness; each session is played straight and through Strata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from proxy.simulator.app import Simulator, create
from proxy.simulator.server import serve
from tests.e2e.kit import MODEL, note, strata

RULES = "\n".join(f"Rule {number} stands for every customer, every order and every return." for number in range(120))
Messages = list[dict[str, Any]]
Turn = tuple[str, Messages, dict[str, Any]]
"""The conversation's name, the messages in front of the newest and the newest, what else is asked for."""


def talk(turns: int, system: Callable[[int], str] = lambda _: RULES, name: str = "", last: int = 99,
         attached: Callable[[int], list[str]] = lambda _: [], **more: Any) -> Iterator[Turn]:  # fmt: skip
    """Play a client that keeps bare words, at most `last` of them, and attaches to its newest message."""
    history: Messages = []
    for turn in range(turns):
        words = f"Question {turn} " + "about orders and returns " * 20
        newest = {"role": "user", "content": "\n\n".join([*attached(turn), words])}
        yield name, [{"role": "system", "content": system(turn)}, *history[-last:], newest], more
        history += [{"role": "user", "content": words}, {"role": "assistant", "content": f"Answer {turn}."}]


def clock(turn: int) -> str:
    return f"Time: 10:{turn:02}\n{RULES}"


def memory(turn: int) -> str:
    facts = "\n".join(f"Fact {number}: the customer likes the number." for number in range(turn // 2 + 1))
    return f"<memory>\n{facts}\n</memory>\n{RULES}"


def documents(turn: int) -> list[str]:
    return [note(f"doc-{number}.md", f"Document {number} says many things. ") for number in range(1 + turn // 3)]


def forks() -> Iterator[Turn]:
    """A named conversation with a side request, a regenerated answer and an edited question."""
    turns = list(talk(8, name="chat", attached=documents))
    for place, (name, messages, more) in enumerate(turns):
        yield name, messages, more
        if place == 2:
            yield (
                name,
                [{"role": "system", "content": "You name chats."}, {"role": "user", "content": "A title?"}],
                more,
            )
            yield name, messages, more
        if place == 4:
            yield name, [*messages[:-3], {"role": "user", "content": "Another question."}], more


def tools(turn: int) -> list[dict[str, Any]]:
    made = [{"type": "function", "function": {"name": f"tool_{number}", "description": "looks up an order " * 20}}
            for number in range(10)]  # fmt: skip
    return made[turn:] + made[:turn]


SESSIONS: dict[str, tuple[Callable[[], Iterator[Turn]], float]] = {
    "append-only": (lambda: talk(8), 1.0),
    "clock": (lambda: talk(8, clock), 0.5),
    "clock, named": (lambda: talk(8, clock, name="chat"), 0.5),
    "memory": (lambda: talk(10, memory), 0.7),
    "strips and attaches again, named": (lambda: talk(9, name="chat", attached=documents), 0.7),
    "strips and attaches again, anonymous": (lambda: talk(9, attached=documents), 0.8),
    "tools shuffled": (
        lambda: ((name, messages, {"tools": tools(turn)}) for turn, (name, messages, _) in enumerate(talk(8))), 0.4,
    ),
    "windowed": (lambda: talk(14, name="chat", last=8), 0.8),
    "forks": (forks, 0.85),
}  # fmt: skip


async def play(client: AsyncOpenAI, turns: Iterator[Turn], *, stream: bool) -> None:
    """Ask each; where a history holds an answer, it is the one that was given."""
    given: dict[str, str] = {}
    for name, messages, more in turns:
        headers = {"x-strata-conversation": name} if name else {}
        said = [{**message, "content": given.get(message["content"], message["content"])} for message in messages]
        asked: Any = {"model": MODEL, "messages": said, "extra_headers": headers, **more}
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **asked)]
            answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        else:
            answer = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
        assert answer
        place = messages[-1]["content"].split("Question ")[-1].split()[0]
        given[f"Answer {place}."] = answer


def uncached(simulator: Simulator) -> int:
    entries = [entry for entry in simulator.requests if entry.charge is not None]
    assert entries
    return sum(entry.charge.prompt_tokens - entry.charge.cached_tokens for entry in entries if entry.charge)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_session_of_the_sdk(kind: str, stream: bool) -> None:
    """What a client breaks today costs less through Strata; what it does not break costs the same."""
    turns, most = SESSIONS[kind]
    straight, through = create(), create()
    async with serve(straight) as provider, AsyncOpenAI(api_key="k", base_url=provider.origin + "/v1") as client:
        await play(client, turns(), stream=stream)
    async with (
        serve(through) as provider,
        strata(provider.origin + "/v1", WINDOWED="true") as proxy,
        AsyncOpenAI(api_key="k", base_url=proxy.origin + "/v1") as client,
    ):
        await play(client, turns(), stream=stream)
    own, ours = uncached(straight.state.simulator), uncached(through.state.simulator)
    assert len(through.state.simulator.requests) == len(straight.state.simulator.requests)
    assert ours <= most * own
