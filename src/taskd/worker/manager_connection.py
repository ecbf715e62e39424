"""The training process's connection to the manager, in its own thread beside the training thread.

It runs the machine of `core/worker/machine.py`: messages of the manager and reports of the training
thread go in; aborts, answers and orders come out. The training thread (`taskd.torch`) calls the
methods of `ManagerConnection`; all except `park` return at once.

An error here never ends the training: it is logged, the connection is closed, and training
continues without protection.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable

from taskd.bus.endpoint import Bus, BusConfig, Joined
from taskd.core.worker import machine, states
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


class ManagerConnection:
    """One per process, for its whole lifetime."""

    def __init__(
        self,
        settings: WorkerSettings,
        me: Identity,
        joining: bool,
        abort: Callable[[int, str], None],
        list_copies: Callable[[], tuple[m.Copy, ...]],
    ) -> None:
        """`abort` frees the training thread; `list_copies` lists the node's snapshots."""
        self._settings, self._abort, self._list_copies = settings, abort, list_copies
        self.step = Step(0)
        """Number of committed steps. The training thread writes it, hello messages contain it."""
        self.awaited = False
        """Whether the manager waits for the next committed step of this rank."""
        self.lost = ""
        """Why the connection failed; empty while it works."""
        incident = Incident(settings.incident)
        kind = states.Joining if joining else states.Training
        self._orders: queue.SimpleQueue[Order | GiveUp] = queue.SimpleQueue()
        bus_connection.take_over(self.send)
        self._thread = LoopThread("taskd-manager")
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._outbox: asyncio.Queue[m.Body] = asyncio.Queue()
        self._driver: Driver[states.State, Event, Command] = Driver(
            kind(me, incident),
            lambda state, event, now: machine.step(state, event, now, settings.rank),
            self._perform,
            inbox=self._inbox,
            log=log,
            subject=lambda state: f"incident={state.incident}",
        )
        self._thread.run(self._guarded())

    # Called by the training thread

    def shard_known(self, shard: str, replica: int, own_since: int = -1) -> None:
        self._post(ShardKnown(shard, replica, self.step, own_since))

    def step_failed(self, kind: FaultCause, evidence: str) -> None:
        self._post(StepFailed(kind, evidence))

    def park(self, parked: ThreadParked) -> Order | GiveUp:
        """Wait until the manager sends an order, or has sent none for too long."""
        if self.lost:
            return GiveUp(self.lost)
        self._post(parked)
        return self._orders.get()

    def repaired(self, repaired: LocalRepairDone) -> None:
        self.awaited = True
        self._post(repaired)

    def repair_failed(self, incident: Incident, because: str) -> None:
        self._post(LocalRepairFailed(incident, because))

    def committed(self, step: Step) -> None:
        """Called if `awaited`; otherwise the beacon shows the step."""
        self.awaited = False
        self._post(FirstStepCommitted(step))

    def dump_finished(self, finished: DumpFinished) -> None:
        self._post(finished)

    def send(self, body: m.Body) -> None:
        """Send a message of a subscriber (`bus_connection.py`)."""
        if not self.lost:
            self._thread.run(self._put_out(body))

    def close(self) -> None:
        """Send all pending messages, then disconnect."""
        try:
            self._thread.run(self._flush()).result(FLUSH_TIMEOUT_S)
        except TimeoutError:
            log.warning("disconnected from the manager before all messages were sent")
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

    # In the connection's own thread

    async def _guarded(self) -> None:
        try:
            await self._run()
        except Exception as error:
            log.exception(
                "the connection to the manager has failed; training continues without protection"
            )
            self.lost = f"{type(error).__name__}: {error}"
            self._orders.put(GiveUp(self.lost))

    async def _run(self) -> None:
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
                tasks.create_task(self._receive_all(bus))
                tasks.create_task(self._follow_connection(bus))
                tasks.create_task(self._send_all(bus))
                tasks.create_task(self._driver.run())
        finally:
            await bus.close()

    async def _receive_all(self, bus: Bus) -> None:
        while True:
            received = await bus.receive_order()
            bus_connection.publish(received.body)
            if isinstance(received.body, m.Park):
                self._inbox.put_nowait(CopiesChanged(self._list_copies()))
            if isinstance(received.body, m.Park | m.Repair | m.Dump | m.Leave):
                self._inbox.put_nowait(received.body)
            elif isinstance(received.body, m.RequestHello):
                self._inbox.put_nowait(ManagerConnected(self.step))

    async def _follow_connection(self, bus: Bus) -> None:
        async for change in bus.changes():
            if isinstance(change, Joined):
                self._inbox.put_nowait(ManagerConnected(self.step))
                bus_connection.publish_joined(self.send)

    async def _send_all(self, bus: Bus) -> None:
        """Send in order, without delaying what is received.

        No send waits for an acknowledgement: between two running processes no message is lost, and
        after a reconnect the machine sends again what is still true. `Dumped` is the exception:
        this process exits after it.
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
