"""What a prompt costs: which of its tokens the provider's cache already holds, and the price.

Pure: token ids and ``now`` in, numbers out. Knows nothing of requests, text or HTTP.
The rules follow https://developers.openai.com/api/docs/guides/prompt-caching (models up to gpt-5.5, read 2026-11)
and https://docs.vllm.ai/en/latest/design/prefix_caching.html.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from itertools import islice

_ID_BYTES = array("I").itemsize
_DIGEST_BYTES = 16
_MTOK = Decimal(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One provider's cache rules and prices.

    ``step_tokens`` is the block: hits are whole blocks, so it is also the granularity of what is reported.
    ``lifetime_seconds`` counts from the last use; ``capacity_tokens`` bounds the cache, least recently used first out.
    """

    name: str
    minimum_tokens: int
    step_tokens: int
    lifetime_seconds: float | None
    capacity_tokens: int | None
    input_usd_per_mtok: Decimal
    cached_usd_per_mtok: Decimal
    write_usd_per_mtok: Decimal
    output_usd_per_mtok: Decimal


OPENAI = Rules(
    name="openai",
    minimum_tokens=1024,
    step_tokens=128,
    lifetime_seconds=600.0,
    capacity_tokens=None,
    input_usd_per_mtok=Decimal("1.25"),
    cached_usd_per_mtok=Decimal("0.125"),
    write_usd_per_mtok=Decimal("1.25"),
    output_usd_per_mtok=Decimal(10),
)
"""OpenAI up to gpt-5.5, with the prices of gpt-5.1; a write is priced as plain input."""

VLLM = Rules(
    name="vllm",
    minimum_tokens=16,
    step_tokens=16,
    lifetime_seconds=None,
    capacity_tokens=524_288,
    input_usd_per_mtok=OPENAI.input_usd_per_mtok,
    cached_usd_per_mtok=OPENAI.cached_usd_per_mtok,
    write_usd_per_mtok=OPENAI.write_usd_per_mtok,
    output_usd_per_mtok=OPENAI.output_usd_per_mtok,
)
"""vLLM's automatic prefix cache. The prices are notional (a self-hosted model has none): OpenAI's, for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one prompt is charged for; ``prompt_tokens`` includes the cached ones."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def uncached_tokens(self) -> int:
        """Tokens the provider had to evaluate."""
        return self.prompt_tokens - self.cached_tokens


class PromptCache:
    """The blocks a provider holds, named by the chain of all tokens before and in them.

    Only prompts are held, not replies: a provider that also keeps its output (vLLM) hits a little more than this.
    """

    __slots__ = ("_blocks", "_rules")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._blocks: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def charge(self, tokens: Iterable[int], *, now: float, partition: str) -> Charge:
        """Account for one prompt and keep its blocks.

        ``now`` is in seconds and never decreases from call to call; prompts of different partitions never share.
        The last token is always evaluated, so a repeated prompt of exactly N blocks hits N - 1 of them.
        """
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
        self._expire(now)
        chain = self._chain(ids.tobytes(), partition)
        step = self._rules.step_tokens
        reusable = max(0, len(ids) - 1) // step
        hit_tokens = step * self._held(islice(chain, reusable))
        self._keep(chain, now)
        return Charge(
            prompt_tokens=len(ids),
            cached_tokens=hit_tokens if hit_tokens >= self._rules.minimum_tokens else 0,
        )

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()

    def _chain(self, packed: bytes, partition: str) -> list[bytes]:
        """Name every full block: digest of the parent's name and the block's ids."""
        size = self._rules.step_tokens * _ID_BYTES
        parent = blake2b(partition.encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).digest()
        chain = []
        for start in range(0, len(packed) - size + 1, size):
            parent = blake2b(parent + packed[start : start + size], digest_size=_DIGEST_BYTES).digest()
            chain.append(parent)
        return chain

    def _held(self, chain: Iterable[bytes]) -> int:
        held = 0
        for name in chain:
            if name not in self._blocks:
                break
            held += 1
        return held

    def _keep(self, chain: list[bytes], now: float) -> None:
        blocks = self._blocks
        for name in reversed(chain):  # the deepest block is the oldest, so that a chain is evicted from its end
            blocks[name] = now
            blocks.move_to_end(name)
        if self._rules.capacity_tokens is not None:
            while len(blocks) * self._rules.step_tokens > self._rules.capacity_tokens:
                blocks.popitem(last=False)

    def _expire(self, now: float) -> None:
        if self._rules.lifetime_seconds is None:
            return
        deadline = now - self._rules.lifetime_seconds
        blocks = self._blocks
        while blocks and next(iter(blocks.values())) < deadline:
            blocks.popitem(last=False)


def cost(
    rules: Rules, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int = 0, written_tokens: int = 0
) -> Decimal:
    """US dollars for one request; ``prompt_tokens`` includes the cached and the written ones."""
    return (
        (prompt_tokens - cached_tokens - written_tokens) * rules.input_usd_per_mtok
        + cached_tokens * rules.cached_usd_per_mtok
        + written_tokens * rules.write_usd_per_mtok
        + completion_tokens * rules.output_usd_per_mtok
    ) / _MTOK
