"""What answers cost and what was saved, on the metrics page."""

from __future__ import annotations

from decimal import Decimal

import pytest

from proxy.core.usage import Usage
from proxy.observe.metrics import Metrics
from proxy.observe.record import Record
from tests.e2e.kit import chat_body, rigged

PRICES = '{"gpt-5.1": {"input": 1.25, "cached_read": 0.125, "output": 10}}'
RULES = "\n".join(f"Rule {number} stands for every customer and every order." for number in range(150))


async def test_the_cost_is_the_providers_own_to_the_cent() -> None:
    """Summed over answers; what the layers saved is what the client's own bytes would have cost more."""
    async with rigged(None, PRICES=PRICES) as rig:
        paid = Decimal(0)
        history: list[dict[str, str]] = []
        for minute in range(8):
            history.append({"role": "user", "content": f"Question {minute}"})
            clock = {"role": "system", "content": f"Time: 10:{minute:02}\n{RULES}"}
            answer = (await rig.proxy.post(chat_body(messages=[clock, *history]))).json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            paid += Decimal("1.25") * (usage["prompt_tokens"] - cached) + Decimal("0.125") * cached
            paid += 10 * usage["completion_tokens"]
            history.append(answer["choices"][0]["message"])
        assert await rig.proxy.total("strata_cost_usd_total") == pytest.approx(float(paid / 1_000_000), rel=1e-9)
        straight = 8 * Decimal("1.25") * 1_700 / 1_000_000
        saved = await rig.proxy.total("strata_as_sent_cost_usd_total") - await rig.proxy.total("strata_cost_usd_total")
        assert float(straight) * 0.4 < saved < float(straight)
        assert await rig.proxy.total("strata_unpriced_total") == 0


def test_what_is_known_of_one_cost_only_saves_nothing() -> None:
    """Both counters count the same answers: one of unknown price in neither, one of unknown alternative as paid."""
    metrics = Metrics(())
    known = {"cost_usd": Decimal("0.2"), "as_sent_usd": Decimal("0.5")}
    for prices in (
        known,
        {"cost_usd": Decimal("0.1")},
        {"cost_usd": Decimal("0.4"), "as_sent_usd": Decimal("0.3")},
        {},
    ):
        metrics.emit(
            Record(
                request_id="r", at=0.0, tenant="default", model="other", mode="layered", stream=False, outcome="ok",
                status=200, usage=Usage(input_tokens=1), **prices,
            )
        )  # fmt: skip
    labels = {"tenant": "default", "model": "other"}
    totals = [
        metrics.registry.get_sample_value(f"strata_{name}_usd_total", labels) for name in ("cost", "as_sent_cost")
    ]
    assert totals == [pytest.approx(0.7), pytest.approx(0.9)]


async def test_a_model_without_a_price_is_counted_and_not_guessed() -> None:
    """At an upstream of one's own nothing costs what it costs elsewhere."""
    async with rigged() as rig:
        await rig.proxy.post(chat_body())
        assert await rig.proxy.total("strata_unpriced_total") == 1
        assert await rig.proxy.total("strata_cost_usd_total") == 0


async def test_a_window_of_the_settings_limits() -> None:
    """Of a model nobody knows; without it nothing would be cut."""
    long = [{"role": role, "content": "word " * 600} for role in ("user", "assistant")] * 8
    messages = [*long, {"role": "user", "content": "And now?"}]
    async with rigged(None, WINDOWS='{"mine": 8192}') as rig:
        answer = await rig.proxy.post({"model": "mine", "messages": messages})
        assert int(answer.headers["x-strata-dropped-turns"]) > 0
