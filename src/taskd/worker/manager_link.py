"""The training process's line to the manager, in a thread of its own beside the training thread.

`core/worker/machine.py` decides; this runs it: messages and the training thread's words go in,
aborts, answers and orders come out. The training thread (`taskd.torch`) calls the methods of
`Link`; all but `stand` return at once.

We must never be what kills training: whatever breaks in here is logged, the line is given up,
and training goes on unprotected.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable

from taskd.bus.endpoint import Bus, BusConfig, Joined
from taskd.core.worker import machine as rank
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Incident, Step, manager, worker
from taskd.model.worker import (
    AbortCollectives,
    Command,
    CopiesChanged,
    DumpFinished,
    Event,
    ExecuteOrder,
    FirstStepCommitted,
    GiveUp,
    Identity,
    LocalRepairDone,
    LocalRepairFailed,
    ManagerConnected,
    Order,
    SendToManager,
    ShardKnown,
    StepFailed,
    ThreadParked,
)
from taskd.runtime.driver import Driver
from taskd.runtime.loop_thread import LoopThread
from taskd.worker import bus_connection
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0


class Link:
    """One for the life of the process."""

    def __init__(
        self,
        settings: WorkerSettings,
        me: Identity,
        joining: bool,
        abort: Callable[[int, str], None],
        look: Callable[[], tuple[m.Copy, ...]],
    ) -> None:
        """`abort` frees the training thread; `look` lists the copies in the node's memory."""
        self._settings, self._abort, self._look = settings, abort, look
        self.step = Step(0)
        """Committed steps; the training thread writes it, hellos read it."""
        self.awaited = False
        """The manager waits for our next committed step."""
        self.lost = ""
        """Why the line was given up; empty while it holds."""
        incident = Incident(settings.incident)
        kind = rank.Joining if joining else rank.Training
        self._orders: queue.SimpleQueue[Order | GiveUp] = queue.SimpleQueue()
        bus_connection.take_over(self.send)
        self._thread = LoopThread("taskd-link")
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox: asyncio.Queue[m.Body] = asyncio.Queue()
        self._driver: Driver[rank.State, Event, Command] = Driver(
            kind(me, incident),
            lambda state, event, now: rank.step(state, event, now, settings.rank),
            self._perform,
            inbox=self._inbox,
            log=log,
            subject=lambda state: f"incident={state.incident}",
        )
        self._thread.run(self._guarded())

    # The training thread's side

    def describe(self, shard: str, replica: int) -> None:
        self._post(ShardKnown(shard, replica, self.step))

    def failed(self, kind: FaultCause, evidence: str) -> None:
        self._post(StepFailed(kind, evidence))

    def stand(self, stood: ThreadParked) -> Order | GiveUp:
        """Stand still until the manager says what to do, or has said nothing for too long."""
        if self.lost:
            return GiveUp(self.lost)
        self._post(stood)
        return self._orders.get()

    def mended(self, mended: LocalRepairDone) -> None:
        self.awaited = True
        self._post(mended)

    def broke(self, incident: Incident, because: str) -> None:
        self._post(LocalRepairFailed(incident, because))

    def committed(self, step: Step) -> None:
        """Called when `awaited`; otherwise the beacon tells."""
        self.awaited = False
        self._post(FirstStepCommitted(step))

    def wrote(self, wrote: DumpFinished) -> None:
        self._post(wrote)

    def send(self, body: m.Body) -> None:
        """For those who ride on this connection (`line.py`)."""
        if not self.lost:
            self._thread.run(self._put_out(body))

    def close(self) -> None:
        """Say what is left to say, then hang up."""
        try:
            self._thread.run(self._flush()).result(FLUSH_TIMEOUT_S)
        except TimeoutError:
            log.warning("hung up before everything was said")
        self._thread.stop()

    async def _flush(self) -> None:
        await self._inbox.join()
        await self._outbox.join()

    def _post(self, event: Event) -> None:
        if not self.lost:
            self._thread.run(self._put(event))

    async def _put(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    async def _put_out(self, body: m.Body) -> None:
        self._outbox.put_nowait(body)

    # The line's own thread

    async def _guarded(self) -> None:
        try:
            await self._live()
        except Exception as error:
            log.exception("the line to the manager is given up; training goes on unprotected")
            self.lost = f"{type(error).__name__}: {error}"
            self._orders.put(GiveUp(self.lost))

    async def _live(self) -> None:
        settings, me = self._settings, self._driver.state.identity
        bus = Bus(
            BusConfig(
                me=worker(me.node, me.rank),
                upstream=settings.proxy,
                job=settings.job_id,
                token=settings.token,
            )
        )
        await bus.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hear(bus))
                tasks.create_task(self._watch(bus))
                tasks.create_task(self._speak(bus))
                tasks.create_task(self._driver.run())
        finally:
            await bus.close()

    async def _hear(self, bus: Bus) -> None:
        while True:
            received = await bus.receive()
            bus_connection.publish(received.body)
            if isinstance(received.body, m.Park):
                self._inbox.put_nowait(CopiesChanged(self._look()))
            if isinstance(received.body, m.Park | m.Repair | m.Dump | m.Leave):
                self._inbox.put_nowait(received.body)
            elif isinstance(received.body, m.RequestHello):
                self._inbox.put_nowait(ManagerConnected(self.step))

    async def _watch(self, bus: Bus) -> None:
        async for change in bus.changes():
            if isinstance(change, Joined):
                self._inbox.put_nowait(ManagerConnected(self.step))
                bus_connection.publish_joined(self.send)

    async def _speak(self, bus: Bus) -> None:
        """In order, and never in the way of what is heard.

        Nobody waits for a receipt: between living ends nothing is lost, and when the link is there
        again, all that is still true is said anew. Not so a last word: this end will not live on.
        """
        while True:
            body = await self._outbox.get()
            if bus.joined:
                sent = await bus.send(manager(), body, sync=isinstance(body, m.Dumped))
                if not sent:
                    log.warning("%s was not sent: %s", type(body).__name__, sent.code.sentence)
            self._outbox.task_done()

    async def _perform(self, command: Command) -> None:
        match command:
            case AbortCollectives(incident=incident, because=because):
                self._abort(incident, because)
            case SendToManager(body=body):
                self._outbox.put_nowait(body)
            case ExecuteOrder(order=order):
                self._orders.put(order)
            case GiveUp():
                self._orders.put(command)
