"""What the budget guard costs, at 1k to 1M tokens: at first sight, and for the next turn.

`python bench/guard.py [--tokens 1000,10000] [--repeat N] [--json FILE]`. A request is read, planned against a budget,
and rendered, in this process; its history is words, tool calls and long outputs. Beside each time stands how it relates
to what must be paid anyway, measured in the same run: at first sight to counting the same text with tiktoken alone, for
the next turn to one parse of the same body with orjson.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy import ranks
from proxy.core import plan, render, request, tokens
from proxy.core.items import Tags
from proxy.core.lineage import NOTHING
from proxy.core.models import describe
from proxy.core.policy import Policy
from proxy.memo import Analyst, TokenScale, count

SIZES = (1_000, 10_000, 100_000, 1_000_000)
RESERVE = 256
WORDS = ("the", "answer", "holds", "because", "every", "value", "is", "kept", "in", "order", "and", "read", "once")


def turn(chance: random.Random, number: int) -> list[dict[str, object]]:
    """A turn of about 1,300 tokens: a question, a call with a long output, an answer."""

    def said(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=words))

    call = {"id": f"call_{number}", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
    output = "\n".join(said(12) for _ in range(60))
    return [
        {"role": "user", "content": f"Question {number}: {said(120)}"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": output},
        {"role": "assistant", "content": said(240)},
    ]


def conversation(size: int) -> tuple[bytes, bytes]:
    """Return a request of about so many tokens, and the same a turn later."""
    chance = random.Random(size)
    talk: list[dict[str, object]] = [{"role": "system", "content": "You help. " * 20}]
    for number in range(max(1, size // 1_300)):
        talk += turn(chance, number)
    more = turn(chance, 10_000)
    first = {"model": "gpt-4o", "messages": [*talk, more[0]]}
    return orjson.dumps(first), orjson.dumps({**first, "messages": [*talk, *more, turn(chance, 10_001)[0]]})


def timed(work: Callable[[], object]) -> float:
    """Return milliseconds of this process's CPU."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1_000


class Guard:
    """A process that has seen nothing yet."""

    def __init__(self) -> None:
        self.analyst = Analyst(Tags.of(), max_bytes=256_000_000)
        self.scale = TokenScale("o200k_base", max_bytes=256_000_000)
        self.total = 0

    def serve(self, body: bytes, budget: int) -> None:
        """Read, plan and render one request."""
        found = request.read(body, self.analyst.analyse, count)
        made = plan.make(
            found,
            NOTHING,
            model=describe(found.model),
            policy=Policy(
                mode="layered", budget_tokens=budget + RESERVE, reserve_tokens=RESERVE, over_budget="forward"
            ),
            named=False,
            scale=self.scale,
            look=self.analyst.analyse,
            now=0.0,
        )
        assert made.total is None or made.total <= budget
        self.total = made.total or 0
        render.body(found, made.draft, ask_usage=False)


def measured(size: int, *, over: bool, repeat: int) -> dict[str, float]:
    """Measure one size: within the budget, counted to the last token, or a third over it."""
    first, later = conversation(size)
    encode = tokens.counter(ranks.load("o200k_base"))
    text = "\n".join(str(message["content"]) for message in orjson.loads(first)["messages"])
    true = encode(text)
    # Just within: so near that bytes alone prove nothing.
    budget = max(800, int(true * (0.67 if over else 1.15)))
    rows: list[tuple[float, float, float, float]] = []
    for _ in range(repeat):
        guard = Guard()
        alone = timed(lambda: encode(text))
        seen = timed(lambda guard=guard: guard.serve(first, budget))  # type: ignore[misc]
        parse = min(timed(lambda: orjson.loads(later)) for _ in range(3))
        rows.append((seen, alone, timed(lambda guard=guard: guard.serve(later, budget)), parse))  # type: ignore[misc]
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    return {
        "tokens": true,
        "first_ms": middle[0],
        "first_ratio": statistics.median(row[0] / max(row[1], 1e-6) for row in rows),
        "next_ms": middle[2],
        "next_ratio": statistics.median(row[2] / max(row[3], 1e-6) for row in rows),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, SIZES)), help="sizes, separated by commas")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args(arguments)
    table = Table(title="The guard's CPU, milliseconds")
    for head in ("tokens", "budget", "first sight", "x tiktoken alone", "next turn", "x one JSON parse"):
        table.add_column(head, justify="right")
    found = []
    for size in map(int, options.tokens.split(",")):
        for over in (False, True):
            row = measured(size, over=over, repeat=options.repeat)
            found.append({"over": over, **row})
            table.add_row(
                f"{row['tokens']:,.0f}", "a third over" if over else "just within", f"{row['first_ms']:.1f}",
                f"{row['first_ratio']:.2f}", f"{row['next_ms']:.2f}", f"{row['next_ratio']:.1f}",
            )  # fmt: skip
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
