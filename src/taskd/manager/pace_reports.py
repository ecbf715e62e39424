"""Which ranks hold the others up: the paces of all ranks, judged by `core/manager/stragglers`.

What it finds is shown by `taskd status` and told to clusterd as sub-health, which writes it into
the job's journal and, in a cluster, does what the job's `subHealthyStrategy` says.
"""

from __future__ import annotations

import logging

from taskd.core.manager import stragglers
from taskd.core.manager.stragglers import (
    Accuse,
    Clear,
    Event,
    JobDisturbed,
    PacesReported,
    Straggler,
    StragglerConfig,
)
from taskd.model.profiling import Pace
from taskd.runtime.clock import monotonic, wall
from taskd.wire._pb import control_pb2 as control

log = logging.getLogger(__name__)


class StragglerMonitor:
    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._state = stragglers.State()

    def paced(self, paces: tuple[Pace, ...]) -> None:
        self._take(PacesReported(paces))

    def disturbed(self) -> None:
        """The job has been repaired: steps before and after it cannot be compared."""
        self._take(JobDisturbed())

    def current(self) -> list[control.Straggler]:
        """All of them, in the order of their ranks."""
        behind = wall() - monotonic()
        return [
            control.Straggler(
                rank=slow.rank,
                cause=slow.cause.value,
                late_ms=slow.late_s * 1000,
                slower=slow.slower,
                since_unix_ms=round((slow.since + behind) * 1000),
                evidence=slow.evidence,
            )
            for slow in self._sorted()
        ]

    def _sorted(self) -> list[Straggler]:
        return [slow for _, slow in sorted(self._state.slow.items())]

    def _take(self, event: Event) -> None:
        outcome = stragglers.step(self._state, event, monotonic(), self._config)
        self._state = outcome.state
        for command in outcome.commands:
            match command:
                case Accuse(straggler):
                    log.warning("%s", straggler.evidence)
                case Clear(straggler):
                    log.info("rank %d does not count as slow any more", straggler.rank)
