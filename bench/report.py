"""What was measured, as a table, targets and JSON: medians over the repetitions, and ratios paired within each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

# variant -> metric -> one value per repetition
Measured = Mapping[str, Mapping[str, Sequence[float]]]

BASES = ("nginx", "relay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A figure's name (its workload stands before the dot), how it is shown, and whether a ratio says anything."""

    name: str
    label: str
    digits: int
    ratio: bool = True

    @property
    def workload(self) -> str:
        """The workload that yields it."""
        return self.name.partition(".")[0]


METRICS = (
    Metric(name="small.req_s", label="2 KB, 64 clients: requests/s", digits=0),
    Metric(name="small.cpu_us", label="2 KB, 64 clients: CPU µs/request", digits=0),
    Metric(name="small.p50_ms", label="2 KB, 64 clients: p50 ms", digits=1),
    Metric(name="small-burst.req_s", label="2 KB, 64 clients, 200 idle: requests/s", digits=0),
    Metric(name="small-burst.cpu_us", label="2 KB, 64 clients, 200 idle: CPU µs/request", digits=0),
    Metric(name="single.p50_ms", label="2 KB, 1 client: p50 ms", digits=2),
    Metric(name="single.p99_ms", label="2 KB, 1 client: p99 ms", digits=2),
    Metric(name="turns.cpu_ms", label="400 KB next turn, 16 agents: CPU ms/request", digits=2),
    Metric(name="turns.req_s", label="400 KB next turn, 16 agents: requests/s", digits=0),
    Metric(name="turns.p50_ms", label="400 KB next turn, 16 agents: p50 ms", digits=1),
    Metric(name="turns.first_cpu_ms", label="400 KB first seen: CPU ms/request", digits=2),
    Metric(name="turns.upstream_kb", label="400 KB next turn: KB/request the upstream got", digits=0),
    Metric(name="turns-streamed.cpu_ms", label="400 KB next turn, 20 events: CPU ms/request", digits=2),
    Metric(name="turns-streamed.ttfb_p50_ms", label="400 KB next turn, 20 events: TTFB p50 ms", digits=1),
    Metric(name="streams.cpu_us", label="200 streams × 50 events/s: CPU µs/event", digits=1),
    Metric(name="streams.events_s", label="200 streams × 50 events/s: events/s delivered", digits=0),
    Metric(name="streams.lost", label="200 streams × 50 events/s: events lost or late", digits=0, ratio=False),
    Metric(name="streams.ttfb_p50_ms", label="200 streams × 50 events/s: TTFB p50 ms", digits=2),
    Metric(name="streams.ttfb_p99_ms", label="200 streams × 50 events/s: TTFB p99 ms", digits=2),
    Metric(name="streams.rss_kb", label="200 live streams: RSS KB/stream", digits=0),
    Metric(name="streams.pss_kb", label="200 live streams: PSS KB/stream", digits=0),
    Metric(name="idle.rss_mb", label="idle: RSS MB", digits=0),
    Metric(name="idle.pss_mb", label="idle: PSS MB", digits=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A target and how it went; `value` is None where something it needs was not measured."""

    label: str
    limit: float
    value: float | None
    met: bool | None


def ratio(measured: Measured, name: str, variant: str, base: str) -> float | None:
    """Return the median over the repetitions of `variant`'s value through `base`'s, None where one is missing."""
    pairs = _pairs(measured, name, variant, base)
    return median(value / other for value, other in pairs) if pairs and all(other for _, other in pairs) else None


def _pairs(measured: Measured, name: str, variant: str, base: str) -> list[tuple[float, float]]:
    return list(zip(measured.get(variant, {}).get(name, ()), measured.get(base, {}).get(name, ()), strict=False))


def outcomes(measured: Measured) -> list[Outcome]:
    """Hold Strata's figures against the targets."""
    lost = measured.get("strata", {}).get("streams.lost")
    turns = _pairs(measured, "turns.cpu_ms", "strata", "nginx")
    added = median(value - other for value, other in turns) if turns else None
    at_most, at_least = operator.le, operator.ge
    targets: tuple[tuple[str, float | None, Callable[[float, float], bool], float], ...] = (
        ("streams: CPU/event ≤ 2.5 × nginx", ratio(measured, "streams.cpu_us", "strata", "nginx"), at_most, 2.5),
        ("streams: no event lost", max(lost) if lost else None, at_most, 0),
        ("2 KB: requests/s ≥ 10 × relay", ratio(measured, "small.req_s", "strata", "relay"), at_least, 10),
        ("400 KB next turn: CPU ≤ 4 ms over nginx", added, at_most, 4),
    )
    return [
        Outcome(label=label, limit=limit, value=value, met=None if value is None else holds(value, limit))
        for label, value, holds, limit in targets
    ]


def _columns(measured: Measured) -> list[tuple[str, str | None]]:
    """Return the columns: a variant's values, then its ratio to each base that stands before it."""
    variants = list(measured)
    columns: list[tuple[str, str | None]] = []
    for variant in variants:
        columns.append((variant, None))
        columns += [(variant, base) for base in BASES if base in variants[: variants.index(variant)]]
    return columns


def _cell(measured: Measured, metric: Metric, variant: str, base: str | None) -> str:
    if base is None:
        values = measured[variant].get(metric.name)
        return f"{median(values):,.{metric.digits}f}" if values else "–"
    value = ratio(measured, metric.name, variant, base) if metric.ratio else None
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def print_tables(console: Console, measured: Measured) -> None:
    """Print the figures with their ratios, and the targets."""
    columns = _columns(measured)
    table = Table(title="Medians; beside them the ratio to nginx and to the plain relay")
    table.add_column("")
    for variant, base in columns:
        table.add_column(variant if base is None else f"× {base}", justify="right", style="dim" if base else "")
    workload = ""
    for metric in METRICS:
        if not any(metric.name in figures for figures in measured.values()):
            continue
        if workload and workload != metric.workload:
            table.add_section()
        workload = metric.workload
        table.add_row(metric.label, *(_cell(measured, metric, variant, base) for variant, base in columns))
    console.print(table)
    verdicts = Table(title="Targets for Strata")
    for title in ("target", "measured", ""):
        verdicts.add_column(title, justify="right" if title == "measured" else "left")
    for outcome in outcomes(measured):
        value = "" if outcome.value is None else f"{outcome.value:.3g}"
        verdict = {None: "[dim]not measured", True: "[green]met", False: "[red]missed"}[outcome.met]
        verdicts.add_row(outcome.label, value, verdict)
    console.print(verdicts)


def as_json(measured: Measured) -> dict[str, object]:
    """Return all figures: every repetition's value, medians, ratios and targets."""
    return {
        "figures": {
            variant: {
                name: {
                    "median": median(figures[name]),
                    "repetitions": list(figures[name]),
                    "ratios": {
                        base: ratio(measured, name, variant, base)
                        for base in BASES
                        if base in measured and base != variant
                    },
                }
                for name in sorted(figures)
            }
            for variant, figures in measured.items()
        },
        "targets": [
            {"target": outcome.label, "limit": outcome.limit, "value": outcome.value, "met": outcome.met}
            for outcome in outcomes(measured)
        ],
    }
