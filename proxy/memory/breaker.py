"""Whether Redis is asked at all: calls bounded in time, and left out while it does not answer.

After three failures in a row and a ping without an answer nothing is asked until a probe of ours, not a client's
request, finds Redis again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError, ResponseError

PROBE_SECONDS = 0.5
_BACK_SECONDS = 1.0
_FAILURES = 3

T = TypeVar("T")


class Breaker:
    """`on_error` is told which operation failed; `on_state` is told when Redis goes (True) and comes."""

    def __init__(
        self,
        ping: Callable[[], Awaitable[object]],
        *,
        on_error: Callable[[str], None],
        on_state: Callable[[bool], None],
    ) -> None:
        self._ping = ping
        self._on_error = on_error
        self._on_state = on_state
        self._failures = 0
        self._asking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._closed = False
        self.open = False

    async def bounded(self, operation: str, work: Awaitable[T], seconds: float) -> T | None:
        """Await a call of Redis for so long and no longer; None when it failed."""
        try:
            async with asyncio.timeout(seconds):
                result = await work
        except (RedisError, OSError, TimeoutError) as error:
            self._on_error(operation)
            if type(error) is not ResponseError:
                # What Redis refuses it has answered: one owner's odd data is no outage for all.
                self._failures += 1
            if self._failures >= _FAILURES:
                self.suspect()
            return None
        self._failures = 0
        return result

    def suspect(self) -> None:
        """Find out whether Redis is gone: what failed may be one conversation that is too large to be read."""
        if not self.open and not self._closed and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._ask())

    def _trip(self) -> None:
        if not self.open and not self._closed:
            self.open = True
            self._on_state(True)  # noqa: FBT003 -- the state is the message
            self._probing = asyncio.ensure_future(self._probe())

    def close(self) -> None:
        """Look for Redis no more."""
        self._closed = True
        for task in (self._asking, self._probing):
            if task is not None:
                task.cancel()

    async def _ask(self) -> None:
        if await self._answers(PROBE_SECONDS):
            self._failures = 0
        else:
            self._trip()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            if await self._answers(_BACK_SECONDS):
                self._failures, self.open = 0, False
                self._on_state(False)  # noqa: FBT003 -- the state is the message
                return

    async def _answers(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ping()
        except (RedisError, OSError, TimeoutError):
            return False
        return True
