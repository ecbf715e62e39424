"""The manager's actions: messages on the bus, reports to clusterd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from taskd.bus.endpoint import Bus
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.model.clusterd import FaultReport, ResultReport, StopReport, StrategiesReport
from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.model.manager import Command, Event, Finish, SendMessage, StopRequested
from taskd.model.messages import Body

log = logging.getLogger(__name__)


class Act:
    def __init__(
        self,
        bus: Bus,
        clusterd: ClusterdClient | None,
        emit: Callable[[Event], None],
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`leads`: whether this manager may act; False ends all its actions."""
        self._bus, self._clusterd, self._emit, self._leads = bus, clusterd, emit, leads
        self._sending: set[asyncio.Task[None]] = set()

    def send(self, to: Position, body: Body) -> None:
        """Send without waiting, for callers that are not coroutines."""
        task = asyncio.ensure_future(self.perform(SendMessage(to, body)))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def perform(self, command: Command) -> None:
        if not self._leads():
            log.warning("%s dropped: this manager does not lead", type(command).__name__)
            return
        match command:
            case SendMessage(to, body):
                # No acknowledgement needed: a disconnected peer sends a hello later, and the
                # order is repeated then.
                sent = await self._bus.send(to, body, sync=False)
                if sent.code != NetCode.OK:
                    log.warning("%s: %s not sent: %s", to, type(body).__name__, sent.code.sentence)
            case FaultReport() | StopReport() | StrategiesReport() | ResultReport():
                if self._clusterd is not None:
                    self._clusterd.report(command)
                elif isinstance(command, FaultReport):
                    because = "; ".join(f"rank {f.rank} {f.cause}" for f in command.faults)
                    self._emit(
                        StopRequested(1, f"{because}, and no clusterd is configured to decide")
                    )
            case Finish(exit_code, because):
                log.info("job ended: exit_code=%d: %s", exit_code, because)
