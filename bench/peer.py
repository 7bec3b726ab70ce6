"""Another proxy, measured with the same traffic: it is called by URL, and its upstream is a recorder of ours."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import orjson
from proxy.core.prefix import Step

from traffic import Exchange


class Recorder:
    """An upstream at a fixed address that keeps the last body it got and answers as the traffic says."""

    def __init__(self, port: int) -> None:
        self.body = b""
        self.reply: Mapping[str, object] = {}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                recorder.body = self.rfile.read(int(self.headers.get("content-length", 0)))
                choice = {"index": 0, "finish_reason": "stop", "message": recorder.reply}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
                          "choices": [choice], "usage": usage}  # fmt: skip
                raw = orjson.dumps(answer)
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class Peer:
    """A proxy in front of the recorder. Its clock is its own: idle gaps of the traffic do not reach it."""

    broke: Mapping[str, int] = {}
    steps: tuple[Step, ...] = ()

    def __init__(self, name: str, url: str, recorder: Recorder) -> None:
        self.name = name
        self._recorder = recorder
        self._client = httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer bench"})

    def forward(self, exchange: Exchange) -> bytes:
        """Return what the proxy sent to its upstream for this request."""
        self._recorder.body, self._recorder.reply = b"", exchange.reply
        headers = {"content-type": "application/json"}
        if exchange.name:
            headers |= {"x-strata-conversation": exchange.name, "x-session-id": exchange.name}
        try:
            answer = self._client.post("/v1/chat/completions", content=exchange.body, headers=headers)
        except httpx.HTTPError as error:
            raise SystemExit(f"{self.name} at {self._client.base_url}: {error}") from error
        if not self._recorder.body:
            why = f"answered {answer.status_code} and did not call its upstream: {answer.text[:300]}"
            raise SystemExit(f"{self.name} {why}")
        return self._recorder.body
