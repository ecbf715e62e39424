"""Lines of the history that are not decisions: closed incidents, and what operators asked for."""

from __future__ import annotations

import asyncio

from taskd.model.codes import RecoverCode
from taskd.wire._pb import control_pb2 as pb
from tests.integration.clusterd.client import Client, started


async def lines(client: Client, after: int = 0) -> list[pb.HistoryLine]:
    request = pb.ReplayRequest(job="job", after=after)
    return [line async for line in client.control.Replay(request, metadata=client.metadata)]


def test_closed_incident_and_action_are_written_to_the_history() -> None:
    async def check() -> None:
        async with started() as (_, client):
            await client.declare("recover-in-place", nodes=2, per_node=2)
            await client.join()
            signals = await client.subscribe()
            await client.fault(3)
            await signals.next()
            before = (await lines(client))[-1].number
            report = pb.IncidentReport(
                job="job",
                incident=1,
                phases=[pb.Phase(name="seen"), pb.Phase(name="step", took_ms=12.0)],
                strategy="recover-in-place",
                outcome="recovered",
                faults=[pb.IncidentFault(rank=3, evidence='<script>alert("x")</script>')],
            )
            assert await client.code("ReportIncident", report) == RecoverCode.OK
            action = pb.OperatorAction(job="job", who="ada", action="stress test of all nodes")
            assert await client.code("RecordAction", action) == RecoverCode.OK
            unknown = pb.IncidentReport(job="job", incident=9)
            assert await client.code("ReportIncident", unknown) == RecoverCode.InvalidReqParam
            closed, asked = await lines(client, before)
            assert closed.event.startswith("IncidentReport {")
            assert closed.because == "rank 3, recover-in-place: recovered in 12 ms (step 12)"
            assert asked.because == "ada: stress test of all nodes"

    asyncio.run(check())
