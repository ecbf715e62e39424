"""One file of shared memory with one copy of a rank's state in it, and how it is read.

The file stays mapped as long as the process runs: its memory is reserved, faulted in and pinned
once, and from then on a copy costs as much as the link to the device. The first word is written
last; `snapshots.py` decides when to write and into which of its files.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from taskd.torch.state import transfer
from taskd.torch.state.sealed import BadState
from taskd.torch.state.state_link import Receive, Send
from taskd.torch.state.transfer import StateImage, Written

log = logging.getLogger(__name__)

MAGIC = 0x3150414E53445354  # "TSDSNAP1"
HEAD = 256
PAGE = 4096
_HEAD = struct.Struct("<QQQQ160s")
_FIRST_WORD = struct.Struct("<Q")
"""MAGIC when the file is complete, 0 while it is being written."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A complete copy in the folder."""

    path: Path
    step: int
    shard: str
    length: int


class SnapshotWriter:
    """A file that this process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._written: Written = {}

    def inspect(self) -> SnapshotInfo | None:
        """What is in the file now: as `inspect`, but without opening it again."""
        if self._map is None:
            return inspect(self._path)
        return _read_head(self._path, self._map[: _HEAD.size], len(self._map))

    def write(self, shard: str, step: int, image: StateImage) -> None:
        """In place: the file keeps its memory from one copy to the next."""
        image.seal()
        size = HEAD + image.length
        if image.is_own:  # it may grow by a few bytes from step to step: then the file stays
            size = -(-size // PAGE) * PAGE
        if self._map is None or os.fstat(self._file).st_size != size or len(self._map) != size:
            self._close()
            self._open(size)
        if image.on_device and not self._is_pinned:
            self._pin()
        target = self._map
        assert target is not None
        target[: _FIRST_WORD.size] = _FIRST_WORD.pack(0)
        written, self._written = self._written, {}
        if (whole := image.head) is None:
            self._written = image.write_into(self._bytes[HEAD:], written)
        else:
            target[HEAD : HEAD + len(whole)] = whole
        head = _HEAD.pack(0, step, image.length, os.getpid(), shard.encode()[:160])
        target[_FIRST_WORD.size : _HEAD.size] = head[_FIRST_WORD.size :]
        target[: _FIRST_WORD.size] = _FIRST_WORD.pack(MAGIC)

    def _open(self, size: int) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, size)
        # Reserve all of it now: writing to memory that is not available would end the process.
        os.posix_fallocate(self._file, 0, size)
        self._map = mmap.mmap(self._file, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
            self._is_pinned = False
        self._bytes, self._written = torch.empty(0, dtype=torch.uint8), {}
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _pin(self) -> None:
        """Let the device write here directly."""
        self._is_pinned = True
        code = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            self._bytes.data_ptr(), self._bytes.numel(), 0
        )
        if int(code):
            log.warning(
                "%s cannot be pinned, so copies are slow: cuda_error=%d", self._path, int(code)
            )


class SnapshotReader:
    """Reads a copy as if it came over a connection."""

    def __init__(self, info: SnapshotInfo) -> None:
        self._file = info.path.open("rb")
        self._file.seek(HEAD)

    def receive(self, target: memoryview) -> None:
        target = target.cast("B")
        while target.nbytes:
            got = self._file.readinto(target)
            if not got:
                raise BadState("the copy is shorter than its manifest says")
            target = target[got:]

    def close(self) -> None:
        self._file.close()


def inspect(path: Path) -> SnapshotInfo | None:
    """None when the file is incomplete, or being written."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    return _read_head(path, head, size)


def _read_head(path: Path, head: bytes, size: int) -> SnapshotInfo | None:
    if len(head) < _HEAD.size:
        return None
    magic, step, length, _, shard = _HEAD.unpack(head)
    if magic != MAGIC or size < HEAD + length:
        return None
    return SnapshotInfo(path, step, shard.rstrip(b"\0").decode(errors="replace"), length)


def is_intact(info: SnapshotInfo) -> bool:
    """Whether every digest in it matches."""
    reader = SnapshotReader(info)
    receive: Receive = reader.receive
    try:
        transfer.verify(receive)
    except BadState:
        return False
    finally:
        reader.close()
    return True


def invalidate(path: Path) -> None:
    """Mark the file as incomplete, so that it is never used again."""
    with path.open("r+b") as file:
        file.write(_FIRST_WORD.pack(0))


def send_file(info: SnapshotInfo, send: Send) -> None:
    """Send a copy as it is; the receiver checks it."""
    with info.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        whole = memoryview(mapped)
        try:
            send(whole[HEAD : HEAD + info.length])
        finally:
            whole.release()
