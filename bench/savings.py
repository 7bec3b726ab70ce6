"""What layering saves, by workload, provider and strategy: `python bench/savings.py [--traces FILE] [--only TITLE]`.

Strategies are the product's own code (plan, render, memory) driven in this process on the traffic's clock; the provider
is the simulator's accounting, or with `--engine URL` a real engine.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import orjson
from proxy.core import items, render
from proxy.core.policy import Policy, Promotion
from proxy.core.prefix import Ledger, Step
from proxy.core.profile import Profile
from proxy.memo import TokenScale, count
from proxy.offline import Offline
from proxy.simulator.accounting import OPENAI, VLLM, PromptCache, Rules, cost
from proxy.simulator.prompt import render as render_prompt
from proxy.simulator.tokens import tokenizer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine import Engine
from peer import Peer, Recorder
from traffic import MODEL, Exchange, Workload, fewer, pieces, volatile, workloads

MEMORY_BYTES = 512_000_000
ENGINE_CONVERSATIONS = 12
"""Of a workload, with a real engine."""
RESERVE = 1_000
"""Of a workload's budget; tokens."""


class Strategy(Protocol):
    """Turns a client's request into what is forwarded. `broke` counts the epochs it ended, by reason.

    `steps` are those of the last prompt forwarded, where it predicts.
    """

    name: str
    broke: Mapping[str, int]
    steps: tuple[Step, ...]

    def forward(self, exchange: Exchange) -> bytes:
        """Return the body the provider gets."""
        ...


class Straight:
    """The client's own bytes."""

    name = "straight"
    broke: Mapping[str, int] = {}
    steps: tuple[Step, ...] = ()

    def forward(self, exchange: Exchange) -> bytes:
        """Change nothing."""
        return exchange.body


class Trimmed:
    """What a client or proxy without a grid does over a budget: each time the oldest turns go until it fits."""

    name = "trimmed"
    broke: Mapping[str, int] = {}
    steps: tuple[Step, ...] = ()

    def __init__(self, budget_tokens: int) -> None:
        self._most = budget_tokens - RESERVE

    def forward(self, exchange: Exchange) -> bytes:
        """Drop the oldest turns."""
        body = orjson.loads(exchange.body)
        system, *turns = body["messages"]
        while len(render_prompt({**body, "messages": [system, *turns]}, tokenizer(MODEL)).tokens) > self._most:
            rest = [at for at, message in enumerate(turns) if at and message["role"] == "user"]
            if not rest:
                break
            turns = turns[rest[0] :]
        return orjson.dumps({**body, "messages": [system, *turns]})


class Strata:
    """The product with one promotion."""

    def __init__(self, promotion: Promotion, rules: Rules, budget_tokens: int | None) -> None:
        self.name = promotion
        self.broke: Counter[str] = Counter()
        self.steps: tuple[Step, ...] = ()
        self._policy = Policy(
            mode="layered",
            promotion=promotion,
            budget_tokens=budget_tokens,
            reserve_tokens=RESERVE if budget_tokens else 4_096,
            over_budget="forward",
            windowed=True,
            profile=Profile(lifetime_seconds=rules.lifetime_seconds or 86_400.0, system_last=True),
        )
        self._offline = Offline(self._policy, _scale(), max_bytes=MEMORY_BYTES)

    def forward(self, exchange: Exchange) -> bytes:
        """Plan, remember, and take the answer as given."""
        found = self._offline.plan(exchange.body, at=exchange.at, name=exchange.name, reply=exchange.reply)
        if found.plan.began is not None and found.plan.began != "first":
            self.broke[found.plan.began] += 1
        self.steps = found.steps
        return render.body(found.request, found.plan.draft, ask_usage=False)


@dataclass(slots=True, kw_only=True)
class Line:
    """One row of the result: tokens, US dollars where the provider has prices, milliseconds where it takes time."""

    workload: str
    provider: str
    strategy: str
    breaks: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0
    floor_tokens: int = 0
    reach_tokens: int = 0
    usd: float = 0.0
    broke: Mapping[str, int] = field(default_factory=dict[str, int])
    first_event_ms: Sequence[float] = ()
    predicted_tokens: int | None = None

    @property
    def uncached_tokens(self) -> int:
        """What is read at full price."""
        return self.prompt_tokens - self.cached_tokens


def measure(workload: Workload, rules: Rules, strategy: Strategy, bounds: tuple[int, int]) -> Line:
    """Run one strategy over a workload."""
    cache, words = PromptCache(rules), tokenizer(MODEL)
    line = Line(workload=workload.title, provider=rules.name, strategy=strategy.name, breaks=workload.breaks)
    total = Decimal(0)
    for exchange in workload.exchanges:
        forwarded = strategy.forward(exchange)
        prompt = render_prompt(orjson.loads(forwarded), words)
        charge = cache.charge(prompt.tokens, now=exchange.at, partition="bench")
        line.prompt_tokens += charge.prompt_tokens
        line.cached_tokens += charge.cached_tokens
        total += cost(rules, prompt_tokens=charge.prompt_tokens, cached_tokens=charge.cached_tokens)
    line.usd, line.broke = float(total), dict(strategy.broke)
    line.floor_tokens, line.reach_tokens = bounds
    return line


def measure_engine(workload: Workload, url: str, strategy: Strategy) -> Line:
    """Run one strategy over a workload against a real engine, whose vocabulary is its own: there is no floor."""
    engine = Engine(url, secrets.token_hex(4))
    line = Line(workload=workload.title, provider="engine", strategy=strategy.name, breaks=workload.breaks)
    waits: list[float] = []
    ledger = Ledger(max_bytes=MEMORY_BYTES)
    profile = Profile(minimum_tokens=1, block_tokens=1, lifetime_seconds=86_400.0)
    for exchange in workload.exchanges:
        prompt, cached, wait = engine.read(strategy.forward(exchange))
        if own := sum(step.tokens for step in strategy.steps):
            # Vocabularies differ: a prediction counts in the engine's tokens.
            held = ledger.cached(0, strategy.steps, now=exchange.at, profile=profile)
            line.predicted_tokens = (line.predicted_tokens or 0) + round(held * prompt / own)
            ledger.forward(0, strategy.steps, now=exchange.at)
        line.prompt_tokens += prompt
        line.cached_tokens += cached
        waits.append(wait)
    line.broke, line.first_event_ms = dict(strategy.broke), waits
    return line


def least(workload: Workload, rules: Rules) -> tuple[int, int]:
    """Return the floor and the reach: what nobody, and what nobody at this provider, can do without reading.

    The floor counts each distinct piece of content once a lifetime, changing values once a turn. The reach counts the
    messages' frames as well, and grants what the provider's prompt cache can hold: whole steps, above its minimum.
    An answer's head has been read with the question: it is what primes the answer.
    """
    changing, lifetime = volatile(workload.exchanges), rules.lifetime_seconds or float("inf")
    priming = len(render_prompt({}, tokenizer(MODEL)).tokens)
    seen: dict[object, float] = {}
    floor = reach = 0
    for exchange in workload.exchanges:
        held, new = priming, 0
        for piece in {each.key: each for each in pieces(exchange, _blocks, changing[exchange.thread])}.values():
            content = _scale().text(piece.text)
            framed = content + _frame(piece.frame) - priming * (piece.frame is not None)
            held += framed
            if piece.key not in seen or exchange.at - seen[piece.key] > lifetime:
                floor += content
                new += framed - priming * (piece.frame is not None and piece.frame["role"] == "assistant")
            seen[piece.key] = exchange.at
        cached = (held - max(new, 1)) // rules.step_tokens * rules.step_tokens
        reach += held - (cached if cached >= rules.minimum_tokens else 0)
    return floor, reach


def _frame(message: Mapping[str, object] | None) -> int:
    return len(render_prompt({"messages": [message]}, tokenizer(MODEL)).tokens) if message else 0


def _blocks(text: str) -> Sequence[str]:
    return [block.item.content for block in items.find(text, items.BUILTIN, count) if block.item]


_scales: list[TokenScale] = []


def _scale() -> TokenScale:
    if not _scales:
        _scales.append(TokenScale("o200k_base", max_bytes=MEMORY_BYTES))
    return _scales[0]


def table(lines: Sequence[Line]) -> Table:
    """Return the result as a table, each workload's strategies below one another."""
    shown = Table(title="Uncached input tokens, by workload, provider and strategy", title_justify="left")
    for column in ("workload", "provider", "strategy"):
        shown.add_column(column)
    for column in ("prompt", "cached", "uncached", "vs straight", "x floor", "x reach", "cost", "extra"):
        shown.add_column(column, justify="right")
    if predicts := any(line.predicted_tokens for line in lines):
        shown.add_column("predicted", justify="right")
    shown.add_column("epochs ended")
    if timed := any(line.first_event_ms for line in lines):
        shown.add_column("ms to first event: median / mean", justify="right")
    straight = {(line.workload, line.provider): line for line in lines if line.strategy == "straight"}
    last = ""
    for line in lines:
        base = straight[line.workload, line.provider]
        change = line.uncached_tokens / base.uncached_tokens - 1
        if (head := f"{line.workload}{line.provider}") != last:
            shown.add_section()
        shown.add_row(
            line.workload if head != last else "",
            line.provider if head != last else "",
            line.strategy,
            f"{line.prompt_tokens:,}",
            f"{line.cached_tokens / line.prompt_tokens:{'.1%' if predicts else '.0%'}}",
            f"{line.uncached_tokens:,}",
            "" if line is base else f"[{'green' if change < 0 else 'red' if change > 0 else 'dim'}]{change:+.0%}[/]",
            f"{line.uncached_tokens / line.floor_tokens:.2f}" if line.floor_tokens else "",
            f"{line.uncached_tokens / line.reach_tokens:.2f}" if line.reach_tokens else "",
            f"${line.usd:.3f}" if line.usd else "",
            _extra(line, base),
            *(
                [f"{line.predicted_tokens / line.prompt_tokens:.1%}" if line.predicted_tokens else ""]
                if predicts
                else []
            ),
            ", ".join(f"{reason} {times}" for reason, times in sorted(line.broke.items())),
            *([_waits(line)] if timed else []),
        )
        last = head
    return shown


def _extra(line: Line, base: Line) -> str:
    """Say what the tokens that the client did not send cost at the cached price, as a share of straight's cost."""
    more = max(0, line.prompt_tokens - base.prompt_tokens)
    return f"{more * float(OPENAI.cached_usd_per_mtok) / 1e6 / base.usd:.1%}" if base.usd and line is not base else ""


def _waits(line: Line) -> str:
    waits = line.first_event_ms
    return f"{statistics.median(waits):.0f} / {statistics.mean(waits):.0f}" if waits else ""


def picture(lines: Sequence[Line]) -> str:
    """Draw uncached tokens as bars, one group a workload, as an SVG."""
    chosen = [line for line in lines if line.provider == lines[0].provider]
    colours = {"straight": "#8c8c8c", "trimmed": "#cc79a7", "eager": "#e69f00", "deferred": "#0072b2"}
    rows, y = [], 40
    for workload in dict.fromkeys(line.workload for line in chosen):
        group = [line for line in chosen if line.workload == workload]
        most = max(line.uncached_tokens for line in group)
        rows.append(f'<text x="10" y="{y + 12}" font-weight="bold">{workload}</text>')
        y += 20
        for line in group:
            width = 560 * line.uncached_tokens / most
            fill = colours.get(line.strategy, "#56b4e9")
            rows.append(f'<rect x="120" y="{y}" width="{width:.0f}" height="12" fill="{fill}"/>')
            rows.append(f'<text x="10" y="{y + 11}">{line.strategy}</text>')
            rows.append(f'<text x="{126 + width:.0f}" y="{y + 11}">{line.uncached_tokens:,}</text>')
            y += 15
        for bound, stroke in ((group[0].floor_tokens, "#d55e00"), (group[0].reach_tokens, "#009e73")):
            x, top = 120 + 560 * bound / most, y - 15 * len(group)
            if bound:
                line = f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top}" y2="{y - 3}" stroke="{stroke}" stroke-width="2"/>'
                rows.append(line)
        y += 10
    head = f"Uncached input tokens ({chosen[0].provider})"
    head += "; the lines are the floor (red) and what is in reach (green)" if chosen[0].floor_tokens else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{y + 10}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="22" font-size="15">{head}</text>'
        + "".join(rows)
        + "</svg>"
    )


def _named(given: str) -> tuple[str, str]:
    name, equals, url = given.partition("=")
    if not equals or not url.startswith(("http://", "https://")):
        sys.exit(f"--proxy is {given!r}: expected NAME=URL, as in litellm=http://127.0.0.1:4000")
    return name, url.rstrip("/").removesuffix("/v1")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--traces", type=Path, help="conversations for the agents' workloads, one JSON object a line")
    parser.add_argument("--only", default="", help="workloads whose title holds this")
    parser.add_argument("--engine", metavar="URL", help="measure against this server instead, one request at a time")
    parser.add_argument(
        "--proxy", metavar="NAME=URL", action="append", default=[],
        help="another proxy as a strategy; its upstream must be http://127.0.0.1:PORT/v1 (see --listen)",
    )  # fmt: skip
    parser.add_argument("--listen", metavar="PORT", type=int, default=9109, help="where the proxies' upstream listens")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="folder for savings.json and savings.svg")
    args = parser.parse_args()
    chosen = [load for load in workloads(args.seed, args.traces) if args.only in load.title]
    if not chosen:
        sys.exit(f"no workload's title holds {args.only!r}")
    peers = dict(_named(given) for given in args.proxy)
    recorder = Recorder(args.listen) if peers else None
    lines: list[Line] = []
    console = Console()
    if args.engine:
        chosen = [fewer(load, ENGINE_CONVERSATIONS) for load in chosen]
    for load in track(chosen, description="workloads", console=console):
        for rules in (VLLM,) if args.engine else (OPENAI, VLLM):
            strategies: list[Strategy] = [
                Straight(),
                *([Trimmed(load.budget_tokens)] if load.budget_tokens else []),
                Strata("eager", rules, load.budget_tokens),
                Strata("deferred", rules, load.budget_tokens),
                *(Peer(name, url, recorder) for name, url in peers.items() if recorder is not None),
            ]
            if args.engine:
                lines += [measure_engine(load, args.engine, strategy) for strategy in strategies]
            else:
                bounds = least(load, rules)
                lines += [measure(load, rules, strategy, bounds) for strategy in strategies]
    Console(width=None if sys.stdout.isatty() else 170).print(table(lines))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "savings.json").write_bytes(orjson.dumps([asdict(line) for line in lines], option=orjson.OPT_INDENT_2))
    (args.out / "savings.svg").write_text(picture(lines))
    console.print(f"written: {args.out}/savings.json, {args.out}/savings.svg")


if __name__ == "__main__":
    main()
