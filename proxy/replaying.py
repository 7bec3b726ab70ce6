"""`strata replay`: the command's tables, progress and files."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import BinaryIO

import orjson
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from proxy.app import given_prices
from proxy.core.items import Tags
from proxy.memo import TokenScale
from proxy.prices import Prices, own
from proxy.replay import Replay, Report, Sums, lines
from proxy.settings import Settings
from proxy.tenants import Tenants

_HOMES = (
    "https://api.openai.com/v1",
    "https://api.anthropic.com/v1",
    "https://generativelanguage.googleapis.com/v1beta",
    "https://api.deepseek.com/v1",
    "https://openrouter.ai/api/v1",
)
"""Whose prices are asked in turn for a model that the upstream does not have: traffic may be of several providers."""


def run(settings: Settings, file: BinaryIO, *, whole: bool, model: str, console: Console) -> Report:
    """Play a file with the settings in force, in layers whatever the mode, and show how far it is."""
    policy = dataclasses.replace(Tenants(settings).nobody.policy, mode="layered")
    prices = Prices(given_prices(settings))
    sellers = (settings.upstream_url, *(() if own(settings.upstream_url) else _HOMES))
    prices.load(sellers)
    replay = Replay(
        policy,
        TokenScale("o200k_base", max_bytes=settings.memory_bytes),
        price=lambda name, at: next(filter(None, (prices.of(name, seller, at) for seller in sellers)), None),
        max_bytes=settings.memory_bytes,
        tags=Tags.of(settings.context_tags),
        windows=settings.windows,
    )
    bar = Progress(
        TextColumn("replay"), BarColumn(bar_width=40), DownloadColumn(), TimeRemainingColumn(), console=console,
        transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("replay", total=_size(file))
        traffic = lines(file, read=lambda size: bar.advance(task, size), whole=whole, model=model, now=time.time())
        return replay.play(traffic)


def _size(file: BinaryIO) -> int | None:
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:
        return None


def show(console: Console, report: Report) -> None:
    """Print a report for people."""
    table = Table(title=f"{report.requests:,} requests", title_justify="left", box=None, pad_edge=False)
    for title in ("", "prompt tokens", "cached", "uncached", "of as sent", "prompts, US dollars"):
        table.add_column(title, justify="left" if not title else "right")
    for title, sums in (("as sent", report.as_sent), ("in layers", report.layered)):
        table.add_row(title, *_row(sums, report.as_sent))
    if report.reported:
        table.add_section()
        table.add_row(f"reported, for {report.reported:,}", *_row(report.recorded, report.recorded_as_sent))
        table.add_row("as sent, of these", *_row(report.recorded_as_sent, report.recorded_as_sent))
    console.print(table)
    if len(report.models) > 1:
        console.print(_models(report))
    _counts(console, "Uncached as sent, by cause", dict(report.as_sent.causes.most_common()), "tokens")
    breaks = {f"{layer}: {kind}": count for (layer, kind), count in report.breaks.most_common(12)}
    _counts(console, "Breaks", breaks, "requests")
    if report.worst:
        worst = Table(title="Worst conversations", title_justify="left", box=None, pad_edge=False)
        for title in ("conversation", "uncached as sent", "in layers"):
            worst.add_column(title, justify="left" if title == "conversation" else "right")
        for name, own, mine in report.worst:
            worst.add_row(escape(name[:60]), f"{own:,}", f"{mine:,}")
        console.print(worst)
    if report.unpriced:
        console.print(f"{report.unpriced:,} requests are of models without a price; STRATA_PRICES gives one.")
    for why, count in report.skipped.items():
        console.print(f"[red]skipped[/red] {count:,}: {escape(why)}")


def _row(sums: Sums, base: Sums) -> list[str]:
    share = f"{sums.cached_share:.0%}" if sums.cached_share is not None else "–"
    change = sums.uncached_tokens / base.uncached_tokens - 1 if base.uncached_tokens else 0.0
    return [f"{sums.input_tokens:,}", share, f"{sums.uncached_tokens:,}", f"{change:+.0%}", _usd(sums)]


def _models(report: Report) -> Table:
    table = Table(title="By model", title_justify="left", box=None, pad_edge=False)
    for title in ("", "prompt tokens", "cached as sent", "in layers", "US dollars", "in layers"):
        table.add_column(title, justify="left" if not title else "right")
    for name, (sent, mine) in sorted(report.models.items(), key=lambda each: -each[1][0].input_tokens):
        shares = (f"{sums.cached_share or 0:.0%}" for sums in (sent, mine))
        table.add_row(escape(name[:60]), f"{sent.input_tokens:,}", *shares, _usd(sent), _usd(mine))
    return table


def _usd(sums: Sums) -> str:
    return f"{sums.usd:,.2f}" if sums.usd >= 1 else f"{sums.usd:.4f}"


def _counts(console: Console, title: str, counts: dict[str, int], unit: str) -> None:
    if not counts:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column(unit, justify="right")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    console.print(table)


def write(report: Report, *, json: BinaryIO | None, svg: BinaryIO | None) -> None:
    """Write the report's files."""
    if json is not None:
        json.write(orjson.dumps(report.told(), option=orjson.OPT_INDENT_2) + b"\n")
    if svg is not None:
        svg.write(picture(report).encode())


def picture(report: Report) -> str:
    """Draw the report: two bars of tokens by what became of them, and as-sent causes. An SVG of its own."""
    width, x = 620.0, 130.0
    most = max(report.as_sent.input_tokens, report.layered.input_tokens, 1)
    rows: list[str] = []

    def bar(y: int, title: str, parts: Mapping[str, tuple[int, str]]) -> None:
        at = x
        rows.append(f'<text x="{x - 8}" y="{y + 15}" text-anchor="end">{title}</text>')
        for name, (tokens, colour) in parts.items():
            wide = width * tokens / most
            told = f"<title>{title}: {name} {tokens:,} tokens</title>"
            box = f'x="{at:.1f}" y="{y}" width="{wide:.1f}" height="22" fill="{colour}"'
            rows.append(f"<rect {box}>{told}</rect>")
            at += wide

    for place, (title, sums) in enumerate((("as sent", report.as_sent), ("in layers", report.layered))):
        bar(
            46 + 40 * place,
            title,
            {"cached": (sums.cached_tokens, "#56a64b"), "uncached": (sums.uncached_tokens, "#d1495b")},
        )
    colours = {"new": "#96d98d", "cold_start": "#8ab8ff", "expired": "#b877d9", "changed": "#d1495b",
               "below_minimum": "#c8c8c8", "provider_miss": "#ff9830"}  # fmt: skip
    causes = report.as_sent.causes
    bar(136, "why uncached", {name: (causes[name], colour) for name, colour in colours.items() if causes[name]})
    legend, at = [], x
    for name, colour in {
        "cached": "#56a64b",
        "uncached": "#d1495b",
        **{k: v for k, v in colours.items() if causes[k]},
    }.items():
        legend.append(f'<rect x="{at}" y="178" width="11" height="11" fill="{colour}"/>')
        legend.append(f'<text x="{at + 16}" y="188">{name}</text>')
        at += 40 + 7 * len(name)
    title = f"{report.requests:,} requests: prompt tokens as sent and in layers"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="780" height="204" font-family="system-ui, sans-serif" '
        f'font-size="13"><rect width="780" height="204" fill="#fff"/><text x="16" y="26" font-size="15" '
        f'font-weight="600">{title}</text>{"".join(rows)}{"".join(legend)}</svg>\n'
    )
