"""The etcd that a job starts by itself: it grows, replaces lost nodes, leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from taskd.agent.etcd_member import etcd_binary, job_authority
from taskd.agent.etcd_member.etcd_binary import EtcdMemberSettings, NoEtcd
from taskd.clusterd.etcd.etcd_client import EtcdClient, put
from taskd.clusterd.etcd.etcd_errors import EtcdUnanswered
from taskd.clusterd.etcd.job_terms import JobTerms
from taskd.runtime.address import free_port
from taskd.runtime.retry import Tries, every
from tests.integration.etcd.etcd_server import binary
from tests.integration.etcd.member_node import PREFIX, TOKEN, MemberNode, cluster
from tests.integration.etcd.test_etcd_client import ready

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def seed() -> str:
    binary()
    return f"127.0.0.1:{free_port()}"


async def write(client: EtcdClient, key: str, value: bytes) -> None:
    await ready(client)
    assert (await client.transact([], [put(key, value)])).succeeded


async def read(client: EtcdClient, key: str) -> list[bytes]:
    await ready(client)
    return [one.value for one in await client.range(key)]


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_members_join_and_a_killed_node_is_replaced(seed: str) -> None:
    async def scenario() -> None:
        first = nodes[0]
        client = EtcdClient([seed], first.settings, call_s=2.0)
        await write(client, "x", b"1")
        fourth = MemberNode(seed, 3)
        nodes.append(fourth)
        fourth.wait(lambda node: node.facts.get("joined"))
        first.wait_for_voters(0, 1, 2)
        gone = nodes[1].facts["pid"]
        nodes[1].kill()
        first.wait_for_voters(0, 2, 3)
        psutil.wait_procs([psutil.Process(gone)] if psutil.pid_exists(gone) else [], 10)
        assert ended(gone), "a member does not outlive its launcher"
        first.kill()
        assert await read(client, "x") == [b"1"], "the others continue without the first node"
        nodes[2].wait_for_voters(2, 3)
        await client.close()

    with cluster(seed, 3) as nodes:
        asyncio.run(scenario())


def test_two_members_wait_for_a_stopped_one_and_continue_without_a_dead_one(seed: str) -> None:
    with cluster(seed, 2) as (first, second):
        client = EtcdClient([second.facts["client"]], second.settings, call_s=2.0)
        asyncio.run(write(client, "x", b"1"))
        etcd = psutil.Process(first.facts["pid"])
        first.popen.send_signal(signal.SIGSTOP)
        etcd.suspend()
        second.wait(lambda node: any("is silent" in text for text in node.said))
        assert "--witness" in second.said[-1]
        first.kill()
        second.wait(lambda node: any("continues alone" in text for text in node.said))
        second.wait_for_voters(1)
        client = EtcdClient([second.facts["client"]], second.settings, call_s=2.0)
        assert asyncio.run(read(client, "x")) == [b"1"]


def test_first_node_without_its_files_learns_where_the_job_runs(seed: str) -> None:
    async def elsewhere(node: MemberNode) -> tuple[str, ...]:
        client = EtcdClient([seed], node.settings, call_s=2.0)
        try:
            await ready(client)
            terms = JobTerms(client, PREFIX)
            async for _ in Tries(every(0.1)):
                if found := await terms.elsewhere():
                    return found
        finally:
            await client.close()
        raise AssertionError

    with cluster(seed, 3) as nodes:
        nodes[0].kill()
        nodes[1].wait_for_voters(1, 2)
        nodes.append(MemberNode(seed, 0))
        nodes[3].wait_for_voters(0)  # it cannot know that the job runs
        found = asyncio.run(elsewhere(nodes[3]))
        assert set(found) == {nodes[1].facts["client"], nodes[2].facts["client"]}


def test_address_of_the_first_node_leads_to_the_members_on_other_nodes(seed: str) -> None:
    with cluster(seed, 3) as nodes:
        nodes.append(MemberNode(seed, 3))
        nodes[3].wait(lambda node: node.facts.get("joined"))
        nodes[0].kill()
        nodes[1].wait_for_voters(1, 2, 3)
        again = MemberNode(seed, 0, member=nodes[1].facts["client"])
        nodes.append(again)
        again.wait_for_voters(1, 2, 3)  # it is not one of them
        client = EtcdClient([seed], again.settings, call_s=2.0)
        asyncio.run(write(client, "x", b"1"))
        fresh = MemberNode(seed, 4)
        nodes.append(fresh)
        fresh.wait(lambda node: node.facts.get("joined"))


def test_certificate_of_another_job_is_refused(seed: str, tmp_path: Path) -> None:
    async def scenario(job: str, token: str) -> None:
        folder = tmp_path / f"{job}-{token}"
        folder.mkdir()
        files = job_authority.issue(token, job, ["127.0.0.1"], folder)
        client = EtcdClient([seed], files.client_settings(), call_s=1.0)
        try:
            await client.range("x")
        finally:
            await client.close()

    with cluster(seed, 1):
        asyncio.run(scenario("job", TOKEN))
        for stranger in (("job", "another token"), ("another job", TOKEN)):
            with pytest.raises(EtcdUnanswered):
                asyncio.run(scenario(*stranger))


def test_everything_is_removed_at_the_end(seed: str) -> None:
    with cluster(seed, 1) as (node,):
        data = Path(node.facts["ca"]).parent
        assert (data / "data").is_dir()
        pid = node.facts["pid"]
    assert not data.exists()
    assert ended(pid)


def test_etcd_that_dies_is_started_again_with_its_data(seed: str) -> None:
    with cluster(seed, 1) as (node,):
        client = EtcdClient([seed], node.settings, call_s=2.0)
        asyncio.run(write(client, "x", b"1"))
        before = node.facts["pid"]
        os.kill(before, signal.SIGKILL)
        node.wait(lambda node: node.facts["pid"] != before)
        client = EtcdClient([seed], node.settings, call_s=2.0)
        assert asyncio.run(read(client, "x")) == [b"1"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.5.0", "can lose data after a crash"),
        ("3.5.2", "can lose data after a crash"),
        ("3.3.27", "is not supported"),
        ("4.0.0", "is not supported"),
        ("nonsense", "unknown version"),
    ],
)
def test_versions_that_are_refused(tmp_path: Path, version: str, expected: str) -> None:
    program = tmp_path / "etcd"
    program.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    program.chmod(0o755)
    found = etcd_binary.find(EtcdMemberSettings(binary=str(program)), encrypted=True)
    assert isinstance(found, NoEtcd)
    assert expected in found.because


def test_missing_etcd_says_what_to_install() -> None:
    found = etcd_binary.find(EtcdMemberSettings(binary="no-such-etcd"), encrypted=True)
    assert isinstance(found, NoEtcd)
    assert "apt-get install etcd-server" in found.remedy
