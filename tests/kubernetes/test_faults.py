"""An API server that fails, and objects that are wrong: nothing is lost, and nothing crashes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from lightkube.config.kubeconfig import KubeConfig

from taskd.clusterd import act
from taskd.clusterd.cluster.in_memory import version_of
from taskd.clusterd.cluster.interface import ClusterRefused, ClusterUnreachable, Key, Kind
from taskd.clusterd.cluster.objects import facts_of
from taskd.clusterd.kubernetes.api_client import ApiClient
from taskd.clusterd.kubernetes.cluster import KubernetesCluster
from taskd.clusterd.kubernetes.lease import KubernetesLease
from taskd.clusterd.leadership import Leadership
from taskd.core.election import Election, ElectionConfig
from taskd.core.record import StoreUnreachable
from taskd.model.clusterd import ResetOperation, WriteResetConfig
from tests.kubernetes.control_plane import ControlPlane, eventually
from tests.kubernetes.faulty_proxy import FaultyProxy, faulty_proxy
from tests.kubernetes.objects import MERGE, TrainingJob, config_map
from tests.kubernetes.replicas import replica
from tests.kubernetes.test_cluster import next_change
from tests.kubernetes.test_leader import code_of, declare

WATCH_PODS, LIST_PODS = ("GET", "/api/v1/pods", "watch=true"), ("GET", "/api/v1/pods?limit")
WAIT_S = 60.0


@asynccontextmanager
async def through(proxy: FaultyProxy) -> AsyncIterator[KubernetesCluster]:
    config = KubeConfig.from_file(proxy.plane.kubeconfig("proxied", "", proxy.url)).get()
    assert config is not None
    api = ApiClient(config)
    cluster = KubernetesCluster(api, Random(0))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()
        await api.close()


@pytest.mark.parametrize("code", [429, 500, 503])
def test_list_is_repeated_until_the_server_answers(plane: ControlPlane, code: int) -> None:
    job = TrainingJob(plane, f"listed-{code}", pods=1)
    with faulty_proxy(plane) as proxy:
        refused = proxy.add(*LIST_PODS, times=2, code=code)

        async def main() -> None:
            async with through(proxy) as cluster:
                assert len(cluster.find(Kind.POD, job.uid)) == 1
                assert cluster.problems() == {}

        asyncio.run(main())
        assert refused.hit.is_set()


def test_server_is_given_the_time_that_it_asks_for(plane: ControlPlane) -> None:
    with faulty_proxy(plane) as proxy:
        refused = proxy.add(*LIST_PODS, code=429, retry_after_s=3)

        async def main() -> None:
            async with through(proxy):
                pass

        asyncio.run(main())
        (refused_at,) = refused.at
        next_at = next(
            at for at, line in proxy.requests if at > refused_at and LIST_PODS[1] in line
        )
        assert next_at - refused_at >= 3


@pytest.mark.parametrize(
    "fault",
    [{"cut_after": 700}, {"code": 410}, {"code": 500}, {"delay_s": 2.0}],
    ids=["cut in the middle of a line", "gone", "fails", "slow"],
)
def test_no_change_is_lost_when_a_watch_breaks(
    plane: ControlPlane, fault: dict[str, float], request: pytest.FixtureRequest
) -> None:
    """A pod is deleted, another one replaced under its name, while the watch does not work."""
    name = f"broken-{request.node.callspec.indices['fault']}"
    job = TrainingJob(plane, name, pods=3)
    gone, replaced = (Key(Kind.POD, "team", f"{name}-worker-{index}") for index in (1, 2))
    with faulty_proxy(plane) as proxy:
        broken = proxy.add(*WATCH_PODS, **fault)

        async def main() -> None:
            async with through(proxy) as cluster:
                changes, old = cluster.changes(), cluster.get(replaced)
                await asyncio.to_thread(broken.hit.wait, WAIT_S)
                for index in (1, 2):
                    await asyncio.to_thread(job.delete_pod, index)
                await asyncio.to_thread(job.pod, 2)
                seen: dict[Key, list[bool]] = {gone: [], replaced: []}
                async with asyncio.timeout(WAIT_S):
                    while seen[gone][-1:] != [False] or seen[replaced][-2:] != [False, True]:
                        change = await anext(changes)
                        if change.key in seen and (change.after is None) != (
                            seen[change.key][-1:] == [False]
                        ):
                            seen[change.key].append(change.after is not None)
                fresh = cluster.get(replaced)
                assert old is not None
                assert fresh is not None
                assert fresh["metadata"]["uid"] != old["metadata"]["uid"]
                assert cluster.get(gone) is None

        asyncio.run(main())


@pytest.mark.parametrize("code", [409, 429, 500])
def test_refused_write_may_be_repeated(plane: ControlPlane, code: int) -> None:
    name = f"reset-config-write-{code}"
    config_map(plane, name, {"reset.json": "{}", "theirs": "kept"})
    key = Key(Kind.CONFIG_MAP, "team", name)
    with faulty_proxy(plane) as proxy:
        proxy.add("PATCH", name, code=code)

        async def main() -> None:
            async with through(proxy) as cluster:
                before = cluster.get(key)
                assert before is not None
                patch = {"data": {"reset.json": '{"a":1}'}}
                with pytest.raises(ClusterUnreachable, match=f"injected {code}"):
                    await cluster.patch(key, patch, version_of(before))
                await cluster.patch(key, patch, version_of(before))

        asyncio.run(main())
    found = plane.request("GET", f"api/v1/namespaces/team/configmaps/{name}")
    assert found["data"] == {"reset.json": '{"a":1}', "theirs": "kept"}


def test_reset_config_keeps_foreign_keys_and_one_that_is_not_json_is_refused(
    plane: ControlPlane,
) -> None:
    job = TrainingJob(plane, "reset", pods=1)
    name, path = "reset-config-reset", "api/v1/namespaces/team/configmaps/reset-config-reset"
    config_map(plane, name, {"reset.json": "no JSON", "restartType": "podReschedule"})
    clear = WriteResetConfig(ResetOperation.CLEAR, sequence=1)
    with faulty_proxy(plane) as proxy:

        async def main() -> None:
            async with through(proxy) as cluster:
                (group,) = cluster.find(Kind.POD_GROUP, job.uid)
                facts = facts_of(group, cluster.find(Kind.POD, job.uid))
                with pytest.raises(ClusterRefused, match=r"reset.json is not valid JSON"):
                    await act.in_cluster(clear, facts, cluster, 1000.0)
                changes = cluster.changes()
                await asyncio.to_thread(
                    plane.request, "PATCH", path, {"data": {"reset.json": "{}"}}, MERGE
                )
                await next_change(changes, Key(Kind.CONFIG_MAP, "team", name))
                await act.in_cluster(clear, facts, cluster, 1000.0)

        asyncio.run(main())
    data = plane.request("GET", path)["data"]
    assert data["restartType"] == "podReschedule"
    assert json.loads(data["reset.json"])["RankList"] == []


WRONG_REPORTS = {
    "no-json": {"data": {"DeviceInfoCfg": "no JSON"}},
    "wrong-types": {"data": {"DeviceInfoCfg": '{"DeviceInfo": [1], "CheckCode": {}}'}},
    "large": {"data": {"DeviceInfoCfg": "x" * (1024 * 1024 - 2000)}},
    "binary": {"binaryData": {"DeviceInfoCfg": "AAEC"}},
    "empty": {},
}


def test_wrong_reports_and_records_do_not_disturb_a_leader(plane: ControlPlane) -> None:
    job = TrainingJob(plane, "undisturbed", pods=1)
    for number, broken in enumerate(({"epoch": "x"}, {})):
        config_map(
            plane, f"taskd-job-broken-{number}", broken, "mindx-dl", **{"taskd/record": "job"}
        )
    with replica(plane, "first") as leader:
        leader.wait_for("clusterd listens on port")
        assert "record taskd-job-broken-0" in leader.log.read_text()
        for name, body in WRONG_REPORTS.items():
            metadata = {"name": f"mindx-dl-deviceinfo-{name}", "namespace": "kube-system"}
            plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **body})
            metadata = {"name": f"reset-config-{name}", "namespace": "team"}
            plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **body})
        group = f"apis/scheduling.volcano.sh/v1beta1/namespaces/team/podgroups/{job.group}"
        wrong = {"metadata": {"annotations": {"recover-strategy": ",,pray", "hccl/rankIndex": "x"}}}
        plane.request("PATCH", group, wrong, MERGE)
        asyncio.run(declare(leader, "next-to-wrong-objects"))
        assert leader.running.poll() is None
        assert "Traceback" not in leader.log.read_text()
    for number in range(2):
        plane.request("DELETE", f"api/v1/namespaces/mindx-dl/configmaps/taskd-job-broken-{number}")


def test_job_that_is_created_again_under_its_name_is_another_job(plane: ControlPlane) -> None:
    old = TrainingJob(plane, "twice", pods=1)
    with replica(plane, "first") as leader:
        leader.wait_for("clusterd listens on port")
        asyncio.run(_registered(leader, old.uid, 0))
        old.delete()
        old.delete_pod(0)
        path = "apis/mindxdl.gitee.com/v1/namespaces/team/ascendjobs/twice"
        plane.request("DELETE", path)
        fresh = TrainingJob(plane, "twice", pods=1)
        assert fresh.uid != old.uid
        eventually(lambda: asyncio.run(code_of(leader, old.uid)) != 0)
        eventually(lambda: asyncio.run(_code(leader, fresh.uid)) == 0)


async def _code(leader: object, job: str) -> int:
    async with leader.client(job) as client:  # type: ignore[attr-defined]
        return int(await client.code("Init"))


async def _registered(leader: object, job: str, code: int) -> None:
    async with leader.client(job) as client:  # type: ignore[attr-defined]
        assert await client.code("Init") == code
        assert await client.code("Register") == code


def test_clocks_of_the_replicas_are_never_compared(plane: ControlPlane) -> None:
    """The holder's clock is decades off: it keeps the lease while it renews, and loses it after."""
    short = ElectionConfig(duration_s=2.0, give_up_s=1.5, period_s=0.2)
    path = "apis/coordination.k8s.io/v1/namespaces/mindx-dl/leases"
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "skewed", "namespace": "mindx-dl"},
        "spec": {
            "holderIdentity": "skewed",
            "leaseDurationSeconds": 2,
            "renewTime": "1999-12-31T23:59:59.000000Z",
        },
    }
    plane.request("POST", path, body)

    def renew(second: int) -> None:
        at = f"2099-12-31T23:{second // 60:02d}:{second % 60:02d}.000000Z"
        plane.request("PATCH", f"{path}/skewed", {"spec": {"renewTime": at}}, MERGE)

    async def main() -> None:
        config = KubeConfig.from_file(plane.kubeconfig("skewed")).get()
        assert config is not None
        api = ApiClient(config)
        election = Election("us", short)
        lease = KubernetesLease(api, "mindx-dl", election, name="skewed")
        until, second = time.monotonic() + 2 * short.duration_s, 0
        while time.monotonic() < until:
            second += 1
            await asyncio.to_thread(renew, second)
            seen_at = time.monotonic()
            assert await lease.acquire() is None, "the holder is alive"
        leadership = Leadership(lease, short.period_s, lambda: election.pause_s(time.monotonic()))
        async with asyncio.timeout(WAIT_S):
            await leadership.win()
        assert time.monotonic() - seen_at >= short.duration_s
        await leadership.close()
        await api.close()

    try:
        asyncio.run(main())
    finally:
        plane.request("DELETE", f"{path}/skewed")


def test_write_of_a_record_whose_answer_was_lost_is_repeated_safely(plane: ControlPlane) -> None:
    """The connection breaks after the API server has written: the leader must not write twice."""
    with faulty_proxy(plane) as proxy, replica(plane, "first", url=proxy.url) as leader:
        leader.wait_for("clusterd listens on port")
        lost = proxy.add("POST", "/api/v1/namespaces/mindx-dl/configmaps", cut_after=1)

        async def main() -> None:
            async with leader.client("answer-lost") as client:
                await client.declare("retry", "dump")
                assert await client.declare("retry", "dump") == 0
                assert await client.code("Init") == 0
                assert await client.code("Register") == 0

        asyncio.run(main())
        assert lost.hit.is_set()
    path = "api/v1/namespaces/mindx-dl/configmaps?labelSelector=taskd/record%3Djob"
    names = [item["data"]["name"] for item in plane.request("GET", path)["items"]]
    assert names.count("answer-lost") == 1


def test_slow_server_delays_a_decision_and_loses_nothing(plane: ControlPlane) -> None:
    with faulty_proxy(plane) as proxy, replica(plane, "first", url=proxy.url) as leader:
        leader.wait_for("clusterd listens on port")
        proxy.add("/api/v1/namespaces/mindx-dl/configmaps", times=3, delay_s=2.0)
        asyncio.run(declare(leader, "slow"))
        assert asyncio.run(code_of(leader, "slow")) == 0
        assert leader.running.poll() is None


def test_lease_that_cannot_be_read_names_the_reason(plane: ControlPlane) -> None:
    with faulty_proxy(plane) as proxy:
        proxy.add("/leases/", code=403)

        async def main() -> None:
            config = KubeConfig.from_file(plane.kubeconfig("refused", "", proxy.url)).get()
            assert config is not None
            api = ApiClient(config)
            lease = KubernetesLease(api, "mindx-dl", Election("us"), name="any")
            with pytest.raises(StoreUnreachable, match="injected 403"):
                await lease.acquire()
            await api.close()

        asyncio.run(main())
