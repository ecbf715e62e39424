"""Watches directories with inotify: reports each file that changes."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE = 0x8, 0x40, 0x80, 0x200
IN_Q_OVERFLOW = 0x4000
HEAD = struct.Struct("iIII")

OnChange = Callable[[Path | None], None]
"""Called with the path that changed, or with None if changes were lost: read everything."""


class Watch:
    """One inotify descriptor in the running event loop."""

    def __init__(self, directories: Sequence[Path], on_change: OnChange) -> None:
        self._libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        self._on_change = on_change
        self._directories: dict[int, Path] = {}
        mask = IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE
        for directory in directories:
            number = self._libc.inotify_add_watch(
                self._descriptor, os.fsencode(directory), ctypes.c_uint32(mask)
            )
            if number < 0:
                error = ctypes.get_errno()
                os.close(self._descriptor)
                raise OSError(error, os.strerror(error), str(directory))
            self._directories[number] = directory
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        data = os.read(self._descriptor, 65536)
        at = 0
        while at < len(data):
            number, mask, _, length = HEAD.unpack_from(data, at)
            name = data[at + HEAD.size : at + HEAD.size + length].rstrip(b"\0")
            at += HEAD.size + length
            if mask & IN_Q_OVERFLOW:
                self._on_change(None)
            elif name and number in self._directories:
                self._on_change(self._directories[number] / os.fsdecode(name))
