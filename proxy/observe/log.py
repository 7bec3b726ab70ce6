"""Record → one JSON line. No content, no keys. Lines leave in batches, off the request's path."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import BinaryIO, Literal

import orjson
from typing_extensions import override

from proxy.core.divergence import Break
from proxy.observe.record import Record

Level = Literal["debug", "info", "warning", "error"]
_ORDER: tuple[Level, ...] = ("debug", "info", "warning", "error")
_BATCH = 512
SERVER_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"lines": {"class": "proxy.observe.log.Lines"}},
    "root": {"handlers": ["lines"], "level": "WARNING"},
}
"""How the server, and any other library, comes to write to standard error what Strata itself writes: JSON lines."""
_ADVICE = "pip install"
"""uvicorn's, at each WebSocket attempt, to install what would make it serve them: these are refused."""


class Log:
    """`later` runs a function soon, once the loop is free; without it every line is written at once."""

    def __init__(
        self, level: Level, *, out: BinaryIO | None = None, later: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        self._from = _ORDER.index(level)
        self._out = out or sys.stderr.buffer
        self._later = later
        self._lines: list[bytes] = []

    def emit(self, record: Record) -> None:
        """Write the request's line: level `error` for the proxy's own faults, `warning` for failures, else `info`."""
        failed = record.outcome in {"upstream_error", "upstream_interrupted", "bypass", "shutdown"}
        level: Level = "error" if record.outcome == "error" else "warning" if failed else "info"
        if _ORDER.index(level) >= self._from:
            self._add({"level": level, "event": "request", **line(record)})

    def say(self, level: Level, event: str, *, at: float, **facts: object) -> None:
        """Write a line that is about no request."""
        if _ORDER.index(level) >= self._from:
            self._add({"level": level, "event": event, "at": at, **facts})

    def _add(self, fields: dict[str, object]) -> None:
        try:
            line = orjson.dumps(fields, default=str)
        except TypeError:
            # A number that JSON's 64 bits do not hold.
            line = orjson.dumps({name: str(value) for name, value in fields.items()})
        self._lines.append(line)
        if self._later is None or len(self._lines) >= _BATCH:
            self.flush()
        elif len(self._lines) == 1:
            self._later(self.flush)

    def flush(self) -> None:
        """Write what is waiting."""
        lines, self._lines = self._lines, []
        if lines:
            self._out.write(b"\n".join([*lines, b""]))
            self._out.flush()


class Lines(logging.Handler):
    """Python's own log records → lines on standard error."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if _ADVICE in message:
            return
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        fields: dict[str, object] = {"at": record.created, "logger": record.name, "message": message}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        sys.stderr.buffer.write(orjson.dumps({"level": level, "event": "server", **fields}, default=str) + b"\n")
        sys.stderr.buffer.flush()


def told(found: Break) -> dict[str, object]:
    """Return a break without what the prompt says there."""
    return {
        name: getattr(found, name)
        for name in ("layer", "kind", "message", "character", "shared_tokens")
        if getattr(found, name) is not None
    }


def line(record: Record) -> dict[str, object]:
    """Flatten a record; what is unknown is left out."""
    fields: dict[str, object] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == "layers" and record.layers is not None:
            each = record.layers.each
            fields["layers"] = {layer.name: [layer.tokens, layer.sha256] for layer in each if layer.tokens}
        elif field.name == "usage" and record.usage is not None:
            fields |= {name: amount for name, amount in dataclasses.asdict(record.usage).items() if amount is not None}
        elif field.name in {"owner", "lineage"}:
            continue
        elif field.name == "causes":
            fields |= {"causes": dict(record.causes)} if record.causes else {}
        elif field.name == "divergence":
            fields |= {"divergence": told(record.divergence)} if record.divergence else {}
        elif field.name == "losses":
            fields |= {name: amount for name, amount in dataclasses.asdict(record.losses).items() if amount}
        elif field.name.endswith("_seconds") and value is not None:
            fields[field.name] = round(value, 6)
        elif value not in (None, (), 0):
            fields[field.name] = value
    return fields
