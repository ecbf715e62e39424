"""One job's owner: the only task that decides for it. Wait, decide, remember, act, repeat.

A decision is in the journal before anybody hears of it. Whoever asks waits for exactly that, so an
answer of 0 means that it will not be forgotten. Jobs share nothing but the journal's transactions,
and none can hold up another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from taskd.clusterd import act
from taskd.clusterd import journal_records as records
from taskd.clusterd.cluster.interface import Cluster, ClusterRefused, ClusterUnreachable
from taskd.clusterd.cluster.objects import JobFacts
from taskd.clusterd.journal_records import PastRound, Record
from taskd.clusterd.listeners import Channel, End
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
from taskd.model.codes import RecoverCode
from taskd.model.ids import JobId
from taskd.model.types import Tick
from taskd.runtime.clock import Clock
from taskd.runtime.driver import Driver, Transition
from taskd.runtime.journal import Journal, JournalFailed
from taskd.runtime.retry import Tries, fixed
from taskd.wire._pb import control_pb2 as pb

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""After the journal refused: when what nobody waits for is tried again."""
RESUME_S = 15.0
"""A deadline that passed while no server ran: the client is given this long to come back first."""
WRITE_PAUSES_S = (1.0, 2.0, 3.0)
ROUNDS = 16


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
    """What an owner works with; the same for all."""

    journal: Journal
    cluster: Cluster
    facts: Callable[[JobId], JobFacts | None]
    clock: Clock
    config: RecoveryConfig
    inbox: int = 64
    """How many of one job's reports may wait; the next is told to come back later."""
    signals: int = 64
    """How many signals may wait for a slow listener."""


class JobOwner:
    def __init__(self, job: JobId, record: Record, context: OwnerContext) -> None:
        self.job, self.record, self._context = job, record, context
        self.because = ""
        self.changed_at = self.heard_at = context.clock()
        self.progress: pb.JobProgress | None = None
        """What the job's manager last told, for people."""
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
        """Nothing will change any more: the job is over, or the server stops."""
        return self._task.done()

    async def ask(self, event: Event) -> Answer:
        """Have the event decided and remembered; the answer says what came of it."""
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
        """For what nobody waits for: it is decided in its turn, and tried again if need be."""
        self._inbox.put_nowait(Request(event))

    def _listeners_changed(self) -> None:
        self.heard_at = self._context.clock()

    def changes(self) -> asyncio.Event:
        """Set whenever there is something new to show; unwatch when done."""
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: asyncio.Event) -> None:
        self._watchers.discard(watcher)

    def touch(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def close(self) -> None:
        """Stop deciding. Those who wait are told that it was cut short."""
        for task in (self._task, self._writing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        while not self._inbox.empty():
            self._answer(self._inbox.get_nowait(), Answer.of(RecoverCode.ControllerEventCancel))
        lines: list[Channel[Any]] = [self.signals, self.nic, self.stress, *self.replies.values()]
        for line in lines:
            line.end(End.OVER)
        self.touch()

    def _step(self, state: State, asked: Request | Tick, now: float) -> Outcome | None:
        try:
            return step(state, _event(asked), now, self._context.config)
        except Exception:
            log.exception("job=%s cannot decide on %r", self.job, _event(asked))
            self._mistake(asked, now)
            return None

    async def _commit(self, transition: Transition[State, Request, Command]) -> bool:
        """Write the decision into the journal; one that cannot be written is not made."""
        asked, outcome, now = transition.event, transition.outcome, transition.now
        try:
            after = self._after(_event(asked), outcome, now)
            if after != self.record or outcome.commands:
                await self._context.journal.append(
                    records.write(self.job, self.record, after, _event(asked), outcome, now)
                )
        except JournalFailed as error:
            self._refuse(asked, str(error), now, again=True)
            return False
        except Exception:
            log.exception("job=%s cannot decide on %r", self.job, _event(asked))
            self._mistake(asked, now)
            return False
        self.record = after
        return True

    def _mistake(self, asked: Request | Tick, now: float) -> None:
        """A mistake of ours costs this one event; the job keeps its owner and its state."""
        self._refuse(asked, RecoverCode.ServerInnerError.sentence, now, again=False)

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

    def _refuse(self, asked: Request | Tick, because: str, now: float, *, again: bool) -> None:
        """The last good state stays. A clock's or cluster's event comes again, a caller may."""
        self._not_before = now + AGAIN_S
        if isinstance(asked, Tick):
            return
        if asked.answer is not None:
            self._answer(asked, Answer.of(RecoverCode.ServerInnerError, because))
        elif again:
            asyncio.get_running_loop().call_later(AGAIN_S, self.post, asked.event)

    def _state_set(self, transition: Transition[State, Request, Command]) -> None:
        asked, outcome = transition.event, transition.outcome
        if transition.state_changed:
            self.because, self.changed_at = outcome.because, transition.now
        # A clock's event that moved nothing must not come again at once.
        idle = isinstance(_event(asked), Tick) and outcome.state == transition.before
        self._not_before = transition.now + AGAIN_S if idle else -inf
        operation = isinstance(_event(asked), OperatorAskedNic | OperatorAskedStress)
        if operation and not outcome.answer:
            self.unread.clear()

    def _commands_done(self, transition: Transition[State, Request, Command]) -> None:
        outcome = transition.outcome
        if isinstance(transition.event, Request):
            self._answer(transition.event, Answer(int(outcome.answer), outcome.because))
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

    def _answer(self, asked: Request, answer: Answer) -> None:
        if asked.answer is not None and not asked.answer.done():
            asked.answer.set_result(answer)

    # Writes to the cluster: in order, one after the other, beside the decisions

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
        log.warning("job=%s %s: %s", self.job, records.told(command), because)
        return ClusterWriteFailed(command.sequence, because)


def _event(asked: Request | Tick) -> Event:
    return asked.event if isinstance(asked, Request) else asked


def past_round(before: State, outcome: Outcome, now: float) -> PastRound | None:
    """The round that this step has brought to its end."""
    at_rest = isinstance(outcome.state, Idle | Shrunk | Ended)
    if not at_rest or isinstance(before, Idle | Ended) or type(before) is type(outcome.state):
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
