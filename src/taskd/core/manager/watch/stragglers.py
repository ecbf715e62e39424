"""Stragglers: which rank slows the others down, by how much, since when, and why.

In synchronous training a step takes the same time on all ranks; the slow rank spends it working,
the others waiting. So what counts is the *own* time of each rank: the step without its waits. The
rank with the longest own time enters the collectives last, and the others wait for the difference.

    slow compute, slow data loading   the part in which the rank exceeds the median of the others
    slow network                      all own times are similar, but one connection of the rank
                                      transfers the bytes of a collective much more slowly

All values are medians over a window: a single long pause does not make a rank a straggler, and
neither does saving a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median

from taskd.model import types
from taskd.model.ids import Rank
from taskd.model.profiling import Pace


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerConfig:
    slower: float = 0.10
    """A rank is reported when it exceeds the median by this fraction of a usual step."""

    window_s: float = 10.0
    """The length of the window that is judged; it ends now."""

    least_steps: int = 20
    """A window with fewer steps than this is extended until it has as many."""

    slow_wire: float = 1.3
    """A connection is slow when it takes this many times longer per byte than the others."""

    longest_s: float = 600.0
    """Older samples are always dropped."""


SAMPLES = 40
"""How many samples of a rank are kept per window."""
LEAST_INTERVALS = 5
JUDGEMENTS = 10
"""How often per window the ranks are judged."""


class Cause(StrEnum):
    COMPUTE = "compute"
    DATA = "data loading"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Straggler:
    rank: Rank
    cause: Cause
    late_s: float
    """How long the others wait for it in each step."""
    usual_s: float
    """Duration of a step without the delay."""
    since: float
    evidence: str
    own_s: float = 0.0
    """Its own time per step."""

    @property
    def slower(self) -> float:
        return self.late_s / self.usual_s


# Events


@dataclass(frozen=True, slots=True)
class PacesReported:
    """Some ranks have reported their pace."""

    paces: tuple[Pace, ...]


@dataclass(frozen=True, slots=True)
class JobDisturbed:
    """The job was interrupted or has changed: earlier measurements are not valid any more."""


Event = PacesReported | JobDisturbed


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    pace: Pace


@dataclass(frozen=True, slots=True)
class State:
    samples: Mapping[Rank, tuple[Sample, ...]] = field(default_factory=dict)
    slow: Mapping[Rank, Straggler] = field(default_factory=dict)
    suspected: Mapping[Rank, Cause] = field(default_factory=dict)
    """At the last judgement. A rank must be suspected twice in a row."""
    next_judgement: float = 0.0
    """Thousands of ranks report their pace; they are judged only a few times per window."""


# Commands


@dataclass(frozen=True, slots=True)
class Accuse:
    """The rank has become a straggler, or is one for another cause than before."""

    straggler: Straggler


@dataclass(frozen=True, slots=True)
class Clear:
    """The rank is no longer a straggler, or can no longer be judged."""

    straggler: Straggler


Command = Accuse | Clear
Outcome = types.Outcome[State, Command]


def step(state: State, event: Event, now: float, config: StragglerConfig) -> Outcome:
    if isinstance(event, JobDisturbed):
        return Outcome(State(slow=state.slow), because="the job was interrupted: measuring again")
    samples = dict(state.samples)
    for pace in event.paces:
        if pace.recorded:
            samples[pace.rank] = _add_sample(samples.get(pace.rank, ()), Sample(now, pace), config)
        else:
            samples.pop(pace.rank, None)
    # A rank that is not recorded any more cannot show that it has become faster.
    unrecorded = [
        pace.rank for pace in event.paces if not pace.recorded and pace.rank in state.slow
    ]
    if unrecorded:
        slow = {rank: accused for rank, accused in state.slow.items() if rank not in unrecorded}
        cleared = tuple(Clear(state.slow[rank]) for rank in unrecorded)
        because = "ranks that are not recorded cannot be judged"
        return Outcome(replace(state, samples=samples, slow=slow), cleared, because)
    if now < state.next_judgement:
        return Outcome(replace(state, samples=samples))
    state = replace(state, samples=samples, next_judgement=now + config.window_s / JUDGEMENTS)
    typical = _typical(samples, config)
    if typical is None:
        return Outcome(state)
    suspected = _accuse(typical, config.slower, config)
    slow = {
        rank: accused
        for rank, accused in suspected.items()
        if state.suspected.get(rank) == accused.cause
    }
    # A straggler is cleared only when it is clearly as fast as the others.
    lasting = _accuse(typical, config.slower / 2, config) if state.slow else {}
    slow |= {rank: state.slow[rank] for rank in lasting if rank in state.slow and rank not in slow}
    slow = {rank: _with_since(state, samples, accused) for rank, accused in slow.items()}
    found = tuple(
        s for r, s in slow.items() if r not in state.slow or state.slow[r].cause != s.cause
    )
    cleared = tuple(Clear(before) for rank, before in state.slow.items() if rank not in slow)
    because = "; ".join(accused.evidence for accused in found)
    causes = {rank: accused.cause for rank, accused in suspected.items()}
    commands: tuple[Command, ...] = (*map(Accuse, found), *cleared)
    return Outcome(replace(state, slow=slow, suspected=causes), commands, because)


def _with_since(
    state: State, samples: Mapping[Rank, tuple[Sample, ...]], accused: Straggler
) -> Straggler:
    before = state.slow.get(accused.rank)
    if before is not None and before.cause == accused.cause:
        return replace(accused, since=before.since)
    series = samples[accused.rank]
    if accused.cause is Cause.NETWORK:
        return replace(accused, since=series[0].at)
    limit_s = accused.own_s - accused.late_s / 2
    first = next(share.began for share in _shares(series) if share.own_s > limit_s)
    return replace(accused, since=first)


def _add_sample(
    before: tuple[Sample, ...], new: Sample, config: StragglerConfig
) -> tuple[Sample, ...]:
    """Add a sample. A new incarnation, or sums that start at zero, start a new series."""
    if before:
        last = before[-1].pace
        if last.incarnation != new.pace.incarnation or last.steps > new.pace.steps:
            before = ()
        elif last.steps == new.pace.steps:
            return before
    if len(before) > 1 and new.at - before[-2].at < config.window_s / SAMPLES:
        before = before[:-1]
    series = (*before, new)
    first = 0
    while first < len(series) - LEAST_INTERVALS - 1 and _is_enough(series[first + 1], new, config):
        first += 1
    while new.at - series[first].at > config.longest_s:
        first += 1
    return series[first:]


def _is_enough(first: Sample, last: Sample, config: StragglerConfig) -> bool:
    long_enough = last.at - first.at >= config.window_s
    return long_enough and last.pace.steps - first.pace.steps >= config.least_steps


# How each rank spends its time in a step


@dataclass(frozen=True, slots=True)
class Share:
    """How one rank spends its time in a step."""

    rank: Rank
    began: float
    step_s: float
    wait_s: float
    own_s: float
    data_s: float
    compute_s: float
    wires: tuple[ConnectionUse, ...]


@dataclass(frozen=True, slots=True)
class ConnectionUse:
    """What one connection transferred in a step."""

    here: str
    there: str
    sent_bytes: float
    busy_s: float

    @property
    def s_per_byte(self) -> float:
        return self.busy_s / self.sent_bytes


Typical = Mapping[Rank, Share]


def _typical(samples: Mapping[Rank, tuple[Sample, ...]], config: StragglerConfig) -> Typical | None:
    """The median over the window of each value. None: the window of some rank is not full yet."""
    if len(samples) < 2:
        return None
    typical: dict[Rank, Share] = {}
    for rank, series in samples.items():
        if len(series) <= LEAST_INTERVALS or not _is_enough(series[0], series[-1], config):
            return None
        shares = _shares(series)
        typical[rank] = Share(
            rank,
            series[0].at,
            step_s=median(share.step_s for share in shares),
            wait_s=median(share.wait_s for share in shares),
            own_s=median(share.own_s for share in shares),
            data_s=median(share.data_s for share in shares),
            compute_s=median(share.compute_s for share in shares),
            wires=_typical_connections(shares),
        )
    return typical


def _typical_connections(shares: list[Share]) -> tuple[ConnectionUse, ...]:
    seen: dict[tuple[str, str], list[ConnectionUse]] = {}
    for share in shares:
        for wire in share.wires:
            seen.setdefault((wire.here, wire.there), []).append(wire)
    return tuple(
        ConnectionUse(*ends, median(w.sent_bytes for w in wires), median(w.busy_s for w in wires))
        for ends, wires in seen.items()
        if 2 * len(wires) > len(shares)
    )


def _shares(series: tuple[Sample, ...]) -> list[Share]:
    """The averages between consecutive samples."""
    return [_share(before, after) for before, after in pairwise(series)]


def _share(before: Sample, after: Sample) -> Share:
    a, b = before.pace, after.pace
    steps = b.steps - a.steps
    known = {(wire.here, wire.there): wire for wire in a.wires}
    wires = []
    for wire in b.wires:
        old = known.get((wire.here, wire.there))
        if old is not None and wire.sent_bytes > old.sent_bytes:
            wires.append(
                ConnectionUse(
                    wire.here,
                    wire.there,
                    (wire.sent_bytes - old.sent_bytes) / steps,
                    (wire.busy_s - old.busy_s) / steps,
                )
            )
    step_s, wait_s = (b.total_s - a.total_s) / steps, (b.wait_s - a.wait_s) / steps
    data_s, save_s = (b.data_s - a.data_s) / steps, (b.save_s - a.save_s) / steps
    own_s = step_s - wait_s - save_s
    return Share(b.rank, before.at, step_s, wait_s, own_s, data_s, own_s - data_s, tuple(wires))


# Which rank is the cause


def _accuse(typical: Typical, slower: float, config: StragglerConfig) -> dict[Rank, Straggler]:
    own = {rank: share.own_s for rank, share in typical.items()}
    # The last rank to enter a collective waits for the transfer only.
    transfer_s = min(share.wait_s for share in typical.values())
    slow: dict[Rank, Straggler] = {}
    for rank, share in typical.items():
        others = [value for other, value in own.items() if other != rank]
        usual_s = median(others) + max(0.0, transfer_s)
        late_s = share.own_s - median(others)
        if late_s > slower * usual_s > 0:
            slow[rank] = _slow_rank(share, typical, late_s, usual_s)
    return slow or _slow_connections(typical, slower, config)


def _slow_rank(share: Share, typical: Typical, late_s: float, usual_s: float) -> Straggler:
    others = [other for rank, other in typical.items() if rank != share.rank]
    data_s, usual_data_s = share.data_s, median(other.data_s for other in others)
    compute_s, usual_compute_s = share.compute_s, median(other.compute_s for other in others)
    cause = Cause.DATA if data_s - usual_data_s > compute_s - usual_compute_s else Cause.COMPUTE
    mine, theirs = (data_s, usual_data_s) if cause is Cause.DATA else (compute_s, usual_compute_s)
    evidence = (
        f"rank {share.rank} enters the collectives last: the others wait {_ms(late_s)} per step "
        f"for it, {late_s / usual_s:.0%} of the usual {_ms(usual_s)}; slow {cause.value}: "
        f"{_ms(mine)} per step, {_ms(theirs)} on the other ranks"
    )
    return Straggler(share.rank, cause, late_s, usual_s, share.began, evidence, share.own_s)


def _slow_connections(
    typical: Typical, slower: float, config: StragglerConfig
) -> dict[Rank, Straggler]:
    """Compare the connections that carry the collectives with each other.

    A connection has two ends. The rank with the most slow connections is named; of two with the
    same number the one that sends, because the kernel's counters are the sender's.
    """
    ends = {wire.here: share.rank for share in typical.values() for wire in share.wires}
    wires = [(share.rank, wire) for share in typical.values() for wire in share.wires]
    most = max((wire.sent_bytes for _, wire in wires), default=0.0)
    heavy = [(rank, wire) for rank, wire in wires if wire.sent_bytes >= 0.2 * most]
    if len(heavy) < 2:
        return {}
    usual_s = min(share.step_s for share in typical.values())
    slow: list[tuple[Rank, ConnectionUse, float]] = []
    for rank, wire in heavy:
        others = [other.s_per_byte for _, other in heavy if other is not wire]
        usual = _lower_median(others)
        late_s = wire.busy_s - usual * wire.sent_bytes
        expected_s = max(usual_s - late_s, 1e-9)
        if wire.s_per_byte > config.slow_wire * usual and late_s > slower * expected_s:
            slow.append((rank, wire, late_s))
    if not slow:
        return {}
    slow_ends: dict[Rank, int] = {}
    for rank, wire, _ in slow:
        for end in {rank, ends.get(wire.there, rank)}:
            slow_ends[end] = slow_ends.get(end, 0) + 1
    senders = {rank for rank, _, _ in slow}
    culprit = max(slow_ends, key=lambda rank: (slow_ends[rank], rank in senders, -rank))
    rank, wire, late_s = max(slow, key=lambda item: item[2])
    other = ends.get(wire.there)
    peer = f"rank {other}" if other is not None else wire.there
    rate = wire.sent_bytes / wire.busy_s / 1e6
    evidence = (
        f"all ranks enter the collectives in time, but the network of rank {culprit} is slow: rank "
        f"{rank} sends to {peer} at {rate:.1f} MB/s, which costs {_ms(late_s)} per step, "
        f"{late_s / max(usual_s - late_s, 1e-9):.0%} of the usual {_ms(usual_s - late_s)}"
    )
    began = typical[culprit].began
    usual_step_s = max(usual_s - late_s, 1e-9)
    return {culprit: Straggler(culprit, Cause.NETWORK, late_s, usual_step_s, began, evidence)}


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
