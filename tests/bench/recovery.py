"""Recovery from the loss of one rank: taskd, a no-restart floor, and other projects.

The same job, the same fault and the same measure for all (see peers/). They run in turn, so that a
busy minute of the machine affects all. `TASKD_BENCH_QUICK=1` runs one round instead of five. A peer
that does not recover, or cannot be installed, gets a row with the reason instead of a number.
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
from tests.bench.peers.train.restarted import SAVE_EVERY
from tests.bench.peers.trial import WARM_S, WARM_STEPS, Outcome, TrialError
from tests.bench.peers.venvs import PACKAGES, prepare
from tests.bench.peers.workload import BATCH, WORLD
from tests.bench.rows import Row, ms

ROUNDS = 5
BUDGET_S = 1500.0
"""After this time the peers are not run again; their rows say how many trials they had."""
HOPELESS = 2
"""A peer that fails this often without ever recovering is not run again."""
REASON_CHARS = 160
HANG_GRACE_S = 1.5
"""A hung rank must be detected within three usual steps plus this time."""
KILL = "SIGKILL of one of 4 ranks until the next step of all ranks"
NOTES = f"""
How this was measured:

- *The job*: an MLP of a million parameters, AdamW, batches of {BATCH}, {WORLD} ranks over gloo on
  one machine, the same torch everywhere. All systems take turns, {ROUNDS} rounds. A trial waits
  until all ranks have done {WARM_STEPS} steps and {WARM_S:g} s more, kills one rank with SIGKILL,
  and ends when all ranks of a full world have finished one and the same step after that.
- *The floor*: plain PyTorch without any recovery system. The survivors keep running. A fifth
  process is ready, with model and optimizer built and warmed up; it is notified through a pipe and
  gets its state by a broadcast. Nothing is decided, protected or checked.
- *taskd*: `taskd run --nproc-per-node {WORLD}` with its defaults; manager and clusterd run on the
  same machine and are part of the time.
- *torchrun*: checks its workers every 0.1 s, which is its default. The variable
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set; without it, restarted ranks often never meet.
  The script saves a checkpoint every {SAVE_EVERY} steps and resumes from it; the same script runs
  under DLRover and NVIDIA's launcher.
- *DLRover* ({PACKAGES["dlrover"][0]}): a local master and `dlrover-run`, checking every 0.1 s.
- *NVIDIA* ({PACKAGES["nvrx"][0]}): in-job restart by `ft_launcher`, checking every 0.1 s;
  in-process restart by its wrapper with a fifth process in reserve, all intervals at 0.1 s instead
  of seconds, every lazy import done before, and our method to free ranks from gloo, which it lacks.
- *torchft* ({PACKAGES["torchft"][0]}): a lighthouse and one torchrun per rank, as in its own
  example; heartbeats are valid for 1 s instead of 5, joining waits 1 s instead of 60, its clock
  ticks every 20 ms instead of 100. With a spare, a fifth replica computes all the time.
"""


Result = TypeVar("Result", Outcome, Incident)


@dataclass
class Contender(Generic[Result]):
    name: str
    trial: Callable[[], Result]
    is_peer: bool = False
    spare: bool = False
    """A fifth rank runs all the time; it waits, or computes along."""
    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [result.seconds for result in self.results]

    def run(self, turn: int, late: bool) -> None:
        hopeless = not self.results and len(self.failures) >= HOPELESS
        if hopeless or (late and self.is_peer and turn):
            return
        try:
            self.results.append(self.trial())
        except TrialError as error:
            self.failures.append(_reason(error))

    @property
    def brief(self) -> str:
        """The text for the rows of other contenders."""
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
    killed = Contender("taskd", ours.killed)
    cut = Contender("taskd, links cut", ours.cut)
    hung = Contender("taskd, a rank hangs", ours.hung)
    shrunk = Contender("taskd, a node is lost", ours.shrunk)
    plain = Contender("`taskd run` with an unmodified script", ours.unmodified)
    yardstick = Contender("the floor", floor.trial)
    restart, *_ = peers = [
        Contender(name, trial, is_peer=True, spare="spare" in name)
        for name, trial in {
            "torchrun": torchrun.trial,
            "DLRover": dlrover.trial,
            "NVIDIA, in-job restart": nvrx.trial_in_job,
            "NVIDIA, in-process restart with a spare rank": nvrx.trial_in_process,
            "torchft": torchft.trial,
            "torchft with a spare rank": torchft.trial_with_spare,
        }.items()
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
        *_cut(cut),
        *_shrunk(shrunk),
        *_hung(hung),
    ]


def _reason(error: TrialError) -> str:
    """One table cell: how far the trial got, and the last error that was printed, if any."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines[1:] if "error" in line.lower()] or lines[-1:]
    return f"{lines[0].partition(';')[0]}; {errors[-1]}".replace("|", "/")[:REASON_CHARS]


def _times(slow: list[float], fast: list[float]) -> float | None:
    """How many times longer the slow one takes."""
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
    """The best peer that uses the same four ranks, and the best one that needs a fifth."""
    rows = []
    for spare, kind in ((False, "with the same 4 ranks"), (True, "with a fifth rank as a spare")):
        able = [peer for peer in peers if peer.spare == spare and peer.results]
        if able:
            best = min(able, key=lambda peer: median(peer.seconds))
            what, against = (
                f"the best other system {kind}, how much slower",
                f"{best.name}: {best.brief}",
            )
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
    text = str(peer)
    if redone := median([result.steps_redone for result in peer.results] or [0]):
        text += f", {redone:.0f} steps repeated"
    reduced = [each.reduced_seconds for each in peer.results if each.reduced_seconds is not None]
    if reduced:
        text += f"; 3 ranks continue alone after {ms(reduced)}"
    return Row(
        f"{peer.name}, how much slower", killed.brief, text, _times(peer.seconds, killed.seconds)
    )


def _unprotected(plain: Contender[Outcome], restart: Contender[Outcome]) -> Row:
    what = f"{plain.name}; torchrun, how much slower"
    return Row(what, str(plain), restart.brief, _times(restart.seconds, plain.seconds))


def _cut(cut: Contender[Incident]) -> list[Row]:
    what = "links of one rank cut until the next step of all ranks, in seconds"
    took = median(cut.seconds) if cut.results else None
    return [Row(what, str(cut), "no process is replaced", took, 0.2), *_account(cut)]


def _shrunk(shrunk: Contender[Incident]) -> list[Row]:
    what = "launcher of one of 2 nodes killed until the next step of the other's ranks, in seconds"
    took = median(shrunk.seconds) if shrunk.results else None
    row = Row(what, str(shrunk), "half of the ranks continue alone", took, 0.3)
    return [row, *_account(shrunk)]


def _account(contender: Contender[Incident]) -> list[Row]:
    return [account(contender.results)] if contender.results else []


def account(incidents: list[Incident]) -> Row:
    parts = {"seen": median(incident.seen for incident in incidents)}
    for name in incidents[0].parts:
        parts[name] = median(incident.parts.get(name, 0.0) for incident in incidents)
    text = ", ".join(f"{name} {part * 1000:.0f}" for name, part in parts.items())
    return Row("of this, in ms", text, "as the job reports it; seen is the rest")


def _hung(hung: Contender[Incident]) -> list[Row]:
    what = "a rank hangs (SIGSTOP), until it is named"
    if not hung.results:
        return [Row(what, str(hung), "")]
    named = [incident.seen for incident in hung.results]
    limits = [3 * incident.usual_step_s + HANG_GRACE_S for incident in hung.results]
    against = f"3 usual steps + {HANG_GRACE_S:g} s: {ms(limits)}"
    after = [incident.seconds - incident.seen for incident in hung.results]
    return [
        Row(what, ms(named), against, median(named) / median(limits), 1.0),
        Row(
            "from there to the next step of all ranks, in seconds",
            ms(after),
            "",
            median(after),
            0.5,
        ),
        *_account(hung),
    ]
