"""Detects silent data corruption: do all replicas still hold the same bits?

In every so many steps, at the gate before the update (`step_cycle.py`), each rank sends the
fingerprint of its state to all others. A rank whose state differs has not spoilt anything by this
step: all ranks abandon the step, the rank receives the state of a peer, and the step is replayed.
`core/worker/state_vote.py` decides which rank is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist

from taskd.core.worker.state_vote import Fingerprint, Verdict, judge
from taskd.model.ids import Rank
from taskd.torch.groups.all_groups import Groups
from taskd.torch.groups.store import Rendezvous
from taskd.torch.state import pieces
from taskd.torch.state.protected import Protected

VERDICT_KEY = "wrong"
"""The key at a rendezvous under which the ranks with a wrong state are listed."""


class Corrupt(Exception):
    """Raise this inside a step when the state of this rank is wrong and must be replaced.

    Use it when the script finds out by itself that the weights are wrong, for example with a check
    of its own or after an error that the device reports. The step is abandoned on all ranks; this
    rank receives the state of a replica, or of a snapshot, and the step is replayed. Copies of the
    wrong state are not used.

    The message of the exception is the reason; it appears in the log, in `taskd status` and in the
    incident record. In a job without a manager the exception ends the process like any other.

    Example:
        ```python
        with attempt:
            loss = loss_fn(model(batch(step)))
            loss.backward()
            if not weights_are_plausible(model):
                raise taskd.Corrupt("norm of the embedding is 1e9")
            optimizer.step()
        ```
    """


class Guard:
    """One rank's part in the comparison."""

    def __init__(
        self, every: int, shard: Callable[[], str], protected: Protected, groups: Groups
    ) -> None:
        self._every, self._protected, self._groups = every, protected, groups
        self._shard = shard
        self._last_agreed = -1
        self.verdict: Verdict | None = None
        """To be published at the next rendezvous: some ranks may not have received it."""

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def compare(self, step: int) -> Verdict | None:
        """The verdict of all ranks about the state at this step. None: the groups broke."""
        world = self._groups.world.shape
        # Where gloo is available, the device is waited for only once: for the fingerprint.
        device = "cpu" if "cpu" in world.backends else next(iter(world.backends))
        mine = [
            crc32(self._shard().encode()),
            pieces.fingerprint(self._protected),
            self._last_agreed,
        ]
        received = [torch.empty(len(mine), dtype=torch.int64, device=device) for _ in world.ranks]
        dist.all_gather(received, torch.tensor(mine, device=device))
        self._groups.wait_for_devices()
        if self._groups.is_broken():
            return None
        rows = torch.stack(received).tolist()
        verdict = judge(
            {Rank(rank): Fingerprint(*row) for rank, row in zip(world.ranks, rows, strict=True)}
        )
        if not verdict.named:
            self._last_agreed = step
        return verdict

    def publish(self, address: str, prefix: str, timeout: timedelta) -> None:
        """Before the groups are formed: which ranks have a wrong state, and since when."""
        if self.verdict is not None:
            named = ",".join(map(str, self.verdict.named))
            store = Rendezvous(address, prefix, timeout).store
            store.set(VERDICT_KEY, f"{self.verdict.agreed} {named}")

    def last_good_step(self, rendezvous: Rendezvous, rank: int) -> int | None:
        """The last step of this rank that is right, if a peer has published that it is wrong."""
        if not rendezvous.store.check([VERDICT_KEY]):
            return None
        agreed, named = rendezvous.store.get(VERDICT_KEY).decode().split()
        return int(agreed) if rank in map(int, named.split(",")) else None
