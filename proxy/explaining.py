"""`strata explain` and `strata capture`: ask a running proxy, or this process, and show what it says."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, BinaryIO

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from starlette.types import Message

from proxy import app
from proxy.settings import Settings

_PATH = "/strata/explain"
_COLOURS = {
    "as sent": "green", "as it was forwarded before": "cyan", "changed": "yellow", "left out": "red",
    "shortened to head and tail": "red",
}  # fmt: skip


class Refused(Exception):
    """The request was refused; the message says why."""


def ask(body: bytes, headers: Mapping[str, str], *, url: str | None, settings: Settings | None) -> str:
    """Return the answer of `POST /strata/explain`. Raises Refused."""
    status, answer = _remote(url, body, headers) if url else asyncio.run(_here(settings, body, headers))
    if status != 200:
        raise Refused(_why(answer))
    return answer.decode()


def _why(answer: bytes) -> str:
    try:
        return str(orjson.loads(answer)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return answer.decode("utf-8", "replace")[:500]


def _remote(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    base = url.rstrip("/").removesuffix("/v1")
    asked = urllib.request.Request(base + _PATH, data=body, method="POST")  # noqa: S310 -- the user's own proxy
    for name, value in {"content-type": "application/json", **headers}.items():
        asked.add_header(name.strip(), value.strip())
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 -- as above
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (urllib.error.URLError, ValueError) as error:
        raise Refused(f"{base + _PATH} cannot be asked: {error}") from error


def capture(url: str, token: str, *, seconds: int, content: bool, out: BinaryIO) -> int:
    """Copy what a running proxy captures; returns how many requests there were. Raises Refused."""
    base = url.rstrip("/").removesuffix("/v1")
    query = f"?seconds={seconds}" + ("&content=true" if content else "")
    asked = urllib.request.Request(f"{base}/strata/capture{query}")  # noqa: S310 -- the user's own proxy
    asked.add_header("authorization", f"Bearer {token}")
    taken, whole = 0, False
    try:
        with urllib.request.urlopen(asked, timeout=seconds + 60) as answer:  # noqa: S310 -- as above
            for line in answer:
                out.write(line)
                out.flush()
                whole = line.startswith(b'{"left_out"')
                taken += not whole
    except urllib.error.HTTPError as error:
        raise Refused(_why(error.read())) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        early = f", after {taken} requests" if taken else ""
        raise Refused(f"{base} cannot be captured from{early}: {str(error).strip() or type(error).__name__}") from error
    if not whole:
        raise Refused(f"{base} ended the capture early, after {taken} requests")
    return taken


async def _here(settings: Settings | None, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Ask an application of this process's own; its memory is Redis's, where that is set."""
    assert settings is not None
    strata = app.create(settings.model_copy(update={"log_level": "error"}))
    raw = [(b"content-length", b"%d" % len(body))]
    raw += [(name.strip().lower().encode(), value.strip().encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": _PATH, "raw_path": _PATH.encode(), "query_string": b"",
        "headers": raw, "http_version": "1.1", "scheme": "http", "root_path": "", "client": None, "server": None,
    }  # fmt: skip
    sent: list[Message] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async with strata.own.router.lifespan_context(strata.own):
        await strata(scope, receive, send)
    answer = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return sent[0]["status"], answer


def show(console: Console, told: str) -> None:
    """Print an explanation for people."""
    found = orjson.loads(told)
    limit = f" of {found['limit_tokens']:,}" if found.get("limit_tokens") else ""
    if "layers" not in found:
        console.print(f"[red]{escape(found['decisions'][0])}[/red]: the client's bytes are forwarded as they came")
        return
    console.print(
        f"[bold]{escape(found['model'])}[/bold] · {found['mode']} · tenant {escape(found['tenant'])}"
        + (f" · conversation {escape(found['conversation'])}" if found["conversation"] else " · anonymous")
        + f" · {found['total_tokens']:,} tokens{limit}"
    )
    layers = Table(box=None, pad_edge=False)
    for title in ("layer", "tokens", "sha256"):
        layers.add_column(title, justify="right" if title == "tokens" else "left")
    for layer in found["layers"]:
        layers.add_row(layer["layer"], f"{layer['tokens']:,}", layer["sha256"])
    console.print(layers)
    messages = Table(box=None, pad_edge=False)
    for title in ("message", "role", "layer", "tokens", "what becomes of it"):
        messages.add_column(title, justify="right" if title in {"message", "tokens"} else "left")
    for each in found["messages"]:
        colour = _COLOURS[each["what"]]
        row = (str(each["message"]), escape(each["role"]), each.get("layer", ""), f"{each.get('tokens', 0):,}")
        messages.add_row(*row, f"[{colour}]{each['what']}[/{colour}]")
    console.print(messages)
    for decision in found["decisions"]:
        console.print(f"• {escape(decision)}")
    held = found["prediction"]
    console.print(
        f"prompt cache: [green]{held['cached_tokens'] or 0:,}[/green] tokens predicted; "
        f"{held['as_sent_cached_tokens'] or 0:,} as sent"
    )
    if (broken := found["divergence"]) is not None:
        where = f"{broken['layer']}, message {broken.get('message', '-')}, character {broken.get('character', '-')}"
        console.print(f"[red]differs from the request before[/red]: {broken['kind']} in {where}")
        console.print(f"  [red]- {escape(broken['was'])!s}[/red]\n  [green]+ {escape(broken['now'])!s}[/green]")
    changed = "changed" if found["changed"] else "the client's own bytes"
    console.print(
        f"forwarded: {len(found['forwarded'].encode()):,} bytes, {changed}, sha256 {found['forwarded_sha256'][:16]}"
    )
