"""Tasks that outlive the request that began them: the one owner, so that none is lost and each failure is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Bounded: beyond `limit` a task is refused rather than queued without end."""

    def __init__(self, on_error: Callable[[BaseException], None], *, limit: int = 10_000) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error
        self._limit = limit

    def start(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Run `work` beside whoever called; False when there is no room."""
        if len(self._tasks) >= self._limit:
            work.close()
            return False
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def close(self, *, within: float) -> None:
        """Let what is under way finish, then end it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)
        for task in self._tasks:
            task.cancel()
