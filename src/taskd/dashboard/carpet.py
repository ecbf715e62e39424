"""What each rank did over time, as runs `[time, first rank, last rank, phase]`. Pure.

A run says that from this time on, these ranks are in this phase. Ranks mostly change together, so
10,000 ranks need few runs. A recovery can be over between two reports of the ranks' phases; the
phases of closed incidents fill that gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taskd.wire._pb import control_pb2 as pb

GONE, TRAINING, PARKED, REPAIRING, JOINING, DONE = range(6)
NAMES = ("gone", "training", "parked", "repairing", "joining", "done")
CODES = {
    "": JOINING,
    "absent": JOINING,
    "dead": GONE,
    "starting": JOINING,
    "joining": JOINING,
    "alive": TRAINING,
    "training": TRAINING,
    "parked": PARKED,
    "repairing": REPAIRING,
    "done": DONE,
}
Run = tuple[int, int, int, int]
"""Unix time in milliseconds, first rank, last rank, phase."""
MOST_RUNS = 20_000
MOST_RANKS = 65_536
"""Higher numbers are not shown: a job may report any, and each rank takes memory and time."""


class Carpet:
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.nodes: list[tuple[int, int, int]] = []
        """First rank, last rank, node: where the ranks are now."""
        self._phases = b""
        self._reported: set[tuple[int, int]] = set()

    @property
    def phases(self) -> bytes:
        return self._phases

    def see(self, ranks: Sequence[pb.RankStatus], now_ms: int, since_ms: int = 0) -> list[Run]:
        """Add the ranks' phases of now; returns the new runs. The first call reaches back."""
        ranks = [rank for rank in ranks if 0 <= rank.rank < MOST_RANKS]
        if not ranks or ranks[0].phase == "unknown":
            return []  # the manager is disconnected
        size = max(rank.rank for rank in ranks) + 1
        phases = bytearray([GONE]) * size
        for rank in ranks:
            phases[rank.rank] = CODES.get(rank.phase, TRAINING)
        first = not self._phases
        before = self._phases.ljust(size, bytes([255]))[:size]
        at = since_ms if first and since_ms else now_ms
        new = [(at, *run) for run in _changed(before, bytes(phases))]
        self._phases = bytes(phases)
        self.nodes = _nodes(ranks)
        self._keep(new)
        return new

    def add_incident(self, report: pb.IncidentReport) -> list[Run]:
        """Add the phases of a closed incident, once. Needs the number of ranks (`see`)."""
        times = {phase.name: phase.at_unix_ms for phase in report.phases}
        key = report.incident, times.get("seen", 0)
        if key in self._reported or "seen" not in times or not self._phases:
            return []
        self._reported.add(key)
        last = len(self._phases) - 1
        lost = sorted({f.rank for f in report.faults if 0 <= f.rank <= last})
        new: list[Run] = [(times["seen"], rank, rank, GONE) for rank in lost]
        others = list(_without(lost, last))
        for name, phase, runs in (
            ("stopped", PARKED, others),
            ("decided", REPAIRING, others),
            ("forked", REPAIRING, [(rank, rank) for rank in lost]),
            ("step", TRAINING, [(0, last)]),
        ):
            new += [(times[name], *run, phase) for run in runs if name in times]
        if report.outcome != "superseded" and "step" not in times:
            end = max(times.values())
            new.append((end, 0, last, TRAINING if report.outcome == "recovered" else JOINING))
        self._keep(new)
        return new

    def _keep(self, new: Iterable[Run]) -> None:
        self.runs = sorted([*self.runs, *new], key=lambda run: run[0])[-MOST_RUNS:]


def _changed(before: bytes, after: bytes) -> Iterable[tuple[int, int, int]]:
    if before == after:
        return
    start = None
    for rank in range(len(after) + 1):
        same = rank == len(after) or before[rank] == after[rank]
        if start is not None and (same or after[rank] != after[start]):
            yield start, rank - 1, after[start]
            start = None
        if start is None and not same:
            start = rank


def _nodes(ranks: Sequence[pb.RankStatus]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        if found and found[-1][2] == rank.node and found[-1][1] == rank.rank - 1:
            found[-1] = (found[-1][0], rank.rank, rank.node)
        else:
            found.append((rank.rank, rank.rank, rank.node))
    return found


def _without(lost: Sequence[int], last: int) -> Iterable[tuple[int, int]]:
    start = 0
    for rank in [*lost, last + 1]:
        if start < rank:
            yield start, rank - 1
        start = rank + 1
