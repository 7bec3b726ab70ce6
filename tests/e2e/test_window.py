"""Windowed clients on the wire, over two replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from proxy.simulator.app import create
from proxy.simulator.server import serve
from tests.e2e.conftest import RedisProcess
from tests.e2e.kit import chat_body, rigged, strata

SYSTEM = {"role": "system", "content": "You help."}
NAMED = {"x-strata-conversation": "c1"}


def turns(*numbers: int) -> list[dict[str, Any]]:
    said = [({"role": "user", "content": f"q{each}"}, {"role": "assistant", "content": f"a{each}"}) for each in numbers]
    return [message for turn in said for message in turn]


def window(number: int) -> list[dict[str, Any]]:
    return [SYSTEM, *turns(*range(max(1, number - 4), number)), {"role": "user", "content": f"q{number}"}]


def whole(number: int) -> list[dict[str, Any]]:
    return [SYSTEM, *turns(*range(1, number)), {"role": "user", "content": f"q{number}"}]


async def test_a_windowed_conversation_is_forwarded_whole() -> None:
    """The receipt says how many messages were put in front; other conversations do not have them."""
    async with rigged(None, WINDOWED="true") as rig:
        for number in range(1, 9):
            answer = await rig.proxy.post(chat_body(messages=window(number)), headers=NAMED)
            assert orjson.loads(rig.last.body)["messages"] == whole(number)
        assert answer.headers["x-strata-kept-messages"] == "6"
        for headers in ({}, {"x-strata-conversation": "c2"}):
            await rig.proxy.post(chat_body(messages=window(9)), headers=headers)
            assert orjson.loads(rig.last.body)["messages"] == window(9)


async def test_by_default_a_window_is_what_the_client_says_it_is() -> None:
    """A client may have its reasons."""
    async with rigged() as rig:
        for number in range(1, 9):
            await rig.proxy.post(chat_body(messages=window(number)), headers=NAMED)
            assert orjson.loads(rig.last.body)["messages"] == window(number)


async def test_a_window_is_completed_at_another_replica(redis_process: RedisProcess) -> None:
    """Whichever of them served the earlier turns."""
    provider = create()
    settings = {"REDIS_URL": redis_process.url, "SECRET": "one", "WINDOWED": "true"}
    async with (
        serve(provider) as upstream,
        strata(upstream.origin + "/v1", **settings) as one,
        strata(upstream.origin + "/v1", **settings) as two,
    ):
        for number in range(1, 9):
            await (one, two)[number % 2].post(chat_body(messages=window(number)), headers=NAMED)
            assert orjson.loads(provider.state.simulator.requests[-1].body)["messages"] == whole(number)
            await asyncio.sleep(0.1)
