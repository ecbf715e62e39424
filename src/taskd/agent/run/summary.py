"""What a person reads at the end of `taskd run`: the faults, the reaction, and the time it took.

The manager that ends the job writes its own summary (`summary.json`) into its state directory,
which is the best source. On other nodes of a job with etcd we use what its leaders have saved
there; without either, what this node has seen itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskd.agent.run.plan import Plan
from taskd.core.agent import incident_text
from taskd.core.agent.error_text import error_lines
from taskd.core.agent.machine import Done, State, Training, describe_exit, running
from taskd.model import messages as m
from taskd.model.agent import Event
from taskd.runtime.plain_text import one_line
from taskd.wire.json_reading import loads

SUMMARY, JOURNAL = "summary.json", "clusterd.journal"
"""In the state directory."""
STOPPED = "stopped by "
EVIDENCE_LINES = 12


@dataclass(frozen=True, slots=True)
class Incident:
    line: str
    fault: bool
    """False: the job was paused by an order, for an operation or to grow."""


@dataclass
class _Fault:
    at_s: float
    exited: m.WorkerExited
    answer: str = "none"
    until_s: float | None = None


class Summary:
    """Observes one node's machine, event by event."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._faults: list[_Fault] = []
        self._late: list[m.WorkerExited] = []
        """Processes that failed by themselves after their script had ended."""

    def observe(self, event: Event, before: State, state: State) -> None:
        now = self._clock() - self._began
        match event:
            case m.WorkerExited() if event.finished:
                if event.exit_code != 0 and isinstance(before, Training):
                    self._late.append(event)
            case m.WorkerExited() if isinstance(before, Training):
                if event.rank not in before.pending:
                    self._faults.append(_Fault(now, event))
            case m.ReplaceWorkers():
                self._answer("recover-in-place")
            case m.RestartJob() | m.RestartAgent():
                self._answer("restart")
            case _:
                pass
        if isinstance(state, Training) and len(running(state.workers)) == len(state.node.ranks):
            for fault in self._faults:
                fault.until_s = fault.until_s or now

    def _answer(self, what: str) -> None:
        for fault in self._faults:
            if fault.until_s is None:
                fault.answer = what

    def lines(self, done: Done, trouble: str, incidents: list[Incident]) -> list[str]:
        """The result first, then the incidents, then the root cause of a failure."""
        took = self._clock() - self._began
        stopped = done.because.startswith(STOPPED)
        result = "done" if done.exit_code == 0 else "stopped" if stopped else "failed"
        shown = incidents or [Incident(_fault_line(fault), True) for fault in self._faults]
        lines = [f"{result} after {took:.1f} s, {count(shown)}: {done.because}"]
        if trouble and done.exit_code and not stopped:
            lines.append(trouble)  # after a signal, the manager may simply have ended first
        lines += [incident.line for incident in shown]
        lines += [f"  rank {each.rank}: {describe_exit(each)}" for each in self._late]
        if done.exit_code:
            lines += self._root_cause()
        return lines

    def _root_cause(self) -> list[str]:
        """The first fault after which the processes did not run again."""
        first = next((fault for fault in self._faults if fault.until_s is None), None)
        if first is None:
            return []
        evidence = error_lines(first.exited.evidence, EVIDENCE_LINES)
        exited = first.exited
        head = f"first rank to fail: rank {exited.rank}, pid {exited.pid}, {describe_exit(exited)}"
        return [head, *(f"  | {line}" for line in evidence)]


def _fault_line(fault: _Fault) -> str:
    recovered = ""
    if fault.until_s is not None:
        took = fault.until_s - fault.at_s
        recovered = f" -> {fault.answer}, processes running again after {took:.2f} s"
    rank, incarnation = fault.exited.rank, fault.exited.incarnation
    return (
        f"  {fault.at_s:7.1f} s  rank {rank}.{incarnation} {describe_exit(fault.exited)}{recovered}"
    )


def count(incidents: list[Incident]) -> str:
    faults = sum(incident.fault for incident in incidents)
    pauses = len(incidents) - faults
    text = f"{faults} fault{'s' * (faults != 1)}"
    return f"{text}, {pauses} pause{'s' * (pauses != 1)} by order" if pauses else text


def hint(incidents: list[Incident], plan: Plan) -> list[str]:
    """How to look at the incidents in detail."""
    if not any(incident.fault for incident in incidents):
        return []
    journal = Path(plan.state_dir) / JOURNAL
    if plan.clusterd:
        where = f"--server {shlex.quote(plan.clusterd)}"
    elif plan.state_dir and journal.exists():
        where = f"--journal {shlex.quote(str(journal))}"
    elif plan.state_dir or plan.etcd:
        return []  # the history was kept in etcd, and only the job itself has served it
    else:
        return ["to keep the incidents for a report (taskd replay --html): run with --state-dir"]
    return [f"for a report: taskd replay {shlex.quote(plan.job)} {where} --html report.html"]


# The manager's summary


def has_ended(summary: Path) -> bool:
    """Whether the manager has ended the job, not only its own process."""
    return _read(summary).get("exit_code") is not None


def read_incidents(state_dir: str, kept: Sequence[dict[str, Any]] = ()) -> list[Incident]:
    """`kept`: what the leaders of the job have saved. A manager that led before another one did
    has written a summary, too, without the incidents since. Empty if nothing is known."""
    try:
        summary = _read(Path(state_dir) / SUMMARY)
        is_newest = summary.get("exit_code") is not None or not kept
        incidents = summary["incidents"] if is_newest else kept
        return [
            Incident(f"  {one_line(incident_text.line(group))}", any(i["faults"] for i in group))
            for group in incident_text.groups(incidents)
        ]
    except (AttributeError, KeyError, TypeError):
        return []


def _read(summary: Path) -> dict[str, Any]:
    try:
        content = loads(summary.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
