"""A real engine as the provider: it says itself what it read from its prompt cache, and how long that took."""

from __future__ import annotations

import time
from typing import Any

import httpx
import orjson

_JSON = {"content-type": "application/json"}


class Engine:
    """An OpenAI-compatible server that reports cached tokens, reached one request at a time.

    Its prompt cache outlives a run, so each run says another word at the head of its prompts: none reads what another
    left behind.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url = f"{url.rstrip('/')}/v1/chat/completions"
        # A kept connection may be closed under a request; a new one each time costs every strategy the same.
        self._client = httpx.Client(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))
        self._head = f"Run {run}.\n"

    def read(self, forwarded: bytes) -> tuple[int, int, float]:
        """Send a request; return its prompt tokens, the cached ones among them, and milliseconds to the first event.

        Raises `httpx.HTTPStatusError` when the engine refuses it.
        """
        body: dict[str, Any] = orjson.loads(forwarded)
        first = body["messages"][0]
        first["content"] = self._head + first["content"]
        body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1, "temperature": 0}
        usage: dict[str, Any] = {}
        began, first_event = time.perf_counter(), 0.0
        with self._client.stream("POST", self._url, content=orjson.dumps(body), headers=_JSON) as answer:
            if answer.is_error:
                answer.read()
                answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_event = first_event or time.perf_counter()
                usage = orjson.loads(line[len("data: ") :]).get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return usage["prompt_tokens"], cached, 1000 * (first_event - began)
