"""Whole conversations of tool-calling agents, turn by turn: untouched while they fit, valid when they do not."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import orjson
import pytest

from proxy.simulator.app import Options
from proxy.simulator.validity import check_chat
from tests.cases.conftest import (
    Provider,
    Start,
    StartProvider,
    Upstream,
    assistant,
    chat,
    provider_tokens,
    result,
    system,
    untold,
    user,
    without_usage_wish,
)

Message = dict[str, object]

SEED = 20_311_104
CONVERSATIONS = 60
LENGTH = 24
_PLACES = ["quay", "berth", "lock", "sluice", "pier", "slip", "dock", "jetty", "mole", "basin"]
_THINGS = ["crate", "rope", "lamp", "buoy", "anchor", "chart", "ledger", "tarpaulin", "winch", "pump"]
_MARKS = ["…", " — ", "\n", "\t", " «№ 7» ", " 潮 ", ' "quoted" ', " \\ ", " <b> ", "\r\n", " 🛟 "]


def prose(chance: random.Random, sentences: int) -> str:
    """Return text as people and programs write it, odd characters and all."""
    return " ".join(
        f"{chance.choice(_PLACES).title()} {chance.randrange(100)} holds {chance.randrange(2, 90)} "
        f"{chance.choice(_THINGS)}s{chance.choice(_MARKS) if chance.random() < 0.2 else ''}."
        for _ in range(sentences)
    )


def tools() -> list[Message]:
    """Return an agent's tools."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Looks at one {thing} and says what is known of it.",
                "parameters": {
                    "type": "object",
                    "properties": {"where": {"type": "string"}, "count": {"type": "integer", "minimum": 1}},
                    "required": ["where"],
                    "additionalProperties": False,
                },
            },
        }
        for name, thing in zip(("find", "count_up", "move", "report"), _THINGS, strict=False)
    ]


def exchange(chance: random.Random, number: int, calls: int, size: int) -> list[Message]:
    """Return one assistant message that calls tools, in parallel where `calls` is above 1, and all the results."""
    names = [f"call_{number:03d}{chance.randrange(1 << 32):08x}{place}" for place in range(calls)]
    asked = [
        {
            "id": name,
            "type": "function",
            "function": {
                "name": chance.choice(("find", "count_up", "move", "report")),
                "arguments": f'{{"where": "{chance.choice(_PLACES)}",  "count":{chance.randrange(1, 9)}}}',
            },
        }
        for name in names
    ]
    said = chance.choice([None, "", prose(chance, 1)])
    results = [
        result(name, orjson.dumps({"rows": [prose(chance, 2) for _ in range(chance.randrange(1, size))]}).decode())
        for name in names
    ]
    return [{"role": "assistant", "content": said, "tool_calls": asked}, *results]


def conversation(number: int, *, size: int = 4, length: int = LENGTH) -> list[Message]:
    """Return one agent's run: a system prompt of 6 KB, then turns with single and parallel calls."""
    chance = random.Random(SEED + number)
    messages: list[Message] = [system("# Harbour agent\n\n" + prose(random.Random(SEED), 260))]
    while len(messages) < length:
        messages.append(user(prose(chance, chance.randrange(1, 5))))
        for _ in range(chance.choice([0, 1, 1, 2, 4])):
            messages += exchange(chance, len(messages), chance.choice([1, 1, 1, 2, 3]), size)
        messages.append(assistant(prose(chance, chance.randrange(1, 6))))
    return messages


def steps(messages: list[Message]) -> Iterator[list[Message]]:
    """Return what a client sends step by step: all that stands before each assistant message."""
    for end, message in enumerate(messages):
        if message["role"] == "assistant":
            yield messages[:end]


def request(messages: list[Message], dumps: int, **more: object) -> bytes:
    """Return a request's body; clients differ in how they write JSON."""
    whole = chat(*messages, model="gpt-5.1", tools=tools(), **more)
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2) if dumps % 3 == 0 else orjson.dumps(whole)


def test_the_conversations_are_what_they_should_be() -> None:
    """Long, valid, with a system prompt of 6 KB and parallel calls; the same in every run."""
    made = [conversation(number) for number in range(CONVERSATIONS)]
    assert made == [conversation(number) for number in range(CONVERSATIONS)]
    assert len({orjson.dumps(messages) for messages in made}) == CONVERSATIONS
    assert sum(len(orjson.dumps(message)) > 6_000 for message in made[0][:1]) == 1
    assert all(len(messages) >= LENGTH for messages in made)
    calls = [len(message["tool_calls"]) for messages in made for message in messages if "tool_calls" in message]  # type: ignore[arg-type]
    assert max(calls) == 3
    for messages in made:
        check_chat({"model": "gpt-5.1", "messages": messages, "tools": tools()}, strict=True)


@pytest.mark.parametrize("named", [False, True], ids=["anonymous", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_append_only_conversations_arrive_byte_for_byte(
    start: Start, upstream: Upstream, stream: bool, named: bool
) -> None:
    """Each step of each of sixty conversations reaches the upstream with the client's own bytes."""
    strata = await start()
    turns = 0
    for number in range(CONVERSATIONS):
        headers = {"x-strata-conversation": f"trace-{number}"} if named else {}
        for messages in steps(conversation(number)):
            body = request(messages, number, **({"stream": True} if stream else {}))
            answer = await strata.post(body, headers)
            assert answer.status_code == 200
            forwarded = upstream.bodies[-1]
            assert (without_usage_wish(forwarded) if stream else forwarded) == body
            turns += 1
    assert turns == len(upstream.seen) > CONVERSATIONS * 6


def unbroken(before: bytes, after: bytes) -> bool:
    """Whether the messages forwarded before are a prefix of those forwarded now."""
    old, new = orjson.loads(before)["messages"], orjson.loads(after)["messages"]
    return bool(new[: len(old)] == old)


def counted(answer: httpx.Response) -> int:
    """Return the tokens of a forwarded prompt as the proxy's receipt tells them."""
    return sum(int(part.partition("=")[2].partition(":")[0]) for part in answer.headers["x-strata-layers"].split())


def left_whole(sent: list[Message], own: list[Message]) -> bool:
    """Whether what was forwarded is L1 and the end of what was sent, with the newest question where a turn was cut."""
    newest = [message for message in sent if message["role"] == "user"][-1]
    tail = own[2:] if own[1] == newest else own[1:]
    return own[0] == sent[0] and newest in own and tail == sent[len(sent) - len(tail) :]


@dataclass(kw_only=True)
class Run:
    """What happened to the requests of a replay: how many were cut, and how many of those only append."""

    over: int = 0
    kept: int = 0
    most_tokens: int = 0
    refusals: list[str] = field(default_factory=list)
    before: bytes = b""

    def take(self, body: bytes, answer: httpx.Response, forwarded: bytes, limit: int) -> None:
        """Take in one request; what holds for every one is asserted here."""
        assert "x-strata-warning" not in answer.headers
        assert counted(answer) <= limit
        if answer.status_code != 200:
            self.refusals.append(answer.text)
        if forwarded == body:
            self.before = forwarded
            return
        self.most_tokens = max(self.most_tokens, provider_tokens(forwarded))
        self.over += 1
        self.kept += unbroken(self.before, forwarded)
        self.before = forwarded


RESERVE = 400
SIZES = pytest.mark.parametrize(
    ("budget", "size", "length"), [(5_000, 6, 80), (6_500, 10, 100), (4_000, 3, 90)], ids=["middle", "bulky", "tight"]
)


async def replay(start: Start, provider: Provider, budget: int, size: int, length: int) -> Run:
    """Replay twelve conversations that outgrow the budget."""
    strata = await start(upstream_url=provider.url, budget_tokens=budget, output_reserve_tokens=RESERVE)
    run = Run()
    for number in range(12):
        run.before = b""
        for messages in steps(conversation(number, size=size, length=length)):
            body = request(messages, 1)
            answer = await strata.post(body)
            forwarded = provider.bodies[-1]
            run.take(body, answer, forwarded, budget - RESERVE)
            own = untold(orjson.loads(forwarded)["messages"])
            assert left_whole(messages, own)
    assert run.over > 100
    return run


@SIZES
async def test_over_budget_every_request_is_valid_and_most_only_append(
    start: Start, provide: StartProvider, budget: int, size: int, length: int
) -> None:
    """Cut to a budget, every request is one the provider takes, L1 and a tail, and seven of ten keep their prefix."""
    run = await replay(start, await provide(Options()), budget, size, length)
    assert run.refusals == []
    assert run.kept >= 0.7 * run.over, f"{run.kept} of {run.over}"


@SIZES
async def test_over_budget_no_request_exceeds_its_limit_as_the_provider_counts(
    start: Start, provide: StartProvider, budget: int, size: int, length: int
) -> None:
    """A provider whose window is the limit itself refuses nothing that was cut to it, and counts no more than it."""
    run = await replay(start, await provide(Options(max_context_tokens=budget - RESERVE)), budget, size, length)
    assert run.refusals == []
    assert run.most_tokens <= budget - RESERVE


async def test_a_long_run_of_one_turn_is_cut_between_exchanges(start: Start, provide: StartProvider) -> None:
    """An agent's run of 150 steps in one turn keeps its question and last exchange, stays valid and mostly appends."""
    budget = 7_000
    provider = await provide(Options())
    strata = await start(upstream_url=provider.url, budget_tokens=budget, output_reserve_tokens=RESERVE)
    chance = random.Random(SEED)
    messages: list[Message] = [system(prose(chance, 80)), user("Check every berth of the harbour.")]
    run = Run()
    for step in range(150):
        messages += exchange(chance, step, chance.choice([1, 1, 2]), 4)
        body = request(messages, 1)
        answer = await strata.post(body)
        forwarded = provider.bodies[-1]
        run.take(body, answer, forwarded, budget - RESERVE)
        own = untold(orjson.loads(forwarded)["messages"])
        assert own[:2] == messages[:2]
        last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        assert own[-len(messages[last:]) :] == messages[last:]
    assert run.refusals == []
    assert run.over > 80
    assert run.kept >= 0.7 * run.over, f"{run.kept} of {run.over}"


async def test_what_cannot_fit_is_forwarded_or_refused_as_set(start: Start, provide: StartProvider) -> None:
    """A newest message beyond the budget is forwarded whole with a warning, or refused with no upstream call."""
    provider = await provide(Options())
    chance = random.Random(SEED)
    body = request([system("Be brief."), user(prose(chance, 400))], 1)
    settings = {"upstream_url": provider.url, "budget_tokens": 2_000, "output_reserve_tokens": 400}
    forward = await start(**settings)
    answer = await forward.post(body)
    assert answer.status_code == 200
    assert "over its limit" in answer.headers["x-strata-warning"]
    assert provider.bodies == [body]
    reject = await start(**settings, over_budget="reject")
    refused = await reject.post(body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert len(provider.bodies) == 1
