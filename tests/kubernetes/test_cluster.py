"""The cluster behind a real API server: what clusterd reads there, and how it writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from lightkube.config.kubeconfig import KubeConfig

from taskd.clusterd.cluster.in_memory import version_of
from taskd.clusterd.cluster.interface import (
    Changed,
    ClusterRefused,
    ClusterUnreachable,
    Key,
    Kind,
)
from taskd.clusterd.cluster.objects import facts_of
from taskd.clusterd.kubernetes.api_client import ApiClient
from taskd.clusterd.kubernetes.cluster import KubernetesCluster
from taskd.model.ids import Rank
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.objects import TrainingJob, config_map

WAIT_S = 60.0


@asynccontextmanager
async def api_client(plane: ControlPlane, token: str = "") -> AsyncIterator[ApiClient]:
    config = KubeConfig.from_file(plane.kubeconfig("client", token)).get()
    assert config is not None
    api = ApiClient(config)
    try:
        yield api
    finally:
        await api.close()


@asynccontextmanager
async def connected(plane: ControlPlane) -> AsyncIterator[KubernetesCluster]:
    async with api_client(plane) as api:
        cluster = KubernetesCluster(api, Random(0))
        await cluster.start()
        try:
            yield cluster
        finally:
            await cluster.close()


async def next_change(changes: AsyncIterator[Changed], key: Key) -> Changed:
    async with asyncio.timeout(WAIT_S):
        async for change in changes:
            if change.key == key:
                return change
    raise AssertionError("the changes ended")


def test_job_is_read_from_its_pod_group_and_pods_and_other_objects_are_not_kept(
    plane: ControlPlane,
) -> None:
    job = TrainingJob(plane, "read")
    config_map(plane, "somebody-elses", {"a": "b"})
    config_map(plane, "reset-config-read", {"reset.json": "{}"})

    async def main() -> None:
        async with connected(plane) as cluster:
            (group,) = cluster.find(Kind.POD_GROUP, job.uid)
            facts = facts_of(group, cluster.find(Kind.POD, job.uid))
            assert [pod.ranks for pod in facts.pods] == [(0, 1), (Rank(2), 3)]
            assert facts.enabled
            assert facts.name == "read"
            assert cluster.get(Key(Kind.CONFIG_MAP, "team", "reset-config-read")) is not None
            assert cluster.get(Key(Kind.CONFIG_MAP, "team", "somebody-elses")) is None

    asyncio.run(main())


def test_patches_keep_foreign_keys_and_conflicts_are_transient(plane: ControlPlane) -> None:
    config_map(plane, "reset-config-patch", {"reset.json": "{}", "restartType": "hotReset"})
    key = Key(Kind.CONFIG_MAP, "team", "reset-config-patch")

    async def main() -> None:
        async with connected(plane) as cluster:
            before = cluster.get(key)
            assert before is not None
            old = version_of(before)
            await cluster.patch(key, {"data": {"reset.json": '{"a": 1}'}}, old)
            after = cluster.get(key)
            assert after is not None
            assert after["data"] == {"reset.json": '{"a": 1}', "restartType": "hotReset"}
            await cluster.patch(key, {"data": {"reset.json": "{}"}}, version_of(after))
            with pytest.raises(ClusterUnreachable, match="modified"):
                await cluster.patch(key, {"data": {"reset.json": "no"}}, old)
            with pytest.raises(ClusterRefused, match="not found"):
                await cluster.patch(Key(Kind.CONFIG_MAP, "team", "missing"), {"data": {}})
            with pytest.raises(ClusterRefused, match="alone deletes it"):
                await cluster.delete(key)

    asyncio.run(main())


def test_declared_jobs_stay_in_memory(plane: ControlPlane) -> None:
    key = Key(Kind.POD, "default", "declared-0")

    async def main() -> None:
        async with connected(plane) as cluster:
            await cluster.create(key, {"metadata": {"uid": "1"}})
            await cluster.patch(key, {"status": {"phase": "Running"}})
            assert cluster.get(key) is not None
            assert plane.request("GET", "api/v1/namespaces/default/pods")["items"] == []
            await cluster.delete(key)
            assert cluster.get(key) is None

    asyncio.run(main())


def test_deleted_pod_is_reported_at_once(plane: ControlPlane) -> None:
    job = TrainingJob(plane, "deleted")
    key = Key(Kind.POD, "team", "deleted-worker-1")

    async def main() -> None:
        async with connected(plane) as cluster:
            changes = cluster.changes()
            await asyncio.to_thread(job.delete_pod, 1)
            change = await next_change(changes, key)
            while change.after is not None:
                change = await next_change(changes, key)
            assert len(cluster.find(Kind.POD, job.uid)) == 1

    asyncio.run(main())


def test_deletions_while_disconnected_are_reported_after_the_server_has_forgotten_them(
    plane: ControlPlane,
) -> None:
    """A restarted API server answers 410 to a watch from before; objects were replaced since."""
    job = TrainingJob(plane, "gap", pods=3)
    gone, replaced = (Key(Kind.POD, "team", f"gap-worker-{index}") for index in (1, 2))

    async def main() -> None:
        async with api_client(plane) as api:
            cluster = KubernetesCluster(api, Random(0))
            await cluster.start()
            lists = cluster.reflectors[Kind.POD].lists
            await cluster.close()
            old = cluster.get(replaced)
            job.delete_pod(1)
            job.delete_pod(2)
            job.pod(2)
            config_map(plane, "reset-config-gap", {"reset.json": "{}"})
            await asyncio.to_thread(plane.compact)
            await asyncio.to_thread(plane.restart)
            changes = cluster.changes()
            await cluster.start()
            try:
                assert (await next_change(changes, gone)).after is None
                assert (await next_change(changes, replaced)).after is None
                fresh = cluster.get(replaced)
                assert fresh is not None
                assert old is not None
                assert fresh["metadata"]["uid"] != old["metadata"]["uid"]
                assert cluster.get(gone) is None
                assert cluster.reflectors[Kind.POD].lists > lists
            finally:
                await cluster.close()

    asyncio.run(main())
