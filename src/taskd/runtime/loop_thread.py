"""One asyncio loop in one daemon thread, for use inside a user's process.

A training script has its own main thread and perhaps its own loop; we must not disturb either.
A thread does not survive a fork, so a forked child must create its own `LoopThread`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from taskd.errors import Permanent

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0


class LoopThread:
    def __init__(self, name: str = "taskd") -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            remaining = asyncio.all_tasks(self._loop)
            for task in remaining:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
            self._loop.close()

    @property
    def is_ours(self) -> bool:
        """False in a process that was forked from its creator."""
        return os.getpid() == self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine in the loop, from any thread of the creating process."""
        if not self.is_ours or not self._thread.is_alive():
            work.close()
            why = "it was stopped" if self.is_ours else "it belongs to the parent process of a fork"
            raise Permanent(f"the loop thread is not running: {why}")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the loop and its thread. A second call, or one in a forked child, does nothing."""
        if not self.is_ours or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)
