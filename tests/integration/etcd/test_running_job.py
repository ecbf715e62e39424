"""A launcher that is started again: does its job still run, although no manager leads just now?"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from taskd.agent.etcd_member.running_job import still_runs
from taskd.clusterd.etcd.etcd_client import EtcdClient, put
from taskd.clusterd.etcd.etcd_settings import EtcdAccess, EtcdSettings
from taskd.errors import SettingsError
from taskd.runtime.address import free_port
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.etcd.test_etcd_client import ready

PREFIX, WITHIN_S = "/taskd/runs/again", 60.0


async def write(etcd: EtcdServer, key: str, value: bytes) -> None:
    client = EtcdClient([etcd.client], call_s=10.0)
    await ready(client)
    await client.transact([], [put(f"{PREFIX}/{key}", value)])
    await client.close()


def test_job_without_a_leader_still_runs_until_its_end_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        access = EtcdAccess((f"127.0.0.1:{free_port()}", etcd.client), EtcdSettings())
        await write(etcd, "epoch", b"3")
        assert await still_runs(access, PREFIX, WITHIN_S, print)
        await write(etcd, "ended", b"3")
        assert not await still_runs(access, PREFIX, WITHIN_S, print)

    with running(tmp_path / "etcd") as etcd:
        asyncio.run(scenario())


def test_silent_etcd_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        access = EtcdAccess((etcd.client,), EtcdSettings())
        await write(etcd, "epoch", b"3")
        etcd.pause()
        with pytest.raises(SettingsError, match="two jobs of one name must not run"):
            await still_runs(access, PREFIX, 2.0, print)
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            etcd.resume()

        assert await still_runs(access, PREFIX, WITHIN_S, say)
        assert "may still run" in said[0]

    with running(tmp_path / "etcd") as etcd:
        asyncio.run(scenario())


def test_job_of_which_all_members_refuse_does_not_run() -> None:
    access = EtcdAccess((f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"), EtcdSettings())
    assert not asyncio.run(still_runs(access, PREFIX, WITHIN_S, print))
