"""How long a rank may show no progress: the watchdog's bounds, by the phase that the rank is in.

A rank publishes its phase (`runtime/beacon.py`). Only inside a step does the job have a pace that
it can be held to. In every other phase a script may do what it likes for as long as it shows a
sign of work: processor time, files, memory, child processes, or a stack that changes. The table
in docs/failure-model.md lists the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from taskd.model.messages import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessConfig:
    hang_steps: float = 3.0
    """A rank inside a step may make no progress for this many usual steps …"""

    hang_floor_s: float = 0.7
    """… plus this time, while others wait for it."""

    busy_steps: float = 10.0
    """In place of `hang_steps` for a rank that uses CPU or disk."""

    busy_floor_s: float = 300.0
    """In place of `hang_floor_s` for a rank that uses CPU or disk."""

    spin_floor_s: float = 1.2
    """In place of `hang_floor_s` for a rank that repeats a few lines of Python."""

    quiet_floor_s: float = 30.0
    """A rank outside of steps, or before the job's pace is known, may show no sign of work for
    this long while others wait for it; or twice as long as such a pause has lasted before."""

    stall_steps: float = 10.0
    """All ranks may wait in collectives at the same time for this many usual steps …"""

    stall_floor_s: float = 5.0
    """… plus this time; three times this time if the pace is not known."""

    idle_floor_s: float = 60.0
    """No rank waits in a collective, and none shows a sign of work: for this long, or twice as
    long as such a pause has lasted before."""

    warn_s: float = 10.0
    """A warning is logged when ranks have waited this long for one that is not hung; or twice as
    long as they had to wait before."""

    stopped_s: float = 1.0
    """A process that a signal has stopped is hung after this time, whatever its rank was doing."""

    known_steps: int = 5
    """The job's pace is known after this many steps."""


@dataclass(frozen=True, slots=True)
class Phase:
    paced: bool = False
    """The job's pace applies, once it is known."""
    judged: bool = True
    """A rank in this phase can be the one that the others wait for."""
    waits: bool = False
    """A rank in this phase waits for others, also outside of collectives."""


PHASES = {
    "loading": Phase(),
    "starting": Phase(),
    "training": Phase(paced=True),
    "between steps": Phase(),
    "section": Phase(),
    "leaving": Phase(),
    "repairing": Phase(judged=False, waits=True),
    "parked": Phase(judged=False),
}
"""loading: before `taskd.init`. leaving: after the last step. The manager's own deadlines apply to
ranks that do not park, and to repairs."""
UNKNOWN = Phase()


def phase_of(progress: Progress) -> Phase:
    return PHASES.get(progress.phase, UNKNOWN)


def no_work_s(progress: Progress) -> float:
    """How long the rank has shown no sign of work at all."""
    return progress.idle_s - (0.0 if progress.stopped else progress.moving_s)


def rank_bound(
    progress: Progress, usual_s: float, longest_s: float, all_wait: bool, config: LivenessConfig
) -> float:
    """For a rank that others wait for. `usual_s` is inf until the pace is known."""
    paced = phase_of(progress).paced
    if paced and usual_s < inf:
        if progress.stopped:
            return config.hang_floor_s + config.hang_steps * usual_s
        if progress.spinning and all_wait:
            return config.spin_floor_s + config.hang_steps * usual_s
        if progress.busy:
            return config.busy_floor_s + config.busy_steps * usual_s
        return config.hang_floor_s + config.hang_steps * usual_s
    if progress.stopped:
        return inf  # `stopped_s` applies
    if progress.busy:
        # The first steps may compile for minutes; elsewhere a rank may compute for ever.
        return 3 * config.busy_floor_s if paced else inf
    return max(config.quiet_floor_s, 2 * longest_s)


def stall_bound(
    progress: Progress, usual_s: float, is_clear: bool, config: LivenessConfig
) -> float:
    """For a rank that waits in a collective, while all others do, too.

    `is_clear`: some ranks are behind the others, so that it is known which ones to replace.
    """
    if progress.busy:
        return config.busy_floor_s
    if is_clear and usual_s < inf and phase_of(progress).paced:
        return config.hang_floor_s + config.hang_steps * usual_s
    if usual_s < inf:
        return config.stall_floor_s + config.stall_steps * usual_s
    return 3 * config.stall_floor_s


def idle_bound(progress: Progress, longest_s: float, config: LivenessConfig) -> float:
    """For a rank outside of collectives, while all others are outside of them, too."""
    if progress.busy or progress.phase == "loading":
        return inf  # it may be a script without TaskD
    # No rank waits for one that finishes its last uploads.
    floor_s = config.busy_floor_s if progress.phase == "leaving" else config.idle_floor_s
    return max(floor_s, 2 * longest_s)
