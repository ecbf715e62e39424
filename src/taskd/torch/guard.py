"""Watches for silent corruption: do the replicas still hold the same bits?

Every so many steps, at the gate before the update (`step.py`), each rank tells all others the
fingerprint of its state. A rank that is named there has not yet spoilt anything by this step: the
step is abandoned by all, the named rank takes the state of a peer, and the step is replayed.
`core/worker/state_vote.py` judges.
"""

from __future__ import annotations

from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist

from taskd.core.worker.state_vote import Fingerprint, Verdict, judge
from taskd.model.ids import Rank
from taskd.torch.groups.all_groups import Groups
from taskd.torch.groups.store import Meeting
from taskd.torch.state import transfer as state
from taskd.torch.state.protected import Protected

WRONG = "wrong"
"""The key at a meeting under which ranks stand that are not to be believed."""


class Corrupt(Exception):
    """Raised by a script inside a step: this rank's state is wrong and is to be replaced.

    The step is abandoned, the state comes from a peer or from a copy, and the step is replayed.
    """


class Guard:
    """One rank's part in the comparison."""

    def __init__(self, every: int, shard: str, kept: Protected, groups: Groups) -> None:
        self._every, self._kept, self._groups = every, kept, groups
        self._shard = crc32(shard.encode())
        self._agreed = -1
        self.found: Verdict | None = None
        """What is to be told at the next meeting: somebody may not have heard it."""

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def compare(self, step: int) -> Verdict | None:
        """What all ranks together say of the state at this step. None: the groups broke."""
        world = self._groups.world.shape
        # Where the host can talk to its peers, the device is waited for once: for the fingerprint.
        device = "cpu" if "cpu" in world.backends else next(iter(world.backends))
        mine = [self._shard, state.fingerprint(self._kept), self._agreed]
        told = [torch.empty(len(mine), dtype=torch.int64, device=device) for _ in world.ranks]
        dist.all_gather(told, torch.tensor(mine, device=device))
        self._groups.land()
        if self._groups.trouble():
            return None
        each = torch.stack(told).tolist()
        verdict = judge(
            {Rank(rank): Fingerprint(*one) for rank, one in zip(world.ranks, each, strict=True)}
        )
        if not verdict.named:
            self._agreed = step
        return verdict

    def tell(self, address: str, place: str, timeout: timedelta) -> None:
        """Before the others are met: whose state was found to differ, and from where on."""
        if self.found is not None:
            named = ",".join(map(str, self.found.named))
            Meeting(address, place, timeout).store.set(WRONG, f"{self.found.agreed} {named}")

    def heard(self, meeting: Meeting, rank: int) -> int | None:
        """When all have met: the last step of ours that is right, if somebody has told so of us."""
        if not meeting.store.check([WRONG]):
            return None
        agreed, named = meeting.store.get(WRONG).decode().split()
        return int(agreed) if rank in map(int, named.split(",")) else None
