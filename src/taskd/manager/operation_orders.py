"""The manager's part in operations: hears clusterd's orders and the ranks' answers, replies.

`core/manager/operation_progress.py` decides. The streams and replies are on the line to clusterd
(`manager/clusterd_client.py`); the pause around an operation is the job's own machine's.
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
from taskd.manager.clusterd_client import ClusterdClient
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
        tell: Callable[[Position, Body], None],
        clusterd: ClusterdClient,
        places: Callable[[], Mapping[Rank, NodeRank]],
        config: OperationsConfig,
        happened: Callable[[NodesMarkedBad], None],
    ) -> None:
        self._happened = happened
        self._tell, self._clusterd, self._places = tell, clusterd, places
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

    def heard(self, src: Position, body: Body) -> None:
        if isinstance(body, NodeHeartbeat) and self.precheck is not None:
            self.precheck.beaten.set()
        if src.role != Role.WORKER or not src.process_rank.isdecimal():
            return
        if isinstance(body, NicSwitched | StressTested | KeptAlive):
            self._inbox.put_nowait(WorkerReplied(Rank(int(src.process_rank)), body))

    def job_is(self, state: JobState) -> None:
        """The job's machine has moved on."""
        paused = isinstance(state, Paused)
        if self._paused and not paused:
            self._inbox.put_nowait(PauseEnded())
        self._paused = paused

    def _nic_asked(self, message: pb.SwitchRankList) -> None:
        order = codec.switch_of(message)
        request = NicSwitchRequested(str(uuid.uuid4()), order.ranks, order.to_backup)
        self._inbox.put_nowait(request)

    def _stress_asked(self, message: pb.StressTestRankParams) -> None:
        ops = codec.stress_of(message).ops
        self._inbox.put_nowait(StressTestRequested(str(uuid.uuid4()), ops))

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run for as long as the manager does."""
        early = [] if self.precheck is None else [self.precheck.run()]
        return [
            *early,
            self._clusterd.follow_orders("SubscribeNotifySwitch", self._nic_asked),
            self._clusterd.follow_orders("SubscribeNotifyExecStressTest", self._stress_asked),
            self._driver.run(),
        ]

    async def _perform(self, command: Command) -> None:
        match command:
            case SendToWorker(to, body):
                self._tell(to, body)
            case NicResult():
                self._clusterd.report(command)
            case StressResult(results):
                self._condemn(results)
                self._clusterd.report(command)

    def _condemn(self, results: Mapping[Rank, Results]) -> None:
        """Before clusterd hears of it and begins the round that moves the ranks away."""
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
            self._happened(NodesMarkedBad(nodes, evidence))


class Precheck:
    """A stress test of all ranks at the job's start, asked for as an operator would.

    Not before each rank has done a step: until then a rank may be busy with what cannot be
    interrupted, such as reading its data for the first time.
    """

    def __init__(
        self, clusterd: ClusterdClient, look: Callable[[], Job], progress: Mapping[int, Progress]
    ) -> None:
        self._clusterd, self._look, self._progress = clusterd, look, progress
        self.beaten = asyncio.Event()
        """Set by whoever hears the nodes' beats."""

    async def run(self) -> None:
        while not await self._asked():
            self.beaten.clear()
            await self.beaten.wait()
        await asyncio.Event().wait()

    async def _asked(self) -> bool:
        job = self._look()
        if job.rebuilt:
            return True  # our former life has, or the job is long past its start
        ranks = job.running()
        seen = [self._progress[rank] for rank in ranks if rank in self._progress]
        if len(seen) < len(job.world) or any(one.step < 1 for one in seen):
            return False
        try:
            code, info = await self._clusterd.ask_stress(sorted(OPS.values()))
        except aio.AioRpcError as error:
            log.warning("the precheck could not be asked for: %s", error.details())
            return False
        if code != RecoverCode.OK:
            log.warning("the precheck was answered with %d: %s", code, info)
        return code != RecoverCode.OMIsRunning
