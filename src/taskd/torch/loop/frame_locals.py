"""The local variables of a running function of the script: read, and set from outside.

Before Python 3.13 a frame keeps a dictionary of its variables from the first time that it is asked
for them. All values stay alive in there until the next time: a batch and its logits, for example,
in the memory of a device. So it is emptied again, unless the script has the same dictionary, from a
call of `locals()`.
"""

from __future__ import annotations

import ctypes
import sys
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

_KEEPS_DICTIONARY = sys.version_info < (3, 13)
_REFERENCES = 4
"""To the dictionary, if the script has none: the frame's, the caller's, that of `_forget`, and that
of the call which counts them."""


def is_module(frame: FrameType) -> bool:
    """Whether its variables are global ones."""
    return not _is_function(frame) and frame.f_locals is frame.f_globals


def read(frame: FrameType) -> dict[str, Any]:
    """All of them, as they are now."""
    present = frame.f_locals
    if not _is_function(frame):
        return present
    found = dict(present)
    if _KEEPS_DICTIONARY:
        _forget(present)
    return found


def put(frame: FrameType, values: dict[str, Any]) -> None:
    present = frame.f_locals
    present.update(values)
    if _KEEPS_DICTIONARY and _is_function(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        _forget(present)


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & CO_OPTIMIZED)


def _forget(present: dict[str, Any]) -> None:
    if sys.getrefcount(present) == _REFERENCES:
        present.clear()
