"""Threads of libraries that call back into Python, such as those of gloo.

Python makes a state for such a thread when a callback begins, and deletes it at its end. It maps
memory for that and unmaps it again, which takes as long as a small callback and interrupts the
other threads of the process.
"""

from __future__ import annotations

import ctypes
import threading

_thread = threading.local()


def keep_state() -> None:
    """Keep Python's state of the calling thread: the next callback in it finds it again.

    A few kilobytes stay allocated when the thread has ended.
    """
    if not hasattr(_thread, "is_kept"):
        _thread.is_kept = True
        ctypes.pythonapi.PyGILState_Ensure()
