"""A tokenizer unknown to Strata is learned from what its upstream reports."""

from __future__ import annotations

import orjson
import pytest

from proxy import ranks
from proxy.core import tokens
from tests.e2e.kit import Wire, scripted, strata, until

BUDGET = 20_000
TURN = "今天的天气很好，我们去公园散步，然后在河边吃午饭。" * 12


async def test_the_guards_error_falls_below_two_percent_within_twenty_requests(redis_url: str) -> None:
    """What is forwarded is as near to the budget, in the upstream's own tokens, as what was counted was to the limit.

    And a replica that has seen nothing of it knows as much.
    """
    count = tokens.counter(ranks.load("cl100k_base"))
    seen: list[int] = []

    async def answers(wire: Wire) -> None:
        while True:
            body = orjson.loads((await wire.request()).body)
            seen.append(tokens.PRIMING + sum(tokens.message(orjson.dumps(each), count) for each in body["messages"]))
            usage = {"prompt_tokens": seen[-1], "completion_tokens": 2, "total_tokens": seen[-1] + 2}
            choice = {"index": 0, "message": {"role": "assistant", "content": TURN}, "finish_reason": "stop"}
            await wire.answer(orjson.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}))

    options = {"BUDGET_TOKENS": str(BUDGET), "OUTPUT_RESERVE_TOKENS": "100", "REDIS_URL": redis_url, "SECRET": "s"}
    async with scripted(answers) as upstream, strata(upstream.url, **options) as proxy:
        history: list[dict[str, str]] = []
        for number in range(20):
            history.append({"role": "user", "content": f"{number} {TURN}"})
            await proxy.post({"model": "mystery-7b", "messages": history})
            history.append({"role": "assistant", "content": TURN})
        learned = await proxy.total("strata_token_ratio", model="other")
        counted = tokens.counter(ranks.load("o200k_base"))
        assert count(TURN) / counted(TURN) > 1.3
        weight = tokens.PRIMING + sum(tokens.message(orjson.dumps(each), counted) for each in history[:-1])
        true = tokens.PRIMING + sum(tokens.message(orjson.dumps(each), count) for each in history[:-1])
        assert abs(weight * learned / true - 1) < 0.02
        assert max(seen) <= BUDGET - 100

        # The last turn that fits, to the token: a longer question alone does not.
        async with strata(upstream.url, **options) as replica:
            await replica.post({"model": "mystery-7b", "messages": history[:1]})

            async def asked() -> bool:
                return await replica.total("strata_token_ratio", model="other") > 0

            # No request waits for what others have learned.
            await until(asked)
            assert await replica.total("strata_token_ratio", model="other") == pytest.approx(learned, rel=0.011)
            room = BUDGET - 100 - tokens.PRIMING
            turns = [message for message in history if message["role"] == "user"]
            each = tokens.message(orjson.dumps(turns[0]), count)
            fits = [dict(turns[0]) for _ in range(int(room * 0.98 / each))]
            answer = await replica.post({"model": "mystery-7b", "messages": fits})
            assert "x-strata-dropped-turns" not in answer.headers
            over = [dict(turns[0]) for _ in range(int(room * 1.02 / each) + 1)]
            answer = await replica.post({"model": "mystery-7b", "messages": over})
            assert int(answer.headers["x-strata-dropped-turns"]) > 0
