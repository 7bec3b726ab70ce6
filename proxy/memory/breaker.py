"""Whether Redis is asked at all: calls bounded in time, and left out while it does not serve.

What one kind of call fails at three times in a row, or is refused for a reason that is the server's, a probe of ours
tries: a write. Where that fails too nothing is asked until another, not a client's request, succeeds.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import ResponseError

PROBE_SECONDS = 0.5
_BACK_SECONDS = 1.0
_FAILURES = 3
_MOST_TOLD = 300

T = TypeVar("T")


class Breaker:
    """`on_error` is told which operation failed; `on_state` is told why Redis is gone, and None when it is back."""

    def __init__(
        self,
        probe: Callable[[], Awaitable[object]],
        *,
        on_error: Callable[[str], None],
        on_state: Callable[[str | None], None],
    ) -> None:
        self._try = probe
        self._on_error = on_error
        self._on_state = on_state
        self._failures: collections.Counter[str] = collections.Counter()
        self._asking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._late: set[asyncio.Future[Any]] = set()
        self._closed = False
        self.open = False

    async def bounded(self, operation: str, work: Awaitable[T], seconds: float) -> T | None:
        """Await a call of Redis for so long and no longer; None when it failed."""
        try:
            result = await self._within(work, seconds)
        except Exception as error:  # noqa: BLE001 -- whatever the client raises, the request goes on without Redis
            self._on_error(operation)
            # By operation: a replica answers what is read and refuses what is written.
            self._failures[operation] += 1
            # A refusal with a class of its own is about the server, not about one key: READONLY, NOPERM, MOVED.
            named = isinstance(error, ResponseError) and type(error) is not ResponseError
            if named or self._failures[operation] >= _FAILURES:
                self.suspect()
            return None
        self._failures[operation] = 0
        return result

    async def _within(self, work: Awaitable[T], seconds: float) -> T:
        """Await for so long and not until a cancellation has been heeded: the client loses some, and waits on."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task,), timeout=seconds)
            if task.done():
                return task.result()
            raise TimeoutError(f"no answer in {seconds:g} s")
        finally:
            if not task.done():
                task.cancel()
                self._late.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            # Else its failure would be told as one that nobody has seen.
            task.exception()

    def suspect(self) -> None:
        """Find out whether Redis is gone: what failed may be one conversation that is too large to be read."""
        if not self.open and not self._closed and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._ask())

    def _trip(self, why: str) -> None:
        if not self.open and not self._closed:
            self.open = True
            self._on_state(why)
            self._probing = asyncio.ensure_future(self._probe())

    def close(self) -> None:
        """Look for Redis no more."""
        self._closed = True
        for task in (self._asking, self._probing):
            if task is not None:
                task.cancel()

    async def _ask(self) -> None:
        why = await self._trouble(PROBE_SECONDS)
        if why is None:
            self._failures.clear()
        else:
            self._trip(why)

    async def _probe(self) -> None:
        while not self._closed:
            await asyncio.sleep(PROBE_SECONDS)
            if await self._trouble(_BACK_SECONDS) is None:
                self._failures.clear()
                self.open = False
                self._on_state(None)
                return

    async def _trouble(self, seconds: float) -> str | None:
        """Return what a probe fails at; None where Redis serves."""
        try:
            await self._within(self._try(), seconds)
        except Exception as error:  # noqa: BLE001 -- as in `bounded`; and who looks for Redis must not die of it
            return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MOST_TOLD]
        return None
