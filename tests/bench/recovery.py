"""Recovery from the loss of one rank: taskd, a no-restart floor, and other people's systems.

The same job, the same fault and the same measure for all (see peers/), in turns, so that a busy
minute of the machine hits everybody. `TASKD_BENCH_QUICK=1` does one round instead of five. A peer
that does not recover gets a row that says why, never a number.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tests.bench.peers import dlrover, floor, nvrx, ours, torchft, torchrun
from tests.bench.peers.ours import Incident
from tests.bench.peers.trial import Outcome, TrialError
from tests.bench.peers.venvs import prepare
from tests.bench.rows import Row, ms

ROUNDS = 5
SLOW_ROUNDS = 3
BUDGET_S = 400.0
"""When it is spent, peers that are slow anyway are not tried again."""
HOPELESS = 2
"""Who fails that often before it ever recovers is not tried again."""
REASON_CHARS = 160
HANG_GRACE_S = 1.5
"""A hung rank is to be named within three usual steps and this."""


@dataclass
class Contender:
    name: str
    """What it is, and what its way costs."""
    trial: Callable[[], Outcome]
    rounds: int = SLOW_ROUNDS
    spare: bool = False
    """A fifth rank is there all the time and waits, or computes along."""
    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def hopeless(self) -> bool:
        return not self.outcomes and len(self.failures) >= HOPELESS

    @property
    def seconds(self) -> list[float]:
        return [outcome.seconds for outcome in self.outcomes]

    def __str__(self) -> str:
        tried = len(self.outcomes) + len(self.failures)
        if not self.outcomes:
            return f"no recovery in {tried} tries: {self.failures[-1] if tried else 'none made'}"
        failed = f", {len(self.failures)} of {tried} failed" if self.failures else ""
        redone = median(outcome.steps_redone for outcome in self.outcomes)
        return ms(self.seconds) + failed + (f", {redone:.0f} steps done again" if redone else "")


@dataclass
class Ours:
    """Our own trials under the three faults."""

    killed: list[Incident] = field(default_factory=list)
    cut: list[Incident] = field(default_factory=list)
    hung: list[tuple[Incident, float]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    _fails: Counter[str] = field(default_factory=Counter)

    def round(self) -> None:
        self._try("killed", lambda: self.killed.append(ours.killed()))
        self._try("cut", lambda: self.cut.append(ours.cut()))
        self._try("hung", lambda: self.hung.append(ours.hung()))

    def _try(self, name: str, trial: Callable[[], None]) -> None:
        if self._fails[name] >= HOPELESS:
            return
        try:
            trial()
        except TrialError as error:
            self._fails[name] += 1
            self.failures[name] = _reason(error)

    def failed(self, name: str) -> str:
        return f"no recovery: {self.failures[name]}"


def measure() -> list[Row]:
    rounds = 1 if os.environ.get("TASKD_BENCH_QUICK") else ROUNDS
    yardstick = Contender("the floor", floor.trial, ROUNDS)
    plain = Contender("`taskd run` with a script that knows nothing of it", ours.unmodified, ROUNDS)
    restart = Contender("torchrun", torchrun.trial, ROUNDS)
    peers = [
        restart,
        Contender("DLRover", dlrover.trial),
        Contender("NVIDIA, in-job restart", nvrx.trial_in_job),
        Contender(
            "NVIDIA, in-process restart with a spare rank", nvrx.trial_in_process, spare=True
        ),
        Contender("torchft", torchft.trial),
        Contender("torchft with a spare rank", torchft.trial_with_spare, spare=True),
    ]
    mine = Ours()
    prepare()  # installing does not count as measuring
    deadline = time.monotonic() + BUDGET_S
    for turn in range(rounds):
        mine.round()
        for contender in [yardstick, plain, *peers]:
            late = turn and contender.rounds < ROUNDS and time.monotonic() > deadline
            if turn < contender.rounds and not late and not contender.hopeless:
                _try(contender)
    return [
        *_against_floor(mine, yardstick),
        *_against_best(mine, [peer for peer in peers if peer.outcomes]),
        *(_against_peer(mine, peer) for peer in peers),
        _unprotected(plain, restart),
        *_other_faults(mine),
    ]


def _try(contender: Contender) -> None:
    try:
        contender.outcomes.append(contender.trial())
    except TrialError as error:
        contender.failures.append(_reason(error))


def _reason(error: TrialError) -> str:
    """On one line of a table: how far it came, and the last that was said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if len(lines) == 1 else f"{lines[0].partition(';')[0]}; {lines[-1]}"
    return said.replace("|", "/")[:REASON_CHARS]


KILL = "SIGKILL of one rank of 4 until the next step of the full world"


def _against_floor(mine: Ours, yardstick: Contender) -> list[Row]:
    if not mine.killed:
        return [Row(KILL, mine.failed("killed"), str(yardstick))]
    seconds = [incident.seconds for incident in mine.killed]
    took = median(seconds)
    ratio = took / median(yardstick.seconds) if yardstick.outcomes else None
    parts = {"seen": median(incident.seen for incident in mine.killed)}
    for name in mine.killed[0].parts:
        parts[name] = median(incident.parts[name] for incident in mine.killed)
    told = ", ".join(f"{name} {part * 1000:.0f}" for name, part in parts.items())
    return [
        Row(f"{KILL}, against a no-restart floor", ms(seconds), str(yardstick), ratio, 2.5),
        Row("the same, in seconds", ms(seconds), "", took, 0.5),
        Row("of which, in ms", told, "the job's own account; seen is the rest"),
    ]


def _against_best(mine: Ours, peers: list[Contender]) -> list[Row]:
    """Those that use the same four ranks, and those that need a fifth, are different offers."""
    rows = []
    for spare, kind in ((False, "with the same 4 ranks"), (True, "with a fifth rank in reserve")):
        able = [peer for peer in peers if peer.spare == spare]
        if able and mine.killed:
            best = min(able, key=lambda peer: median(peer.seconds))
            what = f"the best peer {kind}, how much slower"
            rows.append(_against_peer(mine, best, what, f"{best.name}: "))
    return rows


def _against_peer(mine: Ours, peer: Contender, what: str = "", name: str = "") -> Row:
    seconds = [incident.seconds for incident in mine.killed]
    known = seconds and peer.outcomes
    ratio = median(peer.seconds) / median(seconds) if known else None
    told = ms(seconds) if seconds else "no recovery"
    if what:
        return Row(what, told, f"{name}{peer}", ratio, 5.0, at_least=True)
    reduced = [each.reduced_seconds for each in peer.outcomes if each.reduced_seconds is not None]
    smaller = f"; 3 ranks alone after {ms(reduced)}" if reduced else ""
    return Row(f"{peer.name}, how much slower", told, f"{peer}{smaller}", ratio)


def _unprotected(plain: Contender, restart: Contender) -> Row:
    known = plain.outcomes and restart.outcomes
    ratio = median(restart.seconds) / median(plain.seconds) if known else None
    return Row(f"{plain.name}, against torchrun", str(plain), str(restart), ratio)


def _other_faults(mine: Ours) -> list[Row]:
    rows = []
    what = "links of one rank cut until the next step of all, in seconds"
    if mine.cut:
        seconds = [incident.seconds for incident in mine.cut]
        rows.append(Row(what, ms(seconds), "no process is replaced", median(seconds), 0.2))
    else:
        rows.append(Row(what, mine.failed("cut"), ""))
    what = "a rank that hangs (SIGSTOP) until it is named"
    if mine.hung:
        named = [incident.seen for incident, _ in mine.hung]
        limits = [3 * usual + HANG_GRACE_S for _, usual in mine.hung]
        ratio = median(named) / median(limits)
        rows.append(Row(what, ms(named), f"3 usual steps + 1.5 s: {ms(limits)}", ratio, 1.0))
    else:
        rows.append(Row(what, mine.failed("hung"), ""))
    return rows
