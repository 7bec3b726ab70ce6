"""Narrowing of parsed JSON: ask for a shape and get an empty one when the client sent another."""

from collections.abc import Mapping, Sequence
from typing import cast

Body = Mapping[str, object]


def mapping(value: object) -> Body:
    """Return the JSON object, or an empty one."""
    return cast("Body", value) if isinstance(value, dict) else {}


def sequence(value: object) -> Sequence[object]:
    """Return the JSON array, or an empty one."""
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def text(value: object) -> str:
    """Return the JSON string, or an empty one."""
    return value if isinstance(value, str) else ""


def integer(value: object) -> int | None:
    """Return the JSON integer; a boolean is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
