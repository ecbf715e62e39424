"""Translates cluster objects to our values and back; defines labels, annotations and keys.

Pure functions. interface.py reads and patches the objects; sense.py and act.py use both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from taskd.clusterd.cluster.interface import Json, Key, Kind, key_of, owner_of, owners_of
from taskd.core.clusterd.fault_centre.fault_filter import FaultFilter, read_filter
from taskd.core.clusterd.job_config import is_on, read_pod_group
from taskd.model.clusterd import JobConfig, PlatformSeen, Pod, PodsSeen, ResetOperation
from taskd.model.ids import JobId, NodeRank, Rank
from taskd.wire.json_reading import loads

PLATFORM_STRATEGY = "ProcessRecoverStrategy"
RANK_INDEX = "hccl/rankIndex"
DEVICE_KEYS = (
    "ascend.kubectl.kubernetes.io/ascend-910-configuration",
    "ascend.kubectl.kubernetes.io/ascend-npu-configuration",
)
TRACE_MOUNT = "/user/cluster-info/datatrace-config"
DECLARED = "taskd/declared"
"""Annotation of a PodGroup that a job's manager has declared: the job has no scheduler."""
PUBLIC_FAULT = "PublicFault"
"""The key of a ConfigMap that reports public faults."""
SERIAL = "product-serial-number"
"""Annotation of a node."""
FAULT_JOB_INFO = Key(Kind.CONFIG_MAP, "cluster-system", "fault-job-info")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job as its PodGroup and pods describe it."""

    job: JobId
    name: str
    namespace: str
    pod_group: Key
    config: JobConfig
    enabled: bool
    owners: tuple[Json, ...] = ()
    """The owner of the PodGroup, as a reference for objects that go with the job."""
    pods: tuple[Pod, ...] = ()
    phase: str = ""
    platform: PlatformSeen = field(default_factory=PlatformSeen)
    pod_names: Mapping[str, str] = field(default_factory=dict)
    """Names by uid."""
    mistakes: tuple[str, ...] = ()
    """Settings of the PodGroup that are not understood, as sentences for the log."""
    trace_mounted: bool = False
    """All pods mount the ConfigMap with the profiling switch."""
    fault_filter: FaultFilter = field(default_factory=FaultFilter)
    """How long faults may last before they count for this job."""

    @property
    def pods_seen(self) -> PodsSeen:
        return PodsSeen(self.pods, self.phase)


def facts_of(group: Json, pods: Iterable[Json]) -> JobFacts:
    owner, name = owner_of(group)
    labels, notes = labels_of(group), annotations_of(group)
    pods = list(pods)
    members = tuple(sorted(pod for pod in map(pod_of, pods) if pod is not None))
    settings, mistakes = read_pod_group(labels, notes)
    chosen, wrong = read_filter(notes)
    config = replace(
        settings,
        cluster=DECLARED not in notes,
        super_pod=any("super_pod_id" in devices_of(pod) for pod in pods),
        resources_timeout_s=_resources_timeout(pods),
    )
    return JobFacts(
        job=JobId(owner),
        name=name,
        namespace=key_of(group).namespace,
        pod_group=key_of(group),
        config=config,
        mistakes=(*mistakes, *wrong),
        fault_filter=chosen,
        enabled=is_on(labels),
        owners=tuple(owners_of(group)),
        pods=members,
        phase=text_at(group, "status", "phase", default="Running"),
        platform=platform_of(group),
        pod_names={
            text_at(pod, "metadata", "uid"): text_at(pod, "metadata", "name") for pod in pods
        },
        trace_mounted=bool(pods) and all(map(_mounts_trace, pods)),
    )


def pod_of(body: Json) -> Pod | None:
    """None: the pod has no rank index yet."""
    notes = annotations_of(body)
    index = _number(notes.get(RANK_INDEX))
    if index is None:
        return None
    phase = text_at(body, "status", "phase", default="Running")
    pairs = sorted(
        (rank, text_at(device, "device_id"))
        for device in _maps(devices_of(body).get("devices"))
        if (rank := _number(device.get("rank_id"))) is not None
    )
    return Pod(
        node_rank=NodeRank(index),
        uid=text_at(body, "metadata", "uid"),
        name=text_at(body, "metadata", "name"),
        node=text_at(body, "spec", "nodeName"),
        ranks=tuple(Rank(rank) for rank, _ in pairs),
        devices=tuple(device for _, device in pairs),
        running=phase == "Running",
        finished=phase == "Succeeded",
        backup=notes.get("podType") == "backup",
    )


def platform_of(group: Json) -> PlatformSeen:
    notes = annotations_of(group)
    return PlatformSeen(
        strategy=notes.get(PLATFORM_STRATEGY),
        confirm=notes.get("ProcessConfirmFault"),
        result=notes.get("ProcessResultFault"),
        rank_table=notes.get("RankTableReady"),
    )


def is_public_fault(body: Json) -> bool:
    return labels_of(body).get("mc-consumer-publicfault") == "true"


def serial_of(node: Json) -> str:
    return annotations_of(node).get(SERIAL, "")


def node_addresses(pods: Iterable[Json], nodes: Iterable[Json]) -> dict[str, tuple[str, str]]:
    """Address and serial number of each node, as far as its pods and the node itself say."""
    serials = {text_at(node, "metadata", "name"): serial_of(node) for node in nodes}
    found = {node: ("", serial) for node, serial in serials.items()}
    for pod in pods:
        node = text_at(pod, "spec", "nodeName")
        found[node] = (text_at(pod, "status", "hostIP"), serials.get(node, ""))
    return found


# The reset-config ConfigMap, which agents of older releases read


def reset_key(facts: JobFacts) -> Key:
    return Key(Kind.CONFIG_MAP, facts.namespace, f"reset-config-{facts.name}")


def reset_data(
    before: Mapping[str, Any],
    operation: ResetOperation,
    ranks: Iterable[int],
    again: bool,
    now: int,
) -> dict[str, str]:
    """The keys to write. Raises ValueError while a hot reset uses the ConfigMap."""
    try:
        old = loads(text_at(before, "reset.json"))
    except ValueError as error:
        raise ValueError(f"reset.json is not valid JSON: {error}") from error
    if any(entry.get("Policy") in ("reset", "restart") for entry in _maps(_at(old, "RankList"))):
        raise ValueError("a hot reset is running")
    faults = operation is ResetOperation.FAULT
    retries = _number(_at(old, "RetryTime")) or 0
    body = {
        "RankList": [_reset_rank(rank) for rank in ranks] if faults else [],
        "UpdateTime": now,
        "RetryTime": retries + (operation is ResetOperation.RESTART_ALL),
        "FaultFlushing": operation is ResetOperation.FLUSHING,
        "GracefulExit": 0,
        "RestartFaultProcess": faults and again,
    }
    text = json.dumps(body, separators=(",", ":"))
    return {"reset.json": text, "checkCode": hashlib.sha256(text.encode()).hexdigest()}


def sequence_of(body: Json, annotation: str) -> int:
    """The number of the last command that was carried out on this object."""
    return _number(annotations_of(body).get(annotation)) or 0


def _reset_rank(rank: int) -> Json:
    return {
        "RankId": rank,
        "LogicId": 0,
        "Status": "fault",
        "Policy": "",
        "InitialPolicy": "",
        "ErrorCode": None,
        "ErrorCodeHex": "",
    }


def fault_job_info(facts: JobFacts, pods: Iterable[Json], nodes: Iterable[str], now: int) -> str:
    """By super pod: the lost nodes' device ids, and the healthy nodes that must release them."""
    lost = set(nodes)
    pods_of: dict[str, list[tuple[str, Json]]] = {}
    for pod in pods:
        devices = devices_of(pod)
        node = text_at(pod, "spec", "nodeName")
        pods_of.setdefault(text_at(devices, "super_pod_id"), []).append((node, devices))
    content = {
        super_pod: {
            "SdIds": [
                text_at(device, "super_device_id")
                for node, devices in members
                if node in lost
                for device in _maps(devices.get("devices"))
            ],
            "FaultNodes": {node: {} for node, _ in members if node in lost},
            "NodeNames": [node for node, _ in members if node not in lost],
            "FaultTimes": now,
            "JobId": facts.job,
        }
        for super_pod, members in pods_of.items()
        if any(node in lost for node, _ in members)
    }
    return json.dumps(content)


# The data-trace ConfigMap


def trace_key(facts: JobFacts) -> Key:
    return Key(Kind.CONFIG_MAP, facts.namespace, f"data-trace-{facts.name}")


# Reading parts of objects that other programs have written


def _at(body: object, *path: str) -> Any:
    for name in path:
        body = body.get(name) if isinstance(body, dict) else None
    return body


def text_at(body: object, *path: str, default: str = "") -> str:
    found = _at(body, *path)
    return default if found is None else str(found)


def _maps(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else None


def _texts(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def labels_of(body: Json) -> dict[str, str]:
    return _texts(_at(body, "metadata", "labels"))


def annotations_of(body: Json) -> dict[str, str]:
    return _texts(_at(body, "metadata", "annotations"))


def devices_of(body: Json) -> Json:
    notes = annotations_of(body)
    for key in DEVICE_KEYS:
        try:
            devices = loads(notes.get(key, ""))
        except ValueError:
            continue
        if isinstance(devices, dict):
            return devices
    return {}


def _containers(body: Json) -> list[Json]:
    return _maps(_at(body, "spec", "containers"))


def _mounts_trace(body: Json) -> bool:
    mounts = [mount for c in _containers(body) for mount in _maps(c.get("volumeMounts"))]
    return any(mount.get("mountPath") == TRACE_MOUNT for mount in mounts)


def _resources_timeout(pods: Iterable[Json]) -> float | None:
    for pod in pods:
        if annotations_of(pod).get(RANK_INDEX) == "0":
            for variable in [v for c in _containers(pod) for v in _maps(c.get("env"))]:
                if variable.get("name") == "MINDIO_WAIT_MINDX_TIME":
                    wait = _number(variable.get("value"))
                    return wait - 10.0 if wait is not None and 10 <= wait <= 3600 else None
    return None
