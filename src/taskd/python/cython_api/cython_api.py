"""Loads `libtaskd.so`, an empty library: this TaskD is written in Python.

The file exists because image recipes list it in LD_PRELOAD; `lib` exists because other programs
check whether the library could be loaded. TaskD itself does not call it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

PATH = Path(__file__).parent / "libs" / "libtaskd.so"


def load_lib_taskd() -> ctypes.CDLL | None:
    """The loaded library, or None; the log has the reason."""
    if PATH.is_symlink():
        log.error("the native library is not loaded: %s is a symbolic link", PATH)
        return None
    try:
        return ctypes.CDLL(str(PATH), mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError as error:
        log.error("the native library is not loaded: %s", error)
        return None


lib = load_lib_taskd()
