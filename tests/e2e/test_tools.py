"""Tools on the wire: a stable order for each tenant, the client's own bytes inside, untouched where nothing is due."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.e2e.kit import Rig, chat_body, rigged, total

TENANTS = {"TENANTS__ACME__KEYS": "key-one", "TENANTS__OTHER__KEYS": "key-two"}


def tool(name: str, **more: object) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string", "description": "what to look for " * 20}}}
    return {"type": "function", "function": {"name": name, "description": name * 20, "parameters": schema}, **more}


def names(body: bytes) -> str:
    return "".join(each["function"]["name"] for each in orjson.loads(body)["tools"])


async def ask(rig: Rig, sent: str, *, key: str = "key-one", **more: object) -> str:
    """Send one-letter tools; return them as they arrived."""
    body = chat_body(tools=[tool(name) for name in sent], **more)
    answer = await rig.proxy.post(body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    return names(rig.last.body)


async def test_a_shuffled_set_stands_as_first_seen() -> None:
    """A tool server that lists its tools in another order, one more of them later; the choice is untouched."""
    choice = {"type": "function", "function": {"name": "a"}}
    async with rigged(None, **TENANTS) as rig:
        assert await ask(rig, "cab") == "cab"
        assert await ask(rig, "abc") == "cab"
        assert await ask(rig, "bca", tool_choice=choice) == "cab"
        assert orjson.loads(rig.last.body)["tool_choice"] == choice
        assert await ask(rig, "dabc") == "cabd"
        assert await ask(rig, "abdc") == "cabd"


async def test_the_receipt_names_a_new_order() -> None:
    """It says so where tools moved, and only there."""
    async with rigged(None, **TENANTS) as rig:
        told = [
            (await rig.proxy.post(chat_body(tools=[tool(name) for name in sent]))).headers.get("x-strata-tools")
            for sent in ("ab", "ba", "ab")
        ]
    assert told == [None, "reordered", None]


async def test_tenants_do_not_learn_from_one_another() -> None:
    """Another tenant's tools stand in its own first-seen order."""
    async with rigged(None, **TENANTS) as rig:
        assert await ask(rig, "cab") == "cab"
        assert await ask(rig, "abc", key="key-two") == "abc"
        assert await ask(rig, "bca", key="key-two") == "abc"
        assert await ask(rig, "bca") == "cab"


async def test_observing_moves_no_tool() -> None:
    """In mode `observe` they stand as they were sent."""
    async with rigged(None, MODE="observe") as rig:
        assert await ask(rig, "cab") == "cab"
        assert await ask(rig, "abc") == "abc"


@pytest.mark.parametrize("spelling", ["compact", "indented"])
async def test_tools_in_their_place_are_not_rewritten(spelling: str, rig: Rig) -> None:
    """Where the order is already right the body goes on byte for byte."""
    value = chat_body(tools=[tool("a"), tool("b")])
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2) if spelling == "indented" else orjson.dumps(value)
    for _ in range(3):
        await rig.proxy.post(body)
        assert rig.last.body == body


async def test_marked_tools_are_not_rewritten(rig: Rig) -> None:
    """The client's own cache marks stay where it put them."""
    marked = tool("z", cache_control={"type": "ephemeral"})
    await rig.proxy.post(chat_body(tools=[tool("b"), tool("a"), marked]))
    body = orjson.dumps(chat_body(tools=[tool("a"), tool("b"), marked]))
    await rig.proxy.post(body)
    assert rig.last.body == body


async def test_tools_that_say_the_time_cost_nothing(rig: Rig) -> None:
    """A set that is new in every request is forwarded, the stable tools before it in their order, and all succeeds."""
    for number in range(150):
        said = chat_body(tools=[tool("b"), tool("a"), tool("now", at=number)][:: 1 if number % 2 else -1])
        assert (await rig.proxy.post(said)).status_code == 200
    assert names(rig.last.body).endswith("now")
    assert await rig.proxy.settled(150) == {"ok": 150}
    assert total(await rig.proxy.samples(), "strata_store_errors_total") == 0


async def test_keys_of_a_tool_keep_the_lineages_order() -> None:
    """Within a conversation; a new one takes the order it comes with."""

    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        return value

    ok = {"role": "assistant", "content": "ok"}
    first, now = [tool("a"), tool("b")], [reversed_keys(tool("a")), tool("b")]
    history = [{"role": "user", "content": "hi"}, ok, {"role": "user", "content": "go on"}]
    async with rigged(None, **TENANTS) as rig:
        for messages, sent, got in (
            (history[:1], first, first), (history, now, first), ([*history, ok, history[0]], now, first),
            ([{"role": "user", "content": "another"}], now, now),
        ):  # fmt: skip
            answer = await rig.proxy.post(
                {**chat_body(), "messages": messages, "tools": sent}, headers={"authorization": "Bearer key-one"}
            )
            assert answer.status_code == 200
            assert orjson.dumps(orjson.loads(rig.last.body)["tools"]) == orjson.dumps(got)
