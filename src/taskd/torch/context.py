"""What the parts of one job share in a training process.

`init.py` creates it; `job.py`, `step_cycle.py`, `recovery.py` and `apply_plan.py` work on it. The
script never sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from taskd.model.faults import FaultCause
from taskd.runtime.beacon import Beacon
from taskd.torch import random_state
from taskd.torch.checkpoints.checkpoint_copies import CheckpointCopies
from taskd.torch.copies.copy_schedule import CopySchedule
from taskd.torch.copies.snapshots import LocalState
from taskd.torch.copies.turn_parts import TurnParts
from taskd.torch.groups.all_groups import Groups
from taskd.torch.loop import attempt_values
from taskd.torch.loop.attempt_values import AttemptValues, Values
from taskd.torch.loop.loop_position import LoopPosition
from taskd.torch.loop.loop_variables import LoopVariables
from taskd.torch.replicas.guard import Guard
from taskd.torch.replicas.kept_agreement import KeptAgreement
from taskd.torch.startup.start_mark import StartMark
from taskd.torch.state.protected import Protected
from taskd.worker.manager_connection import ManagerConnection
from taskd.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from taskd.torch.replicas.comparison import Comparison
    from taskd.torch.verify.verification import Verification


class JobContext:
    """One per job: settings, groups, copies, and the position of the training."""

    def __init__(self, settings: WorkerSettings, rank: int, world_size: int) -> None:
        self.settings, self.rank, self.world_size = settings, rank, world_size
        self.members = tuple(range(world_size))
        """The ranks that are in the job now, by their numbers at its start."""
        self.elastic = "accumulate"
        """What happens to the parts of missing ranks: see `Job.protect`."""
        self.step = 0
        """Steps committed."""
        self.held_step: int | None = 0
        """The step whose state this rank holds; None: no usable state, as in a new replacement."""
        self.is_over = False
        """All steps are done: only the code after the loop is left."""
        # In the node's shared memory.
        folder = self.folder = Path(settings.beacon).parent if settings.beacon else None
        self.position = LoopPosition(folder, rank)
        self.values = AttemptValues(folder if settings.proxy else None, rank)
        """What the last attempt has left in the script's variables."""
        self.values_at_update = AttemptValues(
            folder if settings.proxy else None, rank, attempt_values.AT_UPDATE
        )
        """What they were when its first update began."""
        self.variables = LoopVariables(folder if settings.proxy else None, rank)
        """The script's variables that go from one step to the next."""
        self.turn_parts = TurnParts(folder if settings.proxy else None, rank)
        self.kept_agreement = KeptAgreement(folder if settings.proxy else None, rank)
        """What the code after the last step has changed."""
        self.start_mark: StartMark | None = None
        """The connection to the job's store; None: the job has no manager."""
        self.base_seeds = random_state.capture()
        """What the random numbers of all steps are derived from."""
        self.kept_seeds = AttemptValues(folder if settings.proxy else None, rank, "seeds")
        """The same, for a replacement: it may have drawn other numbers before `protect`."""
        self.is_replacement = False
        """This process has joined a job that was already running."""
        self.incident = settings.incident
        self.beacon = Beacon(settings.beacon)
        self.groups = Groups(world_size, self.on_fault, self.beacon.collectives)
        self.groups.on_outside = self.position.note_exchange
        self.copies = CopySchedule(
            folder,
            CheckpointCopies(folder, Path(settings.dump_dir), rank, settings.checkpoint_every),
        )
        self.manager: ManagerConnection | None = None
        """The connection to the manager; None: the job has no manager."""
        self.guard: Guard | None = None
        self.verification: Verification | None = None
        self.comparison: Comparison | None = None
        self.shard = ""
        """The name of this rank's shard; empty: all ranks hold the same."""
        self.replica = -1
        """The replica that this rank belongs to, where the job can continue without some. -1: it is
        one by itself."""
        self.votes = False
        """Whether all ranks agree that a step is good before any of them updates."""
        self._protected: Protected | None = None

    @property
    def is_protected(self) -> bool:
        """Whether the script has called `protect`."""
        return self._protected is not None

    @property
    def protected(self) -> Protected:
        assert self._protected is not None
        return self._protected

    @protected.setter
    def protected(self, protected: Protected) -> None:
        self._protected = protected

    @property
    def local_state(self) -> LocalState:
        """What this rank could give to others."""
        return LocalState(
            self.rank, self.shard, self.held_step, self.protected, self.copies.snapshots
        )

    def needs_recovery(self) -> bool:
        return self.groups.is_broken() or self.held_step is None

    def values_after(self, step: int) -> Values:
        """What the attempts at a step have left, in a replacement that has made none."""
        peers = [rank for rank in self.members if rank != self.rank]
        at_update = self.values_at_update.kept_at(step)
        return self.values.restore(
            step,
            self.variables.names,
            lambda: self.variables.completed(step, peers, at_update),
            at_update,
        )

    def on_fault(self, why: str) -> None:
        """The groups, or the network interface, are broken: tell the manager."""
        if self.manager is not None:
            self.manager.step_failed(FaultCause.COMMUNICATION, why)

    def mark_corrupt(self, evidence: str, cause: FaultCause = FaultCause.CORRUPT) -> None:
        """This rank's state is wrong: it must get another one, or another process."""
        self.held_step = None
        if self.manager is not None:
            self.manager.step_failed(cause, evidence)

    def parts(self) -> list[int]:
        """The parts of a batch for this rank: its own, and its share of the missing ranks'."""
        missing = [rank for rank in range(self.world_size) if rank not in self.members]
        if self.elastic == "scale":
            missing = []
        place = self.members.index(self.rank)
        return [self.rank, *missing[place :: len(self.members)]]

    def loss_share(self) -> float:
        """The factor for the loss of one part: see `Step.share`."""
        return len(self.members) / self.world_size if self.elastic == "accumulate" else 1.0
