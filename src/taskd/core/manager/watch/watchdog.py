"""The watchdog: who makes the others wait, judged by heartbeats alone.

(`silent_nodes.py` judges whole nodes.) It finds four situations. `wait_bounds.py` has the bound of
each, which grows with the job's usual step and with the pauses that have been seen before:

    1. a process that a signal has stopped, in any phase: the rank is hung;
    2. ranks wait in a collective for a rank that is outside and shows no sign of work: it is hung;
    3. all ranks wait, each in a collective, and none shows a sign of work: the job is stalled.
       The ranks that have entered fewer collectives since their last step are named, if they are
       the minority: they are late or have skipped one;
    4. no rank waits in a collective, and none shows a sign of work: all are hung.

A process that a debugger has stopped is not judged. A rank that does new things is slow, not hung:
it may evaluate alone for hours while the others wait in a barrier. Then a warning is logged. Inside
a step, a rank that works without visible progress has a much longer bound, unless it repeats a few
lines of Python while all others wait: then the bound is only a little longer.

The bound of a rank doubles each time it is named, so that a job with real pauses is disturbed only
a few times. A rank that is named and stays as it is, is named again after a while: the manager may
have been busy with something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from taskd.core.manager.watch.wait_bounds import (
    LivenessConfig,
    idle_bound,
    no_work_s,
    phase_of,
    rank_bound,
    stall_bound,
)
from taskd.model import types
from taskd.model.ids import Incarnation, NodeRank, Rank
from taskd.model.messages import NodeHeartbeat, Progress

WINDOW = 32
SETTLE_S = 3.0
"""Nothing is judged before this time: the heartbeats of some nodes may still be missing."""
AGAIN_S = 30.0
"""A rank or a stall that was named is named again after this time."""
STACKS_SHOWN, STACK_CHARS = 16, 2000
"""The evidence of a stall shows this many ranks, with this much of each stack."""


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
    named_idle_s: float = -inf
    """How long it had made no progress when it was last named."""
    warned: bool = False
    """A warning about it has been logged since its last progress."""


@dataclass(frozen=True, slots=True)
class State:
    ranks: Mapping[Rank, Observation] = field(default_factory=dict)
    began: float = inf
    """When the first heartbeat came."""
    paces: tuple[float, ...] = ()
    """Recent durations of one step."""
    steps: int = 0
    """How many steps these come from; counted up to `known_steps`."""
    named: Mapping[Rank, int] = field(default_factory=dict)
    """How often a rank has been named."""
    stalls: int = 0
    """How often the job has been found stalled …"""
    stalled_at: float = -inf
    """… and when it last was."""
    repaired_at: float = -inf
    """When the last repair began. A wait that began earlier does not mean that it failed."""
    longest_s: float = 0.0
    """The longest time without a sign of work outside of steps that ended by itself …"""
    slowest_s: float = 0.0
    """… and without progress, but perhaps with signs of work."""

    @property
    def usual_s(self) -> float:
        return median(self.paces) if self.paces else inf


@dataclass(frozen=True, slots=True)
class Hung:
    rank: Rank
    incarnation: Incarnation
    evidence: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """All ranks wait for each other."""

    behind: tuple[tuple[Rank, Incarnation], ...]
    """Those that have entered fewer collectives than most; empty: no rank stands out."""
    evidence: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Ranks wait for one that is not hung."""

    evidence: str


Command = Hung | Stalled | Warned
Outcome = types.Outcome[State, Command]


def step(state: State, beat: NodeHeartbeat, now: float, config: LivenessConfig) -> Outcome:
    listed = {progress.rank for progress in beat.progress}
    kept = {r: seen for r, seen in state.ranks.items() if seen.node != beat.node or r in listed}
    state = replace(state, ranks=kept, began=min(state.began, now))
    for progress in beat.progress:
        before = kept.get(progress.rank)
        if before is None or progress.incarnation >= before.progress.incarnation:
            state, kept[progress.rank] = _note(state, before, beat.node, progress, now, config)
    outcome = Outcome(state)
    if now >= state.began + SETTLE_S:
        outcome = _judge(state, now, config)
    return _judge_stopped(outcome, now, config)


def _note(
    state: State,
    before: Observation | None,
    node: NodeRank,
    progress: Progress,
    now: float,
    config: LivenessConfig,
) -> tuple[State, Observation]:
    moved_at = now - progress.idle_s
    if before is None or progress.incarnation > before.progress.incarnation:
        seen = Observation(node, progress, moved_at)
    elif progress.step > before.progress.step:
        seen = Observation(node, progress, moved_at)
        state = _learn(_learn_pause(state, before), before, seen, config)
    elif progress.idle_s < before.progress.idle_s:
        state = _learn_pause(state, before)
        seen = Observation(node, progress, before.moved_at, before.stopped_at, before.stop_named)
    else:
        if not progress.stack:
            progress = replace(progress, stack=before.progress.stack)  # it is sent only once
        seen = replace(before, node=node, progress=progress)
    if not progress.stopped:
        seen = replace(seen, stopped_at=inf, stop_named=False)
    elif seen.stopped_at == inf:
        seen = replace(seen, stopped_at=now)
    return state, seen


def _learn(state: State, before: Observation, seen: Observation, config: LivenessConfig) -> State:
    count = seen.progress.step - before.progress.step
    pace = max(0.0, seen.moved_at - before.moved_at) / count
    if before.progress.step == 0 or before.progress.phase not in ("training", "between steps"):
        return state  # this step includes the start of the job, or a repair
    return replace(
        state,
        paces=(*state.paces, pace)[-WINDOW:],
        steps=min(config.known_steps, state.steps + count),
    )


def _learn_pause(state: State, before: Observation) -> State:
    """A pause has ended by itself: the next one may be as long."""
    rule = phase_of(before.progress)
    if rule.paced or not rule.judged or before.progress.stopped or before.progress.waiting:
        return state
    quiet_s = 0.0 if before.progress.busy else no_work_s(before.progress)
    return replace(
        state,
        longest_s=max(state.longest_s, quiet_s),
        slowest_s=max(state.slowest_s, before.progress.idle_s),
    )


# Who makes the others wait


@dataclass(frozen=True, slots=True)
class _Verdict:
    culprits: list[Rank] = field(default_factory=list)
    why: str = ""
    stall: Stalled | None = None


def _judge(state: State, now: float, config: LivenessConfig) -> Outcome:
    verdict = _find(state, now, config)
    if not verdict.culprits and verdict.stall is None:
        return _warn(state, config)
    ranks, named = dict(state.ranks), dict(state.named)
    found: list[Command] = []
    for rank in verdict.culprits:
        seen, progress = ranks[rank], ranks[rank].progress
        if progress.idle_s < seen.named_idle_s + AGAIN_S:
            continue
        ranks[rank] = replace(seen, named_idle_s=progress.idle_s)
        named[rank] = named.get(rank, 0) + 1
        evidence = _evidence(state, seen, verdict.why)
        found.append(Hung(rank, progress.incarnation, evidence, progress.stopped))
    state = replace(state, ranks=ranks, named=named)
    if verdict.stall is not None:
        state = replace(state, stalls=state.stalls + 1, stalled_at=now)
        found.append(verdict.stall)
    return Outcome(state, tuple(found))


def _find(state: State, now: float, config: LivenessConfig) -> _Verdict:
    judged = {r: seen for r, seen in state.ranks.items() if _is_judged(seen)}
    waiting = {r for r, seen in state.ranks.items() if _waits(seen)}
    outside = judged.keys() - waiting
    overdue = [r for r in judged if _is_overdue(state, judged[r].progress, outside, config)]
    if stopped := [r for r in overdue if judged[r].progress.stopped]:
        return _Verdict(sorted(stopped), "its process is stopped")
    absent = [r for r in overdue if r in outside]
    if absent and (waiting or _is_single_step(state, judged, config)):
        # Outside of steps, a rank may wait for the work of another rank by other means.
        others_work = outside - set(absent)
        named = [r for r in absent if _is_paced(state, judged[r].progress, config)]
        named = named if others_work else absent
        return _Verdict(sorted(named), f"{len(waiting)} ranks wait for it")
    if judged and not outside:
        return _stall(state, judged, now, config)
    if judged and not waiting and all(_is_idle(state, judged[r].progress, config) for r in outside):
        return _Verdict(sorted(outside), "no rank shows a sign of work")
    return _Verdict()


def _is_judged(seen: Observation) -> bool:
    return seen.progress.judged and phase_of(seen.progress).judged


def _waits(seen: Observation) -> bool:
    rule = phase_of(seen.progress)
    return rule.waits or (seen.progress.judged and rule.judged and seen.progress.waiting)


def _is_paced(state: State, progress: Progress, config: LivenessConfig) -> bool:
    return phase_of(progress).paced and state.steps >= config.known_steps


def _is_single_step(
    state: State, judged: Mapping[Rank, Observation], config: LivenessConfig
) -> bool:
    """The job has one rank, which is inside a step: no other rank could wait for it."""
    return len(judged) == len(state.ranks) == 1 and all(
        _is_paced(state, seen.progress, config) for seen in judged.values()
    )


def _is_overdue(
    state: State, progress: Progress, outside: Set[Rank], config: LivenessConfig
) -> bool:
    all_wait = len(state.ranks) > 1 and not outside - {progress.rank}
    bound = rank_bound(progress, _usual_s(state, config), state.longest_s, all_wait, config)
    return no_work_s(progress) > bound * _patience(state, progress)


def _is_idle(state: State, progress: Progress, config: LivenessConfig) -> bool:
    bound = idle_bound(progress, state.longest_s, config)
    return no_work_s(progress) > bound * _patience(state, progress)


def _patience(state: State, progress: Progress) -> float:
    return float(2 ** min(state.named.get(progress.rank, 0), 16))


def _usual_s(state: State, config: LivenessConfig) -> float:
    return state.usual_s if state.steps >= config.known_steps else inf


def _stall(
    state: State, judged: Mapping[Rank, Observation], now: float, config: LivenessConfig
) -> _Verdict:
    if now < state.stalled_at + AGAIN_S:
        return _Verdict()
    behind, usual_s = _behind(judged), _usual_s(state, config)
    for seen in state.ranks.values():
        bound = stall_bound(seen.progress, usual_s, bool(behind), config)
        waited_s = min(no_work_s(seen.progress), now - state.repaired_at)
        if not seen.progress.judged or waited_s <= bound * 2**state.stalls:
            return _Verdict()
    return _Verdict(stall=Stalled(behind, _stall_evidence(state, judged)))


def _behind(judged: Mapping[Rank, Observation]) -> tuple[tuple[Rank, Incarnation], ...]:
    """The ranks that have entered fewer collectives than the others, if they are the minority.

    Outside of steps, collectives are not counted.
    """
    if not all(phase_of(seen.progress).paced for seen in judged.values()):
        return ()
    furthest = max(seen.progress.collective for seen in judged.values())
    late = [r for r in sorted(judged) if judged[r].progress.collective < furthest]
    if 2 * len(late) >= len(judged):
        return ()
    return tuple((rank, judged[rank].progress.incarnation) for rank in late)


def _warn(state: State, config: LivenessConfig) -> Outcome:
    """Ranks wait for one that is not hung, or not yet: log it once."""
    ranks, found = dict(state.ranks), list[Command]()
    waiting = sum(map(_waits, state.ranks.values()))
    usual_s = state.usual_s if state.usual_s < inf else 0.0
    patience_s = max(config.warn_s + config.hang_steps * usual_s, 2 * state.slowest_s)
    for rank, seen in state.ranks.items():
        progress = seen.progress
        if seen.warned or not waiting or _waits(seen) or not _is_judged(seen):
            continue
        if progress.idle_s > patience_s:
            ranks[rank] = replace(seen, warned=True)
            doing = "it works" if progress.busy or progress.moving_s else "it shows no sign of work"
            why = f"{waiting} ranks wait for it, and {doing}"
            found.append(Warned(_evidence(state, seen, why)))
    return Outcome(replace(state, ranks=ranks), tuple(found)) if found else Outcome(state)


def _judge_stopped(outcome: Outcome, now: float, config: LivenessConfig) -> Outcome:
    """Name stopped processes that no rank waits for."""
    named = {hung.rank for hung in outcome.commands if isinstance(hung, Hung)}
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


# What people read


def _evidence(state: State, seen: Observation, why: str) -> str:
    progress = seen.progress
    if progress.spinning:
        why = f"it repeats the same lines of Python, and {why}"
    usual = f"; a step usually takes {state.usual_s:.3f} s" if state.usual_s < inf else ""
    evidence = (
        f"rank {progress.rank} has made no progress for {progress.idle_s:.2f} s "
        f"{_where(progress)}{usual}: {why}"
    )
    return f"{evidence}\n{progress.stack}" if progress.stack else evidence


def _where(progress: Progress) -> str:
    inside = f"in collective {progress.collective}" if progress.waiting else "in no collective"
    match progress.phase:
        case "training":
            return f"at step {progress.step}, {inside}"
        case "between steps" | "section":
            return f"at step {progress.step}, {progress.phase}, {inside}"
        case "leaving":
            return f"after its last step, {inside}"
        case "loading":
            return "before it called taskd.init()"
        case _:
            return f"before its first step, {inside}"


def _stall_evidence(state: State, judged: Mapping[Rank, Observation]) -> str:
    waited = min(seen.progress.idle_s for seen in judged.values())
    lines = [f"all {len(state.ranks)} ranks wait for each other since {waited:.1f} s"]
    for rank in sorted(judged)[:STACKS_SHOWN]:
        progress = judged[rank].progress
        lines.append(f"rank {rank} {_where(progress)}:\n{_main_stack(progress.stack)}")
    return "\n".join(lines)


def _main_stack(stack: str) -> str:
    """The first part: that of the main thread."""
    return stack[:STACK_CHARS].rstrip() or "(no stack)"
