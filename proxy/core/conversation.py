"""Which conversation a request names, and for which end user. Never guessed from a prompt's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.request import Request
from proxy.errors import BAD_VALUE, StrataError

HEADER = "x-strata-conversation"
METADATA = ("conversation_id", "session_id", "thread_id", "chat_id")
_LONGEST = 512


@dataclass(frozen=True, slots=True)
class Name:
    """A conversation's id as the client spells it, and the end user it belongs to (empty when not said)."""

    id: str
    user: str


def name(
    request: Request, headers: Mapping[str, str], *, id_headers: Sequence[str], user_headers: Sequence[str]
) -> Name | None:
    """Return the name, or None: the request is anonymous.

    In order: `x-strata-conversation`, `strata.conversation`, the configured headers, `metadata.conversation_id` and
    its like. Raises StrataError when the first, which is for the proxy alone, is too long.
    """
    own = headers.get(HEADER, "")
    if len(own) > _LONGEST:
        raise StrataError(BAD_VALUE, f"{HEADER}: expected at most {_LONGEST} characters, got {len(own)}", param=HEADER)
    candidates = (
        own,
        request.hints.conversation,
        *(headers.get(header) for header in id_headers),
        *(request.metadata.get(key) for key in METADATA),
    )
    found = next((text for text in candidates if text and len(text) <= _LONGEST), None)
    if found is None:
        return None
    user = next((text for header in user_headers if (text := headers.get(header))), None)
    return Name(found, user or request.user or "")
