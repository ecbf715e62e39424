"""Two flags between a process's agent and its recover client: start the engine anew, and stop.

Documented as `taskd.python.toolkit.recover_module.shared_data`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Flags:
    """The exit flag asks for a new engine; the kill flag says that the job is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exit = False
        self._kill = False
        self._watchers: list[Callable[[], None]] = []

    def get_exit_flag(self) -> bool:
        with self._lock:
            return self._exit

    def set_exit_flag(self, flag: bool) -> None:
        with self._lock:
            self._exit = flag
        self._tell(flag)

    def get_kill_flag(self) -> bool:
        with self._lock:
            return self._kill

    def set_kill_flag(self, flag: bool) -> None:
        with self._lock:
            self._kill = flag
        self._tell(flag)

    @contextmanager
    def watched(self, call: Callable[[], None]) -> Iterator[None]:
        """Meanwhile, call this whenever a flag is raised."""
        with self._lock:
            self._watchers.append(call)
        try:
            yield
        finally:
            with self._lock:
                self._watchers.remove(call)

    def _tell(self, raised: bool) -> None:
        if not raised:
            return
        with self._lock:
            watchers = list(self._watchers)
        for call in watchers:
            call()


flags = Flags()
"""Those of this process."""
