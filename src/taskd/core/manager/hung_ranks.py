"""Which rank is hung, judged by heartbeats alone (`silent_nodes.py` judges whole nodes by them).

A rank is hung when it makes no progress for longer than the job's usual pace explains, while
others wait for it. The pace is learned: the limit grows with the usual step time. When several
ranks make no progress, the cause is named, not its victims:

    1. a process that is stopped;
    2. a rank that is in no collective while others wait in one;
    3. a rank that has entered fewer collectives than the others.

A process that a signal has stopped is hung after a moment in every phase: also before the first
step and after the last one, where no pace is known. One that a debugger has stopped is not judged.
If all ranks wait in the same collective, none is named. A rank that still does new things is slow,
not hung. A rank that works without visible progress has a much longer limit, unless it repeats a
few lines of Python inside a step while all others wait: then the limit is only a little longer.
The limit of a rank doubles each time it is named, so that a job with real pauses is disturbed only
a few times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from taskd.model import types
from taskd.model.ids import Incarnation, NodeRank, Rank
from taskd.model.messages import NodeHeartbeat, Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessConfig:
    hang_steps: float = 3.0
    """A rank may make no progress for this many usual steps …"""

    hang_floor_s: float = 0.7
    """… plus this time."""

    busy_steps: float = 10.0
    """In place of `hang_steps` for a rank that uses CPU or disk."""

    busy_floor_s: float = 300.0
    """In place of `hang_floor_s` for a rank that uses CPU or disk."""

    spin_floor_s: float = 1.2
    """In place of `hang_floor_s` for a rank that repeats a few lines of Python."""

    stopped_s: float = 1.0
    """A process that a signal has stopped is hung after this time, whatever its rank was doing."""

    known_steps: int = 5
    """No rank that runs is judged before this many steps have shown the job's pace."""


WINDOW = 32


@dataclass(frozen=True, slots=True)
class Observation:
    """The newest heartbeat data of one rank.

    A rank is judged by this alone: a missing heartbeat says something about its node only.
    """

    node: NodeRank
    progress: Progress
    moved_at: float
    """When its step last changed, by the manager's clock."""
    stopped_at: float = inf
    """When its process was first seen stopped; inf: it is not stopped."""
    stop_named: bool = False
    """The rank has been named since then."""


@dataclass(frozen=True, slots=True)
class State:
    ranks: Mapping[Rank, Observation] = field(default_factory=dict)
    paces: tuple[float, ...] = ()
    """Recent durations of one step."""
    steps: int = 0
    """How many steps these come from; counted up to `known_steps`."""
    named: Mapping[Rank, int] = field(default_factory=dict)
    """How often a rank has been named."""
    accused: frozenset[tuple[Rank, Incarnation]] = frozenset()
    """Incarnations that have been named already; each is named once."""

    @property
    def usual_s(self) -> float:
        return median(self.paces) if self.paces else inf


@dataclass(frozen=True, slots=True)
class Hung:
    rank: Rank
    incarnation: Incarnation
    evidence: str
    stopped: bool = False


Outcome = types.Outcome[State, Hung]


def step(state: State, beat: NodeHeartbeat, now: float, config: LivenessConfig) -> Outcome:
    listed = {progress.rank for progress in beat.progress}
    kept = {r: seen for r, seen in state.ranks.items() if seen.node != beat.node or r in listed}
    state = replace(state, ranks=kept)
    for progress in beat.progress:
        state = _note(state, beat.node, progress, now, config)
    outcome = _judge(state, config)
    return _judge_stopped(outcome, now, config)


def _note(
    state: State, node: NodeRank, progress: Progress, now: float, config: LivenessConfig
) -> State:
    before = state.ranks.get(progress.rank)
    if before is not None and progress.incarnation < before.progress.incarnation:
        return state
    moved_at = now - progress.idle_s
    same = before is not None and progress.incarnation == before.progress.incarnation
    if before is None or not same:
        seen = Observation(node, progress, moved_at)
    elif progress.step > before.progress.step:
        seen = Observation(node, progress, moved_at)
        state = _learn(state, before, seen, config)
    else:
        if not progress.stack and progress.idle_s >= before.progress.idle_s:
            progress = replace(progress, stack=before.progress.stack)  # it is sent only once
        seen = replace(before, node=node, progress=progress)
    if not progress.stopped:
        seen = replace(seen, stopped_at=inf, stop_named=False)
    elif seen.stopped_at == inf:
        seen = replace(seen, stopped_at=now)
    return replace(state, ranks={**state.ranks, progress.rank: seen})


def _learn(state: State, before: Observation, seen: Observation, config: LivenessConfig) -> State:
    count = seen.progress.step - before.progress.step
    pace = max(0.0, seen.moved_at - before.moved_at) / count
    if before.progress.step == 0 or not before.progress.judged:
        return state  # this step includes the start of the job, or a repair
    return replace(
        state,
        paces=(*state.paces, pace)[-WINDOW:],
        steps=min(config.known_steps, state.steps + count),
    )


# Hung ranks


def _judge(state: State, config: LivenessConfig) -> Outcome:
    if state.steps < config.known_steps:
        return Outcome(state)
    judged = {rank: seen for rank, seen in state.ranks.items() if seen.progress.judged}
    idle = {
        rank: seen
        for rank, seen in judged.items()
        if _no_work_s(seen.progress) > _limit(state, seen.progress, config)
    }
    culprits, why = _culprits(judged, idle)
    verdicts = []
    named, accused = dict(state.named), set(state.accused)
    for rank in culprits:
        progress = judged[rank].progress
        process = rank, progress.incarnation
        if process in accused:
            continue
        accused.add(process)
        named[rank] = named.get(rank, 0) + 1
        evidence = _evidence(state, judged[rank], why)
        verdicts.append(Hung(rank, progress.incarnation, evidence, progress.stopped))
    return Outcome(replace(state, named=named, accused=frozenset(accused)), tuple(verdicts))


def _judge_stopped(outcome: Outcome, now: float, config: LivenessConfig) -> Outcome:
    """Name stopped processes that the pace of the job did not name."""
    named = {hung.rank for hung in outcome.commands}
    ranks, verdicts = dict(outcome.state.ranks), list(outcome.commands)
    for rank, seen in outcome.state.ranks.items():
        stopped_s = now - seen.stopped_at
        if seen.stop_named or not (rank in named or stopped_s >= config.stopped_s):
            continue
        ranks[rank] = replace(seen, stop_named=True)
        if rank not in named:
            evidence = (
                f"rank {rank} has made no progress for {seen.progress.idle_s:.2f} s at step "
                f"{seen.progress.step}: a signal stopped its process {stopped_s:.2f} s ago"
            )
            verdicts.append(Hung(rank, seen.progress.incarnation, evidence, stopped=True))
    if len(verdicts) == len(outcome.commands) == 0:
        return outcome
    return Outcome(replace(outcome.state, ranks=ranks), tuple(verdicts))


def _no_work_s(progress: Progress) -> float:
    """How long the rank has shown no sign of work at all."""
    return progress.idle_s - (0.0 if progress.stopped else progress.moving_s)


def _limit(state: State, progress: Progress, config: LivenessConfig) -> float:
    steps, floor_s = config.hang_steps, config.hang_floor_s
    if progress.stopped:
        pass
    elif progress.spinning and _all_wait_for(progress.rank, state):
        floor_s = config.spin_floor_s
    elif progress.busy:
        steps, floor_s = config.busy_steps, config.busy_floor_s
    return float((floor_s + steps * state.usual_s) * 2 ** state.named.get(progress.rank, 0))


def _all_wait_for(rank: Rank, state: State) -> bool:
    others = [seen.progress for each, seen in state.ranks.items() if each != rank]
    return bool(others) and all(each.waiting for each in others if each.judged)


def _culprits(
    judged: Mapping[Rank, Observation], idle: Mapping[Rank, Observation]
) -> tuple[list[Rank], str]:
    if not idle:
        return [], ""
    stopped = [rank for rank, seen in idle.items() if seen.progress.stopped]
    if stopped:
        return sorted(stopped), "its process is stopped"
    waiting = [rank for rank, seen in judged.items() if seen.progress.waiting]
    absent = [rank for rank, seen in idle.items() if not seen.progress.waiting]
    if absent and (waiting or len(judged) == 1):
        return sorted(absent), f"{len(waiting)} ranks wait for it"
    if len(idle) == len(judged) and len(waiting) == len(judged):
        furthest = max(seen.progress.collective for seen in judged.values())
        behind = [rank for rank in judged if judged[rank].progress.collective < furthest]
        return sorted(behind), f"others have entered collective {furthest}"
    return [], ""


def _evidence(state: State, seen: Observation, why: str) -> str:
    progress = seen.progress
    where = f"in collective {progress.collective}" if progress.waiting else "in no collective"
    if progress.spinning:
        why = f"it repeats the same lines of Python, and {why}"
    evidence = (
        f"rank {progress.rank} has made no progress for {progress.idle_s:.2f} s at step "
        f"{progress.step}, {where}; a step usually takes {state.usual_s:.3f} s: {why}"
    )
    return f"{evidence}\n{progress.stack}" if progress.stack else evidence
