"""What the demo prints: a table that grows turn by turn, then both ways side by side."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from proxy.demo import run
from proxy.demo.run import Place, Planted, Step, Told
from proxy.demo.scenes import scenes

_ROWS = 16
_WIDE = 130
_LAYERS = ("L1", "L2", "L3", "L4", "L5")


def demo(console: Console, *, keep: Callable[[], object] | None) -> None:
    """Run the demo; with `keep` its servers stay up until that returns."""
    total = sum(len(scene.turns) for scene in scenes())
    console.print(
        "[bold]Strata demo[/bold]: the same conversations directly with a simulated provider, and through Strata. "
        "No key, no Redis, no network.\n"
    )
    with run.servers() as (straight, through):
        steps = _play(console, straight, through, total)
        console.print(_summary(steps))
        console.print(_verdict(steps))
        if keep is not None:
            with tempfile.TemporaryDirectory(prefix="strata-demo-") as folder:
                planted, following = run.plant(through), Path(folder) / "next.json"
                following.write_bytes(planted.following)
                _urls(console, through, planted, following)
                keep()


def _play(console: Console, straight: Place, through: Place, total: int) -> list[Step]:
    progress = Progress(
        TextColumn("turns"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = progress.add_task("turns", total=total)
    seen: list[Step] = []
    narrow = console.width < _WIDE
    with Live(
        Group(_table([], narrow=narrow), progress), console=console, refresh_per_second=8, transient=True
    ) as live:

        def on_step(step: Step) -> None:
            seen.append(step)
            progress.advance(task)
            live.update(Group(_table(seen[-_ROWS:], narrow=narrow), progress))
            if not console.is_terminal:
                layers = " ".join(f"{name}={tokens}" for name, tokens in step.strata.layers)
                told = f"turn {step.turn} of {step.scene.title}: {layers}; cached {step.strata.cached_tokens}"
                console.print(f"[{len(seen)}/{total}] {told}", soft_wrap=True, highlight=False, markup=False)

        steps = run.drive(straight, through, on_step=on_step)
    console.print(_table(steps, narrow=narrow))
    return steps


def _table(steps: Sequence[Step], *, narrow: bool) -> Table:
    """Tokens by turn; in thousands, and with names without what stands in brackets, where the terminal has no room."""
    table = Table(
        title="Turn by turn, in tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD if narrow else box.ROUNDED,
        padding=(0, 0 if narrow else 1),
        collapse_padding=narrow,
    )
    table.add_column("conversation", no_wrap=True)
    for title in ("turn", "direct", "cached", "Strata", *_LAYERS, "cached", "refs"):
        style = "dim" if title in _LAYERS else ""
        table.add_column(title, justify="right", style=style, no_wrap=True)
    for step in steps:
        title = step.scene.title
        table.add_row(
            title.partition(" (")[0] if narrow else title, *_row(step, _thousands if narrow else "{:,}".format)
        )
    return table


def _thousands(tokens: int) -> str:
    return str(tokens) if tokens < 1_000 else f"{tokens / 1000:.1f}k"


def _row(step: Step, shown: Callable[[int], str]) -> list[str]:
    layers = dict(step.strata.layers)
    return [
        str(step.turn),
        shown(step.straight.prompt_tokens),
        shown(step.straight.cached_tokens),
        shown(step.strata.prompt_tokens),
        *(shown(layers[name]) if layers.get(name) else "" for name in _LAYERS),
        shown(step.strata.cached_tokens),
        str(step.strata.references or ""),
    ]


def _summary(steps: Sequence[Step]) -> Table:
    table = Table(title="\nBoth ways, side by side", title_justify="left")
    for column in ("", "direct", "through Strata", "change"):
        table.add_column(column, justify="left" if not column else "right")
    straight, strata = [step.straight for step in steps], [step.strata for step in steps]
    for name, measure, shown in (
        ("prompt tokens", _prompt, "{:,.0f}"),
        ("of these cached", _cached, "{:,.0f}"),
        ("cached share", _share, "{:.1%}"),
        ("tokens read at full price", _uncached, "{:,.0f}"),
        ("cost (gpt-5.1 prices)", _usd, "${:.4f}"),
        ("time to first token, median", _median, "{:.0f} ms"),
        ("time to first token, mean", _mean, "{:.0f} ms"),
    ):
        before, after = measure(straight), measure(strata)
        change = (
            f"{(after - before) * 100:+.1f} points"
            if measure is _share
            else f"{after / before - 1:+.0%}"
            if before
            else ""
        )
        table.add_row(name, shown.format(before), shown.format(after), change)
    return table


def _verdict(steps: Sequence[Step]) -> str:
    before, after = _usd([step.straight for step in steps]), _usd([step.strata for step in steps])
    references = sum(step.strata.references for step in steps)
    return (
        f"\nStrata sent [bold]{references}[/bold] repeated items as references, and these conversations cost "
        f"[bold]{1 - after / before:.0%}[/bold] less. An append-only conversation goes through byte for byte."
    )


def _urls(console: Console, through: Place, planted: Planted, following: Path) -> None:
    key, named = "-H 'Authorization: Bearer demo'", f"--header 'x-session-id: {planted.conversation}'"
    explain = f"strata explain {following} --url {through.strata} --header 'Authorization: Bearer demo' {named}"
    for line in (
        "\nStill running; Ctrl-C ends it.",
        f"  live page                    {through.strata}/strata/",
        f"  base_url for an OpenAI SDK   {through.strata}/v1   (any key, model {run.MODEL})",
        f"  metrics                      {through.strata}/metrics",
        f"  a conversation's layers      curl {key} {through.strata}/strata/conversations/demo-notes",
        f"  what the provider received   {through.provider}/sim/requests",
        f"\nThe newest request of conversation {planted.conversation} has just broken its prompt cache. What broke it?",
        "  on the live page             the first row, its mark is red; click its number and give the key: demo",
        f"  its receipt                  curl {key} {through.strata}/strata/requests/{planted.request_id}",
        f"  what comes of the next one   {explain}",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _prompt(told: Sequence[Told]) -> float:
    return sum(one.prompt_tokens for one in told)


def _cached(told: Sequence[Told]) -> float:
    return sum(one.cached_tokens for one in told)


def _uncached(told: Sequence[Told]) -> float:
    return _prompt(told) - _cached(told)


def _share(told: Sequence[Told]) -> float:
    return _cached(told) / _prompt(told)


def _usd(told: Sequence[Told]) -> float:
    return float(sum(one.usd for one in told))


def _median(told: Sequence[Told]) -> float:
    return statistics.median(one.first_token_seconds for one in told) * 1000


def _mean(told: Sequence[Told]) -> float:
    return statistics.fmean(one.first_token_seconds for one in told) * 1000
