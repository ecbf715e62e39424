"""Recovery from the loss of one rank: taskd, a no-restart floor, and other people's systems.

The same job, the same fault and the same measure for all (see peers/), in turns, so that a busy
minute of the machine hits everybody. `TASKD_BENCH_QUICK=1` does one round instead of five. A peer
that does not recover gets a row that says why, never a number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, TypeVar

from tests.bench.peers import dlrover, floor, nvrx, ours, torchft, torchrun
from tests.bench.peers.ours import Incident
from tests.bench.peers.trial import Outcome, TrialError
from tests.bench.peers.venvs import prepare
from tests.bench.rows import Row, ms

ROUNDS = 5
SLOW_ROUNDS = 3
BUDGET_S = 400.0
"""When it is spent, contenders that are slow anyway are not tried again."""
HOPELESS = 2
"""Who fails that often before it ever recovers is not tried again."""
REASON_CHARS = 160
HANG_GRACE_S = 1.5
"""A hung rank is to be named within three usual steps and this."""
KILL = "SIGKILL of one rank of 4 until the next step of the full world"


Result = TypeVar("Result", Outcome, Incident)


@dataclass
class Contender(Generic[Result]):
    name: str
    trial: Callable[[], Result]
    rounds: int = SLOW_ROUNDS
    spare: bool = False
    """A fifth rank is there all the time and waits, or computes along."""
    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [result.seconds for result in self.results]

    def run(self, turn: int, late: bool) -> None:
        hopeless = not self.results and len(self.failures) >= HOPELESS
        if turn >= self.rounds or hopeless or (late and turn and self.rounds < ROUNDS):
            return
        try:
            self.results.append(self.trial())
        except TrialError as error:
            self.failures.append(_reason(error))

    @property
    def brief(self) -> str:
        """For all rows but its own."""
        return ms(self.seconds) if self.results else "no recovery"

    def __str__(self) -> str:
        tried = len(self.results) + len(self.failures)
        if not self.results:
            return f"no recovery in {tried} of {tried} trials: {self.failures[-1]}"
        if not self.failures:
            return ms(self.seconds)
        failed = f"{len(self.failures)} of {tried} trials failed, last: {self.failures[-1]}"
        return f"{ms(self.seconds)}; {failed}"


def measure() -> list[Row]:
    killed = Contender("taskd", ours.killed, ROUNDS)
    cut = Contender("taskd, links cut", ours.cut, ROUNDS)
    hung = Contender("taskd, a rank hangs", ours.hung, ROUNDS)
    shrunk = Contender("taskd, a node is lost", ours.shrunk, ROUNDS)
    plain = Contender("`taskd run` with a script that knows nothing of it", ours.unmodified, ROUNDS)
    yardstick = Contender("the floor", floor.trial, ROUNDS)
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
    prepare()  # installing does not count as measuring
    turns: list[Contender[Any]] = [killed, yardstick, cut, shrunk, plain, hung, *peers]
    deadline = time.monotonic() + BUDGET_S
    for turn in range(1 if os.environ.get("TASKD_BENCH_QUICK") else ROUNDS):
        for contender in turns:
            contender.run(turn, late=time.monotonic() > deadline)
    return [
        *_against_floor(killed, yardstick),
        *_against_best(killed, peers),
        *(_against_peer(killed, peer) for peer in peers),
        _unprotected(plain, restart),
        _cut(cut),
        *_shrunk(shrunk),
        _hung(hung),
    ]


def _reason(error: TrialError) -> str:
    """On one line of a table: how far it came, and the error that was told last, if any."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines[1:] if "error" in line.lower()] or lines[-1:]
    return f"{lines[0].partition(';')[0]}; {told[-1]}".replace("|", "/")[:REASON_CHARS]


def _times(slow: list[float], fast: list[float]) -> float | None:
    """How many times longer the first one takes."""
    return median(slow) / median(fast) if slow and fast else None


def _against_floor(killed: Contender[Incident], yardstick: Contender[Outcome]) -> list[Row]:
    against = Row(
        f"{KILL}, against a no-restart floor",
        str(killed),
        str(yardstick),
        _times(killed.seconds, yardstick.seconds),
        2.5,
    )
    if not killed.results:
        return [against]
    seconds = Row("the same, in seconds", killed.brief, "", median(killed.seconds), 0.5)
    return [against, seconds, *_account(killed)]


def _against_best(killed: Contender[Incident], peers: list[Contender[Outcome]]) -> list[Row]:
    """Those that use the same four ranks, and those that need a fifth, are different offers."""
    rows = []
    for spare, kind in ((False, "with the same 4 ranks"), (True, "with a fifth rank in reserve")):
        able = [peer for peer in peers if peer.spare == spare and peer.results]
        if able:
            best = min(able, key=lambda peer: median(peer.seconds))
            what, against = f"the best peer {kind}, how much slower", f"{best.name}: {best.brief}"
            rows.append(
                Row(
                    what,
                    killed.brief,
                    against,
                    _times(best.seconds, killed.seconds),
                    5.0,
                    at_least=True,
                )
            )
    return rows


def _against_peer(killed: Contender[Incident], peer: Contender[Outcome]) -> Row:
    told = str(peer)
    if redone := median([result.steps_redone for result in peer.results] or [0]):
        told += f", {redone:.0f} steps done again"
    reduced = [each.reduced_seconds for each in peer.results if each.reduced_seconds is not None]
    if reduced:
        told += f"; 3 ranks alone after {ms(reduced)}"
    return Row(
        f"{peer.name}, how much slower", killed.brief, told, _times(peer.seconds, killed.seconds)
    )


def _unprotected(plain: Contender[Outcome], restart: Contender[Outcome]) -> Row:
    what = f"{plain.name}; torchrun, how much slower"
    return Row(what, str(plain), restart.brief, _times(restart.seconds, plain.seconds))


def _cut(cut: Contender[Incident]) -> Row:
    what = "links of one rank cut until the next step of all, in seconds"
    took = median(cut.seconds) if cut.results else None
    return Row(what, str(cut), "no process is replaced", took, 0.2)


def _shrunk(shrunk: Contender[Incident]) -> list[Row]:
    what = "launcher of one of 2 nodes killed until the next step of the other's ranks, in seconds"
    took = median(shrunk.seconds) if shrunk.results else None
    row = Row(what, str(shrunk), "half of the ranks go on alone", took, 0.3)
    return [row, *_account(shrunk)]


def _account(contender: Contender[Incident]) -> list[Row]:
    if not contender.results:
        return []
    parts = {"seen": median(incident.seen for incident in contender.results)}
    for name in contender.results[0].parts:
        parts[name] = median(incident.parts.get(name, 0.0) for incident in contender.results)
    told = ", ".join(f"{name} {part * 1000:.0f}" for name, part in parts.items())
    return [Row("of which, in ms", told, "the job's own account; seen is the rest")]


def _hung(hung: Contender[Incident]) -> Row:
    what = "a rank that hangs (SIGSTOP) until it is named"
    if not hung.results:
        return Row(what, str(hung), "")
    named = [incident.seen for incident in hung.results]
    limits = [3 * incident.usual_step_s + HANG_GRACE_S for incident in hung.results]
    against = f"3 usual steps + {HANG_GRACE_S:g} s: {ms(limits)}"
    return Row(what, ms(named), against, median(named) / median(limits), 1.0)
