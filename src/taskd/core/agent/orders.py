"""Starting processes: for the first time, as replacements of dead ones, or all of them again.

The next incarnation of a rank starts only after the exit of the previous one is confirmed, and the
incarnations of an attempt start only after all processes of the previous attempt have exited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from taskd.core.agent.exits import finish, stop
from taskd.core.agent.states import (
    Node,
    Outcome,
    Stopping,
    Training,
    Workers,
    WorkersConfig,
    alive,
    finished,
    kill,
    names,
    newest,
    next_incarnation,
    present,
    with_worker,
)
from taskd.model import messages as m
from taskd.model.agent import (
    Command,
    Dying,
    Ended,
    KillWorker,
    PrepareStandby,
    RenewStore,
    Running,
    Starting,
    StartWorker,
    WorkerStarted,
)
from taskd.model.ids import Incarnation, Rank


def first_start(node: Node, members: tuple[m.Member, ...]) -> Outcome:
    if node.remaining < 0:
        return finish(node, 1, "the restart budget is used up")
    incarnations = {member.rank: member.incarnation for member in members}
    if incarnations:
        # Ranks of this node may have moved to another one, and others may have moved here.
        node = replace(node, ranks=tuple(sorted(incarnations)))
    first = {rank: incarnations.get(rank, Incarnation(0)) for rank in node.ranks}
    workers = {rank: Starting(incarnation) for rank, incarnation in first.items()}
    commands = tuple(_start(node, rank, incarnation) for rank, incarnation in first.items())
    training = Training(node, workers, {}, False)
    return Outcome(training, commands, f"permitted to start {len(first)} ranks")


def _start(node: Node, rank: Rank, incarnation: Incarnation) -> StartWorker:
    return StartWorker(rank, incarnation, node.attempt, node.incident, node.store)


def started(state: Training | Stopping, event: WorkerStarted) -> Outcome:
    worker = state.workers.get(event.rank)
    if not isinstance(worker, Starting | Dying) or worker.incarnation != event.incarnation:
        return Outcome(
            state,
            (KillWorker(event.rank, event.incarnation),),
            "the start of this incarnation was not ordered",
        )
    if isinstance(worker, Dying) or isinstance(state, Stopping):
        dying = with_worker(state, event.rank, Dying(event.incarnation, event.pid))
        killed = (KillWorker(event.rank, event.incarnation),)
        return Outcome(dying, killed, f"rank {event.rank} is not needed any more")
    after = with_worker(state, event.rank, Running(event.incarnation, event.pid))
    assert isinstance(after, Training)
    if after.pending or any(isinstance(other, Starting) for other in after.workers.values()):
        return Outcome(after, because=f"rank {event.rank} is running")
    report = present(after.node, after.workers)
    return Outcome(after, (report, PrepareStandby()), "all ranks of the node are running")


def replace_some(
    state: Training, order: m.ReplaceWorkers, now: float, config: WorkersConfig
) -> Outcome:
    if order.incident < state.node.incident:
        return Outcome(state, because=f"the order belongs to the older incident {order.incident}")
    here = {w.rank: w.incarnation for w in order.workers if w.node == state.node.node}
    ranks = tuple(sorted({*state.node.ranks, *here}))
    node = replace(state.node, incident=order.incident, ranks=ranks, store=order.store)
    new = {r: incarnation for r, incarnation in here.items() if incarnation > newest(state, r)}
    if not new:
        reports = (present(node, state.workers),)
        return Outcome(
            replace(state, node=node), reports, "these incarnations have been started already"
        )
    because = f"incident {order.incident}: replacing {names(new)}"
    return replace_processes(replace(state, node=node), new, False, now, config, because)


def restart_job(state: Training, order: m.RestartJob, now: float, config: WorkersConfig) -> Outcome:
    if order.attempt <= state.node.attempt:
        reports = (present(state.node, state.workers),)
        return Outcome(state, reports, f"attempt {order.attempt} has been started already")
    incarnations = {w.rank: w.incarnation for w in order.workers if w.node == state.node.node}
    ranks = tuple(sorted(incarnations)) or state.node.ranks
    node = replace(
        state.node,
        incident=order.incident,
        attempt=order.attempt,
        ranks=ranks,
        store=order.store,
    )
    again = {
        r: max(incarnations.get(r, Incarnation(0)), next_incarnation(state, r)) for r in node.ranks
    }
    return replace_processes(
        replace(state, node=node), again, True, now, config, f"attempt {order.attempt} begins"
    )


def restart_all(state: Training, remaining: int, now: float, config: WorkersConfig) -> Outcome:
    node = replace(state.node, remaining=remaining, attempt=state.node.attempt + 1)
    if remaining < 0:
        return stop(state, 1, "the restart budget is used up", None, now)
    again = {r: next_incarnation(state, r) for r in node.ranks}
    return replace_processes(
        replace(state, node=node), again, True, now, config, "ordered to restart all ranks"
    )


def replace_processes(
    state: Training,
    incarnations: Mapping[Rank, Incarnation],
    together: bool,
    now: float,
    config: WorkersConfig,
    because: str,
) -> Outcome:
    workers, commands = kill(state.workers, incarnations)
    after = replace(
        state,
        workers=workers,
        pending={**state.pending, **incarnations},
        together=together or state.together,
        deadline=_order_deadline(workers, {**state.pending, **incarnations}, now, config),
    )
    return start_pending(after, commands, because)


def _order_deadline(
    workers: Workers, pending: Mapping[Rank, Incarnation], now: float, config: WorkersConfig
) -> float:
    """A deadline is set as long as there is a dead rank that no order has named."""
    forgotten = any(
        isinstance(worker, Ended) and not finished(worker) and rank not in pending
        for rank, worker in workers.items()
    )
    return now + config.order_timeout_s if forgotten else inf


def start_pending(state: Training, commands: tuple[Command, ...], because: str) -> Outcome:
    """Start the pending ranks that are not blocked any more."""
    living = alive(state.workers)
    blocked = set(living) if not state.together else (set(state.pending) if living else set())
    free = {r: incarnation for r, incarnation in state.pending.items() if r not in blocked}
    if not free:
        return Outcome(state, commands, because)
    renewed = (RenewStore(state.node.attempt),) if state.together else ()
    started = tuple(
        _start(state.node, rank, incarnation) for rank, incarnation in sorted(free.items())
    )
    after = replace(
        state,
        workers={
            **state.workers,
            **{rank: Starting(incarnation) for rank, incarnation in free.items()},
        },
        pending={r: incarnation for r, incarnation in state.pending.items() if r in blocked},
        together=False,
    )
    return Outcome(after, (*commands, *renewed, *started), because)
