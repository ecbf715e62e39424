"""What a person is told at the end of `taskd run`: the faults, what was done, how long it took.

The manager's own account (`summary.json`) is best; on other nodes, or without it, what this node
has seen itself must do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taskd.agent.run.job_account import Incident, count
from taskd.core.agent.machine import Done, State, Training, describe_exit, running
from taskd.model import messages as m
from taskd.model.agent import Event

EVIDENCE_LINES = 12


@dataclass
class _Fault:
    at_s: float
    exited: m.WorkerExited
    answer: str = "none"
    until_s: float | None = None


class Summary:
    """Watches one node's machine, event by event."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._faults: list[_Fault] = []

    def see(self, event: Event, before: State, state: State) -> None:
        now = self._clock() - self._began
        match event:
            case m.WorkerExited() if event.exit_code != 0 and isinstance(before, Training):
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

    def lines(self, over: Done, trouble: str, incidents: list[Incident]) -> list[str]:
        """The whole story, the first line first."""
        took = self._clock() - self._began
        word = "done" if over.exit_code == 0 else "failed"
        story = incidents or [Incident(_line(fault), True) for fault in self._faults]
        told = [f"{word} after {took:.1f} s, {count(story)}: {over.because}"]
        if trouble and over.exit_code:
            told.append(trouble)
        told += [incident.line for incident in story]
        if over.exit_code and self._faults:
            told += self._root_cause(self._faults[-1])
        return told

    def _root_cause(self, last: _Fault) -> list[str]:
        first = next((f for f in self._faults if f.until_s is None), last)
        lines = first.exited.evidence.strip().splitlines()[-EVIDENCE_LINES:]
        exited = first.exited
        ended = describe_exit(exited)
        head = f"first to fail: rank {exited.rank}, pid {exited.pid}, {ended}"
        return [head, *(f"  | {line}" for line in lines)]


def _line(fault: _Fault) -> str:
    cured = ""
    if fault.until_s is not None:
        cured = f" -> {fault.answer}, processes back in {fault.until_s - fault.at_s:.2f} s"
    rank, life = fault.exited.rank, fault.exited.incarnation
    return f"  {fault.at_s:7.1f} s  rank {rank}.{life} {describe_exit(fault.exited)}{cured}"
