"""The loop that runs a machine: wait for an event or the deadline, decide, log, act, repeat.

Every process has the same loop and differs only in the callbacks that it gives to `Driver`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from taskd.model.types import Outcome, Tick
from taskd.runtime.clock import Clock, monotonic, next_before


class HasDeadline(Protocol):
    @property
    def deadline(self) -> float: ...


StateT = TypeVar("StateT", bound=HasDeadline)
EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")
EndT = TypeVar("EndT")


@dataclass(frozen=True)
class Transition(Generic[StateT, EventT, CommandT]):
    """One event, the state before it, and what the machine decided."""

    event: EventT | Tick
    before: StateT
    outcome: Outcome[StateT, CommandT]
    now: float

    @property
    def state_changed(self) -> bool:
        """The machine is in another state, not in the same state with other values."""
        return type(self.outcome.state) is not type(self.before)


async def _always(transition: Any) -> bool:
    return True


def _nothing(transition: Any) -> None:
    pass


class Driver(Generic[StateT, EventT, CommandT]):
    def __init__(
        self,
        state: StateT,
        step: Callable[[StateT, EventT | Tick, float], Outcome[StateT, CommandT] | None],
        perform: Callable[[CommandT], Awaitable[None]],
        *,
        inbox: asyncio.Queue[EventT],
        log: logging.Logger,
        subject: Callable[[StateT], str],
        clock: Clock = monotonic,
        same_state_level: int = logging.DEBUG,
        wake_at: Callable[[StateT], float] = lambda state: state.deadline,
        commit: Callable[[Transition[StateT, EventT, CommandT]], Awaitable[bool]] = _always,
        before: Callable[[Transition[StateT, EventT, CommandT]], None] = _nothing,
        after: Callable[[Transition[StateT, EventT, CommandT]], None] = _nothing,
    ) -> None:
        """Call `run` or `run_until` to start.

        `step` decides; None means that the event is dropped. `commit` may store the transition
        before it takes effect; False drops it. `before` and `after` are called when the new state
        is in place, before and after `perform` carries out the commands. `subject` starts each log
        line, such as `incident=3`; `same_state_level` is the level of the lines about events that
        leave the machine in its state. `wake_at` is the time of the next `Tick`.
        """
        self.state = state
        self._step, self._perform, self._inbox = step, perform, inbox
        self._log, self._subject, self._same_state_level = log, subject, same_state_level
        self._clock, self._wake_at = clock, wake_at
        self._commit, self._before, self._after = commit, before, after

    async def run(self) -> NoReturn:
        while True:
            await self._next()

    async def run_until(self, end: type[EndT]) -> EndT:
        """Return the final state, which is the first of this type."""
        while not isinstance(self.state, end):
            await self._next()
        return self.state

    async def _next(self) -> None:
        event = await next_before(self._inbox, self._wake_at(self.state), self._clock)
        await self._handle(Tick() if event is None else event)
        if event is not None:
            self._inbox.task_done()

    async def _handle(self, event: EventT | Tick) -> None:
        now = self._clock()
        outcome = self._step(self.state, event, now)
        if outcome is None:
            return
        transition = Transition(event, self.state, outcome, now)
        if not await self._commit(transition):
            return
        self.state = outcome.state
        self._write_log(transition)
        self._before(transition)
        for command in outcome.commands:
            await self._perform(command)
        self._after(transition)

    def _write_log(self, transition: Transition[StateT, EventT, CommandT]) -> None:
        outcome = transition.outcome
        level = logging.INFO if transition.state_changed else self._same_state_level
        if not outcome.because or not self._log.isEnabledFor(level):
            return
        names = [type(transition.before).__name__, type(outcome.state).__name__]
        path = " -> ".join(names if transition.state_changed else names[:1])
        self._log.log(level, "%s %s: %s", self._subject(outcome.state), path, outcome.because)
