"""The chain of what was said: each message's place, by which a conversation knows itself again.

    system → b"" · user "One?" → h(b"" + said) · assistant "1" → h(that + said)

A place digests all that was said up to it: roles, words and tool calls. White space and context blocks are left out, so
that a message which comes back in another form stands where it stood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from proxy.core.message import Message
from proxy.core.turn import Shape

Place = bytes


def chain(messages: Sequence[Message], shape: Shape) -> tuple[Place, ...]:
    """Return each message's place; leading system messages have none of their own."""
    places, said = [], b""
    for index, message in enumerate(messages):
        if index >= shape.leading:
            said = after(said, message.said)
        places.append(said)
    return tuple(places)


def after(place: Place, said: bytes) -> Place:
    """Return the place of what was said behind this one; `b""` is where a conversation begins."""
    return hashlib.blake2b(place + said, digest_size=16).digest()
