"""The copies that a rank makes of its state as it goes: when, where to, and who keeps a second one.

`snapshots.py` writes and reads them, `buddy.py` carries them to another node; `job.py` says when a
step is committed, `mending.py` what there is when one was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from taskd import config
from taskd.model.messages import Copy
from taskd.torch.copies.buddy import Keeper
from taskd.torch.copies.snapshots import Snapshots, lying_in
from taskd.torch.groups.store import Meeting
from taskd.torch.state.protected import Protected

log = logging.getLogger(__name__)


class Copying:
    """One rank's copies, every so many steps. Never, as long as `start` is not called."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is the node's memory, if it has any."""
        self._folder, self._every = folder, 1
        self.snapshots: Snapshots | None = None
        self._keeper: Keeper | None = None
        self._alone = int(config.environ.get("GROUP_WORLD_SIZE", "1")) == 1
        """There is no other node that could keep a copy. News only where there was one."""

    def start(self, every: int, rank: int, node: int, shard: str, kept: Protected) -> None:
        if self._folder is not None:
            self._every = every
            self._keeper = Keeper(self._folder, rank, node)
            self.snapshots = Snapshots(self._folder, rank, shard, kept, self._keeper.send)

    def committed(self, step: int, incident: int) -> None:
        """The state stands at this step, and does not change before `wait` returns."""
        if self.snapshots is not None and step % self._every == 0:
            self.snapshots.begin(step, incident)

    def wait(self) -> None:
        if self.snapshots is not None:
            self.snapshots.wait()

    def look(self) -> tuple[Copy, ...]:
        """What lies on this node at this moment. From any thread."""
        return () if self._folder is None else lying_in(self._folder)

    def held(self) -> tuple[Copy, ...]:
        """What this node could give to others, our own newest copy included."""
        if self.snapshots is None:
            return ()
        self.snapshots.wait()
        return self.snapshots.copies()

    def distrust(self, ranks: Collection[int], after: int) -> None:
        """These ranks' state is wrong, perhaps since that step: no copy of it is to be used."""
        if self.snapshots is not None and self._keeper is not None:
            self.snapshots.wait()
            self._keeper.distrust(ranks)
            self.snapshots.distrust(ranks, after)

    def meet_buddy(self, meeting: Meeting, ranks: Sequence[int]) -> None:
        """Find out who keeps our second copies from now on."""
        if self._keeper is None:
            return
        self._keeper.announce(meeting)
        alone = not self._keeper.choose(meeting, list(ranks))
        if alone and not self._alone:
            log.warning("snapshots have no second copy: all ranks are on one node now")
        self._alone = alone
