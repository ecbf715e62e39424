"""clusterd or its disk fails at any point: nothing is lost, nothing is decided twice."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from grpc import aio

from taskd.clusterd.main import ServerConfig
from taskd.model.codes import NOT_STORED
from taskd.wire._pb import recover_pb2 as pb
from tests import ROOT
from tests.integration.clusterd.client import Client, connected, started

KILLS = 8


@dataclass
class Job:
    """A job that follows all orders, across restarts of the server."""

    address: str
    name: str = "job"
    received: dict[int, pb.ProcessManageSignal] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    """The incidents that succeeded."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def live(self) -> None:
        """Join, subscribe and answer; again after every disconnect, like the documented clients."""
        while True:
            try:
                async with connected(self.address, job=self.name) as client:
                    await self._listen(client)
            except (aio.AioRpcError, AssertionError):
                await asyncio.sleep(0.01)

    async def _listen(self, client: Client) -> None:
        await client.join()
        call = (await client.subscribe()).call
        while isinstance(signal := await call.read(), pb.ProcessManageSignal):
            if signal.signalType != "keep-alive":
                self._check(signal)
                await self._answer(client, signal)

    def _check(self, signal: pb.ProcessManageSignal) -> None:
        known = self.received.setdefault(signal.sequence, signal)
        assert known == signal, "one decision, sent in two versions"
        assert signal.sequence >= max(self.received, default=0) - 1

    async def _answer(self, client: Client, signal: pb.ProcessManageSignal) -> None:
        match signal.signalType:
            case "stopTrain":
                await client.stopped(signal.uuid)
            case "globalFault":
                await client.offer("recover", "retry", "dump", "exit", uuid=signal.uuid)
            case "changeStrategy":
                code = await self._say("result", signal.changeStrategy, uuid=signal.uuid)
                if code == 0 and signal.incident not in self.finished:
                    self.finished.append(signal.incident)
                    self.news.set()
            case other:
                raise AssertionError(f"not expected here: {other}")

    async def fault(self, rank: int) -> int:
        return await self._say("fault", rank)

    async def _say(self, method: str, *arguments: object, **options: object) -> int:
        """Send until it is answered: a report with a lost answer may have been accepted."""
        while True:
            try:
                async with connected(self.address, job=self.name) as client:
                    code: int = await getattr(client, method)(*arguments, **options)
                if code not in (400, 599):
                    return code
            except aio.AioRpcError:
                pass
            await asyncio.sleep(0.01)

    async def until_finished(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.finished) < count:
                await self.news.wait()
                self.news.clear()


@contextmanager
def process(
    journal: Path, listen: str, within: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    words = ["taskd", "clusterd", "--listen", listen, "--journal", str(journal)]
    running = subprocess.Popen(
        [*within, sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "src"},
    )
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line, running.stderr and running.stderr.read()
        yield running, int(line.split()[-1])
    finally:
        running.kill()
        running.communicate()


@asynccontextmanager
async def living(job: Job) -> AsyncIterator[Job]:
    task = asyncio.ensure_future(job.live())
    try:
        yield job
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("seed", range(3))
def test_every_round_ends_although_clusterd_is_killed_repeatedly(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    journal = tmp_path / "journal"
    with process(journal, "127.0.0.1:0") as (_, port):
        address = f"127.0.0.1:{port}"

    async def main() -> None:
        async with living(Job(address)) as job:
            faults = asyncio.ensure_future(_faults(job))
            for _ in range(KILLS):
                with process(journal, address) as (running, _):
                    await asyncio.wait([faults], timeout=chance.uniform(0.0, 0.4))
                    running.send_signal(signal.SIGKILL)
                    running.wait()
            with process(journal, address):
                await job.until_finished(len(job.finished) + 2)
            faults.cancel()
            incidents = [signal.incident for _, signal in sorted(job.received.items())]
            assert incidents == sorted(incidents), "an older incident came back"

    asyncio.run(main())


async def _faults(job: Job) -> None:
    number = 0
    while True:
        assert await job.fault(number % 4) == 0
        number += 1
        await job.until_finished(number)


def test_round_continues_after_a_crash_at_every_point(tmp_path: Path) -> None:
    """Copies the files after each decision: that is what a kill at this point would leave."""
    points: list[tuple[str, Path, int]] = []

    async def first() -> None:
        async with started(ServerConfig(journal=tmp_path / "journal")) as (server, client):

            def remember(what: str) -> None:
                copy = tmp_path / f"copy{len(points)}"
                copy.mkdir()
                for name in ("journal", "journal-wal"):
                    shutil.copy(tmp_path / name, copy / name)
                owner = server.jobs.served[job_id]
                points.append((what, copy / "journal", owner.state.job.sequence))

            await client.declare("retry", "recover-in-place", "dump", nodes=2, per_node=2)
            await client.join()
            job_id = next(iter(server.jobs.served))
            remember("registered")
            signals = await client.subscribe()
            assert await client.fault(3, kind="2") == 0
            remember("fault reported")
            stop = await signals.next()
            remember("stop sent")
            await client.stopped(stop.uuid)
            remember("stopped")
            await signals.next()
            await client.offer("retry", "recover", uuid=stop.uuid)
            remember("retry ordered")
            order = await signals.next()
            await client.result("retry", 405, uuid=order.uuid)
            remember("retry failed")
            await client.fault(1)
            remember("second fault")

    async def again(what: str, journal: Path, sequence: int) -> None:
        async with started(ServerConfig(journal=journal)) as (server, _):
            owner = next(iter(server.jobs.served.values()))
            assert owner.state.job.sequence == sequence, what
            async with living(Job(server.address)) as job:
                if what == "registered":
                    await job.fault(2)
                await job.until_finished(1)
                assert max(job.received) >= sequence, what
            async with connected(server.address) as client:
                numbers = [line.number for line in await client.history()]
                assert len(set(numbers)) == len(numbers)

    asyncio.run(first())
    assert len(points) == 7
    for point in points:
        asyncio.run(again(*point))


def test_full_disk_is_reported_and_survived(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def main(running: subprocess.Popen[str], address: str) -> None:
        async with connected(address) as client:
            await client.declare("recover-in-place")
            await client.join()
            signals = await client.subscribe()
            soft, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (1, hard))
            refused = await client.call(
                "ReportProcessFault",
                pb.ProcessFaultRequest(jobId="job", faultRanks=[pb.FaultRank(rankId="1")]),
            )
            assert refused.code == 599
            assert refused.info.startswith(NOT_STORED), "the manager reports it again"
            assert "cannot be written" in refused.info
            status = await client.status()
            assert (status.line.state, status.line.incident) == ("Idle", 0)
            assert await client.code("HealthCheck") == 0
            async with connected(address, job="other") as other:
                assert await other.code("Init") == 0
                assert await other.code("Register") == 599
            resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (soft, hard))
            assert await client.fault(2) == 0
            first = await signals.next()
            # No signal was sent about the fault that could not be journaled.
            assert [fault.rankId for fault in first.faultRanks] == ["2"]
            assert first.incident == 1

    with process(journal, "127.0.0.1:0") as (running, port):
        asyncio.run(main(running, f"127.0.0.1:{port}"))


def mounted(command: str) -> list[str]:
    """A command prefix: only the command sees the mount, which ends with the command."""
    within = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{command} && "$@"']
    within += ["sh"]
    if subprocess.run([*within, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs to be allowed to mount")
    return [word.replace('"$@"', 'exec "$@"') for word in within]


def make_read_only(running: subprocess.Popen[str], disk: Path) -> None:
    mounts = Path(f"/proc/{running.pid}/mounts").read_text().splitlines()
    device = next(line.split()[0] for line in mounts if line.split()[1] == str(disk))
    trigger = Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error")
    if not trigger.exists():
        pytest.skip("the kernel cannot be asked to stop writing")
    trigger.write_text("tested")


@pytest.mark.parametrize("used", [False, True])
def test_read_only_disk_is_reported_at_start(tmp_path: Path, used: bool) -> None:
    """With and without a journal on the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if used:
        with process(disk / "journal", "127.0.0.1:0"):
            pass
    within = mounted(f"mount --bind {disk} {disk} && mount -o remount,bind,ro {disk}")
    before = {path.name: path.read_bytes() for path in disk.iterdir()}
    said = "the journal .*/disk/journal cannot be .*Read-only file system"
    with pytest.raises(AssertionError, match=said):
        process(disk / "journal", "127.0.0.1:0", within).__enter__()
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


def test_disk_that_becomes_read_only_keeps_the_last_state(
    tmp_path: Path,
) -> None:
    """As the kernel does after an error in the file system."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    made = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if made is None:
        pytest.skip("needs mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(16 * 1024 * 1024)
    subprocess.run([made, "-q", str(image)], check=True)
    within = mounted(f"mount -o loop,errors=remount-ro {image} {disk}")

    async def refuses(running: subprocess.Popen[str], address: str) -> None:
        async with connected(address) as client:
            await client.declare("recover-in-place")
            await client.join()
            assert await client.fault(1) == 0
            make_read_only(running, disk)
            for _ in range(2):
                refused = await client.call(
                    "ReportProcessFault",
                    pb.ProcessFaultRequest(jobId="job", faultRanks=[pb.FaultRank(rankId="2")]),
                )
                assert refused.code == 599
                assert f"the journal {disk}/journal cannot be written" in refused.info
                assert "Read-only file system" in refused.info
            status = await client.status()
            assert (status.line.state, status.line.incident) == ("Stopping", 1)
            assert await client.code("HealthCheck") == 0

    async def goes_on(address: str) -> None:
        async with connected(address) as client:
            status = await client.status()
            assert (status.line.state, status.line.incident) == ("Stopping", 1)
            stop = await (await client.subscribe()).next()
            assert [fault.rankId for fault in stop.faultRanks] == ["1"]
            assert await client.fault(2) == 0

    with process(disk / "journal", "127.0.0.1:0", within) as (running, port):
        asyncio.run(refuses(running, f"127.0.0.1:{port}"))
    with process(disk / "journal", "127.0.0.1:0", within) as (_, port):
        asyncio.run(goes_on(f"127.0.0.1:{port}"))


def test_unusable_journal_is_reported_before_serving(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be"):
        process(tmp_path / "nowhere" / "journal", "127.0.0.1:0").__enter__()


def test_clients_of_a_restarted_server_need_no_new_declaration(tmp_path: Path) -> None:
    config = ServerConfig(journal=tmp_path / "journal")

    async def main() -> None:
        async with started(config) as (server, client):
            await client.declare("recover-in-place", nodes=3, per_node=2)
            async with living(Job(server.address)) as job:
                await job.fault(2)
                await job.until_finished(1)
        async with started(config) as (server, client):
            assert await client.fault(5) == 0
            stop = await (await client.subscribe()).next()
            assert [fault.rankId for fault in stop.faultRanks] == ["5"]
            assert stop.incident == 2
            past = (await client.status()).rounds
            assert [(r.incident, r.strategy) for r in past] == [(1, "recover-in-place")]
            owner = next(iter(server.jobs.served.values()))
            assert len(owner.state.job.pods) == 3
            facts = server.jobs.facts(owner.job)
            assert facts is not None
            assert [s.value for s in facts.config.strategies] == ["recover-in-place", "exit"]

    asyncio.run(main())
