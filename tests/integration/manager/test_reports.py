"""Reports to clusterd are kept until clusterd has taken them."""

from __future__ import annotations

import asyncio

import pytest

from taskd.manager.clusterd_link import clusterd_client
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.settings import ManagerConfig
from taskd.model.clusterd import StopReport
from taskd.model.codes import NOT_STORED, RecoverCode
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.ascend.recover_server import Running

NOT_NOW = [
    RecoverCode.EventQueueBusy,
    pb.Status(code=RecoverCode.ServerInnerError, info=f"{NOT_STORED}etcd did not answer"),
]


@pytest.mark.parametrize("answer", NOT_NOW, ids=["busy", "not stored"])
def test_report_is_kept_until_clusterd_takes_it(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusterd_client, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(clusterd_client, "MAX_BACKOFF_S", 0.002)
    refusals = 40
    server = Running()
    server.clusterd.answers["ReportStopComplete"] = [answer] * refusals

    async def report() -> None:
        client = ClusterdClient(server.address, ManagerConfig(job_id="job-1"))
        client.report(StopReport(0, "first"))
        client.report(StopReport(0, "second"))
        delivering = asyncio.create_task(client.deliver())
        for _ in range(refusals + 2):
            call = await asyncio.to_thread(server.clusterd.next_call, "ReportStopComplete")
            seen.append(call.uuid)
        delivering.cancel()
        await client.close()

    seen: list[str] = []
    try:
        asyncio.run(report())
    finally:
        server.stop()
    assert seen == ["first"] * (refusals + 1) + ["second"]
