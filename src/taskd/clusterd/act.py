"""Carries out the machine's commands to the cluster."""

from __future__ import annotations

from typing import Any, assert_never

from taskd.clusterd.cluster.in_memory import version_of
from taskd.clusterd.cluster.interface import Cluster, ClusterRefused, Json, Key, Kind
from taskd.clusterd.cluster.objects import (
    FAULT_JOB_INFO,
    JobFacts,
    fault_job_info,
    reset_data,
    reset_key,
    sequence_of,
)
from taskd.model.clusterd import (
    AnnotateNode,
    AnnotatePod,
    AnnotatePodGroup,
    ClusterCommand,
    DeletePod,
    LabelPod,
    LabelPodGroup,
    RemoveFaultJobInfo,
    ResetOperation,
    WriteFaultJobInfo,
    WriteResetConfig,
)
from taskd.model.ids import JobId

OF_THE_CLUSTER = AnnotateNode | WriteResetConfig
SEQUENCE = "taskd/sequence"
"""Annotation of reset-config: the last command carried out there, so that none runs twice."""


async def in_cluster(
    command: ClusterCommand, facts: JobFacts, cluster: Cluster, now: float
) -> None:
    """Carry out one write; it is idempotent. Raises ClusterUnreachable or ClusterRefused.

    A declared job owns nothing in the cluster: what has its name there belongs to another job.
    """
    if isinstance(command, OF_THE_CLUSTER) and not facts.config.cluster:
        return
    match command:
        case LabelPodGroup(key, value):
            await cluster.patch(facts.pod_group, _labels({key: value}))
        case AnnotatePodGroup(key, value):
            await cluster.patch(facts.pod_group, _annotations({key: value}))
        case LabelPod(uid, key, value):
            await cluster.patch(_pod(facts, uid), _labels({key: value}))
        case AnnotatePod(uid, key, value):
            await cluster.patch(_pod(facts, uid), _annotations({key: value}))
        case DeletePod(uid):
            await cluster.delete(_pod(facts, uid), uid)
        case AnnotateNode(node, key, value):
            await cluster.patch(Key(Kind.NODE, "", node), _annotations({key: value}))
        case WriteResetConfig():
            await _reset(command, facts, cluster, now)
        case WriteFaultJobInfo(nodes):
            pods = cluster.find(Kind.POD, facts.job)
            await _info(cluster, facts.job, fault_job_info(facts, pods, nodes, int(now)))
        case RemoveFaultJobInfo():
            await _info(cluster, facts.job, None)
        case _:
            assert_never(command)


def _labels(values: dict[str, str]) -> Json:
    return {"metadata": {"labels": values}}


def _annotations(values: dict[str, Any]) -> Json:
    return {"metadata": {"annotations": values}}


def _pod(facts: JobFacts, uid: str) -> Key:
    name = facts.pod_names.get(uid)
    if name is None:
        raise ClusterRefused(f"pod {uid} no longer exists")
    return Key(Kind.POD, facts.namespace, name)


async def clear_reset(facts: JobFacts, cluster: Cluster, now: float) -> None:
    """Clear what an earlier incarnation of the job has left in its reset-config.

    A declared job has none: one of its name belongs to another job.
    """
    if facts.config.cluster and cluster.get(reset_key(facts)) is not None:
        await _reset(WriteResetConfig(ResetOperation.CLEAR), facts, cluster, now)


async def _reset(command: WriteResetConfig, facts: JobFacts, cluster: Cluster, now: float) -> None:
    key = reset_key(facts)
    current = cluster.get(key)
    if current is None:
        raise ClusterRefused(f"{key} does not exist")
    if 0 < command.sequence <= sequence_of(current, SEQUENCE):
        return
    try:
        data = reset_data(
            current.get("data") or {},
            command.operation,
            command.ranks,
            command.restart_in_place,
            int(now),
        )
    except ValueError as error:
        raise ClusterRefused(f"{key}: {error}") from error
    patch = _annotations({SEQUENCE: str(command.sequence)}) | {"data": data}
    await cluster.patch(key, patch, version_of(current))


async def _info(cluster: Cluster, job: JobId, text: str | None) -> None:
    if cluster.get(FAULT_JOB_INFO) is not None:
        await cluster.patch(FAULT_JOB_INFO, {"data": {job: text}})
    elif text is not None:
        await cluster.create(FAULT_JOB_INFO, {"apiVersion": "v1", "data": {job: text}})
