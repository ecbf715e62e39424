"""One operation on a paused job (stress test, NIC switch): send the orders, collect the results.

    Idle --requested--> Switching | Testing --all ranks replied, or timeout--> Idle

clusterd pauses the job before it requests an operation and continues it after the reply
(`machine.py` does both). This machine covers the time between. A rank that becomes silent during a
stress test also gets a result: otherwise it would block the whole job. When the pause ends without
our reply (because of a fault), the operation is dropped; clusterd knows that.
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
    """How long a rank under test may send no keep-alive. One is sent every second."""

    stress_s: float = 890.0
    """How long a stress test may take in total; clusterd waits for 900 s."""

    switch_s: float = 300.0
    """How long the ranks may take to switch the network interface."""


@dataclass(frozen=True, slots=True)
class Idle:
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Switching:
    request: NicSwitchRequested
    waiting: frozenset[Rank]
    deadline: float


@dataclass(frozen=True, slots=True)
class Testing:
    request: StressTestRequested
    heard: Mapping[Rank, float]
    """When each rank without a result last sent a message."""
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
    """`places` are the ranks that take part in training, and their nodes."""
    match event:
        case StressTestRequested():
            return _test(event, places, now, config)
        case NicSwitchRequested():
            return _switch(event, places, now, config)
        case WorkerReplied(rank, body):
            return _replied(state, rank, body, now)
        case PauseEnded():
            why = (
                ""
                if isinstance(state, Idle)
                else f"{describe(state)}: dropped, the pause has ended"
            )
            return Outcome(Idle(), because=why)
        case Tick():
            return _deadline_passed(state, now)
        case _:
            assert_never(event)


def describe(state: State) -> str:
    """The running operation, for `taskd status`."""
    match state:
        case Idle():
            return ""
        case Switching(request, waiting):
            way = ", ".join(
                f"rank {rank} to the {'backup' if backup else 'primary'}"
                for rank, backup in zip(request.ranks, request.to_backup, strict=True)
            )
            return f"NIC switch ({way}), {len(waiting)} ranks have not replied"
        case Testing(request, heard):
            names = sorted({NAMES[op] for ops in request.ops.values() for op in ops if op in NAMES})
            done = len(request.ops) - len(heard)
            return f"stress test ({', '.join(names)}), {done} of {len(request.ops)} ranks done"
        case _:
            assert_never(state)


def _test(
    request: StressTestRequested,
    places: Mapping[Rank, NodeRank],
    now: float,
    config: OperationsConfig,
) -> Outcome:
    ops = {rank: which for rank, which in request.ops.items() if rank in places}
    if not ops:
        return Outcome(Idle(), (StressResult({}),), "none of the requested ranks is in training")
    order = RunStressTest(request.uuid, ops)
    messages = tuple(SendToWorker(worker(places[rank], rank), order) for rank in sorted(ops))
    heard = dict.fromkeys(ops, now)
    state = Testing(replace(request, ops=ops), heard, {}, now + config.stress_s, config.silence_s)
    return Outcome(state, messages, f"stress test started on {len(ops)} ranks")


def _switch(
    request: NicSwitchRequested,
    places: Mapping[Rank, NodeRank],
    now: float,
    config: OperationsConfig,
) -> Outcome:
    if not places:
        return Outcome(Idle(), (NicResult(False),), "the job has no running ranks")
    # All ranks get the order: those that do not move must reconnect to those that do.
    order = SwitchNic(request.uuid, request.ranks, request.to_backup)
    state = Switching(request, frozenset(places), now + config.switch_s)
    return Outcome(
        state,
        (SendToWorker(EVERY_WORKER, order),),
        f"NIC switch started for {len(request.ranks)} ranks",
    )


def _replied(state: State, rank: Rank, body: object, now: float) -> Outcome:
    match state, body:
        case Switching(request, waiting), NicSwitched(uuid, ok) if uuid == request.uuid:
            if not ok:
                return Outcome(Idle(), (NicResult(False),), f"rank {rank} could not switch its NIC")
            waiting -= {rank}
            if waiting:
                return Outcome(replace(state, waiting=waiting))
            return Outcome(Idle(), (NicResult(True),), "all ranks have switched their NIC")
        case Testing(request, heard), StressTested(uuid, results) if uuid == request.uuid:
            if rank not in heard:
                return Outcome(state)
            found = {op: OpResult(code, text) for op, (code, text) in results.items()}
            return _add_results(state, {rank: found}, f"rank {rank} has finished its stress test")
        case Testing(heard=heard), _ if rank in heard:
            return Outcome(replace(state, heard={**heard, rank: now}))
        case _:
            return Outcome(state)


def _deadline_passed(state: State, now: float) -> Outcome:
    if now < state.deadline:
        return Outcome(state)
    match state:
        case Idle():
            return Outcome(state)
        case Switching(waiting=waiting):
            why = f"ranks {sorted(waiting)} have not switched their NIC in time"
            return Outcome(Idle(), (NicResult(False),), why)
        case Testing(request, heard):
            over = now >= state.until
            why = "the stress test took too long" if over else "worker heartbeat timeout"
            silent = [r for r, at in heard.items() if over or now >= at + state.silence_s]
            found = {
                rank: {str(op): OpResult(TIMED_OUT, why) for op in request.ops[rank]}
                for rank in silent
            }
            return _add_results(state, found, f"ranks {sorted(silent)}: {why}")
        case _:
            assert_never(state)


def _add_results(state: Testing, found: Mapping[Rank, Results], because: str) -> Outcome:
    heard = {rank: at for rank, at in state.heard.items() if rank not in found}
    results = {**state.results, **found}
    if heard:
        return Outcome(replace(state, heard=heard, results=results), because=because)
    return Outcome(Idle(), (StressResult(results),), f"{because}; all ranks have finished")
