"""Who leads: decides on a lease that several processes read and write. Pure, without I/O.

A lease expires when it has not changed for its duration on the reader's own clock. The clocks of
the machines are never compared, so they may differ. The holder gives up earlier than the others
take over, and counts from before it sent its last successful renewal.
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
    version: str


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

    def consider(self, lease: LeaseSeen | None, now: float) -> Take | Keep | Wait:
        """What to write, after the lease was read."""
        if lease is None:
            return Take(epoch=1, version=None)
        if self._seen is None or lease.version != self._seen.version:
            self._seen, self._seen_at = lease, now
        if lease.holder == self.identity and lease.epoch == self.epoch:
            return Keep(lease.epoch, lease.version)
        expired = now - self._seen_at >= self.config.duration_s
        # Our own name from an earlier incarnation is a former holder like any other, but it cannot
        # still be deciding: take over at once.
        if expired or lease.holder in ("", self.identity):
            return Take(lease.epoch + 1, lease.version)
        return Wait(lease.holder)

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
