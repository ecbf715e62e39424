"""One node's agent: its bus, its inputs (`sense.py`), its actions, and the loop that decides.

`node.py` runs it with actions on our own zygote (`act.py`); `seams/hosted_agent.py` runs it with
actions that call a framework's functions (`seams/framework_actions.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from taskd.agent import sense
from taskd.bus.endpoint import Bus
from taskd.core.agent.machine import Done, State, WorkersConfig, step
from taskd.model import messages as m
from taskd.model.agent import Command, Event
from taskd.model.ids import manager
from taskd.runtime.clock import Clock, monotonic, wall
from taskd.runtime.driver import Driver

log = logging.getLogger(__name__)


Observer = Callable[[Event, State, State], None]
"""Called with every event and the states before and after it."""


def no_observer(event: Event, before: State, after: State) -> None:
    """The default: does nothing."""


def _no_profiling(order: m.SetProfiling) -> None:
    """The default where no rank can record: does nothing."""


class Actions(Protocol):
    async def perform(self, command: Command) -> None: ...

    def close(self) -> None:
        """Stop everything that would continue by itself, such as timers."""


class Agent:
    def __init__(
        self,
        bus: Bus,
        proxy: Bus,
        config: WorkersConfig,
        clock: Clock = monotonic,
        observer: Observer = no_observer,
    ) -> None:
        self._bus, self._config, self._clock = bus, config, clock
        self._buses = (bus, proxy)
        self._observer = observer
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.profiling: Callable[[m.SetProfiling], None] = _no_profiling
        """Called with the manager's orders about profiling."""

    def enqueue(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    async def send_to_manager(self, body: m.Body) -> None:
        """Send to the manager, in order. What is lost is sent again after the next hello."""
        if isinstance(body, m.RanksFailed) and body.ranks:
            body = replace(body, reported_at_s=int(wall()))
        await self._bus.send(manager(), body, sync=False)

    async def run(
        self,
        state: State,
        make_actions: Callable[[asyncio.TaskGroup], Actions],
        make_beat: Callable[[], m.NodeHeartbeat],
        beat_interval_s: Callable[[], float],
    ) -> Done:
        """Run until the node's part of the job is over."""
        async with asyncio.TaskGroup() as tasks:
            actions = make_actions(tasks)
            inputs = [
                tasks.create_task(sense.listen(self._bus, self.enqueue, self.profiling)),
                tasks.create_task(self._beat(make_beat, beat_interval_s)),
                *(
                    tasks.create_task(sense.watch_link(bus, self._buses, self.enqueue))
                    for bus in self._buses
                ),
            ]
            done = await self._decide(state, actions.perform)
            actions.close()
            for task in inputs:
                task.cancel()
        return done

    async def _beat(
        self, make_beat: Callable[[], m.NodeHeartbeat], beat_interval_s: Callable[[], float]
    ) -> None:
        """Send heartbeats. This is one of the few places that wait for time, not for an event.

        Heartbeats start at the proxy's bus, one hop closer to the manager, because they are by
        far the most messages.
        """
        nearest = self._buses[-1]
        while True:
            await asyncio.sleep(beat_interval_s())
            beat = make_beat()
            if nearest.joined:
                await nearest.send(manager(), beat, sync=False)

    async def _decide(self, state: State, perform: Callable[[Command], Awaitable[None]]) -> Done:
        driver: Driver[State, Event, Command] = Driver(
            state,
            lambda state, event, now: step(state, event, now, self._config),
            perform,
            inbox=self._inbox,
            log=log,
            subject=lambda state: f"incident={state.node.incident}",
            clock=self._clock,
            same_state_level=logging.INFO,
            before=lambda done: self._observer(done.event, done.before, done.outcome.state),
        )
        return await driver.run_until(Done)
