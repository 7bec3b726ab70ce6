"""``POST /v1/embeddings``: https://platform.openai.com/docs/api-reference/embeddings (read 2026-11)."""

import base64
import math
from array import array
from hashlib import shake_256

from proxy.simulator.exchange import Exchange
from proxy.simulator.prompt import render_text
from proxy.simulator.shape import integer, text
from proxy.simulator.tokens import tokenizer
from proxy.simulator.validity import check_present

_DIMENSIONS = 1536
_LARGE_DIMENSIONS = 3072


async def embeddings(exchange: Exchange) -> None:
    """Give every input a unit vector made from its tokens; float or base64 (little-endian float32)."""
    body = exchange.body()
    check_present(body, "input")
    model = text(body["model"])
    prompt = render_text(body["input"], tokenizer(model))
    dimensions = integer(body.get("dimensions")) or (_LARGE_DIMENSIONS if "large" in model else _DIMENSIONS)
    vectors = [_vector(segment.tokens.tobytes(), dimensions) for segment in prompt.segments]
    as_base64 = body.get("encoding_format") == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    tokens = prompt.count()
    await exchange.json(
        {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    )


def _vector(seed: bytes, dimensions: int) -> "array[float]":
    raw = array("h", shake_256(seed).digest(2 * dimensions))
    length = math.sqrt(sum(value * value for value in raw)) or 1.0
    return array("f", (value / length for value in raw))
