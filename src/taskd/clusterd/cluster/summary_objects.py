"""Job summaries: the ConfigMaps `job-summary-<job>` and the rank table inside. Pure functions.

Other programs of a cluster read them: fault diagnosis, dashboards, inference services.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from taskd.clusterd.cluster.interface import Json, Key, Kind, key_of, owner_of
from taskd.clusterd.cluster.objects import (
    RANK_INDEX,
    annotations_of,
    devices_of,
    labels_of,
    text_at,
)
from taskd.model.ids import JobId

ADD, DELETE = "add", "delete"
INITIALIZING = '{"status":"initializing"}'
MAX_BYTES = 800 << 10
"""Of the rank table in one ConfigMap; a longer one is divided between servers."""
TIMES = ("time", "deleteTime")
"""Keys of a summary."""
OF_ASCEND = ("ring-controller.atlas", "framework")
"""A PodGroup with one of these labels belongs to a training or inference job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSummary:
    job: JobId
    name: str
    namespace: str
    framework: str
    status: str
    """pending, running, complete, failed"""
    sid: str
    servers: tuple[str, ...] = ()
    """The servers of a complete rank table, as JSON."""
    ranks: int = 0
    master: str = ""
    shared_tor: str = ""
    operator: str = ADD
    changed_at: int = 0
    """Seconds."""
    deleted_at: int = 0

    def same_as(self, other: JobSummary | None) -> bool:
        """Apart from the times."""
        return other is not None and other.at(self.changed_at, self.deleted_at) == self

    def at(self, changed_at: int, deleted_at: int) -> JobSummary:
        return replace(self, changed_at=changed_at, deleted_at=deleted_at)


def is_summarized(group: Json) -> bool:
    return any(label in labels_of(group) for label in OF_ASCEND)


def summary_of(group: Json, pods: Sequence[Json], now: int) -> JobSummary:
    job, name = owner_of(group)
    labels = labels_of(group)
    members = sorted(
        (pod for pod in pods if annotations_of(pod).get(RANK_INDEX, "").isdecimal()),
        key=lambda pod: int(annotations_of(pod)[RANK_INDEX][:8]),
    )
    wanted = text_at(group, "spec", "minMember")
    servers = tuple(_server(pod) for pod in members if devices_of(pod).get("devices"))
    complete = bool(servers) and len(servers) >= (int(wanted) if wanted.isdecimal() else 1)
    status = _status(text_at(group, "status", "phase", default="Running"), pods)
    pytorch = labels.get("framework") == "pytorch"
    return JobSummary(
        job=JobId(job),
        name=name,
        namespace=key_of(group).namespace,
        framework=labels.get("framework", ""),
        status=status,
        sid=labels.get(labels.get("customJobKey", ""), "")
        or labels.get("custom-job-id", "")
        or job,
        servers=tuple(map(_compact, servers)) if complete else (),
        ranks=sum(len(server["device"]) for server in servers) if complete else 0,
        master=text_at(members[0], "status", "podIP") if pytorch and members else "",
        shared_tor=_shared_tor(members) if pytorch else "",
        changed_at=now,
        deleted_at=now if status in ("complete", "failed") else 0,
    )


def rank_tables(summary: JobSummary) -> list[str]:
    """One text per ConfigMap."""
    if not summary.servers:
        return [INITIALIZING]
    groups: list[list[str]] = [[]]
    size = 0
    for server in summary.servers:
        if groups[-1] and size + len(server) > MAX_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(server)
        size += len(server) + 1
    count = len(summary.servers)
    return [
        f'{{"status":"complete","server_list":[{",".join(group)}],'
        f'"server_count":"{count}","total":{len(groups)}}}'
        for group in groups
    ]


def summary_maps(
    summary: JobSummary, owners: list[Any], labels: Mapping[str, str]
) -> dict[Key, Json]:
    """All ConfigMaps of a summary. They go with the job: its owner is theirs."""
    tables = rank_tables(summary)
    marks = {"outside-job-info": "true"}
    if atlas := labels.get("ring-controller.atlas"):
        marks["ring-controller.atlas"] = atlas
    maps = {}
    for index, table in enumerate(tables):
        name = f"job-summary-{summary.name}" + (f"-{index}" if index else "")
        maps[Key(Kind.CONFIG_MAP, summary.namespace, name)] = {
            "apiVersion": "v1",
            "metadata": {"labels": marks, "ownerReferences": owners},
            "data": _data(summary, index, len(tables), table),
        }
    return maps


def dated_as_written(
    summary: JobSummary, maps: Mapping[Key, Json], written: Mapping[Key, Json]
) -> JobSummary:
    """With the times in `written`, if that says the same as `maps`: an earlier leader wrote it."""
    dates = set()
    for key, body in maps.items():
        found = written[key].get("data") or {} if key in written else {}
        wanted = {**body["data"], **{name: found.get(name) for name in TIMES}}
        if not isinstance(found, dict) or not wanted.items() <= found.items():
            return summary
        dates.add(tuple(found[name] for name in TIMES))
    changed, deleted = dates.pop() if len(dates) == 1 else ("", "")
    if not changed.isdecimal() or deleted.isdecimal() != bool(summary.deleted_at):
        return summary
    return summary.at(int(changed), int(deleted or 0))


def _data(summary: JobSummary, index: int, total: int, table: str) -> dict[str, str]:
    data = {
        "job_name": summary.name,
        "framework": summary.framework,
        "job_id": summary.job,
        "job_status": summary.status,
        "time": str(summary.changed_at),
        "operator": summary.operator,
        "cm_index": str(index),
        "total": str(total),
        "hccl.json": table,
        "sid": summary.sid,
        "deleteTime": str(summary.deleted_at or ""),
    }
    if summary.framework == "pytorch":
        data |= {"sharedTorIp": summary.shared_tor, "masterAddr": summary.master}
    return data


def _server(pod: Json) -> Json:
    devices = devices_of(pod)
    names = ("device_id", "device_ip", "rank_id", "super_device_id")
    listed = devices.get("devices")
    return {
        "device": [
            {name: str(device[name]) for name in names if name in device}
            for device in (listed if isinstance(listed, list) else [])
            if isinstance(device, dict)
        ],
        "server_id": text_at(devices, "server_id"),
        "host_ip": text_at(pod, "status", "hostIP") or text_at(devices, "host_ip"),
        "super_pod_id": text_at(devices, "super_pod_id"),
        "server_name": text_at(pod, "spec", "nodeName"),
        "pod_name": text_at(pod, "metadata", "name"),
    }


def _status(phase: str, pods: Iterable[Json]) -> str:
    phases = [text_at(pod, "status", "phase", default="Running") for pod in pods]
    if "Failed" in phases:
        return "failed"
    if phase == "Completed" or (phases and set(phases) == {"Succeeded"}):
        return "complete"
    return "running" if phase == "Running" and phases else "pending"


def _shared_tor(pods: Iterable[Json]) -> str:
    for pod in pods:
        if address := annotations_of(pod).get("sharedTorIp"):
            return address
    return ""


def _compact(server: Json) -> str:
    return json.dumps(server, separators=(",", ":"))
