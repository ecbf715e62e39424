"""The copies that a rank makes of its state while it trains: when, and where the second one goes.

`snapshots.py` writes and reads them, `buddy.py` sends them to another node; `step_cycle.py` reports
committed steps, `recovery.py` asks for the copies after a fault.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from taskd import config
from taskd.core.worker import copy_interval
from taskd.model.messages import Copy
from taskd.runtime.clock import monotonic
from taskd.torch.checkpoints.checkpoint_copies import CheckpointCopies
from taskd.torch.copies.buddy import Buddy
from taskd.torch.copies.copy_costs import CopyCosts
from taskd.torch.copies.snapshots import Snapshots, copies_in, forget_in
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state.pieces import is_large
from taskd.torch.state.protected import Protected

log = logging.getLogger(__name__)

SHORT_S, SHORT_SHARE = 0.001, 0.03
"""The training waits for a copy that takes at most this long, or this share of a step."""


class CopySchedule:
    """One rank's copies. It makes none before `attach` is called."""

    def __init__(self, folder: Path | None, checkpoints: CheckpointCopies) -> None:
        """`folder` is in the node's shared memory; None: there is no such folder."""
        self._folder = folder
        self.checkpoints = checkpoints
        self.every = 0
        """After how many steps the shard of this rank is copied. 0: never."""
        self.snapshots: Snapshots | None = None
        self._protected: Protected | None = None
        self._buddy: Buddy | None = None
        self._costs = CopyCosts()
        self._votes: deque[float] = deque(maxlen=2)
        """When the last two steps ended."""
        nodes = config.environ.get("GROUP_WORLD_SIZE", "")
        self._on_one_node = nodes in ("", "1")
        """No other node could keep a copy. Worth a warning only where there was one before."""
        self._never_leaves = nodes == "1"

    def attach(self, rank: int, node: int, protected: Protected) -> None:
        if self._folder is not None:
            self._protected = protected
            self.checkpoints.attach(protected)
            self._buddy = Buddy(self._folder, rank, node)
            self.snapshots = Snapshots(self._folder, rank, "", protected, self._buddy.send)

    def forget_predecessors(self) -> None:
        """All ranks start together. To be called before any of them can make a copy."""
        if self._folder is not None:
            forget_in(self._folder)

    @property
    def each_step(self) -> bool:
        """Whether every step is copied."""
        return self.snapshots is not None and self.every == 1

    def on_commit(self, step: int, incident: int) -> None:
        """The state is that of this step, and does not change before `wait` returns."""
        is_due = self.snapshots is not None and self.every > 0 and step % self.every == 0
        self._costs.stepped(is_due)
        if self.snapshots is not None and is_due:
            with self._costs.waiting():
                self.snapshots.start(step, incident)

    def copy_before_vote(self, step: int, incident: int) -> None:
        """Copy the state that the step is about to commit; wait for it if that takes no time."""
        self._votes.append(monotonic())
        self._costs.stepped(copies=True)
        if self.snapshots is not None:
            with self._costs.waiting():
                self.snapshots.start(step, incident)
                if self._is_short(self.snapshots.copy_s):
                    self.snapshots.wait()

    def propose_interval(self) -> int:
        """How often this rank could copy its state; 0: it does not know, or need not care.

        Small states are copied after each step: that costs milliseconds, and no step is lost.
        """
        measured, protected = self._costs.measured(), self._protected
        if not self.every or measured is None or protected is None or not is_large(protected):
            return copy_interval.NO_PROPOSAL
        return copy_interval.propose(*measured)

    def describe_costs(self) -> str:
        """What was measured, in words."""
        step_s, cost_s = self._costs.measured() or (0.0, 0.0)
        copy_s = self.snapshots.copy_s if self.snapshots is not None else 0.0
        return (
            f"a step takes {step_s * 1e3:.0f} ms, a copy {copy_s * 1e3:.0f} ms, "
            f"of which training waits {cost_s * 1e3:.0f} ms"
        )

    def _is_short(self, copy_s: float) -> bool:
        """Whether a copy takes little time in comparison with a step."""
        step_s = self._votes[-1] - self._votes[0]
        return copy_s <= max(SHORT_S, SHORT_SHARE * step_s)

    def copy_own(
        self, step: int, incident: int, gradients: bool, parts: dict[str, Any] | None = None
    ) -> None:
        """Copy what only this rank has, as of this step, and return when that is done.

        `parts`: the states of the parts in it, if they are known.
        """
        if self.snapshots is not None:
            self.snapshots.copy_own(step, incident, gradients, parts)

    def wait(self) -> None:
        self.checkpoints.wait()
        if self.snapshots is not None and not self.snapshots.is_idle:
            with self._costs.waiting():
                self.snapshots.wait()

    def list_on_node(self) -> tuple[Copy, ...]:
        """The copies on this node at this moment. From any thread."""
        return () if self._folder is None else copies_in(self._folder)

    def finish_and_list(self) -> tuple[Copy, ...]:
        """What this node could send to others, our own newest copy included."""
        self._costs.forget()
        self.checkpoints.wait()
        if self.snapshots is None:
            return ()
        self.snapshots.wait()
        return self.snapshots.copies()

    def distrust(self, ranks: Collection[int], after: int) -> None:
        """The state of these ranks may be wrong since that step: use no copy of it."""
        self.checkpoints.distrust(after)
        if self.snapshots is not None and self._buddy is not None:
            self.snapshots.wait()
            self._buddy.distrust(ranks)
            self.snapshots.distrust(ranks, after)

    def forget_own(self, step: int) -> None:
        """What only one rank has, as of this step or later, is not complete in its copies."""
        if self.snapshots is not None:
            self.snapshots.wait()
            self.snapshots.forget_own(step)

    def choose_buddy(self, rendezvous: Rendezvous, ranks: Sequence[int]) -> None:
        """Choose the rank that keeps our second copies from now on."""
        if self._buddy is None or self._never_leaves:
            return
        self._buddy.announce(rendezvous)
        on_one_node = not self._buddy.choose(rendezvous, list(ranks))
        if self.every and on_one_node and not self._on_one_node:
            log.warning("snapshots have no second copy: all ranks are on one node now")
        self._on_one_node = on_one_node
