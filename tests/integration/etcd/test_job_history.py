"""The incidents of a job pass from leader to leader, however each term ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from taskd.clusterd.records import journal_records
from taskd.clusterd.records.journal_records import PastRound
from taskd.core.clusterd.states import Outcome
from taskd.manager.job_term import JobTerm, lead
from taskd.manager.settings import ManagerConfig
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import JobId, Rank
from taskd.model.types import Tick
from tests.integration.etcd.etcd_server import EtcdServer, running


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server


@asynccontextmanager
async def leader(etcd: EtcdServer, job: str) -> AsyncIterator[JobTerm]:
    config = ManagerConfig(job_id=job, etcd=etcd.client, advertise="127.0.0.1:1")
    async with AsyncExitStack() as stack:
        yield await lead(config, stack)


def incident(number: int, evidence: str = "exit code 1") -> dict[str, Any]:
    faults = [{"rank": number, "kind": "exited", "evidence": evidence}]
    texts = {"strategy": "recover", "outcome": "recovered", "because": ""}
    return {"incident": number, **texts, "faults": faults, "parts_ms": {}}


def test_incidents_that_are_saved_while_a_term_ends_reach_the_next_leader(etcd: EtcdServer) -> None:
    async def main() -> None:
        async with leader(etcd, "ends") as first:
            first.incidents.keep([incident(1)])
            first.incidents.keep([incident(1), incident(2)])
        async with leader(etcd, "ends") as second:
            assert second.epoch == 2
            assert [one["incident"] for one in second.earlier] == [1, 2]

    asyncio.run(main())


def test_incidents_with_long_evidence_reach_the_next_leader(etcd: EtcdServer) -> None:
    """etcd refuses a value of more than 1.5 MiB."""

    async def main() -> None:
        long = "".join(f"{number:x}" for number in range(400_000))
        async with leader(etcd, "long") as first:
            first.incidents.keep([incident(number, long) for number in (1, 2, 3)])
        async with leader(etcd, "long") as second:
            assert [one["incident"] for one in second.earlier] == [1, 2, 3]

    asyncio.run(main())


def test_incident_that_its_leader_could_not_save_is_taken_from_the_record(etcd: EtcdServer) -> None:
    """The leader was killed after the decision was in the record, and before it saved anything."""

    async def main() -> None:
        job = JobId("killed")
        async with leader(etcd, job) as first:
            fault = Fault.of(Rank(3), FaultCause.LOST, "its agent has ended")
            before = journal_records.first(job)
            past = PastRound(1, 10.0, 0.5, "recover", "all ranks train again", (fault,))
            after = replace(before, rounds=(past,))
            step = Outcome(after.state)
            write = journal_records.write(job, before, after, Tick(), step, 11.0)
            await first.journal.append(write)
        async with leader(etcd, job) as second:
            [shown] = second.earlier
            assert (shown["incident"], shown["outcome"]) == (1, "all ranks train again")
            assert [one["rank"] for one in shown["faults"]] == [3]

    asyncio.run(main())
