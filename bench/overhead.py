"""What the proxy costs, as ratios within one run: `python bench/overhead.py` (Linux; see bench/README.md).

nginx `proxy_pass`, a plain httpx relay and Strata stand before the same mock upstream, all up at once, and are tried in
turn; every repetition reverses their order, and every workload starts all of them anew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import orjson
import uvloop
from rich.console import Console

import bodies
import report
import servers
import workloads
from load import LoadError
from servers import Cores, Server, ServerError, running

VARIANTS = ("nginx", "relay", "strata")
WORKLOADS = tuple(workloads.WORKLOADS)
STEP_SECONDS = 60.0
MOST_WAITING = 0.1
WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure: `seconds` scales each workload; the run is stopped after `limit_seconds`."""

    repetitions: int
    seconds: float
    limit_seconds: float
    variants: tuple[str, ...]
    workloads: tuple[str, ...]
    strata_env: Mapping[str, str]
    json: Path | None


@dataclass(slots=True, kw_only=True)
class Run:
    """A run's figures so far, and what has to be said about them."""

    settings: Settings
    console: Console
    measured: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say something now, and keep it for the JSON."""
        self.notes.append(text)
        self.console.print(f"[yellow]{text}")

    def add(self, variant: str, figures: workloads.Figures) -> None:
        """Add one repetition's figures of a variant."""
        for name, value in figures.items():
            self.measured[variant].setdefault(name, []).append(value)


def _arguments(argv: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        description="Measure the proxy's overhead against nginx and a plain httpx relay, as ratios within one run."
    )
    parser.add_argument("--reps", type=int, help="repetitions (default 3; 1 with --quick)")
    parser.add_argument("--seconds", type=float, help="scale of each workload in seconds (default 3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="one short repetition, at most 90 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    names = ", ".join((*VARIANTS, *WORKLOADS))
    parser.add_argument("--only", default="", metavar="NAMES", help=f"comma-separated variants and workloads: {names}")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a setting of Strata other than its default"
    )
    args = parser.parse_args(argv)
    only = [name for name in args.only.split(",") if name]
    unknown = set(only) - set(VARIANTS) - set(WORKLOADS)
    if unknown:
        parser.error(f"--only does not know {', '.join(sorted(unknown))}; it knows {names}")
    repetitions = args.reps or (1 if args.quick else 3)
    return Settings(
        repetitions=repetitions,
        seconds=args.seconds or (1.0 if args.quick else 3.0),
        limit_seconds=_limit(args.quick, repetitions, args.seconds or 3.0),
        variants=tuple(name for name in VARIANTS if name in only) or VARIANTS,
        workloads=tuple(name for name in WORKLOADS if name in only) or WORKLOADS,
        strata_env={"STRATA_LOG_LEVEL": "warning"} | dict(pair.partition("=")[::2] for pair in args.env),
        json=args.json,
    )


def _limit(quick: bool, repetitions: int, seconds: float) -> float:
    """Return how long a run may take: 85 s, 350 s, and more only for who asked for more."""
    if quick:
        return 85.0
    return 350.0 * max(repetitions / 3, 1) * max(seconds / 3, 1)


def _present(run: Run) -> list[str]:
    """Return the variants that can be started, and say why the others cannot."""
    present = list(run.settings.variants)
    if "nginx" in present and servers.nginx_path() is None:
        present.remove("nginx")
        run.note("nginx is not installed: skipped, and with it the ratios to it (Debian: apt-get install nginx-light)")
    if "strata" in present and not (servers.ROOT / "proxy" / "__main__.py").exists():
        present.remove("strata")
        run.note("proxy/__main__.py does not exist: Strata skipped")
    return present


def _busy_share() -> float:
    """Return which share of the machine others use, over half a second."""

    def ticks() -> tuple[int, int]:
        values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(values), values[3] + values[4]

    total, idle = ticks()
    signal.sigtimedwait([], 0.5)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def _start(stack: ExitStack, name: str, folder: Path, upstream_port: int, run: Run, core: int | None) -> Server:
    port = servers.free_port()
    env = run.settings.strata_env if name == "strata" else {}
    nginx = servers.nginx_path() or ""
    command = {
        "nginx": lambda: servers.nginx_command(nginx, folder, port, upstream_port),
        "relay": lambda: servers.relay_command(port, upstream_port),
        "strata": lambda: servers.strata_command(port, upstream_port),
    }[name]()
    return stack.enter_context(running(name, command, port, core=core, folder=folder, env=env))


async def _trial(run: Run, name: str, subject: workloads.Subject, upstream: Server) -> None:
    """Try one variant with one workload, and note how long it had to wait for its core. Raises: LoadError."""
    server = subject.server
    run.console.print(f"[dim]{name}: {server.name}")
    begin, waited = perf_counter(), server.waited_seconds()
    try:
        async with asyncio.timeout(STEP_SECONDS):
            if name != "idle":
                await workloads.warm_up(server)
            figures = await workloads.WORKLOADS[name](subject)
    except (LoadError, TimeoutError, OSError) as error:
        server.check()
        upstream.check()
        raise LoadError(f"{server.name}, {name}: {error or 'not done in time'}") from error
    share = (server.waited_seconds() - waited) / (perf_counter() - begin)
    run.add(server.name, figures | {f"{name}.waited_percent": 100 * share})
    if share > MOST_WAITING:
        run.note(
            f"{name}: {server.name} was ready but waited for its core {share:.0%} of the time "
            "(others were on it, or its own other threads)"
        )


async def _repetition(run: Run, number: int, variants: Sequence[str], cores: Cores) -> None:
    """Give each workload fresh servers, all up at once, and try them in turn."""
    order = list(variants) if number % 2 == 0 else list(reversed(variants))
    seeds = range(1_000 * number, 1_000 * number + workloads.AGENTS + workloads.STREAMED_AGENTS)
    histories = [bodies.history(seed, workloads.AGENT_TURNS) for seed in seeds]
    for name in run.settings.workloads:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-bench-")))
            port = servers.free_port()
            upstream = stack.enter_context(
                running("upstream", servers.upstream_command(port), port, core=cores.load, folder=folder, env={})
            )
            await workloads.wait_until_ready(upstream)
            started = [_start(stack, variant, folder, port, run, cores.proxy) for variant in order]
            for server in started:
                await workloads.wait_until_ready(server)
            for server in started:
                await workloads.settle(server)
                subject = workloads.Subject(
                    server=server, upstream_port=port, seconds=run.settings.seconds, histories=histories
                )
                await _trial(run, name, subject, upstream)


async def _measure(run: Run, variants: Sequence[str], cores: Cores) -> None:
    """Do as many repetitions as asked for and as there is time for."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    limit = run.settings.limit_seconds
    begin = perf_counter()
    longest = 0.0
    try:
        async with asyncio.timeout(limit):
            for number in range(run.settings.repetitions):
                start = perf_counter()
                if start - begin + longest > limit:
                    run.note(f"{number} of {run.settings.repetitions} repetitions: there is no time for another")
                    return
                run.console.print(f"[dim]repetition {number + 1} of {run.settings.repetitions}")
                await _repetition(run, number, variants, cores)
                longest = max(longest, perf_counter() - start)
    except TimeoutError:
        run.note(f"stopped after {limit:.0f} s: what had no time is missing, and its ratios with it")


def _machine(cores: Cores) -> dict[str, object]:
    nginx = servers.nginx_path()
    shown = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=False).stderr.strip() if nginx else ""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "proxy_core": cores.proxy,
        "load_core": cores.load,
        "nginx": shown.partition("/")[2],
        "libraries": {name: version(name) for name in ("httpx", "starlette", "uvicorn", "uvloop", "httptools")},
    }


def _finish(run: Run, cores: Cores, error: str | None) -> None:
    """Print what there is, and write the JSON."""
    if any(run.measured.values()):
        report.print_tables(run.console, run.measured)
    if run.settings.json is not None:
        content = {
            "machine": _machine(cores),
            "settings": {"repetitions": run.settings.repetitions, "seconds": run.settings.seconds}
            | {"strata_env": dict(run.settings.strata_env)},
            "notes": run.notes,
            "error": error,
        } | report.as_json(run.measured)
        run.settings.json.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def main() -> int:
    """Measure, report; return 1 if an answer was wrong or a server failed, 130 if interrupted."""
    if not sys.platform.startswith("linux"):
        print("bench/overhead.py reads CPU time and memory from Linux's /proc; it does not run here.", file=sys.stderr)
        return 2
    run = Run(settings=_arguments(), console=Console(width=None if sys.stdout.isatty() else WIDTH))
    variants = _present(run)
    run.measured.update((name, {}) for name in variants)
    cores = Cores.available()
    if cores.load is not None:
        os.sched_setaffinity(0, {cores.load})
    else:
        run.note("one core only: proxy, upstream and load share it; requests/s say little, CPU figures still do")
    busy = _busy_share()
    if busy > 0.1:
        run.note(f"others use {busy:.0%} of this machine now: read even the ratios loosely")
    # Nothing here makes cycles in any number, and a collection would show in the latencies.
    gc.disable()
    error: str | None = None
    status = 0
    try:
        uvloop.run(_measure(run, variants, cores))
    except (LoadError, ServerError) as failure:
        error, status = str(failure), 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        error, status = "interrupted", 130
    _finish(run, cores, error)
    if error is not None:
        run.console.print(error, style="bold red", markup=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
