"""The copies that a rank makes of its state while it trains: when, and where the second one goes.

`snapshots.py` writes and reads them, `buddy.py` sends them to another node; `step_cycle.py` reports
committed steps, `recovery.py` asks for the copies after a fault.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from taskd import config
from taskd.model.messages import Copy
from taskd.torch.copies.buddy import Buddy
from taskd.torch.copies.snapshots import Snapshots, copies_in
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state.protected import Protected

log = logging.getLogger(__name__)


class CopySchedule:
    """One rank's copies. It makes none before `start` is called."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is in the node's shared memory; None: there is no such folder."""
        self._folder, self._every = folder, 1
        self.snapshots: Snapshots | None = None
        self._buddy: Buddy | None = None
        self._on_one_node = int(config.environ.get("GROUP_WORLD_SIZE", "1")) == 1
        """No other node could keep a copy. Worth a warning only where there was one before."""

    def start(self, every: int, rank: int, node: int, shard: str, protected: Protected) -> None:
        """Copy after every so many steps from now on."""
        if self._folder is not None:
            self._every = every
            self._buddy = Buddy(self._folder, rank, node)
            self.snapshots = Snapshots(self._folder, rank, shard, protected, self._buddy.send)

    def on_commit(self, step: int, incident: int) -> None:
        """The state is that of this step, and does not change before `wait` returns."""
        if self.snapshots is not None and step % self._every == 0:
            self.snapshots.start(step, incident)

    def wait(self) -> None:
        if self.snapshots is not None:
            self.snapshots.wait()

    def list_on_node(self) -> tuple[Copy, ...]:
        """The copies on this node at this moment. From any thread."""
        return () if self._folder is None else copies_in(self._folder)

    def finish_and_list(self) -> tuple[Copy, ...]:
        """What this node could send to others, our own newest copy included."""
        if self.snapshots is None:
            return ()
        self.snapshots.wait()
        return self.snapshots.copies()

    def distrust(self, ranks: Collection[int], after: int) -> None:
        """The state of these ranks may be wrong since that step: use no copy of it."""
        if self.snapshots is not None and self._buddy is not None:
            self.snapshots.wait()
            self._buddy.distrust(ranks)
            self.snapshots.distrust(ranks, after)

    def choose_buddy(self, rendezvous: Rendezvous, ranks: Sequence[int]) -> None:
        """Choose the rank that keeps our second copies from now on."""
        if self._buddy is None:
            return
        self._buddy.announce(rendezvous)
        on_one_node = not self._buddy.choose(rendezvous, list(ranks))
        if on_one_node and not self._on_one_node:
            log.warning("snapshots have no second copy: all ranks are on one node now")
        self._on_one_node = on_one_node
