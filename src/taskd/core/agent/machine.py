"""The agent's state machine: start, stop and replace the training processes of one node.

    Waiting -> Training -> Stopping -> Done
       |           |                    ^
       +-----------+--------------------+

The manager decides for the job; this machine carries out its orders on one node, always in a safe
sequence. Orders may come twice, late or out of order: those of an older incident or attempt are
rejected, a repeated one is answered again. The states are in `states.py`, the reactions in
`orders.py` (processes start) and `exits.py` (the node's part of the job ends).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import assert_never

from taskd.core.agent.exits import SIGTERM, deadline_passed, describe_exit, finish, stop, stop_now
from taskd.core.agent.orders import (
    first_start,
    replace_processes,
    replace_some,
    restart_all,
    restart_job,
    start_pending,
    started,
)
from taskd.core.agent.states import (
    LEGAL,
    Done,
    LostManager,
    Node,
    Outcome,
    State,
    Stopping,
    Training,
    Waiting,
    WorkersConfig,
    alive,
    describe,
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
    ManagerLost,
    PrepareStandby,
    RanksTrain,
    Running,
    SendToManager,
    Starting,
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
    """Decide what to do. Deterministic: the same input always gives the same outcome."""
    match state, event:
        case Done(), _:
            return Outcome(state, because="the node's part of the job has ended")
        case Waiting(Node(ranks=())), ManagerConnected():
            # A spare node waits as long as there is a job that may need it.
            waiting = replace(state, deadline=inf)
            return Outcome(waiting, hello(state), "ready to take over ranks of another node")
        case Waiting(Node(ranks=())), ManagerDisconnected():
            waiting = replace(state, deadline=now + config.permission_timeout_s)
            return Outcome(waiting, because="disconnected from the manager")
        case Training(lost=LostManager(order_by=order_by)), (ManagerConnected() | RanksTrain()):
            found = replace(state, lost=None, deadline=order_by)
            greeting = hello(found) if isinstance(event, ManagerConnected) else ()
            return Outcome(found, greeting, "the job continues")
        case Training(lost=None), ManagerLost(evidence) if alive(state.workers):
            lost = LostManager(evidence, state.deadline)
            stuck = replace(state, lost=lost, deadline=now + config.lost_manager_s)
            return Outcome(stuck, because=f"{evidence}: waiting for it")
        case _, (ManagerLost() | RanksTrain()):
            return Outcome(state, because="nothing here waits for the manager")
        case _, (ManagerConnected() | m.RequestHello()):
            return Outcome(
                state, hello(state), "connected: the manager gets the state of this node"
            )
        case _, m.NodeMarkedBad(evidence):
            known = replace(state, node=replace(state.node, condemned=evidence))
            return Outcome(known, because=f"this node is marked as bad: {evidence}")
        case _, m.KeepShards(shards):
            kept = {**state.node.shards, **{shard.rank: shard for shard in shards}}
            keeping = replace(state, node=replace(state.node, shards=kept))
            return Outcome(keeping, because=f"keeping the shards of {len(kept)} ranks")
        case Waiting(), WarmedUp():
            hello_again = describe(state.node, ())
            return Outcome(state, (hello_again,), "warmed up: ranks can start here at once")
        case _, WarmedUp():
            return Outcome(state, because="warmed up; the workers are running already")
        case _, ManagerDisconnected():
            return Outcome(state, because="disconnected from the manager")
        case Waiting(), Tick() if now >= state.deadline:
            return finish(
                state.node,
                1,
                f"no permission to start came within {config.permission_timeout_s:g} s",
            )
        case Waiting(), (m.StartWorkers(remaining) | m.RestartAgent(remaining)):
            return first_start(replace(state.node, remaining=remaining), ())
        case Waiting(), m.RestartJob(incident, attempt, members, store):
            node = replace(state.node, incident=incident, attempt=attempt, store=store)
            return first_start(node, members)
        case Waiting(), m.ReplaceWorkers(incident, members, store):
            return first_start(replace(state.node, incident=incident, store=store), members)
        case Waiting(Node(ranks=())), Interrupted(because):
            return finish(state.node, 1, because, messages=(SendToManager(m.RanksFailed(())),))
        case Waiting(), Interrupted(because):
            ended = m.EndJob(1, f"node {state.node.node} was {because}")
            return finish(state.node, 1, because, messages=(SendToManager(ended),))
        case Waiting(), m.ExitAgent():
            return finish(state.node, 1, "the manager ordered the agent to exit")
        case Waiting(), m.EndJob(exit_code, because):
            return finish(state.node, exit_code, because)
        case Waiting(), _:
            return Outcome(state, because=f"{type(event).__name__} has no effect before the start")
        case _, WorkerStarted():
            outcome = started(state, event)
            return _registered_again(outcome) if config.in_ascends_words else outcome
        case _, WorkerStartFailed(rank, incarnation, because):
            failed = m.WorkerExited(
                rank, incarnation, 0, None, None, f"the process could not be started: {because}"
            )
            return _exited(state, failed, now, config)
        case _, m.WorkerExited():
            return _exited(state, event, now, config)
        case Stopping(), (Interrupted() | Tick()):
            if isinstance(event, Tick) and now < state.deadline:
                return Outcome(state, because="the deadline has not passed yet")
            is_second = isinstance(event, Interrupted)
            why = "interrupted twice" if is_second else "they did not end in time"
            return stop_now(state, why)
        case Stopping(), _:
            return Outcome(state, because=f"already stopping: {state.because}")
        case Training(), Interrupted(because, signum):
            ended = m.EndJob(1, f"node {state.node.node} was {because}")
            messages = SendToManager(ended), SendToManager(m.RanksFailed(()))
            return stop(state, 1, because, signum, now + config.grace_s, messages)
        case Training(), m.ExitAgent():
            leaving = SendToManager(m.RanksFailed(()))
            return stop(state, 1, "the manager ordered the agent to exit", None, now, (leaving,))
        case Training(), m.EndJob(exit_code, because):
            return stop(state, exit_code, because, SIGTERM, now + config.grace_s)
        case Training(), Tick():
            return deadline_passed(state, now, config)
        case Training(), m.StartWorkers():
            return Outcome(
                state, (present(state.node, state.workers),), "the workers are running already"
            )
        case Training(), m.ReplaceWorkers():
            return replace_some(state, event, now, config)
        case Training(), m.RestartJob():
            return restart_job(state, event, now, config)
        case Training(), m.RestartAgent(remaining):
            return restart_all(state, remaining, now, config)
        case Training(), m.RestartWorkers(ranks):
            again = {r: next_incarnation(state, r) for r in local(state.node, ranks)}
            return replace_processes(
                state, again, False, now, config, f"ordered to restart {names(again)}"
            )
        case Training(), m.StopWorkers(ranks):
            here = local(state.node, ranks)
            pending = {r: i for r, i in state.pending.items() if r not in here}
            workers, commands = kill(state.workers, here)
            stopped = replace(state, workers=workers, pending=pending)
            return Outcome(stopped, commands, f"ordered to stop {names(here)}")
        case Training(), m.EndWorkers(members):
            return _end_former(state, members)
        case _:
            assert_never(event)


def _end_former(state: Training, members: tuple[m.Member, ...]) -> Outcome:
    former = tuple(
        member.rank
        for member in members
        if isinstance(worker := state.workers.get(member.rank), Starting | Running)
        and worker.incarnation == member.incarnation
    )
    workers, commands = kill(state.workers, former)
    because = f"the job continues without {names(former)}" if former else "they have ended already"
    return Outcome(replace(state, workers=workers), commands, because)


def _registered_again(outcome: Outcome) -> Outcome:
    """Once all ranks run again: Ascend's manager forgets a death only when the agent registers."""
    all_run = any(isinstance(command, PrepareStandby) for command in outcome.commands)
    state = outcome.state
    if not all_run or not isinstance(state, Training):
        return outcome
    if not any(isinstance(w, Running) and w.incarnation for w in state.workers.values()):
        return outcome
    register = SendToManager(m.AgentRegistered())
    return replace(outcome, commands=(*outcome.commands, register))


# A process ends


def _exited(
    state: Training | Stopping, exited: m.WorkerExited, now: float, config: WorkersConfig
) -> Outcome:
    worker = state.workers.get(exited.rank)
    if worker is None or isinstance(worker, Ended) or incarnation_of(worker) != exited.incarnation:
        return Outcome(state, because=f"an older incarnation of rank {exited.rank} has ended")
    after = with_worker(state, exited.rank, Ended(exited))
    if isinstance(after, Stopping):
        if alive(after.workers):
            return Outcome(after, because=f"{len(alive(after.workers))} ranks have not ended yet")
        return finish(after.node, after.exit_code, after.because, after.workers)
    if exited.rank in after.pending:
        return start_pending(after, (), f"the previous incarnation of rank {exited.rank} has ended")
    deadline = after.deadline
    if all(finished(w) for w in after.workers.values()):
        deadline = now + config.farewell_s
    elif not exited.finished and not isinstance(worker, Dying):
        deadline = min(deadline, now + config.order_timeout_s)
    messages: tuple[Command, ...] = (SendToManager(exited),)
    if config.in_ascends_words and not exited.finished:
        messages += (SendToManager(m.RanksFailed((exited.rank,))),)
    because = f"rank {exited.rank} ended: {describe_exit(exited)}"
    return start_pending(replace(after, deadline=deadline), messages, because)
