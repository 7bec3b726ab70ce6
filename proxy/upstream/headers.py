"""Which headers pass a proxy, and whose credentials go where (RFC 9110, section 7.6.1)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

Raw = list[tuple[bytes, bytes]]

_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
_CREDENTIAL = re.compile(
    rb"auth(?!or(?!i))|api-?key|(?:^|-)(?:key|token|jwt)(?:$|-)|[a-z]token$|secret|subscription|credential|password|"
    rb"signature|^cookie$"
)
_NO_CREDENTIAL = re.compile(rb"idempotenc|cache|partition|^sec-websocket-|^:")
_ORGANISATION = frozenset({b"openai-organization", b"openai-project"})
_OURS = b"x-strata-"
_KEY_PARAMETER = re.compile(
    rb"(?:(?:api|subscription|access|auth)?[-_]?key|(?:access|auth|id)?[-_]?token|auth(?:orization)?|code|sig(?:nature)?|"
    rb"secret|password|jwt)=",
    re.IGNORECASE,
)


@functools.lru_cache(maxsize=4_096)
def is_credential(name: bytes) -> bool:
    """Whether a header of this name may say on whose account a request is: `x-portkey-api-key`, `helicone-auth`, …

    Vendors have names of their own, so it goes by what they have in common; what is doubtful is one.
    """
    return _CREDENTIAL.search(name) is not None and _NO_CREDENTIAL.search(name) is None


def keys_in(query: bytes) -> list[bytes]:
    """Return the parts of a query string that may say on whose account a request is."""
    return [part for part in query.split(b"&") if _KEY_PARAMETER.match(part)] if query else []


def upstream(headers: Iterable[tuple[bytes, bytes]], *, key: str | None, hide: bool, drop: frozenset[bytes]) -> Raw:
    """Return the request headers to send on.

    With `hide` nothing of the client's credentials or organisation goes upstream; `key` takes their place.
    """
    raw = list(headers)
    gone = _HOP | _named(raw) | drop | {b"host"}
    if hide:
        gone |= _ORGANISATION | {name for name, _ in raw if is_credential(name)}
    kept = [(name, value) for name, value in raw if name not in gone and not name.startswith(_OURS)]
    if key is not None:
        kept.append((b"authorization", b"Bearer " + key.encode("latin-1")))
    return kept


def query(raw: bytes, *, hide: bool) -> bytes:
    """Return a query string to send on; with `hide` without the keys some clients put there."""
    keys = keys_in(raw) if hide else []
    return b"&".join(part for part in raw.split(b"&") if part not in keys) if keys else raw


def downstream(headers: Iterable[tuple[bytes, bytes]], *, drop: frozenset[bytes] = frozenset()) -> Raw:
    """Return the answer's headers to pass on: all but those of the hop."""
    raw = [(name.lower(), value) for name, value in headers]
    gone = _HOP | _named(raw) | drop
    if any(name == b"transfer-encoding" for name, _ in raw):
        # Who states both means the chunks (RFC 9112, section 6.3).
        gone |= {b"content-length"}
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
