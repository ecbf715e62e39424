"""Processes start: at first, in place of dead ones, or all of them anew.

A rank's next life starts only after its last one is confirmed dead, and all lives of an attempt
only after every life of the attempt before is.
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
    lives = {member.rank: member.incarnation for member in members}
    if lives:
        # Some of ours may stand elsewhere by now, and some of another node's here.
        node = replace(node, ranks=tuple(sorted(lives)))
    first = {rank: lives.get(rank, Incarnation(0)) for rank in node.ranks}
    workers = {rank: Starting(life) for rank, life in first.items()}
    commands = tuple(_start(node, rank, life) for rank, life in first.items())
    training = Training(node, workers, {}, False)
    return Outcome(training, commands, f"permitted to start {len(first)} ranks")


def _start(node: Node, rank: Rank, incarnation: Incarnation) -> StartWorker:
    return StartWorker(rank, incarnation, node.attempt, node.incident)


def started(state: Training | Stopping, event: WorkerStarted) -> Outcome:
    worker = state.workers.get(event.rank)
    if not isinstance(worker, Starting | Dying) or worker.incarnation != event.incarnation:
        return Outcome(
            state, (KillWorker(event.rank, event.incarnation),), "nobody asked for this life"
        )
    if isinstance(worker, Dying) or isinstance(state, Stopping):
        dying = with_worker(state, event.rank, Dying(event.incarnation, event.pid))
        killed = (KillWorker(event.rank, event.incarnation),)
        return Outcome(dying, killed, f"rank {event.rank} is not wanted any more")
    after = with_worker(state, event.rank, Running(event.incarnation, event.pid))
    assert isinstance(after, Training)
    if after.pending or any(isinstance(other, Starting) for other in after.workers.values()):
        return Outcome(after, because=f"rank {event.rank} runs")
    told = present(after.node, after.workers)
    return Outcome(after, (told, PrepareStandby()), "every rank of the node runs")


def replace_some(
    state: Training, order: m.ReplaceWorkers, now: float, config: WorkersConfig
) -> Outcome:
    if order.incident < state.node.incident:
        return Outcome(state, because=f"an order of incident {order.incident} comes too late")
    here = {w.rank: w.incarnation for w in order.workers if w.node == state.node.node}
    ranks = tuple(sorted({*state.node.ranks, *here}))
    node = replace(state.node, incident=order.incident, ranks=ranks)
    new = {r: life for r, life in here.items() if life > newest(state, r)}
    if not new:
        told = (present(node, state.workers),)
        return Outcome(replace(state, node=node), told, "these lives have been started already")
    because = f"incident {order.incident}: {names(new)} to be replaced"
    return begin(replace(state, node=node), new, False, now, config, because)


def restart_job(state: Training, order: m.RestartJob, now: float, config: WorkersConfig) -> Outcome:
    if order.attempt <= state.node.attempt:
        told = (present(state.node, state.workers),)
        return Outcome(state, told, f"attempt {order.attempt} has been started already")
    lives = {w.rank: w.incarnation for w in order.workers if w.node == state.node.node}
    ranks = tuple(sorted(lives)) or state.node.ranks
    node = replace(state.node, incident=order.incident, attempt=order.attempt, ranks=ranks)
    again = {r: max(lives.get(r, Incarnation(0)), next_incarnation(state, r)) for r in node.ranks}
    return begin(
        replace(state, node=node), again, True, now, config, f"attempt {order.attempt} begins"
    )


def restart_all(state: Training, remaining: int, now: float, config: WorkersConfig) -> Outcome:
    node = replace(state.node, remaining=remaining, attempt=state.node.attempt + 1)
    if remaining < 0:
        return stop(state, 1, "the restart budget is used up", None, now)
    again = {r: next_incarnation(state, r) for r in node.ranks}
    return begin(
        replace(state, node=node), again, True, now, config, "ordered to restart all ranks"
    )


def begin(
    state: Training,
    lives: Mapping[Rank, Incarnation],
    together: bool,
    now: float,
    config: WorkersConfig,
    because: str,
) -> Outcome:
    workers, commands = kill(state.workers, lives)
    after = replace(
        state,
        workers=workers,
        pending={**state.pending, **lives},
        together=together or state.together,
        deadline=_patience(workers, {**state.pending, **lives}, now, config),
    )
    return go_on(after, commands, because)


def _patience(
    workers: Workers, pending: Mapping[Rank, Incarnation], now: float, config: WorkersConfig
) -> float:
    """A dead rank that no order has named keeps the clock running."""
    forgotten = any(
        isinstance(worker, Ended) and not finished(worker) and rank not in pending
        for rank, worker in workers.items()
    )
    return now + config.order_timeout_s if forgotten else inf


def go_on(state: Training, commands: tuple[Command, ...], because: str) -> Outcome:
    """Start what is pending and no longer blocked."""
    living = alive(state.workers)
    blocked = set(living) if not state.together else (set(state.pending) if living else set())
    free = {r: life for r, life in state.pending.items() if r not in blocked}
    if not free:
        return Outcome(state, commands, because)
    fresh = (RenewStore(state.node.attempt),) if state.together else ()
    started = tuple(_start(state.node, rank, life) for rank, life in sorted(free.items()))
    after = replace(
        state,
        workers={**state.workers, **{rank: Starting(life) for rank, life in free.items()}},
        pending={r: life for r, life in state.pending.items() if r in blocked},
        together=False,
    )
    return Outcome(after, (*commands, *fresh, *started), because)
