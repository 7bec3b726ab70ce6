"""Seeded traffic as real clients send it: what each kind of client keeps, strips, repeats, shuffles or changes.

A workload is a list of exchanges in the order of time. The replies are part of the traffic, so that every strategy is
measured on the same words.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Chat = list[dict[str, Any]]
MODEL = "gpt-5.1"
_WORDS = [
    "order", "ledger", "retry", "window", "tenant", "replica", "importer", "gateway", "audit", "schema", "manifest",
    "invoice", "queue", "deadline", "owner", "release", "canary", "metric", "budget", "prompt", "layer", "reader",
    "writer", "review", "contract", "notice", "supplier", "breach", "signature", "draft", "summary", "before", "after",
    "during", "without", "unless", "within", "every", "neither", "because", "whether", "support", "explains", "checks",
    "keeps", "publishes", "compares", "rewrites", "stores", "returns", "waits", "closes", "opens", "counts", "names",
    "moves", "reads", "drops", "sends",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request at a time (seconds), and what the model answers. `name` is the conversation's id, where sent.

    `thread` tells conversations apart for the floor, whatever the client says.
    """

    at: float
    thread: str
    name: str | None
    body: bytes
    reply: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Exchanges, and whether the client breaks its own prompt cache today."""

    title: str
    breaks: bool
    exchanges: tuple[Exchange, ...]
    budget_tokens: int | None = None


@dataclass(slots=True)
class _Client:
    """One conversation of a client that keeps `history` in its own form."""

    rng: random.Random
    thread: str
    named: bool
    system: Callable[[int], str]
    history: Chat = field(default_factory=list)
    turn: int = 0

    def ask(self, attached: Sequence[str], *, keeps: bool, window: int = 0, **extra: Any) -> Exchange:
        words = sentence(self.rng, 14)
        sent = {"role": "user", "content": "\n\n".join([*attached, words])}
        history = self.history[-window:] if window else self.history
        reply = {"role": "assistant", "content": sentence(self.rng, 60)}
        body = {"model": MODEL, "messages": [{"role": "system", "content": self.system(self.turn)}, *history, sent],
                **extra}  # fmt: skip
        self.history += [sent if keeps else {"role": "user", "content": words}, reply]
        self.turn += 1
        return Exchange(
            at=0.0, thread=self.thread, name=self.thread if self.named else None, body=orjson.dumps(body), reply=reply
        )


def sentence(rng: random.Random, words: int) -> str:
    """Return so many words, the same for the same generator."""
    text = " ".join(rng.choice(_WORDS) for _ in range(words))
    return f"{text[0].upper()}{text[1:]}."


def prose(rng: random.Random, sentences: int) -> str:
    """Return a text of many lines."""
    return "\n".join(sentence(rng, 14) for _ in range(sentences))


def note(path: str, text: str) -> str:
    """Return an attached note."""
    return f"<note_context>\n<path>{path}</path>\n<content>\n{text}\n</content>\n</note_context>"


def timed(
    threads: Iterable[Sequence[Exchange]], *, seconds: float = 20.0, pause: float = 900.0
) -> tuple[Exchange, ...]:
    """Interleave conversations in rotation, one more beginning each round.

    Half-way everybody pauses for longer than a short prompt cache lives.
    """
    queues = [(begins, list(thread)) for begins, thread in enumerate(threads)]
    rounds = max(begins + len(queue) for begins, queue in queues)
    at, ordered = 0.0, []
    for place in range(rounds):
        at += pause if place == rounds // 2 else 0.0
        for begins, queue in queues:
            if begins <= place < begins + len(queue):
                at += seconds / len(queues)
                ordered.append(_at(queue[place - begins], at))
    return tuple(ordered)


def _at(exchange: Exchange, at: float) -> Exchange:
    return Exchange(at=at, thread=exchange.thread, name=exchange.name, body=exchange.body, reply=exchange.reply)


def _fixed(text: str) -> Callable[[int], str]:
    return lambda _: text


def workloads(seed: int, traces: Path | None) -> Iterator[Workload]:
    """Return every workload, each with a generator of its own."""
    for make in (
        _agents, _agents_with_clock, _name_and_memory, _notes_named, _notes_anonymous, _active, _repeated,
        _retrieval_named, _retrieval_anonymous, _tools, _long_runs, _windowed, _forks, _shared_documents,
    ):  # fmt: skip
        yield make(random.Random(f"{seed} {make.__name__}"), traces)


def fewer(workload: Workload, most: int) -> Workload:
    """Return a workload of its first conversations only."""
    threads = {*list(dict.fromkeys(exchange.thread for exchange in workload.exchanges))[:most]}
    kept = tuple(exchange for exchange in workload.exchanges if exchange.thread in threads)
    return dataclasses.replace(workload, exchanges=kept)


def _conversations(rng: random.Random, traces: Path | None, count: int) -> Iterator[tuple[str, Chat]]:
    if traces is not None:
        for line in traces.read_bytes().splitlines()[:count]:
            read = orjson.loads(line)
            yield read["conversation"], read["messages"]
        return
    policy = prose(rng, 90)
    for number in range(count):
        chat: Chat = [{"role": "system", "content": policy}]
        for step in range(9):
            chat.append({"role": "user", "content": sentence(rng, 25)})
            if step % 2:
                asked = orjson.dumps({"q": sentence(rng, 3)}).decode()
                function = {"name": "look_up", "arguments": asked}
                call = {"id": f"call_{number}_{step}", "type": "function", "function": function}
                chat += [{"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": call["id"], "content": prose(rng, 6)}]  # fmt: skip
            chat.append({"role": "assistant", "content": sentence(rng, 50)})
        yield f"agent-{number}", chat


def _steps(thread: str, chat: Chat, change: Callable[[Chat, int], Chat] = lambda chat, _: chat, *, named: bool = False,
           **extra: Any) -> list[Exchange]:  # fmt: skip
    """Cut a finished conversation into the requests its client made."""
    steps = []
    for place, message in enumerate(chat):
        if message["role"] in {"user", "tool"} and place + 1 < len(chat) and chat[place + 1]["role"] == "assistant":
            body = {"model": MODEL, "messages": change(chat[: place + 1], len(steps)), **extra}
            steps.append(
                Exchange(at=0.0, thread=thread, name=thread if named else None, body=orjson.dumps(body),
                         reply=chat[place + 1])
            )  # fmt: skip
    return steps


def _agents(rng: random.Random, traces: Path | None) -> Workload:
    threads = [_steps(thread, chat) for thread, chat in _conversations(rng, traces, 16)]
    return Workload(title="agents, append-only", breaks=False, exchanges=timed(threads))


def _agents_with_clock(rng: random.Random, traces: Path | None) -> Workload:
    ticks = iter(range(10**9))

    def clock(chat: Chat, _: int) -> Chat:
        now = f"Current time: 2026-11-29 10:{next(ticks) % 60:02}:{rng.randrange(60):02}"
        return [{**chat[0], "content": f"{now}\n{chat[0]['content']}"}, *chat[1:]]

    threads = [_steps(thread, chat, clock) for thread, chat in _conversations(rng, traces, 40)]
    return Workload(title="agents, a clock in the system prompt", breaks=True, exchanges=timed(threads))


def _name_and_memory(rng: random.Random, _: Path | None) -> Workload:
    policy = prose(rng, 90)
    threads = []
    for number in range(40):
        memories = [sentence(rng, 12) for _ in range(9)]

        def system(turn: int, number: int = number, memories: Sequence[str] = memories) -> str:
            block = "\n".join(memories[: 3 + turn // 2])
            user = f"The user is {_WORDS[number].title()} Smith, customer {number}."
            return f"{user}\n<memory>\n{block}\n</memory>\n{policy}"

        client = _Client(rng, f"user-{number}", named=False, system=system)
        threads.append([client.ask((), keeps=True) for _ in range(8)])
    return Workload(title="user name and a changing memory block", breaks=True, exchanges=timed(threads))


def _note_chats(rng: random.Random, *, named: bool) -> list[list[Exchange]]:
    policy = prose(rng, 80)
    threads = []
    for number in range(8):
        notes = [note(f"folder/{number}-{each}.md", prose(rng, 45)) for each in range(4)]
        client = _Client(rng, f"notes-{number}", named=named, system=_fixed(policy))
        threads.append([client.ask(notes[: 1 + turn // 2], keeps=False) for turn in range(8)])
    return threads


def _notes_named(rng: random.Random, _: Path | None) -> Workload:
    threads = _note_chats(rng, named=True)
    return Workload(title="note chat, strips and re-attaches (named)", breaks=True, exchanges=timed(threads))


def _notes_anonymous(rng: random.Random, _: Path | None) -> Workload:
    threads = _note_chats(rng, named=False)
    return Workload(title="note chat, strips and re-attaches (anonymous)", breaks=True, exchanges=timed(threads))


def _active(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    for number in range(8):
        notes = [note(f"folder/{number}-{each}.md", prose(rng, 45)) for each in range(3)]
        drafts = [f"<active_note>\n<path>{number}.md</path>\n{prose(rng, 20)}\n</active_note>" for _ in range(4)]
        client = _Client(rng, f"active-{number}", named=False, system=_fixed(policy))
        threads.append([client.ask([*notes[: 1 + turn // 3], drafts[turn // 3]], keeps=False) for turn in range(10)])
    title = "notes and one that is being written (anonymous)"
    return Workload(title=title, breaks=True, exchanges=timed(threads))


def _repeated(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    for number in range(8):
        contract = f'<document name="contract-{number}.pdf">\n{prose(rng, 70)}\n</document>'
        client = _Client(rng, f"kept-{number}", named=False, system=_fixed(policy))
        threads.append([client.ask((contract,), keeps=True) for _ in range(8)])
    return Workload(title="attachment kept and sent every turn", breaks=False, exchanges=timed(threads))


def _retrieval_named(rng: random.Random, _: Path | None) -> Workload:
    return _retrieval(rng, "named")


def _retrieval_anonymous(rng: random.Random, _: Path | None) -> Workload:
    return _retrieval(rng, "anonymous")


def _retrieval(rng: random.Random, who: str) -> Workload:
    policy, threads = prose(rng, 80), []
    corpus = [f'<chunk id="doc-{number}:{number % 7}">\n{prose(rng, 12)}\n</chunk>' for number in range(40)]
    for number in range(10):
        client = _Client(rng, f"rag-{number}", named=who == "named", system=_fixed(policy))
        pool = rng.sample(corpus, 9)
        threads.append([client.ask(rng.sample(pool, 5), keeps=False) for _ in range(8)])
    title = f"retrieval of five chunks a turn, by score ({who})"
    return Workload(title=title, breaks=True, exchanges=timed(threads))


def _tools(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    tools = [
        {"type": "function", "function": {"name": f"{rng.choice(_WORDS)}_{number}", "description": sentence(rng, 30),
         "parameters": {"type": "object", "properties": {word: {"type": "string", "description": sentence(rng, 8)}
                                                         for word in rng.sample(_WORDS, 4)}}}}
        for number in range(14)
    ]  # fmt: skip
    for number in range(8):
        client = _Client(rng, f"tools-{number}", named=False, system=_fixed(policy))
        exchanges = []
        for turn in range(8):
            offered = tools[: 10 + turn // 2]
            exchanges.append(client.ask((), keeps=True, tools=rng.sample(offered, len(offered))))
        threads.append(exchanges)
    return Workload(title="tools shuffled and growing", breaks=True, exchanges=timed(threads))


def _long_runs(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    for number in range(4):
        client = _Client(rng, f"long-{number}", named=bool(number % 2), system=_fixed(policy))
        pasted = [prose(rng, 12) for _ in range(80)]
        threads.append([client.ask((text,), keeps=True) for text in pasted])
    return Workload(
        title="long runs over a budget of 12,000", breaks=False, exchanges=timed(threads), budget_tokens=12_000
    )


def _windowed(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    for number in range(8):
        client = _Client(rng, f"window-{number}", named=True, system=_fixed(policy))
        threads.append([client.ask((), keeps=True, window=8) for _ in range(16)])
    return Workload(title="windowed client: its last eight messages", breaks=True, exchanges=timed(threads))


def _forks(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    for number in range(6):
        notes = [note(f"fork/{number}-{each}.md", prose(rng, 45)) for each in range(3)]
        client = _Client(rng, f"fork-{number}", named=True, system=_fixed(policy))
        exchanges: list[Exchange] = []
        for turn in range(8):
            exchanges.append(client.ask(notes[: 1 + turn // 3], keeps=False))
            if turn == 0:
                asked = {"role": "user", "content": f"Give this chat a title: {client.history[0]['content']}"}
                namer = {"role": "system", "content": "You name conversations."}
                title = {"model": MODEL, "messages": [namer, asked]}
                exchanges.append(
                    Exchange(at=0.0, thread=f"{client.thread}-title", name=client.thread, body=orjson.dumps(title),
                             reply={"role": "assistant", "content": "A title"})
                )  # fmt: skip
            if turn == 3:
                # The answer is regenerated: the same request, another reply, and the chat goes on from that.
                again = {"role": "assistant", "content": sentence(rng, 60)}
                exchanges.append(
                    Exchange(at=0.0, thread=client.thread, name=client.thread, body=exchanges[-1].body, reply=again)
                )
                client.history[-1] = again
            if turn == 5:
                # An earlier question is edited: the chat goes back two turns.
                client.history = client.history[:-4]
        threads.append(exchanges)
    return Workload(title="side requests, regenerations and forks (named)", breaks=True, exchanges=timed(threads))


def _shared_documents(rng: random.Random, _: Path | None) -> Workload:
    policy, threads = prose(rng, 80), []
    documents = [f'<document name="handbook-{number}.pdf">\n{prose(rng, 60)}\n</document>' for number in range(10)]
    for number in range(50):
        client = _Client(rng, f"shared-{number}", named=False, system=_fixed(policy))
        mine = rng.sample(documents, 2)
        threads.append([client.ask(mine, keeps=False) for _ in range(4)])
    return Workload(title="50 conversations over 10 documents", breaks=True, exchanges=timed(threads))


def volatile(exchanges: Iterable[Exchange]) -> dict[str, set[str]]:
    """Return each thread's system lines that are not in all of its requests, and what stands in one block with them."""
    prompts: dict[str, list[list[str]]] = {}
    for exchange in exchanges:
        messages = orjson.loads(exchange.body)["messages"]
        lines = [
            line for message in messages if message["role"] == "system" for line in message["content"].splitlines()
        ]
        prompts.setdefault(exchange.thread, []).append(lines)
    found: dict[str, set[str]] = {}
    for thread, each in prompts.items():
        always = set.intersection(*map(set, each))
        found[thread] = {line for lines in each for line in lines if line not in always}
        for lines in each:
            for block in _tagged(lines):
                if found[thread] & {*block}:
                    found[thread] |= {*block}
    return found


def _tagged(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    opened = 0
    for at, line in enumerate(lines):
        if line.startswith("</"):
            yield lines[opened + 1 : at]
        elif line.startswith("<"):
            opened = at


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of content, what makes it distinct, and the message it fills, without its words."""

    key: object
    text: str
    frame: Mapping[str, Any] | None = None


def pieces(exchange: Exchange, blocks: Callable[[str], Sequence[str]], changing: set[str]) -> Iterator[Piece]:
    """Cut a request into distinct pieces of content, for the floor.

    Items and system lines are the same wherever they stand; what people and models said belongs to its thread. Values
    of the system prompt that change are told once a turn, by whatever was asked last.
    """
    body: Mapping[str, Any] = orjson.loads(exchange.body)
    turn = next((message["content"] for message in reversed(body["messages"]) if message["role"] == "user"), "")
    for tool in body.get("tools", ()):
        text = orjson.dumps(tool).decode()
        yield Piece(("tool", text), text)
    for message in body["messages"]:
        text = message.get("content") or ""
        if message["role"] == "system":
            yield Piece("system", "", {**message, "content": ""})
            for line in text.splitlines():
                key = ("value", exchange.thread, turn, line) if line in changing else ("line", line)
                yield Piece(key, f"{line}\n")
            continue
        for block in blocks(text):
            yield Piece(("item", block), block)
            text = text.replace(block, "")
        calls = message.get("tool_calls") or ()
        said = "".join(call["function"]["arguments"] for call in calls)
        bare = [{**call, "function": {**call["function"], "arguments": ""}} for call in calls]
        frame = {**message, "content": "", **({"tool_calls": bare} if bare else {})}
        yield Piece((exchange.thread, message["role"], text, said), text.strip() + said, frame)
