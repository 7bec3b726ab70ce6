"""Observe mode: the client's bytes as they came, but for the question for usage; everything is recorded still."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest

from tests.e2e.kit import MODEL, USAGE_ASKED, Rig, note, rigged, total

ITEM = note("a.md", "The notes say many things. ")
HISTORY = [
    {"role": "system", "content": "Be brief. \r\n\r\n  "},
    {"role": "user", "content": f"{ITEM}\n\nFirst?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": f"{ITEM}\n\nSecond?"},
]


@pytest.fixture
async def observing() -> AsyncIterator[Rig]:
    """A rig in observe mode with a budget that would bite."""
    async with rigged(MODE="observe", BUDGET_TOKENS="600", OUTPUT_RESERVE_TOKENS="100", OVER_BUDGET="reject") as rig:
        yield rig


async def test_plain_bytes_are_untouched(observing: Rig) -> None:
    """A plain request with repeats, over the budget, in a named conversation, is forwarded byte for byte."""
    raw = orjson.dumps({"model": MODEL, "messages": HISTORY}, option=orjson.OPT_INDENT_2)
    for _ in range(2):
        answer = await observing.proxy.post(raw, headers={"x-strata-conversation": "c1"})
        assert answer.status_code == 200
        assert observing.last.body == raw
        assert "x-strata-references" not in answer.headers
        assert "x-strata-dropped-turns" not in answer.headers
    assert await observing.proxy.settled(2) == {"ok": 2}


async def test_only_usage_is_asked_for(observing: Rig) -> None:
    """A streamed request gets the one member more, and its client not the chunk that answers it."""
    raw = orjson.dumps({"model": MODEL, "messages": HISTORY, "stream": True})
    answer = await observing.proxy.post(raw)
    assert observing.last.body == raw[:-1] + USAGE_ASKED
    assert b'"choices":[]' not in answer.content


async def test_everything_is_recorded(observing: Rig) -> None:
    """Layers, usage and the conversation are recorded as in layered mode."""
    raw = orjson.dumps({"model": MODEL, "messages": HISTORY, "stream": True})
    answer = await observing.proxy.post(raw, headers={"x-strata-conversation": "c1"})
    assert {"L1", "L4", "L5"} <= {part.partition("=")[0] for part in answer.headers["x-strata-layers"].split()}
    await observing.proxy.settled(1)
    samples = await observing.proxy.samples()
    assert total(samples, "strata_prompt_tokens_total", model=MODEL) > 500
    assert total(samples, "strata_input_tokens_total", model=MODEL) > 500
    view = await observing.proxy.http.get("/strata/conversations/c1", headers={"authorization": "Bearer key-one"})
    assert view.json()["turns"] == 2


async def test_nothing_left_out_is_put_back(observing: Rig) -> None:
    """What a named conversation's client leaves out stays out."""
    headers = {"x-strata-conversation": "c1"}
    answer = await observing.proxy.post({"model": MODEL, "messages": HISTORY[:2]}, headers=headers)
    reply = answer.json()["choices"][0]["message"]["content"]
    second = [HISTORY[0], {"role": "user", "content": "First?"}, {"role": "assistant", "content": reply}]
    raw = orjson.dumps({"model": MODEL, "messages": [*second, {"role": "user", "content": "Second?"}]})
    await observing.proxy.post(raw, headers=headers)
    assert observing.last.body == raw
