"""A node that loses the job's etcd before ranks run on it starts again; later it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from taskd.agent.run.leader_follower import watch_start
from taskd.clusterd.etcd.etcd_settings import EtcdAccess, EtcdSettings
from taskd.errors import EtcdLostAtStart
from taskd.runtime.address import free_port
from tests.integration.etcd.etcd_server import running

PREFIX = "/taskd/runs/start"


def access(address: str) -> EtcdAccess:
    return EtcdAccess((address,), EtcdSettings())


@pytest.mark.parametrize("starts", [True, False])
def test_silent_etcd_is_given_up_before_the_job_begins(starts: bool) -> None:
    async def scenario() -> None:
        silent = access(f"127.0.0.1:{free_port()}")
        with pytest.raises(EtcdLostAtStart, match="no rank has begun") as lost:
            await watch_start(silent, PREFIX, lambda: False, starts, 0.5, 0.5)
        assert lost.value.do_without == starts

    asyncio.run(scenario())


def test_silent_etcd_is_no_reason_to_start_again_once_ranks_run() -> None:
    silent = access(f"127.0.0.1:{free_port()}")
    asyncio.run(watch_start(silent, PREFIX, lambda: True, True, 0.5))


def test_etcd_that_answers_is_not_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        looks = 0

        def begun() -> bool:
            nonlocal looks
            looks += 1
            return looks > 2

        await watch_start(access(etcd.client), PREFIX, begun, True, 5.0, 5.0)

    with running(tmp_path / "etcd") as etcd:
        asyncio.run(scenario())
