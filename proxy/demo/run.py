"""Drive the scenes twice with the real `openai` SDK, streams on: straight to the provider, and through Strata."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

import orjson
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from proxy import app
from proxy import environment as config
from proxy.demo.scenes import Scene, Script, Turn, broken, scenes
from proxy.simulator import app as simulator
from proxy.simulator.accounting import OPENAI, cost
from proxy.simulator.server import serve

MODEL = "gpt-5.1"
_SECONDS_PER_UNCACHED_TOKEN = 0.00008
_FIRST_TOKEN_SECONDS = 0.02
_PRICES = orjson.dumps(
    {
        MODEL: {
            "input": float(OPENAI.input_usd_per_mtok),
            "cached_read": float(OPENAI.cached_usd_per_mtok),
            "output": float(OPENAI.output_usd_per_mtok),
        }
    }
).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One answer: what the provider reported, what Strata's receipt said. Tokens, seconds, US dollars."""

    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    usd: Decimal
    layers: tuple[tuple[str, int], ...] = ()
    references: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn, driven both ways."""

    scene: Scene
    turn: int
    straight: Told
    strata: Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the demo's servers are."""

    provider: str
    strata: str


@contextlib.contextmanager
def servers() -> Iterator[tuple[Place, Place]]:
    """Start a provider for each way, so that neither finds the other's cache, and Strata before the second."""
    options = simulator.Options(
        rules=OPENAI,
        first_token_seconds=_FIRST_TOKEN_SECONDS,
        seconds_per_uncached_token=_SECONDS_PER_UNCACHED_TOKEN,
    )
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(serve(simulator.create(options)))
        behind = stack.enter_context(serve(simulator.create(options)))
        settings = config.load(
            {
                "STRATA_UPSTREAM_URL": behind.base_url,
                "STRATA_LOG_LEVEL": "error",
                "STRATA_DEBUG": "true",
                "STRATA_PRICES": _PRICES,
            }
        )
        strata = stack.enter_context(serve(app.create(settings)))
        yield Place(provider=alone.origin, strata=""), Place(provider=behind.origin, strata=strata.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A request that broke its prompt cache, and the one that comes after it, not sent."""

    conversation: str
    request_id: str
    following: bytes


def plant(through: Place) -> Planted:
    """Break a prompt cache as clients do: a trace id that is another in each request, from the third on."""
    script = Script(broken())
    traces = ("trace-7f3a9c51", "trace-7f3a9c51", "trace-b20e64d8", "trace-9e6b1f07")

    def messages(place: int) -> list[ChatCompletionMessageParam]:
        system, *rest = script.request(script.scene.turns[place])
        head, _, text = str(system["content"]).partition("\n")
        made = [{**system, "content": f"{head} [{traces[place]}]\n{text}"}, *rest]
        return cast("list[ChatCompletionMessageParam]", made)

    client = OpenAI(base_url=f"{through.strata}/v1", api_key="demo", max_retries=0)
    named = {"x-session-id": script.scene.conversation}
    request_id = ""
    for place in range(3):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages(place), extra_headers=named
        )
        request_id = answer.headers["x-strata-request-id"]
        script.answered(script.scene.turns[place], answer.parse().choices[0].message.content or "")
    client.close()
    following = orjson.dumps({"model": MODEL, "messages": messages(3)})
    return Planted(conversation=script.scene.conversation, request_id=request_id, following=following)


def drive(straight: Place, through: Place, *, on_step: Callable[[Step], None]) -> list[Step]:
    """Play every scene, turn by turn, all scenes in rotation as real traffic has it."""
    return asyncio.run(_drive(straight.provider, through.strata, on_step))


async def _drive(straight: str, strata: str, on_step: Callable[[Step], None]) -> list[Step]:
    steps: list[Step] = []
    ways = [AsyncOpenAI(base_url=f"{origin}/v1", api_key="demo", max_retries=0) for origin in (straight, strata)]
    scripts = [(Script(scene), Script(scene)) for scene in scenes()]
    for place in range(max(len(script.scene.turns) for script, _ in scripts)):
        for both in scripts:
            scene = both[0].scene
            if place < len(scene.turns):
                told = [await _ask(way, script, scene.turns[place]) for way, script in zip(ways, both, strict=True)]
                steps.append(Step(scene=scene, turn=place + 1, straight=told[0], strata=told[1]))
                on_step(steps[-1])
    for way in ways:
        await way.close()
    return steps


async def _ask(way: AsyncOpenAI, script: Script, turn: Turn) -> Told:
    """Send one turn and read its stream to the end."""
    named = {"x-session-id": script.scene.conversation} if script.scene.conversation else {}
    started, first = time.perf_counter(), 0.0
    raw = await way.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=cast("list[ChatCompletionMessageParam]", script.request(turn)),
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=60,
        extra_headers=named,
    )
    words: list[str] = []
    usage = None
    async for chunk in raw.parse():
        first = first or time.perf_counter()
        words += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    if usage is None:
        raise RuntimeError("the simulated provider told no usage")
    script.answered(turn, "".join(words))
    cached = (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details else 0
    return Told(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=cached,
        first_token_seconds=first - started,
        usd=cost(
            OPENAI,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=usage.completion_tokens,
        ),
        layers=_layers(raw.headers.get("x-strata-layers", "")),
        references=int(raw.headers.get("x-strata-references", "0")),
    )


def _layers(receipt: str) -> tuple[tuple[str, int], ...]:
    """Read `L1=812:9f86d081884c7d65 L4=…`."""
    pairs = (part.partition("=") for part in receipt.split())
    return tuple((name, int(rest.partition(":")[0])) for name, _, rest in pairs)
