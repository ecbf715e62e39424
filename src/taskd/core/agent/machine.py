"""One node's training processes: start, stop, replace some, give up.

    Waiting -> Training -> Stopping -> Over
       |           |                    ^
       +-----------+--------------------+

The manager decides for the job; this machine carries its orders out on one node, in an order that
is always safe. Orders come twice, late, or out of order: an older incident or attempt is refused, a
repeated one is answered again. The states are in `states`, the reactions in `orders` (processes
start) and `endings` (all of them end).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import assert_never

from taskd.core.agent.exits import SIGTERM, describe_exit, finish, stop, stop_now, waited
from taskd.core.agent.orders import (
    begin,
    first_start,
    go_on,
    replace_some,
    restart_all,
    restart_job,
    started,
)
from taskd.core.agent.states import (
    LEGAL,
    Done,
    Node,
    Outcome,
    State,
    Stopping,
    Training,
    Waiting,
    WorkersConfig,
    alive,
    finished,
    hello,
    incarnation_of,
    kill,
    local,
    names,
    next_incarnation,
    present,
    running,
    with_worker,
)
from taskd.model import messages as m
from taskd.model.agent import (
    Command,
    Dying,
    Ended,
    Event,
    Interrupted,
    ManagerConnected,
    ManagerDisconnected,
    SendHello,
    SendToManager,
    WarmedUp,
    WorkerStarted,
    WorkerStartFailed,
)
from taskd.model.types import Tick

__all__ = [
    "LEGAL",
    "Done",
    "Node",
    "Outcome",
    "State",
    "Stopping",
    "Training",
    "Waiting",
    "WorkersConfig",
    "describe_exit",
    "running",
    "step",
]


def step(state: State, event: Event, now: float, config: WorkersConfig) -> Outcome:
    """Decide. Same state, same event, same time: same answer."""
    match state, event:
        case Done(), _:
            return Outcome(state, because="the node's part of the job is over")
        case Waiting(Node(ranks=())), ManagerConnected():
            # A spare waits for as long as there is a job that may need it.
            waiting = replace(state, deadline=inf)
            return Outcome(waiting, hello(state), "ready to take over ranks of another node")
        case Waiting(Node(ranks=())), ManagerDisconnected():
            waiting = replace(state, deadline=now + config.permission_timeout_s)
            return Outcome(waiting, because="the manager is out of reach")
        case _, ManagerConnected():
            return Outcome(state, hello(state), "the manager must know what is true here")
        case _, m.NodeMarkedBad(evidence):
            known = replace(state, node=replace(state.node, condemned=evidence))
            return Outcome(known, because=f"this node is not to be used again: {evidence}")
        case Waiting(), WarmedUp():
            node = state.node
            word = SendHello((), node.attempt, node.remaining, node.condemned)
            return Outcome(state, (word,), "a job that trains without us need not wait any longer")
        case _, WarmedUp():
            return Outcome(state, because="that the workers run is proof enough")
        case _, ManagerDisconnected():
            return Outcome(
                state, because="the manager will have to be told again what is true here"
            )
        case Waiting(), Tick() if now >= state.deadline:
            return finish(
                state.node, 1, f"no permission to start in {config.permission_timeout_s:g} s"
            )
        case Waiting(), (m.StartWorkers(remaining) | m.RestartAgent(remaining)):
            return first_start(replace(state.node, remaining=remaining), ())
        case Waiting(), m.RestartJob(incident, attempt, members):
            return first_start(replace(state.node, incident=incident, attempt=attempt), members)
        case Waiting(), m.ReplaceWorkers(incident, members):
            return first_start(replace(state.node, incident=incident), members)
        case Waiting(Node(ranks=())), Interrupted(because):
            return finish(state.node, 1, because, told=(SendToManager(m.RanksFailed(())),))
        case Waiting(), Interrupted(because):
            ended = m.EndJob(1, f"node {state.node.node} was {because}")
            return finish(state.node, 1, because, told=(SendToManager(ended),))
        case Waiting(), m.ExitAgent():
            return finish(state.node, 1, "the manager ordered the agent to exit")
        case Waiting(), m.EndJob(exit_code, because):
            return finish(state.node, exit_code, because)
        case Waiting(), _:
            return Outcome(
                state, because=f"{type(event).__name__} changes nothing before the start"
            )
        case _, WorkerStarted():
            return started(state, event)
        case _, WorkerStartFailed(rank, incarnation, because):
            gone = m.WorkerExited(
                rank, incarnation, 0, None, None, f"it could not start: {because}"
            )
            return _exited(state, gone, now, config)
        case _, m.WorkerExited():
            return _exited(state, event, now, config)
        case Stopping(), (Interrupted() | Tick()):
            if isinstance(event, Tick) and now < state.deadline:
                return Outcome(state, because="the workers still have time")
            return stop_now(state, "told twice" if isinstance(event, Interrupted) else "time is up")
        case Stopping(), _:
            return Outcome(state, because=f"already stopping: {state.because}")
        case Training(), Interrupted(because, signum):
            ended = m.EndJob(1, f"node {state.node.node} was {because}")
            last_words = SendToManager(ended), SendToManager(m.RanksFailed(()))
            return stop(state, 1, because, signum, now + config.grace_s, last_words)
        case Training(), m.ExitAgent():
            told = SendToManager(m.RanksFailed(()))
            return stop(state, 1, "the manager ordered the agent to exit", None, now, (told,))
        case Training(), m.EndJob(exit_code, because):
            return stop(state, exit_code, because, SIGTERM, now + config.grace_s)
        case Training(), Tick():
            return waited(state, now, config)
        case Training(), m.StartWorkers():
            return Outcome(state, (present(state.node, state.workers),), "the workers run already")
        case Training(), m.ReplaceWorkers():
            return replace_some(state, event, now, config)
        case Training(), m.RestartJob():
            return restart_job(state, event, now, config)
        case Training(), m.RestartAgent(remaining):
            return restart_all(state, remaining, now, config)
        case Training(), m.RestartWorkers(ranks):
            again = {r: next_incarnation(state, r) for r in local(state.node, ranks)}
            return begin(state, again, False, now, config, f"ordered to restart {names(again)}")
        case Training(), m.StopWorkers(ranks):
            here = local(state.node, ranks)
            pending = {r: i for r, i in state.pending.items() if r not in here}
            workers, commands = kill(state.workers, here)
            stopped = replace(state, workers=workers, pending=pending)
            return Outcome(stopped, commands, f"ordered to stop {names(here)}")
        case _:
            assert_never(event)


# A process ends


def _exited(
    state: Training | Stopping, exited: m.WorkerExited, now: float, config: WorkersConfig
) -> Outcome:
    worker = state.workers.get(exited.rank)
    if worker is None or isinstance(worker, Ended) or incarnation_of(worker) != exited.incarnation:
        return Outcome(state, because=f"an older life of rank {exited.rank} has ended")
    after = with_worker(state, exited.rank, Ended(exited))
    if isinstance(after, Stopping):
        if alive(after.workers):
            return Outcome(after, because=f"{len(alive(after.workers))} ranks still to end")
        return finish(after.node, after.exit_code, after.because, after.workers)
    if exited.rank in after.pending:
        return go_on(after, (), f"the last life of rank {exited.rank} is over")
    deadline = after.deadline
    if all(finished(w) for w in after.workers.values()):
        deadline = now + config.farewell_s
    elif exited.exit_code != 0 and not isinstance(worker, Dying):
        deadline = min(deadline, now + config.order_timeout_s)
    told: tuple[Command, ...] = (SendToManager(exited),)
    if config.in_ascends_words and exited.exit_code != 0:
        told += (SendToManager(m.RanksFailed((exited.rank,))),)
    because = f"rank {exited.rank} ended: {describe_exit(exited)}"
    return go_on(replace(after, deadline=deadline), told, because)
