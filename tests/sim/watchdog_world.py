"""A job for the watchdog in virtual time: its ranks compute, pause, wait in collectives, and hang.

Each rank runs through the same list of segments. Before the next one, all ranks wait for each other
in a collective. The world knows which rank is to blame; the watchdog sees only heartbeats.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from taskd.core.manager.watch import watchdog
from taskd.core.manager.watch.wait_bounds import PHASES, LivenessConfig
from taskd.core.manager.watch.watchdog import Hung, Stalled
from taskd.model.ids import Incarnation, NodeRank, Rank, Step
from taskd.model.messages import NodeHeartbeat, Progress

BEAT_S = 0.5
CONFIG = LivenessConfig()
QUIET, BUSY, NEW = "quiet", "busy", "new"
"""What a rank shows between two collectives: nothing, processor time, or new work all the time."""


@dataclass(frozen=True)
class Segment:
    phase: str
    step: int
    seconds: tuple[float, ...]
    """How long each rank needs before it enters the collective."""
    shows: tuple[str, ...]


@dataclass
class SimRank:
    rank: int
    at: int = 0
    moved_at: float = 0.0
    waiting: bool = False
    entered: int = 0
    hung: str = ""
    """How it hangs: stopped, deadlocked, lost (in a collective that no other rank enters)."""


@dataclass
class World:
    seed: int
    size: int = 0
    segments: list[Segment] = field(default_factory=list)
    ranks: list[SimRank] = field(default_factory=list)
    now: float = 100.0
    named: list[tuple[float, Hung | Stalled]] = field(default_factory=list)
    hung_at: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.size = self.random.randint(2, 6)
        self.ranks = [SimRank(rank, moved_at=self.now) for rank in range(self.size)]
        self.state = watchdog.State()
        step_s = self.random.choice([0.5, 2.0])
        self._add("starting", 0, *self._some(1.0, 120.0))
        for step in range(self.random.randint(3, 25)):
            quick = [step_s * self.random.uniform(0.5, 1.2) for _ in range(self.size)]
            self._add("training", step, quick, [self.random.choice([BUSY, QUIET])] * self.size)
            if self.random.random() < 0.15:
                self._add("between steps", step + 1, *self._alone())
        self._add("leaving", len(self.segments), *self._some(0.5, 60.0))

    def _add(self, phase: str, step: int, seconds: list[float], shows: list[str]) -> None:
        self.segments.append(Segment(phase, step, tuple(seconds), tuple(shows)))

    def _some(self, least: float, most: float) -> tuple[list[float], list[str]]:
        """All ranks work, some much longer than others. A quiet rank is quick."""
        seconds = [self.random.uniform(least, most) for _ in range(self.size)]
        shows = [self.random.choice([BUSY, NEW]) if s > 25.0 else QUIET for s in seconds]
        return seconds, shows

    def _alone(self) -> tuple[list[float], list[str]]:
        """One rank evaluates or uploads, the others wait in a barrier."""
        who, how = self.random.randrange(self.size), self.random.choice([QUIET, BUSY, NEW])
        seconds = [0.01] * self.size
        seconds[who] = self.random.uniform(1.0, 25.0 if how == QUIET else 350.0)
        return seconds, [how if rank == who else QUIET for rank in range(self.size)]

    def hang(self, how: str) -> SimRank:
        """One rank hangs where it is."""
        inside = [one for one in self.ranks if not one.waiting and not one.hung]
        chosen = self.random.choice(inside)
        chosen.hung, self.hung_at = how, self.now
        if how == "lost":
            chosen.waiting, chosen.entered, chosen.moved_at = True, chosen.entered + 1, self.now
        return chosen

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and not self.finished:
            self.now += BEAT_S
            self._advance()
            self._beat()

    @property
    def finished(self) -> bool:
        return all(one.at >= len(self.segments) for one in self.ranks)

    def _advance(self) -> None:
        for one in self.ranks:
            if one.at >= len(self.segments) or one.hung or one.waiting:
                continue
            if self.now - one.moved_at >= self.segments[one.at].seconds[one.rank]:
                one.waiting, one.entered, one.moved_at = True, one.entered + 1, self.now
        if all(one.waiting and not one.hung for one in self.ranks):
            for one in self.ranks:
                before, one.at = one.at, one.at + 1
                one.waiting, one.moved_at = False, self.now
                if one.at < len(self.segments) and self._step(one.at) > self._step(before):
                    one.entered = 0

    def _step(self, at: int) -> int:
        return self.segments[at].step

    def _beat(self) -> None:
        reports = tuple(self._progress(one) for one in self.ranks if one.at < len(self.segments))
        if not reports:
            return
        beat = NodeHeartbeat(NodeRank(0), reports)
        outcome = watchdog.step(self.state, beat, self.now, CONFIG)
        self.state = outcome.state
        self.named += [(self.now, c) for c in outcome.commands if isinstance(c, Hung | Stalled)]

    def _progress(self, one: SimRank) -> Progress:
        segment = self.segments[one.at]
        assert segment.phase in PHASES
        shows = QUIET if one.hung or one.waiting else segment.shows[one.rank]
        idle_s = self.now - one.moved_at
        return Progress(
            Rank(one.rank),
            Incarnation(0),
            Step(segment.step),
            idle_s,
            one.waiting,
            one.entered,
            busy=shows == BUSY,
            stopped=one.hung == "stopped",
            moving_s=max(0.0, idle_s - 0.4) if shows == NEW else 0.0,
            phase=segment.phase,
        )
