"""Operations in the manager: receives clusterd's requests and the ranks' results, and replies.

`core/manager/operation_progress.py` decides. `clusterd_client.py` has the streams and sends
the replies; the pause around an operation belongs to the manager's own machine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from grpc import aio

from taskd.core.manager import operation_progress as machine
from taskd.core.manager.operation_progress import OperationsConfig
from taskd.core.manager.states import Job, Paused
from taskd.core.manager.states import State as JobState
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.model.codes import RecoverCode
from taskd.model.ids import NodeRank, Position, Rank, Role
from taskd.model.manager import NodesMarkedBad
from taskd.model.messages import Body, KeptAlive, NicSwitched, NodeHeartbeat, Progress, StressTested
from taskd.model.operations import (
    FAULTY,
    OPS,
    Command,
    Event,
    NicResult,
    NicSwitchRequested,
    PauseEnded,
    Results,
    SendToWorker,
    StressResult,
    StressTestRequested,
    WorkerReplied,
)
from taskd.runtime.driver import Driver
from taskd.wire import recover_codec as codec
from taskd.wire._pb import recover_pb2 as pb

log = logging.getLogger(__name__)


class Operations:
    def __init__(
        self,
        send: Callable[[Position, Body], None],
        clusterd: ClusterdClient,
        places: Callable[[], Mapping[Rank, NodeRank]],
        config: OperationsConfig,
        emit: Callable[[NodesMarkedBad], None],
    ) -> None:
        self._emit = emit
        self._send, self._clusterd, self._places = send, clusterd, places
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._driver: Driver[machine.State, Event, Command] = Driver(
            machine.Idle(),
            lambda state, event, now: machine.step(state, event, places(), now, config),
            self._perform,
            inbox=self._inbox,
            log=log,
            subject=lambda _: "operation",
            same_state_level=logging.INFO,
        )
        self._paused = False
        self.precheck: Precheck | None = None

    def describe(self) -> str:
        return machine.describe(self._driver.state)

    def handle(self, src: Position, body: Body) -> None:
        if isinstance(body, NodeHeartbeat) and self.precheck is not None:
            self.precheck.heartbeat.set()
        if src.role != Role.WORKER or not src.process_rank.isdecimal():
            return
        if isinstance(body, NicSwitched | StressTested | KeptAlive):
            self._inbox.put_nowait(WorkerReplied(Rank(int(src.process_rank)), body))

    def job_changed(self, state: JobState) -> None:
        """The manager's machine has taken a step."""
        paused = isinstance(state, Paused)
        if self._paused and not paused:
            self._inbox.put_nowait(PauseEnded())
        self._paused = paused

    def _nic_requested(self, message: pb.SwitchRankList) -> None:
        order = codec.switch_of(message)
        request = NicSwitchRequested(str(uuid.uuid4()), order.ranks, order.to_backup)
        self._inbox.put_nowait(request)

    def _stress_requested(self, message: pb.StressTestRankParams) -> None:
        ops = codec.stress_of(message).ops
        self._inbox.put_nowait(StressTestRequested(str(uuid.uuid4()), ops))

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines that run as long as the manager does."""
        early = [] if self.precheck is None else [self.precheck.run()]
        return [
            *early,
            self._clusterd.follow_orders("SubscribeNotifySwitch", self._nic_requested),
            self._clusterd.follow_orders("SubscribeNotifyExecStressTest", self._stress_requested),
            self._driver.run(),
        ]

    async def _perform(self, command: Command) -> None:
        match command:
            case SendToWorker(to, body):
                self._send(to, body)
            case NicResult():
                self._clusterd.report(command)
            case StressResult(results):
                self._mark_bad_nodes(results)
                self._clusterd.report(command)

    def _mark_bad_nodes(self, results: Mapping[Rank, Results]) -> None:
        """Mark nodes as bad, before clusterd gets the result and begins to move the ranks away."""
        places = self._places()
        found = {
            rank: one.text
            for rank, per_op in sorted(results.items())
            for one in per_op.values()
            if one.code == FAULTY and rank in places
        }
        if found:
            evidence = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            nodes = frozenset(places[rank] for rank in found)
            self._emit(NodesMarkedBad(nodes, evidence))


class Precheck:
    """A stress test of all ranks at the start of the job, requested like an operator does.

    Only after the first step of each rank: before that a rank may do something that cannot be
    interrupted, such as reading its data for the first time.
    """

    def __init__(
        self, clusterd: ClusterdClient, look: Callable[[], Job], progress: Mapping[int, Progress]
    ) -> None:
        self._clusterd, self._look, self._progress = clusterd, look, progress
        self.heartbeat = asyncio.Event()
        """Set when a heartbeat comes."""

    async def run(self) -> None:
        while not await self._requested():
            self.heartbeat.clear()
            await self.heartbeat.wait()
        await asyncio.Event().wait()

    async def _requested(self) -> bool:
        job = self._look()
        if job.rebuilt:
            return True  # the manager was restarted: the precheck has run already
        ranks = job.running()
        seen = [self._progress[rank] for rank in ranks if rank in self._progress]
        if len(seen) < len(job.world) or any(one.step < 1 for one in seen):
            return False
        try:
            code, info = await self._clusterd.request_stress_test(sorted(OPS.values()))
        except aio.AioRpcError as error:
            log.warning("precheck: could not be requested: %s", error.details())
            return False
        if code != RecoverCode.OK:
            log.warning("precheck: code=%d: %s", code, info)
        return code != RecoverCode.OMIsRunning
