"""Several clusterds that share a real etcd: one decides, the next continues where it stopped."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from taskd.clusterd.etcd.etcd_client import EtcdClient, put
from taskd.clusterd.etcd.etcd_lease import EtcdLease
from taskd.clusterd.etcd.etcd_records import EtcdRecords
from taskd.core.election import Election
from taskd.core.record import Record, RecordConflict, StoreUnreachable
from taskd.manager.clusterd_link.clusterd_client import ClusterdClient
from taskd.manager.settings import ManagerConfig
from taskd.model.clusterd import Signal
from tests.integration.clusterd.client import WAIT_S, connected
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.etcd.test_etcd_client import ready


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server


@contextmanager
def clusterd(etcd: EtcdServer, prefix: str) -> Iterator[subprocess.Popen[str]]:
    words = ("clusterd", "--listen", "127.0.0.1:0", "--etcd", etcd.client, "--etcd-prefix", prefix)
    process = subprocess.Popen(
        [sys.executable, "-m", "taskd", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()


def address_of(leader: subprocess.Popen[str]) -> str:
    """Waits until it leads: only the leader listens."""
    assert leader.stdout is not None
    line = leader.stdout.readline()
    assert line, "it has ended"
    return f"127.0.0.1:{line.split()[-1]}"


async def begin_round(address: str) -> tuple[int, str]:
    """The incident of a round that the leader has begun."""
    async with connected(address) as client:
        assert await client.declare("recover-in-place", nodes=2, per_node=2) == 0
        await client.join()
        signals = await client.subscribe()
        assert await client.fault(3) == 0
        order = await signals.next()
        return (await client.status()).line.incident, order.signalType


async def first_order(addresses: str) -> str:
    """What the manager of the job hears first."""
    manager = ClusterdClient(addresses, ManagerConfig(job_id="job"))
    heard: asyncio.Queue[Signal] = asyncio.Queue()
    listening = asyncio.create_task(manager.listen(heard.put_nowait, lambda: None))
    try:
        async with asyncio.timeout(WAIT_S):
            while (signal := await heard.get()).type == "keep-alive":
                pass
            return str(signal.type)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await manager.close()


async def finish_round(address: str) -> tuple[int, str, list[str]]:
    """The same round at the next leader: incident, first order, and how all rounds ended."""
    async with connected(address) as client:
        await client.join()
        signals = await client.subscribe()
        order = await signals.next()
        assert await client.stopped(order.uuid) == 0
        assert await client.offer("recover", uuid=(await signals.next()).uuid) == 0
        assert await client.result("recover", uuid=(await signals.next()).uuid) == 0
        status = await client.status()
        return status.line.incident, order.signalType, [one.strategy for one in status.rounds]


def test_next_leader_continues_a_round_whose_leader_was_killed(etcd: EtcdServer) -> None:
    with clusterd(etcd, "/killed") as first:
        incident, order = asyncio.run(begin_round(address_of(first)))
        with clusterd(etcd, "/killed") as second:
            first.kill()
            address = address_of(second)
            heard = asyncio.run(first_order(f"127.0.0.1:1,{address}"))
            assert heard == order, "the job's manager finds the leader by itself"
            again = asyncio.run(finish_round(address))
            assert again[:2] == (incident, order)
            assert len(again[2]) == 1, "the round was decided once"


def test_stopped_leader_decides_nothing_more_and_exits(etcd: EtcdServer) -> None:
    with clusterd(etcd, "/stopped") as first:
        asyncio.run(begin_round(address_of(first)))
        with clusterd(etcd, "/stopped") as second:
            first.send_signal(signal.SIGSTOP)
            address_of(second)
            first.send_signal(signal.SIGCONT)
            assert first.wait(60) == 1
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0


def test_former_leader_can_neither_change_nor_create_a_record(etcd: EtcdServer) -> None:
    async def scenario() -> None:
        client = EtcdClient([etcd.client], call_s=10.0)
        await ready(client)
        old = EtcdLease(client, "/fence", Election("old"))
        assert await old.acquire() == 1
        records = EtcdRecords(client, "/fence", old.is_ours)
        stored = await records.write("a/b", Record(1, 1, "first"), None)
        assert await old.renew(), "a renewal does not disturb the writes"
        stored = await records.write("a/b", Record(1, 2, "second"), stored.version)
        fence = old.is_ours()
        await old.release()
        new = EtcdLease(client, "/fence", Election("new"))
        assert await new.acquire() == 2
        assert await old.acquire() is None
        late = EtcdRecords(client, "/fence", lambda: fence)
        with pytest.raises(RecordConflict):
            await late.write("a/b", Record(1, 3, "late"), stored.version)
        with pytest.raises(RecordConflict):
            await late.write("other", Record(1, 1, "late"), None)
        assert {name: one.record.state for name, one in (await late.read_all()).items()} == {
            "a/b": "second"
        }
        await client.close()

    asyncio.run(scenario())


def test_restored_backup_and_foreign_keys_are_refused(etcd: EtcdServer) -> None:
    async def scenario() -> None:
        client = EtcdClient([etcd.client], call_s=10.0)
        await ready(client)
        lease = EtcdLease(client, "/backup", Election("one"))
        assert await lease.acquire() == 1
        old = (await client.range("/backup/leader"))[0].value
        assert await EtcdLease(client, "/backup", Election("one")).acquire() == 2
        assert await lease.acquire() is None or lease._newest >= 2
        await client.transact([], [put("/backup/leader", old)])
        with pytest.raises(StoreUnreachable, match="old backup"):
            await lease.acquire()
        await client.transact([], [put("/backup/leader", b"?")])
        with pytest.raises(StoreUnreachable, match="--etcd-prefix"):
            await lease.acquire()
        await client.close()

    asyncio.run(scenario())
