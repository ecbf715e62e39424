"""Ascend's own profiler, `libmspti.so`: it records the marks of torch_npu and MindSpore.

TaskD supplies buffers; the library fills them with records and returns them, at the latest on a
flush. `worker/profiling/recorder.py` flushes once per second and writes the lines to disk. Layouts
and numbers are those of Ascend's header `mspti_activity.h`, whose structures are packed.
"""

from __future__ import annotations

import ctypes as c
import json
import logging
import os
import stat
import subprocess
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from taskd import config
from taskd.errors import Permanent
from taskd.model.profiling import Part

log = logging.getLogger(__name__)

NAME = "libmspti.so"
CANN_PATHS = (
    Path("/usr/local/Ascend/ascend-toolkit/latest/lib64") / NAME,
    Path("/usr/local/Ascend/cann/lib64") / NAME,
)
DISABLED = "off"
LDCONFIG = "/sbin/ldconfig"
LDCONFIG_S = 10.0
MARKER = 1
COMMUNICATION = b"communication"
BUFFER_BYTES = 2 * 1024 * 1024
MOST_BUFFERS = 100
"""Buffers in use at the same time. Beyond that the library drops records and logs it."""
ERRORS = {
    1: "invalid parameter",
    2: "another program has subscribed",
    4: "the device is offline",
    999: "internal error",
}

_Requested = c.CFUNCTYPE(None, c.POINTER(c.c_void_p), c.POINTER(c.c_size_t), c.POINTER(c.c_size_t))
_Completed = c.CFUNCTYPE(None, c.c_void_p, c.c_size_t, c.c_size_t)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "msptiSubscribe": (c.POINTER(c.c_void_p), c.c_void_p, c.c_void_p),
    "msptiUnsubscribe": (c.c_void_p,),
    "msptiActivityRegisterCallbacks": (_Requested, _Completed),
    "msptiActivityEnable": (c.c_int,),
    "msptiActivityDisable": (c.c_int,),
    "msptiActivityEnableMarkerDomain": (c.c_char_p,),
    "msptiActivityDisableMarkerDomain": (c.c_char_p,),
    "msptiActivityFlushAll": (c.c_uint32,),
    "msptiActivityGetNextRecord": (c.c_void_p, c.c_size_t, c.POINTER(c.c_void_p)),
}


class _Marker(c.Structure):
    _pack_ = 1
    _fields_ = (
        ("kind", c.c_int32),
        ("flag", c.c_int32),
        ("source", c.c_int32),
        ("timestamp", c.c_uint64),
        ("id", c.c_uint64),
        (
            "process_or_device",
            c.c_uint32,
        ),  # The process id; for marks of a device, the device number.
        ("thread_or_stream", c.c_uint32),  # The thread id; for marks of a device, the stream.
        ("name", c.c_char_p),
        ("domain", c.c_char_p),
    )


class LibraryRefused(Permanent):
    """A call to Ascend's library failed. The message has the call and its error code."""


class Library:
    """Loaded once per process. It calls back from its own threads."""

    def __init__(self, path: Path) -> None:
        library: Any = c.CDLL(str(path))
        self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        for name, signature in _SIGNATURES.items():
            self._calls[name].argtypes, self._calls[name].restype = signature, c.c_int
        self._in_use: dict[int, Any] = {}
        self._full: deque[tuple[int, int]] = deque()
        self._subscriber = c.c_void_p()
        self._requested, self._completed = (
            _Requested(self._supply_buffer),
            _Completed(self._return_buffer),
        )
        """The library refers to them: they must exist as long as it does."""
        self._call("msptiActivityRegisterCallbacks", self._requested, self._completed)

    def record(self, wanted: Part) -> None:
        """Record all marks of the default domain or none, and those of communication if wanted."""
        if wanted and self._subscriber.value is None:
            self._call("msptiSubscribe", c.byref(self._subscriber), None, None)
        if wanted:
            self._call("msptiActivityEnable", MARKER)
        change = "Enable" if wanted & Part.COMMUNICATION else "Disable"
        self._call(f"msptiActivity{change}MarkerDomain", COMMUNICATION)
        if not wanted:
            self._call("msptiActivityDisable", MARKER)
            self.flush()
            if self._subscriber.value is not None:
                self._call("msptiUnsubscribe", self._subscriber)
                self._subscriber = c.c_void_p()

    def flush(self) -> None:
        self._call("msptiActivityFlushAll", 1)

    def drain(self) -> list[str]:
        """The lines of all records since the last call."""
        try:
            self.flush()
        except LibraryRefused as error:
            log.warning("the latest records are not available yet: %s", error)
        found: list[str] = []
        while self._full:
            address, size = self._full.popleft()
            found += self._lines(address, size)
            self._in_use.pop(address, None)
        return found

    def _lines(self, address: int, size: int) -> list[str]:
        record, found = c.c_void_p(), list[str]()
        get_next = self._calls["msptiActivityGetNextRecord"]
        while get_next(address, size, c.byref(record)) == 0 and record.value:
            if c.c_int32.from_address(record.value).value == MARKER:
                found.append(_line(_Marker.from_address(record.value)))
        return found

    def _supply_buffer(self, buffer: Any, size: Any, most: Any) -> None:
        buffer[0], size[0], most[0] = None, 0, 0
        if len(self._in_use) < MOST_BUFFERS:
            fresh = c.create_string_buffer(BUFFER_BYTES)
            address = c.addressof(fresh)
            self._in_use[address] = fresh
            buffer[0], size[0] = address, BUFFER_BYTES

    def _return_buffer(self, address: int, _size: int, valid: int) -> None:
        self._full.append((address, valid))

    def _call(self, name: str, *args: Any) -> None:
        if code := self._calls[name](*args):
            raise LibraryRefused(f"{name} returned {code}: {ERRORS.get(code, 'unknown error')}")


def find(configured: str) -> Library | None:
    """The library; None if it is not installed, disabled, or of an unknown version."""
    if configured == DISABLED:
        return None
    for path in (Path(configured),) if configured else candidates():
        if not path.is_file():
            continue
        try:
            return Library(path)
        except (OSError, AttributeError, LibraryRefused) as error:
            log.warning("%s is not used: %s", path, error)
    return None


def candidates() -> Iterator[Path]:
    """Possible paths, best first: where the loader would find it, then CANN's folders.

    A path that the loader would find counts only if no user but root can have written it.
    """
    for path in chain(_in_search_path(), _in_cache()):
        real = Path(os.path.realpath(path))
        if real.is_file() and all(_only_root_writes(path) for path in (real, *real.parents)):
            yield real
    yield from CANN_PATHS


def _in_search_path() -> Iterator[Path]:
    folders = config.environ.get("LD_LIBRARY_PATH", "").split(":")
    yield from (Path(folder) / NAME for folder in folders if folder)


def _in_cache() -> Iterator[Path]:
    """`ldconfig -p` prints one line per library: name (kind) => path."""
    try:
        listed = subprocess.run(
            [LDCONFIG, "-p"], capture_output=True, text=True, timeout=LDCONFIG_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("the loader's cache cannot be read: %s", error)
        return
    for line in listed.stdout.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith(f"{NAME} "):
            yield Path(path)


def _only_root_writes(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _line(mark: _Marker) -> str:
    owner, part = mark.process_or_device, mark.thread_or_stream
    return (
        f'{{"Kind":1,"SourceKind":{mark.source},"Flag":{mark.flag},"Timestamp":{mark.timestamp},'
        f'"Id":{mark.id},"MsptiObjectId":{{"Pt":{{"ProcessId":{owner},"ThreadId":{part}}},'
        f'"Ds":{{"DeviceId":{owner},"StreamId":{part}}}}},'
        f'"Name":{_text(mark.name)},"Domain":{_text(mark.domain)}}}\n'
    )


def _text(value: bytes | None) -> str:
    return json.dumps("NULL" if value is None else value.decode(errors="replace"))
