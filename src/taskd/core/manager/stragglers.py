"""Which rank holds the others up, by how much, since when, and with what.

In synchronous training all ranks take the same time for a step; the slow one spends it working,
the others waiting. So of each rank its *own* time counts: a step less its waits. Whoever has the
longest own time comes last to the collectives, and the others wait for the difference.

    slow compute, slow data loading   the part in which the rank exceeds the median of the others
    slow network                      all own times are alike, and a connection of the rank carries
                                      the bytes of a collective much more slowly than the rest

Everything is the median over a window: a hiccup is no reason to accuse anybody, however long it
was, and neither is the saving of a checkpoint.
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
    """A rank that exceeds the median by this part of a usual step is reported."""

    window_s: float = 10.0
    """What is looked at, ending now."""

    least_steps: int = 20
    """The window must have so many steps, or it is stretched until it has."""

    slow_wire: float = 1.3
    """A connection counts as slow when it takes so many times as long for its bytes as others."""

    longest_s: float = 600.0
    """What is older is forgotten, whatever else."""


SAMPLES = 40
"""How many paces of a rank are kept in a window."""
LEAST_INTERVALS = 5
LOOKS = 10
"""How often in a window it is judged."""


class Cause(StrEnum):
    COMPUTE = "compute"
    DATA = "data loading"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Straggler:
    rank: Rank
    cause: Cause
    late_s: float
    """What it costs the others in each step."""
    usual_s: float
    """A step without it."""
    since: float
    evidence: str
    own_s: float = 0.0
    """What it needs for a step by itself."""

    @property
    def slower(self) -> float:
        return self.late_s / self.usual_s


# Events


@dataclass(frozen=True, slots=True)
class PacesReported:
    """How some ranks fare."""

    paces: tuple[Pace, ...]


@dataclass(frozen=True, slots=True)
class JobDisturbed:
    """The job has stood still or has changed: what was measured before says nothing any more."""


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
    """At the last look. Only what is seen twice counts."""
    next_look: float = 0.0
    """Thousands of ranks tell their pace; it is judged a few times a window only."""


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
        return Outcome(State(slow=state.slow), because="the job was disturbed: measured anew")
    samples = dict(state.samples)
    for pace in event.paces:
        if pace.recorded:
            samples[pace.rank] = _with(samples.get(pace.rank, ()), Sample(now, pace), config)
        else:
            samples.pop(pace.rank, None)
    # Who is not recorded any more cannot show that he has become faster.
    unseen = [pace.rank for pace in event.paces if not pace.recorded and pace.rank in state.slow]
    if unseen:
        slow = {rank: accused for rank, accused in state.slow.items() if rank not in unseen}
        cleared = tuple(Clear(state.slow[rank]) for rank in unseen)
        because = "what is not recorded cannot be judged"
        return Outcome(replace(state, samples=samples, slow=slow), cleared, because)
    if now < state.next_look:
        return Outcome(replace(state, samples=samples))
    state = replace(state, samples=samples, next_look=now + config.window_s / LOOKS)
    typical = _typical(samples, config)
    if typical is None:
        return Outcome(state)
    suspected = _accuse(typical, config.slower, config)
    slow = {
        rank: accused
        for rank, accused in suspected.items()
        if state.suspected.get(rank) == accused.cause
    }
    # Who has been accused is let go only when he is clearly as fast as the others.
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


def _with(before: tuple[Sample, ...], new: Sample, config: StragglerConfig) -> tuple[Sample, ...]:
    """A new life, or sums that begin again, begin a new series."""
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


# What a step is like for each rank


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's time in a step."""

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
    """What a connection did in a step."""

    here: str
    there: str
    sent_bytes: float
    busy_s: float

    @property
    def s_per_byte(self) -> float:
        return self.busy_s / self.sent_bytes


Typical = Mapping[Rank, Share]


def _typical(samples: Mapping[Rank, tuple[Sample, ...]], config: StragglerConfig) -> Typical | None:
    """The median over the window, part by part. None: somebody's window is not full yet."""
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
            wires=_typical_wires(shares),
        )
    return typical


def _typical_wires(shares: list[Share]) -> tuple[ConnectionUse, ...]:
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
    """Averages from each sample to the next."""
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


# Who is to blame


def _accuse(typical: Typical, slower: float, config: StragglerConfig) -> dict[Rank, Straggler]:
    own = {rank: share.own_s for rank, share in typical.items()}
    # The last one to come waits for the transfer alone.
    transfer_s = min(share.wait_s for share in typical.values())
    slow: dict[Rank, Straggler] = {}
    for rank, share in typical.items():
        others = [value for other, value in own.items() if other != rank]
        usual_s = median(others) + max(0.0, transfer_s)
        late_s = share.own_s - median(others)
        if late_s > slower * usual_s > 0:
            slow[rank] = _late(share, typical, late_s, usual_s)
    return slow or _slow_wires(typical, slower, config)


def _late(share: Share, typical: Typical, late_s: float, usual_s: float) -> Straggler:
    others = [other for rank, other in typical.items() if rank != share.rank]
    data_s, usual_data_s = share.data_s, median(other.data_s for other in others)
    compute_s, usual_compute_s = share.compute_s, median(other.compute_s for other in others)
    cause = Cause.DATA if data_s - usual_data_s > compute_s - usual_compute_s else Cause.COMPUTE
    mine, theirs = (data_s, usual_data_s) if cause is Cause.DATA else (compute_s, usual_compute_s)
    evidence = (
        f"rank {share.rank} comes last to the collectives: the others wait {_ms(late_s)} a step "
        f"for it, {late_s / usual_s:.0%} of a usual {_ms(usual_s)}; slow {cause.value}: "
        f"{_ms(mine)} a step against {_ms(theirs)}"
    )
    return Straggler(share.rank, cause, late_s, usual_s, share.began, evidence, share.own_s)


def _slow_wires(typical: Typical, slower: float, config: StragglerConfig) -> dict[Rank, Straggler]:
    """The connections that carry the collectives, compared with each other.

    A link has two ends. Blamed is the rank at which the most slow connections end; of two equals
    the one that sends, since the kernel's accounts are the sender's.
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
    touched: dict[Rank, int] = {}
    for rank, wire, _ in slow:
        for end in {rank, ends.get(wire.there, rank)}:
            touched[end] = touched.get(end, 0) + 1
    senders = {rank for rank, _, _ in slow}
    blamed = max(touched, key=lambda rank: (touched[rank], rank in senders, -rank))
    rank, wire, late_s = max(slow, key=lambda item: item[2])
    other = ends.get(wire.there)
    peer = f"rank {other}" if other is not None else wire.there
    rate = wire.sent_bytes / wire.busy_s / 1e6
    evidence = (
        f"all ranks come to the collectives in time, but the link of rank {blamed} is slow: rank "
        f"{rank} sends to {peer} at {rate:.1f} MB/s, which costs {_ms(late_s)} a step, "
        f"{late_s / max(usual_s - late_s, 1e-9):.0%} of a usual {_ms(usual_s - late_s)}"
    )
    began = typical[blamed].began
    usual_step_s = max(usual_s - late_s, 1e-9)
    return {blamed: Straggler(blamed, Cause.NETWORK, late_s, usual_step_s, began, evidence)}


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
