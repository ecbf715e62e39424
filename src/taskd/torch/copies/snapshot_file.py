"""One file of shared memory with one copy of a rank's state in it, and how it is read.

The file stays mapped as long as the process lives: its memory is reserved, faulted in and made
known to the device once, and from then on a copy costs what the link to the device costs. The
first word is written last; `snapshots.py` decides when to write and which of its files to use.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from taskd.torch.state import transfer as state
from taskd.torch.state.sealed import BadState
from taskd.torch.state.state_link import Receive
from taskd.torch.state.transfer import Parcel

log = logging.getLogger(__name__)

MAGIC = 0x3150414E53445354  # "TSDSNAP1"
HEAD = 256
_HEAD = struct.Struct("<QQQQ160s")
_WHOLE = struct.Struct("<Q")
"""The first word: MAGIC when the rest is whole, 0 while it is being written."""


@dataclass(frozen=True, slots=True)
class Found:
    """A whole copy that lies in the folder."""

    path: Path
    step: int
    shard: str
    length: int


class Page:
    """A file that this process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def write(self, shard: str, step: int, parcel: Parcel) -> None:
        """In place: the file keeps its memory from one time to the next."""
        parcel.seal()
        size = HEAD + parcel.length
        if self._map is None or os.fstat(self._file).st_size != size or len(self._map) != size:
            self._close()
            self._open(size)
        if parcel.on_device and not self._is_pinned:
            self._pin()
        page = self._map
        assert page is not None
        page[: _WHOLE.size] = _WHOLE.pack(0)
        parcel.lay(self._bytes[HEAD:])
        head = _HEAD.pack(0, step, parcel.length, os.getpid(), shard.encode()[:160])
        page[_WHOLE.size : _HEAD.size] = head[_WHOLE.size :]
        page[: _WHOLE.size] = _WHOLE.pack(MAGIC)

    def _open(self, size: int) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size)
        # All of it now: memory that is not there when it is written to would end the process.
        os.posix_fallocate(self._file, 0, size)
        self._map = mmap.mmap(self._file, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
            self._is_pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _pin(self) -> None:
        """Let the device write here by itself."""
        self._is_pinned = True
        told = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            self._bytes.data_ptr(), self._bytes.numel(), 0
        )
        if int(told):
            log.warning("%s cannot be pinned (CUDA error %d): copies are slow", self._path, told)


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(_WHOLE.pack(0))


def look(path: Path) -> Found | None:
    """None when it is torn, or being written."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(head) < _HEAD.size:
        return None
    magic, step, length, _, shard = _HEAD.unpack(head)
    if magic != MAGIC or size != HEAD + length:
        return None
    return Found(path, step, shard.rstrip(b"\0").decode(), length)


def is_sound(found: Found) -> bool:
    """Whether every sum in it matches."""
    reader = Reader(found)
    try:
        state.check(reader.receive)
    except BadState:
        return False
    finally:
        reader.close()
    return True


class Reader:
    """Reads a copy as if it came over a connection."""

    def __init__(self, found: Found) -> None:
        self._file = found.path.open("rb")
        self._file.seek(HEAD)

    @property
    def receive(self) -> Receive:
        return self._read

    def _read(self, place: memoryview) -> None:
        place = place.cast("B")
        while place.nbytes:
            got = self._file.readinto(place)
            if not got:
                raise BadState("the copy ends too early")
            place = place[got:]

    def close(self) -> None:
        self._file.close()


def send(found: Found, to: Receive) -> None:
    """Give a copy away as it is; the taker checks it."""
    with found.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as page:
        whole = memoryview(page)
        try:
            to(whole[HEAD : HEAD + found.length])
        finally:
            whole.release()
