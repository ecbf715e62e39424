"""Who leads: decides on a lease that several processes read and write. Pure, without I/O.

`Election` is for several clusterds, `Candidacy`, `Tenure` and `Fence` for the managers of one job.

A lease of `Election` expires when it has not changed for its duration on the reader's own clock.
The clocks of the machines are never compared, so they may differ. The holder gives up earlier than
the others take over, and counts from before it sent its last successful renewal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionConfig:
    duration_s: float = 10.0
    """How long the lease must stay unchanged before another process may take it."""
    give_up_s: float = 7.0
    """How long the leader may fail to renew before it stops."""
    period_s: float = 1.0
    """Time between two tries to take or to renew the lease."""

    def __post_init__(self) -> None:
        if not 0 < self.period_s < self.give_up_s < self.duration_s:
            raise ValueError("expected 0 < period_s < give_up_s < duration_s")


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """The lease as the store has it."""

    holder: str
    """Empty: its holder has released it."""
    epoch: int
    """Counts the terms."""
    version: str
    """Changes with every write."""


@dataclass(frozen=True, slots=True)
class Take:
    """Write the lease for a new term."""

    epoch: int
    version: str | None
    """The version to replace; None: create it."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The lease is ours from this term on, or still is: renew it."""

    epoch: int
    version: str | None
    """The version to replace; None: create it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Another process leads."""

    holder: str


class Election:
    def __init__(self, identity: str, config: ElectionConfig | None = None) -> None:
        self.identity, self.config = identity, config or ElectionConfig()
        self.epoch: int | None = None
        """Of our term, while we lead."""
        self._seen: LeaseSeen | None = None
        self._seen_at = -inf
        self._renewed_at = -inf

    def consider(self, lease: LeaseSeen | None, now: float, above: int = 0) -> Take | Keep | Wait:
        """What to write, after the lease was read; None: it does not exist.

        `above`: a term that has existed, although the lease may have forgotten it.
        """
        if lease is None:
            return self._consider_missing(now, above)
        if self._seen is None or lease.version != self._seen.version:
            self._seen, self._seen_at = lease, now
        if lease.holder == self.identity and lease.epoch == self.epoch and lease.epoch > above:
            return Keep(lease.epoch, lease.version)
        # Our own name from an earlier incarnation is a former holder like any other, but it cannot
        # still be deciding: take over at once.
        if self._expired(now) or lease.holder in ("", self.identity):
            return Take(max(lease.epoch, above) + 1, lease.version)
        return Wait(lease.holder)

    def _consider_missing(self, now: float, above: int) -> Take | Keep | Wait:
        """It was never written, or deleted by hand: then its holder writes it again, and another
        process waits as long as if it were still there."""
        if self.epoch is not None and self.epoch > above:
            return Keep(self.epoch, None)
        if self._seen is None:
            return Take(above + 1, None)
        if self._expired(now) or self._seen.holder in ("", self.identity):
            return Take(max(self._seen.epoch, above) + 1, None)
        return Wait(self._seen.holder)

    def _expired(self, now: float) -> bool:
        return now - self._seen_at >= self.config.duration_s

    def pause_s(self, now: float) -> float:
        """How long to wait before the next try: not past the time when the lease expires."""
        left_s = self._seen_at + self.config.duration_s - now
        return min(left_s, self.config.period_s) if left_s > 0 else self.config.period_s

    def written(self, epoch: int, sent_at: float) -> None:
        """The write that was sent at that time has succeeded."""
        self.epoch, self._renewed_at = epoch, sent_at

    def lost(self) -> None:
        """Another process has written the lease."""
        self.epoch = None

    def leads(self, now: float) -> bool:
        """Whether this process may still decide."""
        return self.epoch is not None and now - self._renewed_at < self.config.give_up_s


# The managers of one job: each node has a candidate, and etcd ends the term of a silent leader.


@dataclass(frozen=True, slots=True)
class Term:
    """The time in which one manager leads the job."""

    epoch: int
    """Counts the terms: every later leader has a higher one."""
    node: int
    manager: str
    """host:port where the nodes reach it."""
    liveness_port: str
    """host:port of its liveness port; empty: it has none."""
    run: str = ""
    """The same in all terms of one run of the job. A first node that has lost its files begins
    another run, with an etcd of its own and the same epochs."""


@dataclass(frozen=True, slots=True)
class TermsSeen:
    """What the store says about the terms of the job."""

    term: Term | None
    """None: no manager leads."""
    epoch: int
    """Of the newest term that has begun; 0: none has."""
    ended: int
    """The epoch in which the job ended; 0: it has not."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Begin this term, unless another candidate is faster."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Another manager leads."""

    term: Term


@dataclass(frozen=True, slots=True)
class NotYet:
    because: str


@dataclass(frozen=True, slots=True)
class OldBackup:
    """The store has forgotten terms that have begun: no process can lead safely."""

    because: str


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job has ended in a term that this candidate has followed."""


class Candidacy:
    """Decides for the candidate of one node when to lead."""

    def __init__(self, node: int, newest: int = 0) -> None:
        """`newest`: the newest epoch that this node has seen."""
        self.node = node
        self._newest = newest
        self._followed = 0

    def consider(self, seen: TermsSeen) -> Claim | Follow | NotYet | OldBackup | JobOver:
        if (old := old_backup(seen, self._newest)) is not None:
            return old
        self._newest = seen.epoch
        if seen.term is not None:
            self._followed = seen.term.epoch
            return Follow(seen.term)
        if seen.ended and seen.ended == self._followed:
            return JobOver()
        if seen.epoch == 0 and self.node != 0:
            # The ranks first meet at the store of node 0: without it no job can start.
            return NotYet("the first node leads first")
        return Claim(seen.epoch + 1)


def old_backup(seen: TermsSeen, newest: int) -> OldBackup | None:
    """`newest`: the newest epoch that was ever seen. The number only grows in an intact store."""
    if seen.epoch >= newest:
        return None
    return OldBackup(
        f"etcd is at epoch {seen.epoch}, but epoch {newest} has existed: it was restored from an "
        "old backup, or its data was deleted. Training goes on, and a fault has to wait. Restore a "
        "newer backup, or start the job again"
    )


class Tenure:
    """Whether the leader may still act, by its own clock.

    It counts from before it sent its last successful renewal, and the store from when it received
    it. So the leader stops before any other process can begin.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        """Of our term, while it lasts."""
        self._until = -inf

    def begin(self, epoch: int, sent_at: float, length_s: float) -> None:
        self.epoch = epoch
        self.renewed(sent_at, length_s)

    def renewed(self, sent_at: float, length_s: float) -> None:
        if self.epoch is not None:
            self._until = sent_at + length_s * SAFE_PART

    def end(self) -> None:
        self.epoch = None

    def holds(self, now: float) -> bool:
        return self.epoch is not None and now < self._until


SAFE_PART = 0.75
"""Of the lease's length: the rest is for clocks that do not run equally fast."""


class Fence:
    """Refuses the orders of former leaders: the one place, in every agent and worker.

    A new leader decides only about processes that have answered it. By then their fence has its
    epoch, so no order of a former leader can come between its decision and their obedience.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def admits(self, epoch: int) -> bool:
        """False: the order comes from a former leader. Orders without an epoch have 0."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True
