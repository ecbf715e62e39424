"""The owner of one job: the only task that decides for it.

A decision is in the journal before any peer learns of it. A caller waits for exactly that, so an
answer of 0 means that the decision survives a crash. Jobs share only the journal's transactions;
no job can delay another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from taskd.clusterd import act
from taskd.clusterd.cluster.interface import Cluster, ClusterRefused, ClusterUnreachable
from taskd.clusterd.cluster.objects import JobFacts
from taskd.clusterd.listeners import Channel, End
from taskd.clusterd.records import journal_records as records
from taskd.clusterd.records.journal_records import PastRound, Record
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.machine import step
from taskd.core.clusterd.states import Ended, Idle, Outcome, Shrunk, State
from taskd.model.clusterd import (
    ClusterCommand,
    ClusterWriteDone,
    ClusterWriteFailed,
    Command,
    Event,
    Operation,
    OperatorAskedNic,
    OperatorAskedStress,
    ReplyOperator,
    SendStressRanks,
    SendSwitchRanks,
    Signal,
)
from taskd.model.codes import NOT_STORED, RecoverCode
from taskd.model.ids import JobId
from taskd.model.types import Tick
from taskd.runtime.clock import Clock
from taskd.runtime.driver import Driver, Transition
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import JournalFailed
from taskd.runtime.retry import Tries, fixed
from taskd.wire._pb import control_pb2 as pb

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before an event without a caller is tried again after the journal failed."""
RESUME_S = 15.0
"""If a deadline passed while no server ran, the client gets this long to reconnect first."""
WRITE_PAUSES_S = (1.0, 2.0, 3.0)
ROUNDS = 16
DISCONNECTED = "disconnected, the state is unknown"


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    info: str = ""

    @classmethod
    def of(cls, code: RecoverCode, info: str = "") -> Answer:
        return cls(int(code), info or code.sentence)


@dataclass(frozen=True, slots=True)
class Request:
    event: Event
    answer: asyncio.Future[Answer] | None = None


@dataclass(frozen=True, slots=True)
class OwnerContext:
    """What all owners share."""

    journal: Journal
    cluster: Cluster
    facts: Callable[[JobId], JobFacts | None]
    clock: Clock
    config: RecoveryConfig
    inbox: int = 64
    """How many reports of one job may wait; the next one is answered with EventQueueBusy."""
    signals: int = 64
    """How many signals may wait for a slow listener."""
    decided: Callable[[JobOwner], None] = lambda _: None
    """Called after every decision."""


class JobOwner:
    def __init__(self, job: JobId, record: Record, context: OwnerContext) -> None:
        self.job, self.record, self._context = job, record, context
        self.because = ""
        self.changed_at = self.client_changed_at = context.clock()
        self.progress: pb.JobProgress | None = None
        """The progress that the job's manager last published, for people."""
        self.version = 0
        """Grows with every change that a watcher may see."""
        self.namespace = ""
        """For people. Read when the job's objects change: a large job has many of them."""
        self.history = 0
        """Grows with every entry in the journal, so that readers know of new ones."""
        self.signals: Channel[Signal] = Channel(context.signals, self._listeners_changed)
        self.nic: Channel[SendSwitchRanks] = Channel(context.signals)
        self.stress: Channel[SendStressRanks] = Channel(context.signals)
        self.replies: dict[Operation, Channel[ReplyOperator]] = {
            operation: Channel(1) for operation in Operation
        }
        self.unread: dict[Operation, ReplyOperator] = {}
        self._inbox: asyncio.Queue[Request] = asyncio.Queue()
        self._asking = 0
        self._not_before = -inf
        missed = record.state.deadline < self.changed_at and not isinstance(record.state, Idle)
        self._patient_until = self.changed_at + RESUME_S if missed else -inf
        self._watchers: set[asyncio.Event] = set()
        self._writing: asyncio.Task[None] | None = None
        self._written = 0
        driver: Driver[State, Request, Command] = Driver(
            record.state,
            self._step,
            self._perform,
            inbox=self._inbox,
            log=log,
            subject=lambda state: f"job={job} incident={state.job.incident}",
            clock=context.clock,
            wake_at=lambda state: max(state.deadline, self._not_before, self._patient_until),
            commit=self._commit,
            before=self._state_set,
            after=self._commands_done,
        )
        self._task = asyncio.create_task(driver.run(), name=f"owner of {job}")
        self._write_undone()

    @property
    def state(self) -> State:
        return self.record.state

    @property
    def closed(self) -> bool:
        """The state is final: the job is over, or the server stops."""
        return self._task.done()

    async def ask(self, event: Event) -> Answer:
        """Decide on the event and write the decision to the journal; returns the answer."""
        if self._asking >= self._context.inbox:
            return Answer.of(RecoverCode.EventQueueBusy)
        if self.closed:
            return Answer.of(RecoverCode.ControllerEventCancel)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asking += 1
        try:
            self._inbox.put_nowait(Request(event, answer))
            return await answer
        finally:
            self._asking -= 1

    def post(self, event: Event) -> None:
        """Queue an event without a caller; it is tried again if the journal fails."""
        self._inbox.put_nowait(Request(event))

    def _listeners_changed(self) -> None:
        self.client_changed_at = self._context.clock()
        if self.progress is not None and not self.signals.connected and not self.closed:
            self.progress = unknown(self.progress)
        self.touch()

    def changes(self) -> asyncio.Event:
        """An event that is set on every change of the job; call `unwatch` when done."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: asyncio.Event) -> None:
        self._watchers.discard(watcher)

    def touch(self) -> None:
        self.version += 1
        for watcher in self._watchers:
            watcher.set()

    async def close(self) -> None:
        """Stop deciding. Waiting callers are answered with ControllerEventCancel."""
        for task in (self._task, self._writing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        while not self._inbox.empty():
            self._answer(self._inbox.get_nowait(), Answer.of(RecoverCode.ControllerEventCancel))
        channels: list[Channel[Any]] = [self.signals, self.nic, self.stress, *self.replies.values()]
        for channel in channels:
            channel.end(End.OVER)
        self.touch()

    def _step(self, state: State, request: Request | Tick, now: float) -> Outcome | None:
        try:
            return step(state, _event(request), now, self._context.config)
        except Exception:
            log.exception("job=%s cannot decide on %r", self.job, _event(request))
            self._internal_error(request, now)
            return None

    async def _commit(self, transition: Transition[State, Request, Command]) -> bool:
        """Write the decision to the journal. A decision that cannot be written does not count."""
        request, outcome, now = transition.event, transition.outcome, transition.now
        try:
            after = self._after(_event(request), outcome, now)
            if after != self.record or outcome.commands:
                await self._context.journal.append(
                    records.write(self.job, self.record, after, _event(request), outcome, now)
                )
                self.history += 1
        except JournalFailed as error:
            self._refuse(request, f"{NOT_STORED}{error}", now, again=True)
            return False
        except Exception:
            log.exception("job=%s cannot decide on %r", self.job, _event(request))
            self._internal_error(request, now)
            return False
        self.record = after
        return True

    def _internal_error(self, request: Request | Tick, now: float) -> None:
        """An internal error costs only this event; the job keeps its owner and its state."""
        self._refuse(request, RecoverCode.ServerInnerError.sentence, now, again=False)

    def _after(self, event: Event, outcome: Outcome, now: float) -> Record:
        undone = self.record.undone
        if isinstance(event, ClusterWriteDone | ClusterWriteFailed):
            undone = tuple(c for c in undone if c.sequence != event.sequence)
        ordered = tuple(c for c in outcome.commands if isinstance(c, ClusterCommand))
        rounds = self.record.rounds
        ended = past_round(self.state, outcome, now)
        if ended is not None:
            rounds = (ended, *rounds)[:ROUNDS]
        return Record(outcome.state, undone + ordered, rounds)

    def _refuse(self, request: Request | Tick, because: str, now: float, *, again: bool) -> None:
        """Keep the last state. Events without a caller are posted again; callers may retry."""
        self._not_before = now + RETRY_S
        if isinstance(request, Tick):
            return
        if request.answer is not None:
            self._answer(request, Answer.of(RecoverCode.ServerInnerError, because))
        elif again:
            asyncio.get_running_loop().call_later(RETRY_S, self.post, request.event)

    def _state_set(self, transition: Transition[State, Request, Command]) -> None:
        request, outcome = transition.event, transition.outcome
        if transition.state_changed:
            self.because, self.changed_at = outcome.because, transition.now
        # A Tick that changed nothing must not come again at once.
        idle = isinstance(_event(request), Tick) and outcome.state == transition.before
        self._not_before = transition.now + RETRY_S if idle else -inf
        operation = isinstance(_event(request), OperatorAskedNic | OperatorAskedStress)
        if operation and not outcome.answer:
            self.unread.clear()

    def _commands_done(self, transition: Transition[State, Request, Command]) -> None:
        outcome = transition.outcome
        if isinstance(transition.event, Request):
            self._answer(transition.event, Answer(int(outcome.answer), outcome.because))
        self._context.decided(self)
        self.touch()

    async def _perform(self, command: Command) -> None:
        match command:
            case Signal():
                self.signals.put(command)
            case SendSwitchRanks():
                self.nic.put(command)
            case SendStressRanks():
                self.stress.put(command)
            case ReplyOperator(operation=operation):
                self.unread[operation] = command
                self.replies[operation].put(command)
            case _:
                self._write_undone()

    def _answer(self, request: Request, answer: Answer) -> None:
        if request.answer is not None and not request.answer.done():
            request.answer.set_result(answer)

    # Writes to the cluster: one after the other, in order, in parallel to the decisions

    def _write_undone(self) -> None:
        if self.record.undone and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        while todo := [c for c in self.record.undone if c.sequence > self._written]:
            event = await self._write(todo[0])
            self._written = event.sequence
            self.post(event)

    async def _write(self, command: ClusterCommand) -> ClusterWriteDone | ClusterWriteFailed:
        because = ""
        async for _ in Tries(fixed(*WRITE_PAUSES_S)):
            facts = self._context.facts(self.job)
            if facts is None:
                return ClusterWriteFailed(command.sequence, "the cluster does not know the job")
            try:
                await act.in_cluster(command, facts, self._context.cluster, self._context.clock())
            except (ClusterRefused, ValueError) as error:
                return ClusterWriteFailed(command.sequence, str(error))
            except ClusterUnreachable as error:
                because = str(error)
            else:
                return ClusterWriteDone(command.sequence)
        log.warning("job=%s write failed: %s: %s", self.job, records.describe(command), because)
        return ClusterWriteFailed(command.sequence, because)


def _event(request: Request | Tick) -> Event:
    return request.event if isinstance(request, Request) else request


def unknown(progress: pb.JobProgress) -> pb.JobProgress:
    """What is known of the job while its manager is disconnected: only where it was."""
    shown = pb.JobProgress()
    shown.CopyFrom(progress)
    if not progress.summary.startswith(DISCONNECTED):
        shown.summary = f"{DISCONNECTED}; the last was: {progress.summary}"
    shown.steps_per_s, shown.rank_version = 0.0, 0
    for rank in shown.ranks:
        rank.phase = "unknown"
    return shown


def past_round(before: State, outcome: Outcome, now: float) -> PastRound | None:
    """The round that this outcome has ended, if it has."""
    round_over = isinstance(outcome.state, Idle | Shrunk | Ended)
    if not round_over or isinstance(before, Idle | Ended) or type(before) is type(outcome.state):
        return None
    task = getattr(before, "task", None)
    tried = task.operation if task else getattr(before, "strategy", "") or type(before).__name__
    return PastRound(
        incident=before.job.incident,
        began=before.round.began,
        took_s=now - before.round.began,
        strategy=str(tried),
        outcome=outcome.because,
        faults=before.round.faults,
    )
