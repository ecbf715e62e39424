"""Copies of sharded state in shared memory: they outlive the process that made them.

A shard that exists once in the job is lost with its rank. So each rank copies its own after a
commit into one of two files in the node's shared memory, beside its beacon; the copying runs while
the next step computes, and the optimizer's gate waits for it. A file counts only when its last
word, the seal of its head, is written (`page.py`); whoever reads it checks every sum. Any rank of
the node can give what lies there to the one that replaces the lost (`repair.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from taskd.model.ids import Step
from taskd.model.messages import Copy
from taskd.torch.copies.snapshot_file import Found, Page, Reader, look, spoil
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState
from taskd.torch.state.state_link import Receive
from taskd.torch.state.transfer import Parcel

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        self._pages = {path: Page(path) for path in self._mine}
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
        return lying_in(self._folder)

    def find(self, shard: str, step: int) -> Found | None:
        return next((o for o in self._all() if (o.shard, o.step) == (shard, step)), None)

    def made_by(self, ranks: Collection[int], step: int) -> Found | None:
        """A copy of what one of these ranks, which hold the same, had at that step."""
        return next((o for o in self._all() if o.step == step and _maker(o.path) in ranks), None)

    def read(self, found: Found, by: Callable[[Receive], T]) -> T:
        """What `by` makes of a copy. One that turns out damaged is never offered again."""
        reader = Reader(found)
        try:
            return by(reader.receive)
        except BadState:
            self.refuse(found)
            raise
        finally:
            reader.close()

    def refuse(self, found: Found) -> None:
        """It does not match its sums: never offer it again."""
        log.warning("the copy in %s is damaged and is not used", found.path)
        spoil(found.path)

    def forget_after(self, step: int) -> None:
        """The job has gone back: what was ahead will be made anew."""
        for one in self._all():
            if one.step > step and one.path in self._mine:
                spoil(one.path)

    def distrust(self, ranks: Collection[int], after: int) -> None:
        """What these ranks have copied since that step may be as wrong as they are."""
        for one in self._all():
            if one.step > after and _maker(one.path) in ranks:
                spoil(one.path)

    def _copy(self, path: Path, step: int, parcel: Parcel) -> None:
        try:
            self._pages[path].write(self._shard, step, parcel)
            if self._then is not None:
                self._then(path)
        except (OSError, ValueError) as error:
            self._problem = f"{path}: {error}"

    def _all(self) -> Iterator[Found]:
        return _all_in(self._folder)


def lying_in(folder: Path) -> tuple[Copy, ...]:
    """All whole copies on this node, whoever made them."""
    return tuple({Copy(one.shard, Step(one.step)) for one in _all_in(folder)})


def _all_in(folder: Path) -> Iterator[Found]:
    for path in sorted(folder.glob("snapshot-*")):
        found = look(path)
        if found is not None:
            yield found


def older(held: dict[Path, Found | None]) -> Path:
    """Which file is to be written over: never the newest, which may be the only one that fits."""
    return min(held, key=lambda path: -1 if (one := held[path]) is None else one.step)


def place_of(folder: Path, name: str) -> Path:
    """Where the next copy of this name goes."""
    return older({path: look(path) for path in _pair(folder, name)})


def _maker(path: Path) -> int:
    """The rank whose state it is, whoever keeps it."""
    return int(path.name.removeprefix("snapshot-").split(".")[0])


def _pair(folder: Path, name: str) -> list[Path]:
    return [folder / f"snapshot-{name}.{turn}" for turn in range(2)]
