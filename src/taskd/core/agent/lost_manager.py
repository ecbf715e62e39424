"""Is the manager gone for good, together with ranks that ours wait for?

Training continues while the manager is restarted, so a broken connection alone means nothing. But
if no rank of this node makes progress either, the machine of the manager is probably gone, with
the ranks on it: then nothing happens before its launcher is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from taskd.model.messages import Progress

NOTICE_S = 5.0
"""How long both must last: no connection, and no progress."""


@dataclass(frozen=True, slots=True)
class Contact:
    disconnected_at: float = inf
    progress: tuple[object, ...] = ()
    moved_at: float = -inf

    def look(self, connected: bool, seen: tuple[Progress, ...], now: float) -> Contact:
        progress = tuple((one.rank, one.incarnation, one.step, one.collective) for one in seen)
        return Contact(
            inf if connected else min(self.disconnected_at, now),
            progress,
            now if progress != self.progress else self.moved_at,
        )

    def is_lost(self, now: float) -> bool:
        since = max(self.disconnected_at, self.moved_at)
        return bool(self.progress) and now - since >= NOTICE_S
