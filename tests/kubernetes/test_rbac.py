"""clusterd's rights: it needs all of them, and no others. The audit log shows what it did."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from random import Random

import pytest

from taskd.clusterd import act
from taskd.clusterd.cluster.interface import Kind
from taskd.clusterd.cluster.objects import facts_of
from taskd.clusterd.kubernetes.cluster import KubernetesCluster
from taskd.model.clusterd import (
    AnnotateNode,
    AnnotatePod,
    AnnotatePodGroup,
    ClusterCommand,
    LabelPod,
    LabelPodGroup,
    RemoveFaultJobInfo,
    ResetOperation,
    WriteFaultJobInfo,
    WriteResetConfig,
)
from taskd.model.ids import JobId
from taskd.wire._pb import control_pb2, recover_pb2
from tests.kubernetes.control_plane import ControlPlane, Json, eventually
from tests.kubernetes.manifests import objects
from tests.kubernetes.objects import MERGE, TrainingJob, config_map, exists
from tests.kubernetes.replicas import Replica, labels_of, own_pod, replica
from tests.kubernetes.test_cluster import api_client
from tests.kubernetes.test_leader import LEASE, RECORDS, declare

USER = "system:serviceaccount:mindx-dl:clusterd"
POD = "clusterd-0"


@pytest.fixture
def token(plane: ControlPlane) -> str:
    """Of clusterd, once it has all its rights: the tests take some of them away."""
    for body in objects("clusterd"):
        if body["kind"] in {
            "ServiceAccount",
            "ClusterRole",
            "ClusterRoleBinding",
            "Role",
            "RoleBinding",
        }:
            plane.apply(body)
    for kind, namespace in (("ClusterRole", "team"), ("Role", "mindx-dl")):
        for rule in rules(kind)["rules"]:
            for verb in rule["verbs"]:
                about = attributes(rule, verb, namespace)
                eventually(lambda about=about: allowed(plane, about))
    path = "api/v1/namespaces/mindx-dl/serviceaccounts/clusterd/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(plane.request("POST", path, request)["status"]["token"])


def commands(pod: str) -> list[ClusterCommand]:
    """One of each kind."""
    return [
        LabelPodGroup("process-recover-enable", "on", sequence=1),
        AnnotatePodGroup("ProcessRecoverStatus", "retry", sequence=2),
        LabelPod(pod, "fault-type", "software", sequence=3),
        AnnotatePod(pod, "needOperatorOpe", "create", sequence=4),
        AnnotateNode("node-0", "NodeHealthyStatus", "UnHealthy", sequence=5),
        WriteResetConfig(ResetOperation.CLEAR, sequence=6),
        WriteFaultJobInfo(("node-0",), sequence=7),
        RemoveFaultJobInfo(sequence=8),
    ]


async def drive_cluster(plane: ControlPlane, token: str) -> None:
    """Every command that the machine may give."""
    job = TrainingJob(plane, "rights")
    config_map(plane, "reset-config-rights", {"reset.json": "{}"})
    plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0"}})
    async with api_client(plane, token) as api:
        cluster = KubernetesCluster(api, Random(0))
        await cluster.start()
        try:
            (group,) = cluster.find(Kind.POD_GROUP, job.uid)
            facts = facts_of(group, cluster.find(Kind.POD, job.uid))
            assert facts.job == JobId(job.uid)
            for command in commands(facts.pods[0].uid):
                changes = cluster.changes()
                await act.in_cluster(command, facts, cluster, 1000.0)
                if isinstance(command, WriteFaultJobInfo):
                    async with asyncio.timeout(60):
                        await anext(changes)
        finally:
            await cluster.close()
    labels = job.pod_group()["metadata"]["labels"]
    assert labels["process-recover-enable"] == "on"


async def drive_replica(plane: ControlPlane, one: Replica) -> None:
    """A record is created, written, found changed, written again, and removed."""
    async with one.client("rights-declared") as client:
        assert await client.declare("retry", "dump") == 0
        assert await client.code("Init") == 0
        assert await client.code("Register") == 0
        names = [
            item["metadata"]["name"]
            for item in plane.request("GET", RECORDS)["items"]
            if item["data"]["name"] == "rights-declared"
        ]
        path = f"api/v1/namespaces/mindx-dl/configmaps/{names[0]}"
        plane.request("PATCH", path, {"metadata": {"labels": {"touched": "1"}}}, MERGE)
        assert await client.fault(0) == 0
        end = control_pb2.JobEnd(job="rights-declared", because="done")
        assert await client.code("EndJob", end) == 0


def test_clusterd_uses_every_right_and_no_other(plane: ControlPlane, token: str) -> None:
    earlier = plane.audit_length()
    own_pod(plane, POD)
    if exists(plane, LEASE):
        plane.request("DELETE", LEASE)  # so that it is created again
    with replica(plane, "rights", token, POD) as one:
        one.wait_for("clusterd listens on port")
        eventually(lambda: labels_of(plane, POD) == {"taskd/role": "leader"})
        asyncio.run(drive_replica(plane, one))
    assert "taskd/role" not in labels_of(plane, POD)
    asyncio.run(drive_cluster(plane, token))

    audited = plane.audited(USER, earlier)
    assert not [request for request in audited if request.denied]
    own = {(one.verb, one.resource) for one in audited if one.namespace == "mindx-dl"}
    elsewhere = {(one.verb, one.resource) for one in audited if one.namespace != "mindx-dl"}
    assert granted("ClusterRole") == elsewhere
    assert granted("Role") == own - granted("ClusterRole")


def rules(kind: str) -> Json:
    (role,) = (body for body in objects("clusterd") if body["kind"] == kind)
    return role


def granted(kind: str) -> set[tuple[str, str]]:
    return {
        (verb, resource)
        for rule in rules(kind)["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("kind", ["ClusterRole", "Role"])
def test_one_verb_less_is_refused(plane: ControlPlane, token: str, kind: str) -> None:
    role = rules(kind)
    namespace = "mindx-dl" if kind == "Role" else "team"
    for number, rule in enumerate(role["rules"]):
        for verb in rule["verbs"]:
            less = deepcopy(role)
            less["rules"][number]["verbs"] = [v for v in rule["verbs"] if v != verb]
            if not less["rules"][number]["verbs"]:
                del less["rules"][number]
            plane.apply(less)
            about = attributes(rule, verb, namespace)
            eventually(lambda about=about: not allowed(plane, about))
    plane.apply(role)


def attributes(rule: Json, verb: str, namespace: str) -> Json:
    return {
        "namespace": namespace,
        "verb": verb,
        "group": rule["apiGroups"][0],
        "resource": rule["resources"][0],
    }


def allowed(plane: ControlPlane, attributes: Json) -> bool:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": USER, "resourceAttributes": attributes},
    }
    path = "apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(plane.request("POST", path, review)["status"]["allowed"])


def test_rights_that_are_taken_away_are_named_and_nothing_is_lost(
    plane: ControlPlane, token: str
) -> None:
    job = TrainingJob(plane, "revoked", pods=1)
    role = rules("ClusterRole")

    async def main() -> None:
        async with api_client(plane, token) as api:
            cluster = KubernetesCluster(api, Random(0))
            await cluster.start()
            await cluster.close()
            less = deepcopy(role)
            less["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["podgroups"]]
            await asyncio.to_thread(plane.apply, less)
            cluster.reflectors[Kind.POD_GROUP]._list_again()
            await cluster.start()
            core = cluster.reflectors[Kind.POD_GROUP]
            await asyncio.to_thread(eventually, lambda: "forbidden" in core.problem)
            assert len(cluster.find(Kind.POD_GROUP, job.uid)) == 1
            await asyncio.to_thread(plane.apply, role)
            await asyncio.to_thread(eventually, lambda: not core.problem)
            assert len(cluster.find(Kind.POD_GROUP, job.uid)) == 1
            await cluster.close()

    asyncio.run(main())


def without(kind: str, resource: str, verb: str) -> Json:
    """The role without this right."""
    less = deepcopy(rules(kind))
    for rule in less["rules"]:
        if rule["resources"] == [resource]:
            rule["verbs"] = [one for one in rule["verbs"] if one != verb]
    return less


def test_leader_that_may_not_write_decides_nothing_and_loses_nothing(
    plane: ControlPlane, token: str
) -> None:
    role = rules("Role")

    async def answer(one: Replica) -> tuple[int, str]:
        """To a report of a fault; the code 0 means that the decision is in the record."""
        async with one.client("rights-lost") as client:
            fault = recover_pb2.FaultRank(rankId="1", faultType="1")
            request = recover_pb2.ProcessFaultRequest(jobId="rights-lost", faultRanks=[fault])
            status = await client.call("ReportProcessFault", request)
            return status.code, status.info

    async def incidents(one: Replica) -> int:
        async with one.client("rights-lost") as client:
            return (await client.status()).line.incident

    with replica(plane, "rights-lost", token) as one:
        one.wait_for("clusterd listens on port")
        asyncio.run(declare(one, "rights-lost"))
        plane.apply(without("Role", "configmaps", "update"))
        try:
            code, info = eventually(
                lambda: found if (found := asyncio.run(answer(one)))[0] else None
            )
            assert "cannot update resource" in info, (code, info)
            before = asyncio.run(incidents(one))
        finally:
            plane.apply(role)
        eventually(lambda: asyncio.run(answer(one))[0] == 0)
        assert asyncio.run(incidents(one)) <= before + 1
        assert one.running.poll() is None


def test_leader_that_may_not_renew_its_lease_says_why_and_ends(
    plane: ControlPlane, token: str
) -> None:
    with replica(plane, "lease-lost", token) as one:
        one.wait_for("clusterd listens on port")
        plane.apply(without("Role", "leases", "update"))
        try:
            assert one.running.wait(60) == 1
        finally:
            plane.apply(rules("Role"))
        text = one.log.read_text()
        assert "the lease is lost" in text
        assert "cannot update resource" in text
