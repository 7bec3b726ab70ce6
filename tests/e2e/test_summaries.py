"""Summaries made beside the requests, and what happens when they fail."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.e2e.kit import HANG, MODEL, Wire, scripted, strata

SETTINGS = {"BUDGET_TOKENS": "9000", "OUTPUT_RESERVE_TOKENS": "500", "SUMMARY_MODEL": "small-model"}
NAMED = {"x-strata-conversation": "c1", "authorization": "Bearer key-one"}


def completion(text: str, tokens: int = 50) -> bytes:
    """Return an answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
    return orjson.dumps({"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


class Provider:
    """Answers chats; summaries as a test says. `asked` are the bodies of calls for one."""

    def __init__(self, made: str | None = "## Current goal\nTo count.", delay: float = 0.0) -> None:
        self.made, self.delay = made, delay
        self.chats: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []

    async def __call__(self, wire: Wire) -> None:
        while True:
            got = await wire.request()
            body = orjson.loads(got.body)
            if body["model"] != "small-model":
                self.chats.append(body)
                await wire.answer(completion("Fine."))
                continue
            self.asked.append(body)
            self.keys.append(got.header("authorization"))
            await asyncio.sleep(self.delay)
            if self.made is None:
                await wire.answer(b'{"error":{"message":"no"}}', status="500 No")
            else:
                await wire.answer(completion(self.made))


async def converse(proxy: Any, turns: int, note: str = "") -> None:
    """Hold a conversation that outgrows its budget."""
    history: list[dict[str, str]] = []
    for turn in range(turns):
        attached = note if turn == 0 else ""
        history.append({"role": "user", "content": f"{attached}Question {turn}: Never guess. " + "word " * 300})
        answer = await proxy.post({"model": MODEL, "messages": history}, headers=NAMED)
        assert answer.status_code == 200
        history.append({"role": "assistant", "content": "Fine."})


async def test_a_summary_stands_where_turns_were_dropped(redis_url: str) -> None:
    """Made with the client's own key, from the raw turns; shared with the replica that serves the next turn."""
    provider = Provider()
    options = {**SETTINGS, "REDIS_URL": redis_url, "SECRET": "summaries"}
    async with scripted(provider) as upstream, strata(upstream.url, **options) as proxy:
        await converse(proxy, 16)
        async with asyncio.timeout(HANG):
            while not await proxy.total("strata_summaries_total", outcome="made"):
                await asyncio.sleep(0.01)
        assert provider.keys[0] == "Bearer key-one"
        assert "[user]\nQuestion 0" in provider.asked[0]["messages"][1]["content"]
    async with scripted(provider) as upstream, strata(upstream.url, **options) as replica:
        await converse(replica, 40)
    last = provider.chats[-1]["messages"][0]["content"]
    assert "earlier messages of this conversation left out here" in last
    assert "<conversation_summary>" in last
    assert "## Current goal\nTo count." in last
    assert ": Never guess." in last.partition("word for word")[2]


@pytest.mark.parametrize(("made", "delay"), [(None, 0.0), ("", 0.0), ("x", 30.0)], ids=["500", "empty", "late"])
async def test_without_a_summary_turns_are_plainly_dropped(made: str | None, delay: float) -> None:
    """And no request has waited."""
    provider = Provider(made, delay)
    async with scripted(provider) as upstream, strata(upstream.url, **SETTINGS) as proxy:
        async with asyncio.timeout(HANG):
            await converse(proxy, 40)
        assert provider.asked
        assert await proxy.total("strata_summaries_total", outcome="made") == 0
        last = orjson.dumps(provider.chats[-1])
        assert b"left out here" in last
        assert b"<conversation_summary>" not in last


async def test_nothing_is_summarised_of_whom_nothing_is_kept() -> None:
    """Nor of anonymous clients, nor without a limit."""
    provider = Provider()
    async with scripted(provider) as upstream:
        for given in ({"REMEMBER_CONTENT": "false"}, {"SUMMARY_MODEL": ""}):
            async with strata(upstream.url, **{**SETTINGS, **given}) as proxy:
                await converse(proxy, 20)
    assert not provider.asked


async def test_a_summary_counts_as_what_its_tenant_uses() -> None:
    """Over a quota none is made."""
    provider = Provider()
    options = {**SETTINGS, "TENANTS__ACME__KEYS": "key-one", "TENANTS__ACME__UPSTREAM_KEY": "sk-up"}
    async with scripted(provider) as upstream:
        async with strata(upstream.url, **options, TENANTS__ACME__TOKENS_PER_DAY="1000000") as proxy:
            await converse(proxy, 16)
            async with asyncio.timeout(HANG):
                while not await proxy.total("strata_summaries_total", outcome="made"):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await proxy.post({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, headers=NAMED)
            used = await proxy.total("strata_quota_used_ratio", quota="tokens_per_day") * 1_000_000
            calls = len(provider.asked) + 16
            assert 55 * calls <= round(used) <= 55 * calls + 600
        assert set(provider.keys) == {"Bearer sk-up"}


async def test_a_long_item_is_summarised_in_pieces() -> None:
    """Each piece, then what was written of them; it stands for the item in L2 once the limit asks for it."""
    provider = Provider(made="The note in short.")
    note = "<note_context>\n<path>long.md</path>\n" + "a line of a very long note\n" * 4_000 + "</note_context>\n"
    options = {**SETTINGS, "BUDGET_TOKENS": "60000"}
    async with scripted(provider) as upstream, strata(upstream.url, **options) as proxy:
        await converse(proxy, 3, note)
        async with asyncio.timeout(HANG):
            # A summary of the conversation may be asked for between the pieces and the whole.
            while not any(asked["messages"][1]["content"].count("The note in short.") == 3 for asked in provider.asked):
                await asyncio.sleep(0.01)
