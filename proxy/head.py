"""The head of a client's request before uvicorn parses it: an offer of HTTP/2 is declined, its size is bounded.

    POST /v1/chat/completions HTTP/1.1\\r\\nConnection: Upgrade, HTTP2-Settings\\r\\nUpgrade: h2c\\r\\n…

Java's own client sends that with every request. A server that does not upgrade answers as if it were not there (RFC
9110, section 7.8); llhttp takes such a request for one without a body.
"""

from __future__ import annotations

import re
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.downstream import error_body
from proxy.errors import HEAD_TOO_LARGE

MOST_BYTES = 65_536
_BLANK = re.compile(rb"(?:\A|\n)\r?\n")
_OFFER = re.compile(rb"^upgrade[ \t]*:(?![ \t]*websocket)[^\n]*\n", re.IGNORECASE | re.MULTILINE)


class Protocol(HttpToolsProtocol):
    """uvicorn's; what reaches it are whole lines of a head, then the body as it comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line = b""
        self._bytes = 0
        self._begun = self._in_body = False

    @override
    def data_received(self, data: bytes) -> None:
        if self._in_body:
            super().data_received(data)
            return
        data = self._line + data if self._line else data
        start = 0 if self._begun else len(data) - len(data.lstrip(b"\r\n"))
        if not self._begun and not data[start : start + 1].isalpha():
            # No method begins like this: the parser says so at once.
            super().data_received(data)
            return
        blank = _BLANK.search(data, start)
        end = blank.end() if blank else data.rfind(b"\n") + 1
        head, rest = data[:end], data[end:]
        self._line = b"" if blank else rest
        self._bytes += len(head)
        if self._bytes + len(self._line) > MOST_BYTES:
            self._refuse()
            return
        if b"pgrade" in head.lower():
            head = _OFFER.sub(b"", head)
        if head:
            super().data_received(head + rest if blank else head)

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True

    @override
    def on_headers_complete(self) -> None:
        self._begun, self._in_body, self._bytes = False, True, 0
        super().on_headers_complete()

    @override
    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def _refuse(self) -> None:
        told = error_body(HEAD_TOO_LARGE, f"The request's head is larger than {MOST_BYTES} bytes.")
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(told) + told
        )
        self.transport.close()
