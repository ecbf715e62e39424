"""Reports of slow ranks to clusterd: answered, written to the journal, shown again."""

from __future__ import annotations

import asyncio

from taskd.model.codes import RecoverCode
from taskd.wire._pb import control_pb2 as control
from tests.integration.clusterd.client import started

SLOW = control.Straggler(
    rank=1, cause="compute", late_ms=20.0, slower=0.4, evidence="rank 1 enters the collectives last"
)


def test_sub_health_is_written_into_the_journal() -> None:
    async def main() -> None:
        async with started() as (_, client):
            report = control.SubHealth(job="job", stragglers=[SLOW])
            assert await client.code("ReportSubHealth", report) == RecoverCode.UnRegistry
            await client.declare("retry", nodes=1)
            await client.join()
            assert await client.code("ReportSubHealth", report) == RecoverCode.OK
            wrong = control.SubHealth(job="job", stragglers=[control.Straggler(rank=-1)])
            assert await client.code("ReportSubHealth", wrong) == RecoverCode.InvalidReqParam
            well = control.SubHealth(job="job")
            assert await client.code("ReportSubHealth", well) == RecoverCode.OK
            replay = client.control.Replay(control.ReplayRequest(job="job"))
            lines = [(line.event, line.because) async for line in replay]
            assert ("SubHealth 1", "rank 1 enters the collectives last") in lines
            assert lines[-1][1] == "no rank slows the others down any more"
            status = await client.call("Status", control.JobRequest(job="job"))
            assert status.line.state == "Idle", "a slow rank is not a fault"

    asyncio.run(main())
