"""One operation on a paused job, as its manager follows it: tell the ranks, collect, answer.

    Quiet --asked--> Switching | Testing --all have answered, or too late--> Quiet

clusterd has paused the job before it asks and lets it go on after the answer (`core/manager` does
both); here is only what happens between. A rank that falls silent in the middle of a stress test
gets a result as well: a test that nobody ends would hold up the whole job. When the pause is over
without our answer (a fault has come), the operation is forgotten; clusterd knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import assert_never

from taskd.model import types
from taskd.model.ids import EVERY_WORKER, NodeRank, Rank, worker
from taskd.model.messages import NicSwitched, RunStressTest, StressTested, SwitchNic
from taskd.model.operations import (
    OPS,
    TIMED_OUT,
    Command,
    Event,
    NicResult,
    NicSwitchRequested,
    OpResult,
    PauseEnded,
    Results,
    SendToWorker,
    StressResult,
    StressTestRequested,
    WorkerReplied,
)
from taskd.model.types import Tick

NAMES = {op: name for name, op in OPS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationsConfig:
    silence_s: float = 15.0
    """How long a rank under test may be without a sign of life. They come every second."""

    stress_s: float = 890.0
    """How long a stress test may take in all; clusterd waits for 900."""

    switch_s: float = 300.0
    """How long the ranks may take to move their links."""


@dataclass(frozen=True, slots=True)
class Idle:
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Switching:
    asked: NicSwitchRequested
    waiting: frozenset[Rank]
    deadline: float


@dataclass(frozen=True, slots=True)
class Testing:
    asked: StressTestRequested
    heard: Mapping[Rank, float]
    """When each rank without a result was last heard."""
    results: Mapping[Rank, Results]
    until: float
    silence_s: float

    @property
    def deadline(self) -> float:
        return min(self.until, min(self.heard.values(), default=inf) + self.silence_s)


State = Idle | Switching | Testing


Outcome = types.Outcome[State, Command]


def step(
    state: State,
    event: Event,
    places: Mapping[Rank, NodeRank],
    now: float,
    config: OperationsConfig,
) -> Outcome:
    """`places` are the ranks that train now, and their nodes."""
    match event:
        case StressTestRequested():
            return _test(event, places, now, config)
        case NicSwitchRequested():
            return _switch(event, places, now, config)
        case WorkerReplied(rank, body):
            return _answered(state, rank, body, now)
        case PauseEnded():
            why = "" if isinstance(state, Idle) else f"{describe(state)} is over with the pause"
            return Outcome(Idle(), because=why)
        case Tick():
            return _late(state, now)
        case _:
            assert_never(event)


def describe(state: State) -> str:
    """For people: what runs at present."""
    match state:
        case Idle():
            return ""
        case Switching(asked, waiting):
            way = ", ".join(
                f"rank {rank} to the {'backup' if backup else 'primary'}"
                for rank, backup in zip(asked.ranks, asked.to_backup, strict=True)
            )
            return f"switching links ({way}), {len(waiting)} ranks to answer"
        case Testing(asked, heard):
            names = sorted({NAMES[op] for ops in asked.ops.values() for op in ops if op in NAMES})
            done = len(asked.ops) - len(heard)
            return f"stress test ({', '.join(names)}), {done} of {len(asked.ops)} ranks done"
        case _:
            assert_never(state)


def _test(
    asked: StressTestRequested,
    places: Mapping[Rank, NodeRank],
    now: float,
    config: OperationsConfig,
) -> Outcome:
    ops = {rank: which for rank, which in asked.ops.items() if rank in places}
    if not ops:
        return Outcome(Idle(), (StressResult({}),), "none of these ranks is here")
    order = RunStressTest(asked.uuid, ops)
    tells = tuple(SendToWorker(worker(places[rank], rank), order) for rank in sorted(ops))
    heard = dict.fromkeys(ops, now)
    state = Testing(replace(asked, ops=ops), heard, {}, now + config.stress_s, config.silence_s)
    return Outcome(state, tells, f"{len(ops)} ranks test themselves")


def _switch(
    asked: NicSwitchRequested, places: Mapping[Rank, NodeRank], now: float, config: OperationsConfig
) -> Outcome:
    if not places:
        return Outcome(Idle(), (NicResult(False),), "there are no ranks")
    # All of them: whoever stays where it is still has to meet those that move.
    order = SwitchNic(asked.uuid, asked.ranks, asked.to_backup)
    state = Switching(asked, frozenset(places), now + config.switch_s)
    return Outcome(state, (SendToWorker(EVERY_WORKER, order),), f"{len(asked.ranks)} ranks move")


def _answered(state: State, rank: Rank, body: object, now: float) -> Outcome:
    match state, body:
        case Switching(asked, waiting), NicSwitched(uuid, ok) if uuid == asked.uuid:
            if not ok:
                return Outcome(Idle(), (NicResult(False),), f"rank {rank} could not move")
            waiting -= {rank}
            if waiting:
                return Outcome(replace(state, waiting=waiting))
            return Outcome(Idle(), (NicResult(True),), "every rank has moved")
        case Testing(asked, heard), StressTested(uuid, told) if uuid == asked.uuid:
            if rank not in heard:
                return Outcome(state)
            found = {op: OpResult(code, text) for op, (code, text) in told.items()}
            return _noted(state, {rank: found}, f"rank {rank} has tested itself")
        case Testing(heard=heard), _ if rank in heard:
            return Outcome(replace(state, heard={**heard, rank: now}))
        case _:
            return Outcome(state)


def _late(state: State, now: float) -> Outcome:
    if now < state.deadline:
        return Outcome(state)
    match state:
        case Idle():
            return Outcome(state)
        case Switching(waiting=waiting):
            why = f"ranks {sorted(waiting)} have not moved in time"
            return Outcome(Idle(), (NicResult(False),), why)
        case Testing(asked, heard):
            over = now >= state.until
            why = "it has taken too long" if over else "worker heartbeat timeout"
            silent = [r for r, at in heard.items() if over or now >= at + state.silence_s]
            found = {
                rank: {str(op): OpResult(TIMED_OUT, why) for op in asked.ops[rank]}
                for rank in silent
            }
            return _noted(state, found, f"ranks {sorted(silent)}: {why}")
        case _:
            assert_never(state)


def _noted(state: Testing, found: Mapping[Rank, Results], because: str) -> Outcome:
    heard = {rank: at for rank, at in state.heard.items() if rank not in found}
    results = {**state.results, **found}
    if heard:
        return Outcome(replace(state, heard=heard, results=results), because=because)
    return Outcome(Idle(), (StressResult(results),), f"{because}; all have")
