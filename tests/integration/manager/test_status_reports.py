"""What clusterd knows of a job: its faults, however many ranks fail, and its status."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from taskd.clusterd.main import ServerConfig
from taskd.core.manager import machine
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.reports import job_status
from taskd.manager.reports.incident_reports import IncidentReports
from taskd.manager.settings import ManagerConfig
from taskd.model.clusterd import FaultReport, Signal
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Rank
from taskd.runtime.clock import monotonic
from taskd.wire._pb import control_pb2
from tests.integration.clusterd.client import WAIT_S, Client, started

CONFIG = ManagerConfig(job_id="job", publish_s=0.01, rpc_timeout_s=WAIT_S)


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_all_ranks_of_a_large_job_may_fail_with_a_long_traceback() -> None:
    async def main() -> None:
        async with started() as (server, _):
            manager = ClusterdClient(server.address, CONFIG)
            manager.declaration = control_pb2.JobDeclaration(
                job="job",
                strategies=["recover"],
                nodes=[control_pb2.Node(name="a", ranks=range(1_200))],
            )
            signals: asyncio.Queue[Signal] = asyncio.Queue()
            joined = asyncio.Event()
            work = [
                asyncio.create_task(manager.listen(signals.put_nowait, joined.set)),
                asyncio.create_task(manager.deliver()),
            ]
            async with asyncio.timeout(WAIT_S):
                await joined.wait()
                evidence = "exit code 1\n" + "x" * 4_000
                cause = FaultCause.EXITED
                faults = (Fault.of(Rank(r), cause, evidence, 0.0) for r in range(1_200))
                manager.report(FaultReport(tuple(faults)))
                while (await signals.get()).type != "stopTrain":
                    pass
            await end(*work)
            await manager.close()

    asyncio.run(main())


def test_status_is_published_until_clusterd_has_it() -> None:
    """It may not know the job yet, or have forgotten it in a restart, and the status of a job that
    waits for a node does not change any more."""

    async def main() -> None:
        state = machine.begin(CONFIG.job, monotonic())

        def look() -> job_status.JobSnapshot:
            looked.release()
            return job_status.JobSnapshot(state, "waiting for node 1", {})

        async def summary(client: Client) -> str:
            request = control_pb2.JobRequest(job="job")
            answer: control_pb2.JobStatus = await client.call("Status", request)
            return answer.manager

        looked = asyncio.Semaphore(0)
        async with started(ServerConfig()) as (server, client):
            manager = ClusterdClient(server.address, CONFIG)
            now = monotonic()
            publishing = asyncio.create_task(
                job_status.publish(
                    manager,
                    CONFIG,
                    look,
                    asyncio.Event(),
                    IncidentReports("job", 0.0),
                    job_status.Pace(now, now),
                )
            )
            async with asyncio.timeout(WAIT_S):
                for _ in range(3):
                    await looked.acquire()
                await client.join()
                while "waiting for node 1" not in await summary(client):
                    await looked.acquire()
            await end(publishing)
            await manager.close()

    asyncio.run(main())
