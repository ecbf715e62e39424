"""Copies of state in shared memory: they outlive the process that made them.

A shard that exists once in the job is lost with its rank. So after a commit each rank copies its
own into one of two files in the node's shared memory, beside its beacon; the copying runs while
the next step computes, and the optimizer's gate waits for it. What only one rank has beside its
shard is small and is copied into two more files, at the gate of the step that leads to it: when the
first rank commits a step, the copies of all ranks are complete. A file is used only when its first
word, which is written last, says that it is complete (`snapshot_file.py`); every reader checks all
digests. Any rank of the node can send a copy to the replacement of the lost rank
(`apply_plan.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from taskd.model.ids import Step
from taskd.model.messages import Copy, own_name
from taskd.runtime.clock import monotonic
from taskd.torch.copies.snapshot_file import (
    SnapshotInfo,
    SnapshotReader,
    SnapshotWriter,
    inspect,
    invalidate,
)
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState
from taskd.torch.state.state_link import Receive
from taskd.torch.state.transfer import StateImage

log = logging.getLogger(__name__)
T = TypeVar("T")


class Snapshots:
    """One rank's copies, and a view of all others on its node."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        shard: str,
        protected: Protected,
        on_complete: Callable[[Path], None] | None = None,
    ) -> None:
        """`on_complete` is called with each complete file, in the thread that wrote it."""
        self._on_complete = on_complete
        self._folder, self._rank, self.shard, self._protected = folder, rank, shard, protected
        self._of_shard = _two_files(folder, str(rank))
        self._of_rank = _two_files(folder, f"{rank}.own")
        self._writers = {path: SnapshotWriter(path) for path in (*self._of_shard, *self._of_rank)}
        self._thread: threading.Thread | None = None
        self._problem = ""
        self.copy_s = 0.0
        """How long the last copy took."""

    def start(self, step: int, incident: int) -> None:
        """Copy the state of this step. It must not change before `wait` returns."""
        self.wait()
        existing = {path: inspect(path) for path in self._of_shard}
        if any(one is not None and one.step == step for one in existing.values()):
            return  # as after a repair that has put us back to this step
        path = file_for(step, existing)
        image = StateImage(self._protected, step, incident, self.shard)
        self._thread = threading.Thread(
            target=self._copy,
            args=(path, self.shard, step, image),
            name="taskd-snapshot",
            daemon=True,
        )
        self._thread.start()

    def copy_own(
        self, step: int, incident: int, gradients: bool, parts: dict[str, Any] | None = None
    ) -> None:
        """Copy what only this rank has, as of this step. On return it is on another node, too.

        `parts`: the states of the parts in it, if they are known.
        """
        self.wait()
        path = file_for(step, {path: self._writers[path].inspect() for path in self._of_rank})
        name, protected = own_name(self._rank), self._protected
        image = StateImage(
            protected, step, incident, name, own=True, gradients=gradients, parts=parts
        )
        self._copy(path, name, step, image)

    @property
    def is_idle(self) -> bool:
        """`wait` would do nothing."""
        return self._thread is None and not self._problem

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem:
            log.warning(
                "snapshot failed: %s. If this rank is lost before the next one, all ranks restart "
                "from the last checkpoint",
                self._problem,
            )
            self._problem = ""

    def copies(self) -> tuple[Copy, ...]:
        """What this node could send to others."""
        return copies_in(self._folder)

    def find(self, shard: str, step: int) -> SnapshotInfo | None:
        return next((one for one in self._all() if (one.shard, one.step) == (shard, step)), None)

    def made_by(self, ranks: Collection[int], step: int) -> SnapshotInfo | None:
        """A copy of the state that one of these ranks, which hold the same, had at that step."""
        found = (one for one in self._all() if one.step == step and _maker(one.path) in ranks)
        return next((one for one in found if one.shard != own_name(_maker(one.path))), None)

    def read(self, info: SnapshotInfo, use: Callable[[Receive], T]) -> T:
        """The result of `use` on a copy. A copy that turns out damaged is never offered again."""
        reader = SnapshotReader(info)
        try:
            return use(reader.receive)
        except BadState:
            self.reject(info)
            raise
        finally:
            reader.close()

    def reject(self, info: SnapshotInfo) -> None:
        """Its digests do not match: never offer it again."""
        log.warning("snapshot %s is damaged and is not used", info.path)
        invalidate(info.path)

    def forget_after(self, step: int) -> None:
        """The job has gone back: later copies will be made again."""
        for one in self._all():
            if one.step > step and one.path in self._writers:
                invalidate(one.path)

    def distrust(self, ranks: Collection[int], after: int) -> None:
        """Copies of these ranks after that step may be as wrong as the ranks."""
        for one in self._all():
            if one.step > after and _maker(one.path) in ranks:
                invalidate(one.path)

    def forget_own(self, step: int) -> None:
        """Copies of what only one rank has, of that step or later, lack something."""
        for one in self._all():
            if one.step >= step and one.shard == own_name(_maker(one.path)):
                invalidate(one.path)

    def _copy(self, path: Path, shard: str, step: int, image: StateImage) -> None:
        started = monotonic()
        try:
            self._writers[path].write(shard, step, image)
            if self._on_complete is not None:
                self._on_complete(path)
            self.copy_s = monotonic() - started
        except (OSError, ValueError) as error:
            self._problem = f"{path}: {error}"

    def _all(self) -> Iterator[SnapshotInfo]:
        return _all_in(self._folder)


@dataclass(frozen=True, slots=True)
class LocalState:
    """What this rank holds: the state of which step and shard, and the copies on its node."""

    rank: int
    shard: str
    step: int | None
    """None: no state at all, as in a replacement that has just been started."""
    protected: Protected
    snapshots: Snapshots | None


def copies_in(folder: Path) -> tuple[Copy, ...]:
    """All complete copies on this node, of any rank."""
    return tuple({Copy(one.shard, Step(one.step)) for one in _all_in(folder)})


def forget_in(folder: Path) -> None:
    """All ranks start together: no copy on this node is of the training that begins."""
    for one in _all_in(folder):
        invalidate(one.path)


def file_for(step: int, existing: dict[Path, SnapshotInfo | None]) -> Path:
    """Which file to overwrite: that of the same step, if the step is replayed, or the older one.
    Never the newest other one, which may be the only one that is usable."""
    steps = {path: -1 if one is None else one.step for path, one in existing.items()}
    return min(existing, key=lambda path: (steps[path] != step, steps[path]))


def next_file(folder: Path, rank: int, new: SnapshotInfo) -> Path:
    """Where a copy that another node has sent goes."""
    name = f"{rank}.own.kept" if new.shard == own_name(rank) else f"{rank}.kept"
    return file_for(new.step, {path: inspect(path) for path in _two_files(folder, name)})


def _all_in(folder: Path) -> Iterator[SnapshotInfo]:
    for path in sorted(folder.glob("snapshot-*")):
        info = inspect(path)
        if info is not None:
            yield info


def _maker(path: Path) -> int:
    """The rank whose state it is, whichever node keeps the file."""
    return int(path.name.removeprefix("snapshot-").split(".")[0])


def _two_files(folder: Path, name: str) -> list[Path]:
    return [folder / f"snapshot-{name}.{number}" for number in range(2)]
