"""Copies of sharded state in shared memory: they outlive the process that made them.

A shard that exists once in the job is lost with its rank. So each rank copies its own after a
commit into one of two files in the node's shared memory, beside its beacon; the copying runs while
the next step computes, and the optimizer's gate waits for it. A file counts only when its last
word, the seal of its head, is written; whoever reads it checks every sum. Any rank of the node can
give what lies there to the one that replaces the lost (`repair.py`).
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from taskd.model.ids import Step
from taskd.model.messages import Copy
from taskd.torch import state
from taskd.torch.courier import Receive
from taskd.torch.protected import Protected
from taskd.torch.state import BadState, Parcel

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


class Snapshots:
    """One rank's copies, and a view of all others on its node."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        shard: str,
        kept: Protected,
        then: Callable[[Path], None] | None = None,
    ) -> None:
        """`then` is called with each file that is whole, in the thread that made it."""
        self._then = then
        self._folder, self._rank, self._shard, self._kept = folder, rank, shard, kept
        self._mine = _pair(folder, str(rank))
        self._copying: threading.Thread | None = None
        self._problem = ""

    def begin(self, step: int, incident: int) -> None:
        """Copy the state of this step aside. It must not change before `wait` returns."""
        self.wait()
        held = {path: look(path) for path in self._mine}
        if any(one is not None and one.step == step for one in held.values()):
            return  # as after a repair that has put us back to it
        path = older(held)
        parcel = Parcel(self._kept, step, incident, self._shard)
        self._copying = threading.Thread(
            target=self._copy, args=(path, step, parcel), name="taskd-snapshot", daemon=True
        )
        self._copying.start()

    def wait(self) -> None:
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        if self._problem:
            log.warning("a snapshot could not be made: %s", self._problem)
            self._problem = ""

    def copies(self) -> tuple[Copy, ...]:
        """What this node could give to others."""
        return tuple({Copy(one.shard, Step(one.step)) for one in self._all()})

    def find(self, shard: str, step: int) -> Found | None:
        return next((o for o in self._all() if (o.shard, o.step) == (shard, step)), None)

    def refuse(self, found: Found) -> None:
        """It does not match its sums: never offer it again."""
        log.warning("the copy in %s is damaged and is not used", found.path)
        _spoil(found.path)

    def forget_after(self, step: int) -> None:
        """The job has gone back: what was ahead will be made anew."""
        for one in self._all():
            if one.step > step and one.path in self._mine:
                _spoil(one.path)

    def _copy(self, path: Path, step: int, parcel: Parcel) -> None:
        try:
            write(path, self._shard, step, parcel)
            if self._then is not None:
                self._then(path)
        except (OSError, ValueError) as error:
            self._problem = f"{path}: {error}"

    def _all(self) -> Iterator[Found]:
        for path in sorted(self._folder.glob("snapshot-*")):
            found = look(path)
            if found is not None:
                yield found


def older(held: dict[Path, Found | None]) -> Path:
    """Which file is to be written over: never the newest, which may be the only one that fits."""
    return min(held, key=lambda path: -1 if (one := held[path]) is None else one.step)


def place_of(folder: Path, name: str) -> Path:
    """Where the next copy of this name goes."""
    return older({path: look(path) for path in _pair(folder, name)})


def _pair(folder: Path, name: str) -> list[Path]:
    return [folder / f"snapshot-{name}.{turn}" for turn in range(2)]


def write(path: Path, shard: str, step: int, parcel: Parcel) -> None:
    """In place: the file keeps its memory from one time to the next."""
    parcel.seal()
    size = HEAD + parcel.length
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size != size:
            os.ftruncate(file, size)
        with mmap.mmap(file, size) as page:
            page[: _WHOLE.size] = _WHOLE.pack(0)
            at = HEAD

            def send(piece: memoryview) -> None:
                nonlocal at
                flat = piece.cast("B")
                page[at : at + flat.nbytes] = flat
                at += flat.nbytes

            parcel.give(send)
            head = _HEAD.pack(0, step, parcel.length, os.getpid(), shard.encode()[:160])
            page[_WHOLE.size : _HEAD.size] = head[_WHOLE.size :]
            page[: _WHOLE.size] = _WHOLE.pack(MAGIC)
    finally:
        os.close(file)


def _spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(_WHOLE.pack(0))


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
