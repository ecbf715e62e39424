"""Simulation of a training job in virtual time with one straggler.

Ranks compute, load data and take part in a ring all-reduce. All durations have noise, and now and
then there is a pause. The world reports paces about once per second, like real ranks, and compares
the verdict of the machine with the straggler that it knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from taskd.core.manager.watch.stragglers import (
    Accuse,
    Cause,
    PacesReported,
    State,
    StragglerConfig,
    step,
)
from taskd.model.ids import Incarnation, Rank
from taskd.model.profiling import EVERYTHING, Pace, PeerConnection


@dataclass(frozen=True)
class Truth:
    rank: int | None = None
    cause: Cause | None = None
    slower: float = 0.0
    """How slow, as a fraction of a usual step."""
    receives: bool = False
    """The connection is also slow in the direction to the rank."""


@dataclass
class World:
    random: Random
    ranks: int
    truth: Truth
    compute_s: float
    data_s: float
    transfer_s: float
    noise: float
    hiccups: bool
    now: float = 0.0
    sums: list[Pace] = field(default_factory=list)
    said: list[tuple[int, Cause]] = field(default_factory=list)

    @staticmethod
    def of(seed: int, cause: Cause | None) -> World:
        random = Random(f"{seed} {cause}")
        ranks = random.choice([2, 3, 4, 8, 16])
        receives = ranks > 2 and random.random() < 0.5
        truth = Truth(random.randrange(ranks), cause, random.uniform(0.15, 1.0), receives)
        return World(
            random,
            ranks,
            Truth() if cause is None else truth,
            compute_s=random.uniform(0.02, 0.4),
            data_s=random.choice([0.0, 0.001, 0.01]),
            transfer_s=random.uniform(0.002, 0.1),
            noise=random.uniform(0.01, 0.08),
            hiccups=random.random() < 0.5,
        )

    @property
    def usual_s(self) -> float:
        return self.compute_s + self.data_s + self.transfer_s

    def run(self, steps: int = 240) -> None:
        """A rank becomes slow after some time."""
        state, config = State(), StragglerConfig(window_s=40 * self.usual_s)
        self.sums = [Pace(Rank(rank), Incarnation(0), EVERYTHING) for rank in range(self.ranks)]
        reported_at = 0.0
        for number in range(steps):
            self._step(slow=number > steps // 4)
            if self.now - reported_at > self.usual_s:
                reported_at = self.now
                # Nodes of up to four ranks, one after the other.
                for node in range(0, self.ranks, 4):
                    paces = tuple(self.sums[node : node + 4])
                    outcome = step(state, PacesReported(paces), self.now + node * 1e-3, config)
                    state = outcome.state
                    self.said += [
                        (command.straggler.rank, command.straggler.cause)
                        for command in outcome.commands
                        if isinstance(command, Accuse)
                    ]

    def _step(self, slow: bool) -> None:
        truth, extra_s = self.truth, self.truth.slower * self.usual_s if slow else 0.0
        own, data = list[float](), list[float]()
        for rank in range(self.ranks):
            mine = extra_s if rank == truth.rank else 0.0
            data.append(self._noisy(self.data_s) + (mine if truth.cause is Cause.DATA else 0.0))
            compute = self._noisy(self.compute_s) + (mine if truth.cause is Cause.COMPUTE else 0.0)
            if self.hiccups and self.random.random() < 0.002:
                compute += self.random.uniform(1, 5) * self.usual_s
            own.append(compute + data[-1])
        wires = {rank: self._noisy(self.transfer_s * 0.8) for rank in range(self.ranks)}
        if truth.cause is Cause.NETWORK and truth.rank is not None:
            # The slow connection must be slow per byte, independent of the others.
            for sender in {
                truth.rank,
                (truth.rank - 1) % self.ranks if truth.receives else truth.rank,
            }:
                wires[sender] += extra_s
        length_s = max(own) + max(max(wires.values()), self.transfer_s)
        self.now += length_s
        for rank, before in enumerate(self.sums):
            wire = PeerConnection(
                f"10.0.0.{rank}:1",
                f"10.0.0.{(rank + 1) % self.ranks}:1",
                (before.steps + 1) * 4_000_000,
                (before.wires[0].busy_s if before.wires else 0.0) + wires[rank],
            )
            self.sums[rank] = Pace(
                before.rank,
                before.incarnation,
                before.recorded,
                "",
                before.steps + 1,
                before.total_s + length_s,
                before.wait_s + length_s - own[rank],
                before.data_s + data[rank],
                0.0,
                before.collectives + 1,
                (wire,),
            )

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.2, self.random.gauss(1.0, self.noise))

    @property
    def is_right(self) -> bool:
        """Exactly the slow rank was named with the right cause, or none if no rank is slow."""
        if self.truth.rank is None:
            return not self.said
        return bool(self.said) and set(self.said) == {(self.truth.rank, self.truth.cause)}
