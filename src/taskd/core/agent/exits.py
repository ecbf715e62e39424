"""How a node's part of the job ends: its processes get a signal first and are killed later."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from taskd.core.agent.states import (
    Done,
    Node,
    Outcome,
    Stopping,
    Training,
    Workers,
    WorkersConfig,
    alive,
    finished,
    incarnation_of,
    kill,
)
from taskd.model import messages as m
from taskd.model.agent import Command, SignalWorker
from taskd.model.faults import signal_text

SIGTERM = 15


def describe_exit(exited: m.WorkerExited) -> str:
    """How a process ended, in a few words for logs and status."""
    if exited.signal is not None:
        how = f"killed by {signal_text(exited.signal)}"
    elif exited.exit_code is None:
        how = "no exit status"
    else:
        how = f"exit code {exited.exit_code}"
    late = exited.script_ended and exited.exit_code != 0
    return f"{how} after its script had ended, which counts as finished" if late else how


def deadline_passed(state: Training, now: float, config: WorkersConfig) -> Outcome:
    if now < state.deadline:
        return Outcome(state, because="the deadline has not passed yet")
    if state.lost is not None:
        why = f"{state.lost.evidence}; it did not come back within {config.lost_manager_s:g} s"
        return stop(state, 1, why, SIGTERM, now + config.grace_s)
    if all(finished(worker) for worker in state.workers.values()):
        return finish(state.node, 0, "all ranks of the node have finished", state.workers)
    why = f"no order for the dead ranks came within {config.order_timeout_s:g} s"
    return stop(state, 1, why, SIGTERM, now + config.grace_s)


def stop(
    state: Training,
    exit_code: int,
    because: str,
    signum: int | None,
    deadline: float,
    messages: tuple[Command, ...] = (),
) -> Outcome:
    living = alive(state.workers)
    if not living:
        return finish(state.node, exit_code, because, state.workers, messages)
    stopping = Stopping(state.node, state.workers, exit_code, because, deadline)
    if signum is None:
        return stop_now(stopping, because, messages)
    signals = tuple(
        SignalWorker(rank, incarnation_of(worker), signum) for rank, worker in living.items()
    )
    return Outcome(stopping, (*messages, *signals), because)


def stop_now(state: Stopping, why: str, messages: tuple[Command, ...] = ()) -> Outcome:
    workers, commands = kill(state.workers, state.workers)
    stopped = replace(state, workers=workers, deadline=inf)
    return Outcome(stopped, (*messages, *commands), f"killing the remaining processes: {why}")


def finish(
    node: Node,
    exit_code: int,
    because: str,
    workers: Workers | None = None,
    messages: tuple[Command, ...] = (),
) -> Outcome:
    return Outcome(Done(node, exit_code, because, workers or {}), messages, because)
