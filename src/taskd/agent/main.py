"""One node's agent: its bus, its senses, its hands, and the loop that decides between them.

`taskd run` (`launch.py`) and the torchrun seam (`torchrun.py`) both run this; they differ in the
hands that they give it.
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


Seer = Callable[[Event, State, State], None]
"""Is shown every event, with the states before and after it."""


def unseen(event: Event, before: State, after: State) -> None:
    """Nobody looks."""


def _unrecorded(order: m.SetProfiling) -> None:
    """Nobody records here."""


class Performs(Protocol):
    async def perform(self, command: Command) -> None: ...

    def close(self) -> None:
        """Let go of whatever would go on by itself."""


class Agent:
    def __init__(
        self,
        bus: Bus,
        proxy: Bus,
        config: WorkersConfig,
        clock: Clock = monotonic,
        watch: Seer = unseen,
    ) -> None:
        self._bus, self._config, self._clock = bus, config, clock
        self._way = (bus, proxy)
        self._watch = watch
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.profiling: Callable[[m.SetProfiling], None] = _unrecorded
        """Who is told what is to be recorded."""

    def happened(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    async def tell(self, body: m.Body) -> None:
        """To the manager, in order. Said again after the next hello if it does not arrive."""
        if isinstance(body, m.RanksFailed) and body.ranks:
            body = replace(body, reported_at_s=int(wall()))
        await self._bus.send(manager(), body, sync=False)

    async def run(
        self,
        state: State,
        make_hands: Callable[[asyncio.TaskGroup], Performs],
        look: Callable[[], m.NodeHeartbeat],
        pace_s: Callable[[], float],
    ) -> Done:
        """Until the node's part of the job is over."""
        async with asyncio.TaskGroup() as tasks:
            hands = make_hands(tasks)
            senses = [
                tasks.create_task(sense.listen(self._bus, self.happened, self.profiling)),
                tasks.create_task(self._beat(look, pace_s)),
                *(
                    tasks.create_task(sense.watch_link(bus, self._way, self.happened))
                    for bus in self._way
                ),
            ]
            over = await self._decide(state, hands.perform)
            hands.close()
            for task in senses:
                task.cancel()
        return over

    async def _beat(self, look: Callable[[], m.NodeHeartbeat], pace_s: Callable[[], float]) -> None:
        """A heart beats in time; there is no event to wait for.

        Beats take the shortest way, from the proxy's own bus: they are by far the most messages.
        """
        nearest = self._way[-1]
        while True:
            await asyncio.sleep(pace_s())
            if nearest.joined:
                await nearest.send(manager(), look(), sync=False)

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
            before=lambda done: self._watch(done.event, done.before, done.outcome.state),
        )
        return await driver.run_until(Done)
