"""The command line: `strata serve`, `strata demo`, `strata explain`, `strata replay`, `strata config`."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import BinaryIO

import click
from rich.console import Console
from rich.table import Table

from proxy import environment as config
from proxy import server
from proxy.settings import PREFIX, Settings


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="strata-proxy", prog_name="strata")
def main() -> None:
    """Strata: a reverse proxy that makes every prompt cheap to repeat."""


@main.command()
@click.option("--host", help="Address to listen on (STRATA_HOST).")
@click.option("--port", help="Port to listen on; 0 takes a free one (STRATA_PORT).")
@click.option("--upstream", help="The model API behind the proxy (STRATA_UPSTREAM_URL).")
@click.option("--workers", help="Processes (STRATA_WORKERS).")
def serve(host: str | None, port: str | None, upstream: str | None, workers: str | None) -> None:
    """Serve until interrupted."""
    given = {"HOST": host, "PORT": port, "UPSTREAM_URL": upstream, "WORKERS": workers}
    options = {PREFIX + name: value for name, value in given.items() if value is not None}
    settings = _load(options)
    config.export(options)
    try:
        listener = server.listen(settings)
    except OSError as error:
        click.echo(
            f"strata: cannot listen on {settings.host}:{settings.port}: {(error.strerror or str(error)).lower()}",
            err=True,
        )
        sys.exit(1)
    click.echo(server.announce(settings, listener), err=True)
    sys.exit(server.run(settings, listener))


@main.command()
@click.option("--keep", is_flag=True, help="Stay up afterwards and say which URLs to open.")
def demo(*, keep: bool) -> None:
    """Show the main job on this machine alone: no key, no Redis, no network."""
    try:
        from proxy.demo import show  # noqa: PLC0415 -- needs the extra, which a server does without
    except ModuleNotFoundError as error:
        click.echo(f"strata: the demo needs the package {error.name!r}: pip install '.[demo]'", err=True)
        sys.exit(2)
    # Whoever ends it, its servers stop and its files go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        show.demo(Console(), keep=threading.Event().wait if keep else None)


@main.command(name="explain")
@click.argument("file", type=click.File("rb"))
@click.option("--url", help="A running proxy; without one this process plans with the settings in force.")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="A header of the request.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer of POST /strata/explain as it is.")
def explain_(file: BinaryIO, url: str | None, headers: tuple[str, ...], *, as_json: bool) -> None:
    """Say what would be done with the chat request in FILE (`-` for standard input), and why."""
    from proxy import explaining  # noqa: PLC0415 -- brings the whole application

    given = {name.strip(): value.strip() for name, _, value in (header.partition(":") for header in headers)}
    if wrong := [header for header in headers if not header.partition(":")[0].strip() or ":" not in header]:
        raise click.BadParameter(f"{wrong[0]!r} is not 'NAME: VALUE'", param_hint="--header")
    try:
        told = explaining.ask(file.read(), given, url=url, settings=None if url else _load({}))
    except explaining.Refused as error:
        click.echo(f"strata: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(told)
    else:
        explaining.show(Console(width=None if sys.stdout.isatty() else 120), told)


@main.command()
@click.argument("file", type=click.File("rb"))
@click.option("--conversations", "whole", is_flag=True, help="A line is a whole conversation, not a request.")
@click.option("--model", default="gpt-5.1", show_default=True, help="The model of what names none.")
@click.option("--json", "json_file", type=click.File("wb", lazy=False), help="Write the report here.")
@click.option("--svg", "svg_file", type=click.File("wb", lazy=False), help="Draw a picture here.")
def replay(file: BinaryIO, model: str, json_file: BinaryIO | None, svg_file: BinaryIO | None, *, whole: bool) -> None:
    """Say what recorded traffic cost, why, and what it would have cost in layers. FILE has a request a line."""
    from proxy import replaying  # noqa: PLC0415 -- brings the whole application

    console = Console(width=None if sys.stdout.isatty() else 120)
    report = replaying.run(_load({}), file, whole=whole, model=model, console=console)
    replaying.write(report, json=json_file, svg=svg_file)
    replaying.show(console, report)
    if not report.requests:
        click.echo(f"strata: {file.name}: no line of it is a chat request", err=True)
        sys.exit(1)


@main.command()
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The running proxy.")
@click.option("--token", envvar="STRATA_ADMIN_TOKEN", required=True, help="Its admin token (STRATA_ADMIN_TOKEN).")
@click.option("--seconds", default=60, show_default=True, help="How long.")
@click.option("--content", is_flag=True, help="With the words themselves; the proxy must run with STRATA_DEBUG=true.")
@click.option("--out", type=click.File("wb"), default="-", show_default=True, help="Where to write.")
def capture(url: str, token: str, seconds: int, out: BinaryIO, *, content: bool) -> None:
    """Write live chat requests, a line each, for `strata replay`; words replaced by others of the same length."""
    from proxy import explaining  # noqa: PLC0415 -- brings the whole application

    try:
        taken = explaining.capture(url, token, seconds=seconds, content=content, out=out)
    except KeyboardInterrupt:
        click.echo("strata: the capture was ended; what is written is whole lines", err=True)
    except explaining.Refused as error:
        click.echo(f"strata: {error}", err=True)
        sys.exit(1)
    else:
        click.echo(f"strata: {taken} requests", err=True)


@main.command(name="config")
def config_() -> None:
    """Print the effective settings and where each comes from; secrets are masked."""
    settings = _load({})
    table = Table(box=None, pad_edge=False)
    for title in ("Setting", "Value", "From"):
        table.add_column(title, overflow="fold")
    for line in config.effective(settings):
        table.add_row(line.name, line.value or "[dim]not set[/dim]", line.source)
    # A pipe has no width to fold to.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _load(options: dict[str, str]) -> Settings:
    """Read the settings, options of the command line over the environment; end the program when one is wrong."""
    try:
        return config.load(config.environment() | options)
    except config.SettingsError as error:
        for line in str(error).splitlines():
            click.echo(f"strata: {line}", err=True)
        sys.exit(2)
