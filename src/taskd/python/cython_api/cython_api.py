"""Loads `libtaskd.so`, which in this TaskD holds nothing: all the work is done in Python.

The file is there because image recipes name it in LD_PRELOAD, and `lib` because other code asks
whether it could be loaded. Nothing of ours calls it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

PATH = Path(__file__).parent / "libs" / "libtaskd.so"


def load_lib_taskd() -> ctypes.CDLL | None:
    """The loaded library, or None, with the reason in the log."""
    if PATH.is_symlink():
        log.error("%s is a symbolic link, and is not loaded", PATH)
        return None
    try:
        return ctypes.CDLL(str(PATH), mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError as error:
        log.error("the native library is not loaded: %s", error)
        return None


lib = load_lib_taskd()
