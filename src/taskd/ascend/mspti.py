"""Ascend's own profiler, `libmspti.so`: the marks that torch_npu and MindSpore set on the device.

We lend it buffers; it fills them with records and hands them back, at the latest when it is asked
to. `recorder.py` asks once a second and writes the lines to disk. Layouts and numbers are those of
Ascend's header `mspti_activity.h`, whose structures are packed.
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
PLACES = (
    Path("/usr/local/Ascend/ascend-toolkit/latest/lib64") / NAME,
    Path("/usr/local/Ascend/cann/lib64") / NAME,
)
NEVER = "off"
LDCONFIG = "/sbin/ldconfig"
LDCONFIG_S = 10.0
MARKER = 1
COMMUNICATION = b"communication"
BUFFER_BYTES = 2 * 1024 * 1024
MOST_BUFFERS = 100
"""Lent at the same time. Beyond that the library drops records, and says so itself."""
ANSWERS = {
    1: "invalid parameter",
    2: "somebody else has subscribed",
    4: "the device is offline",
    999: "inner error",
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
        ("holder", c.c_uint32),  # the process, or on the device its number
        ("part", c.c_uint32),  # the thread, or the stream
        ("name", c.c_char_p),
        ("domain", c.c_char_p),
    )


class LibraryRefused(Permanent):
    """Ascend's library cannot do what it is asked for; says which call, and its answer."""


class Library:
    """Loaded once a process. Its callbacks come in threads of its own."""

    def __init__(self, path: Path) -> None:
        library: Any = c.CDLL(str(path))
        self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        for name, signature in _SIGNATURES.items():
            self._calls[name].argtypes, self._calls[name].restype = signature, c.c_int
        self._lent: dict[int, Any] = {}
        self._full: deque[tuple[int, int]] = deque()
        self._subscriber = c.c_void_p()
        self._requested, self._completed = _Requested(self._lend), _Completed(self._take_back)
        """Referred to from the library: they must live as long as it does."""
        self._ask("msptiActivityRegisterCallbacks", self._requested, self._completed)

    def record(self, wanted: Part) -> None:
        """All marks of the default domain or none; those of communication only if asked for."""
        if wanted and self._subscriber.value is None:
            self._ask("msptiSubscribe", c.byref(self._subscriber), None, None)
        if wanted:
            self._ask("msptiActivityEnable", MARKER)
        asked_for = "Enable" if wanted & Part.COMMUNICATION else "Disable"
        self._ask(f"msptiActivity{asked_for}MarkerDomain", COMMUNICATION)
        if not wanted:
            self._ask("msptiActivityDisable", MARKER)
            self.flush()
            if self._subscriber.value is not None:
                self._ask("msptiUnsubscribe", self._subscriber)
                self._subscriber = c.c_void_p()

    def flush(self) -> None:
        self._ask("msptiActivityFlushAll", 1)

    def drain(self) -> list[str]:
        """The lines of all that has been recorded since."""
        try:
            self.flush()
        except LibraryRefused as error:
            log.warning("the last records stay where they are: %s", error)
        found: list[str] = []
        while self._full:
            address, size = self._full.popleft()
            found += self._lines(address, size)
            self._lent.pop(address, None)
        return found

    def _lines(self, address: int, size: int) -> list[str]:
        record, found = c.c_void_p(), list[str]()
        following = self._calls["msptiActivityGetNextRecord"]
        while following(address, size, c.byref(record)) == 0 and record.value:
            if c.c_int32.from_address(record.value).value == MARKER:
                found.append(_line(_Marker.from_address(record.value)))
        return found

    def _lend(self, buffer: Any, size: Any, most: Any) -> None:
        buffer[0], size[0], most[0] = None, 0, 0
        if len(self._lent) < MOST_BUFFERS:
            fresh = c.create_string_buffer(BUFFER_BYTES)
            address = c.addressof(fresh)
            self._lent[address] = fresh
            buffer[0], size[0] = address, BUFFER_BYTES

    def _take_back(self, address: int, _size: int, valid: int) -> None:
        self._full.append((address, valid))

    def _ask(self, name: str, *args: Any) -> None:
        if answer := self._calls[name](*args):
            raise LibraryRefused(f"{name} answered {answer}: {ANSWERS.get(answer, 'unknown')}")


def find(configured: str) -> Library | None:
    """None: it is not installed here, not wanted, or not one that we know."""
    if configured == NEVER:
        return None
    for path in (Path(configured),) if configured else places():
        if not path.is_file():
            continue
        try:
            return Library(path)
        except (OSError, AttributeError, LibraryRefused) as error:
            log.warning("%s is not used: %s", path, error)
    return None


def places() -> Iterator[Path]:
    """Where it may be, the best first: where the loader would find it, then where CANN puts it.

    What the loader would find counts only if nobody but root can have put it there.
    """
    for path in chain(_in_search_path(), _in_cache()):
        real = Path(os.path.realpath(path))
        if real.is_file() and all(_is_roots(place) for place in (real, *real.parents)):
            yield real
    yield from PLACES


def _in_search_path() -> Iterator[Path]:
    named = config.environ.get("LD_LIBRARY_PATH", "").split(":")
    yield from (Path(folder) / NAME for folder in named if folder)


def _in_cache() -> Iterator[Path]:
    """`ldconfig -p` has a line for each: name (kind) => path."""
    try:
        asked = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, timeout=LDCONFIG_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("the loader's cache is not known: %s", error)
        return
    for line in asked.stdout.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith(f"{NAME} "):
            yield Path(path)


def _is_roots(place: Path) -> bool:
    there = place.stat()
    return there.st_uid == 0 and not there.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _line(mark: _Marker) -> str:
    holder, part = mark.holder, mark.part
    return (
        f'{{"Kind":1,"SourceKind":{mark.source},"Flag":{mark.flag},"Timestamp":{mark.timestamp},'
        f'"Id":{mark.id},"MsptiObjectId":{{"Pt":{{"ProcessId":{holder},"ThreadId":{part}}},'
        f'"Ds":{{"DeviceId":{holder},"StreamId":{part}}}}},'
        f'"Name":{_text(mark.name)},"Domain":{_text(mark.domain)}}}\n'
    )


def _text(told: bytes | None) -> str:
    return json.dumps("NULL" if told is None else told.decode(errors="replace"))
