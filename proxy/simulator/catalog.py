"""The endpoints without generation: models, moderations, and the simulator's own summary."""

from proxy.simulator.exchange import EPOCH_SECONDS, Exchange
from proxy.simulator.refusal import unknown_model, unknown_url
from proxy.simulator.shape import sequence
from proxy.simulator.validity import check_present

_HARMS = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)


async def models(exchange: Exchange) -> None:
    """List the models."""
    data = [_model(name) for name in exchange.simulator.options.model_list]
    await exchange.json({"object": "list", "data": data})


async def model(exchange: Exchange) -> None:
    """Describe one model; its name may contain slashes, encoded or not."""
    name = exchange.scope["path_params"]["id"]
    if name not in exchange.simulator.options.model_list:
        raise unknown_model(name)
    await exchange.json(_model(name))


async def moderations(exchange: Exchange) -> None:
    """Find every input harmless."""
    body = exchange.body()
    check_present({"model": "omni-moderation-latest", **body}, "input")
    several = sequence(body["input"])
    whole = not several or not all(isinstance(part, str) for part in several)
    result = {
        "flagged": False,
        "categories": dict.fromkeys(_HARMS, False),
        "category_scores": dict.fromkeys(_HARMS, 0.0),
        "category_applied_input_types": {harm: ["text"] for harm in _HARMS},
    }
    await exchange.json(
        {
            "id": f"modr-sim{exchange.entry.index:08d}",
            "model": body.get("model") or "omni-moderation-latest",
            "results": [result] * (1 if whole else len(several)),
        }
    )


async def requests(exchange: Exchange) -> None:
    """Summarise the requests so far, oldest first."""
    totals = exchange.simulator.totals
    await exchange.json(
        {
            "rules": exchange.simulator.options.rules.name,
            "totals": {
                "requests": totals.requests,
                "prompt_tokens": totals.prompt_tokens,
                "cached_tokens": totals.cached_tokens,
                "cached_share": totals.cached_share,
                "completion_tokens": totals.completion_tokens,
                "usd": str(totals.usd),
            },
            "requests": [entry.summary() for entry in exchange.simulator.requests],
        }
    )


async def nowhere(exchange: Exchange) -> None:
    """Refuse an unknown path."""
    raise unknown_url(exchange.entry.method, exchange.entry.raw_path)


def _model(name: str) -> dict[str, object]:
    owner = name.partition("/")[0] if "/" in name else "simulator"
    return {"id": name, "object": "model", "created": EPOCH_SECONDS, "owned_by": owner}
