"""Which headers pass a proxy, and whose credentials go where (RFC 9110, section 7.6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable

Raw = list[tuple[bytes, bytes]]

_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key", b"cookie"})
_ORGANISATION = frozenset({b"openai-organization", b"openai-project"})
_OURS = b"x-strata-"
_KEY_PARAMETER = re.compile(rb"(?:key|api[-_]?key)=", re.IGNORECASE)


def upstream(headers: Iterable[tuple[bytes, bytes]], *, key: str | None, hide: bool, drop: frozenset[bytes]) -> Raw:
    """Return the request headers to send on.

    With `hide` nothing of the client's credentials or organisation goes upstream; `key` takes their place.
    """
    raw = list(headers)
    gone = _HOP | _named(raw) | drop | {b"host"}
    if hide:
        gone |= CREDENTIALS | _ORGANISATION
    kept = [(name, value) for name, value in raw if name not in gone and not name.startswith(_OURS)]
    if key is not None:
        kept.append((b"authorization", b"Bearer " + key.encode("latin-1")))
    return kept


def query(raw: bytes, *, hide: bool) -> bytes:
    """Return a query string to send on; with `hide` without the keys some clients put there."""
    if not hide or b"key" not in raw.lower():
        return raw
    return b"&".join(part for part in raw.split(b"&") if not _KEY_PARAMETER.match(part))


def downstream(headers: Iterable[tuple[bytes, bytes]], *, drop: frozenset[bytes] = frozenset()) -> Raw:
    """Return the answer's headers to pass on: all but those of the hop."""
    raw = [(name.lower(), value) for name, value in headers]
    gone = _HOP | _named(raw) | drop
    return [(name, value) for name, value in raw if name not in gone]


_ACCOUNT = frozenset({b"set-cookie", *_ORGANISATION})


def unsigned(headers: Raw) -> Raw:
    """Return an answer's headers without those that tell whose account it was: that is the operator's own."""
    return [(name, value) for name, value in headers if name.lower() not in _ACCOUNT]


def _named(headers: Raw) -> frozenset[bytes]:
    """Return the headers that `connection` names as the hop's own."""
    return frozenset(
        token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")
    )
