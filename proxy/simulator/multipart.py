"""Parts of a ``multipart/form-data`` body (RFC 7578), taken as whole bytes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from proxy.simulator.refusal import Refusal

_BOUNDARY = re.compile(r'boundary="?([^";]+)"?', re.IGNORECASE)
_NAME = re.compile(r'\bname="([^"]*)"')
_FILENAME = re.compile(r'\bfilename="([^"]*)"')
_TYPE = re.compile(r"^content-type:\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field; ``filename`` is set for a file."""

    name: str
    filename: str | None
    content_type: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """All fields in order."""

    parts: tuple[Part, ...]

    def text(self, name: str) -> str:
        """First plain field of this name; empty when there is none."""
        found = (part.content for part in self.parts if part.name == name and part.filename is None)
        return next(found, b"").decode("utf-8", "replace")

    def file(self, name: str) -> Part:
        """First file of this name; refuses a form without it."""
        for part in self.parts:
            if part.name == name and part.filename is not None:
                return part
        raise Refusal(message=f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def parse(content_type: str, body: bytes) -> Form:
    """Split a body at the boundary its content type names; refuses other content types."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None or not content_type.lower().startswith("multipart/form-data"):
        raise Refusal(message="Could not parse multipart form", code="invalid_multipart_form")
    return Form(parts=tuple(_parts(boundary[1].encode("latin-1"), body)))


def _parts(boundary: bytes, body: bytes) -> Iterator[Part]:
    for piece in (b"\r\n" + body).split(b"\r\n--" + boundary)[1:]:
        if piece.startswith(b"--"):
            return
        head, _, content = piece.partition(b"\r\n\r\n")
        named = head.decode("utf-8", "replace")
        name, filename, kind = _NAME.search(named), _FILENAME.search(named), _TYPE.search(named)
        if name is not None:
            yield Part(
                name=name[1],
                filename=None if filename is None else filename[1],
                content_type="application/octet-stream" if kind is None else kind[1],
                content=content,
            )
