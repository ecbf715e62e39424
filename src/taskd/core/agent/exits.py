"""How a node's part of the job comes to its end: processes are asked, then killed."""

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

SIGTERM = 15


def describe_exit(exited: m.WorkerExited) -> str:
    """How a process ended, in a few words."""
    if exited.signal is not None:
        return f"killed by signal {exited.signal}"
    return "no exit status" if exited.exit_code is None else f"exit code {exited.exit_code}"


def waited(state: Training, now: float, config: WorkersConfig) -> Outcome:
    if now < state.deadline:
        return Outcome(state, because="the deadline has moved")
    if all(finished(worker) for worker in state.workers.values()):
        return finish(state.node, 0, "every rank of the node has finished", state.workers)
    late = f"nobody decided about the dead ranks in {config.order_timeout_s:g} s"
    return stop(state, 1, late, SIGTERM, now + config.grace_s)


def stop(
    state: Training,
    exit_code: int,
    because: str,
    signum: int | None,
    deadline: float,
    told: tuple[Command, ...] = (),
) -> Outcome:
    living = alive(state.workers)
    if not living:
        return finish(state.node, exit_code, because, state.workers, told)
    stopping = Stopping(state.node, state.workers, exit_code, because, deadline)
    if signum is None:
        return stop_now(stopping, because, told)
    asked = tuple(
        SignalWorker(rank, incarnation_of(worker), signum) for rank, worker in living.items()
    )
    return Outcome(stopping, (*told, *asked), because)


def stop_now(state: Stopping, why: str, told: tuple[Command, ...] = ()) -> Outcome:
    workers, commands = kill(state.workers, state.workers)
    stopped = replace(state, workers=workers, deadline=inf)
    return Outcome(stopped, (*told, *commands), f"killing what is left: {why}")


def finish(
    node: Node,
    exit_code: int,
    because: str,
    workers: Workers | None = None,
    told: tuple[Command, ...] = (),
) -> Outcome:
    return Outcome(Done(node, exit_code, because, workers or {}), told, because)
