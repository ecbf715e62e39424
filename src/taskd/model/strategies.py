"""The six ways out of a fault, and how users and peers spell them."""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """In the order in which they are tried: from the cheapest to the end of the job."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"

    @property
    def order(self) -> str:
        """What the job is told, and what it must have offered."""
        return _ORDERS.get(self, self.value)


_ORDERS = {Strategy.RECOVER_IN_PLACE: "recover", Strategy.ELASTIC: "downgrade"}

LADDER = tuple(Strategy)

UPGRADE = "upgrade"
"""The job grows back; offered by a job that runs without some of its ranks."""
CONTINUE = "continue"
"""The job goes on after it was paused for an operation."""
MIGRATION = "migration"
"""The job goes on in the backup pod of a hot switch."""


def parse_strategies(text: str) -> tuple[Strategy, ...]:
    """Read `recover-strategy`: a comma list, blanks tolerated, `exit` always part of it."""
    words = [word.strip() for word in text.split(",")]
    unknown = sorted({word for word in words if word and word not in list(Strategy)})
    if unknown:
        known = ", ".join(Strategy)
        raise ValueError(f"recover-strategy: unknown {', '.join(unknown)}; known are {known}")
    wanted = {Strategy(word) for word in words if word} | {Strategy.EXIT}
    return tuple(strategy for strategy in LADDER if strategy in wanted)
