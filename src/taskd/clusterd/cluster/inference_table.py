"""The rank table of an inference job, which consists of several cluster jobs. Pure functions.

Its pods carry the labels `jobID` and `app`: one coordinator, one controller, and servers, each with
a rank table of its own in a ConfigMap `rings-config-<job>` with the label `jobID`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from taskd.clusterd.cluster.interface import Json
from taskd.clusterd.cluster.objects import labels_of, text_at
from taskd.wire.json_reading import loads

RINGS = "rings-config-"
APPS = ("mindie-ms-coordinator", "mindie-ms-controller")


def is_part_of(body: Json, job: str) -> bool:
    return bool(job) and labels_of(body).get("jobID") == job


def is_inference_part(pod: Json) -> bool:
    """The coordinator or the controller of an inference job: it has no devices of its own."""
    labels = labels_of(pod)
    return bool(labels.get("jobID")) and labels.get("app") in APPS


def inference_table(job: str, pods: Iterable[Json], maps: Iterable[Json]) -> str:
    """The table as JSON; empty while a part of the job is not there yet."""
    pods = [pod for pod in pods if is_part_of(pod, job)]
    groups: list[Json] = []
    for app in APPS:
        addresses = sorted(
            address
            for pod in pods
            if labels_of(pod).get("app") == app and (address := text_at(pod, "status", "podIP"))
        )
        groups.append(_group(len(groups), [{"server_ip": address} for address in addresses]))
    for body in sorted(maps, key=lambda one: text_at(one, "metadata", "name")):
        if not is_part_of(body, job):
            continue
        try:
            table = loads(text_at(body, "data", "hccl.json"))
        except ValueError:
            return ""
        if not isinstance(table, dict) or table.get("status") not in ("completed", "complete"):
            return ""
        servers = table.get("server_list")
        groups.append(_group(len(groups), servers if isinstance(servers, list) else []))
    if len(groups) == len(APPS) or not all(group["server_list"] for group in groups):
        return ""
    content = {"version": "1.0", "status": "completed", "server_group_list": groups}
    return json.dumps(content, separators=(",", ":"))


def _group(number: int, servers: list[Json]) -> Json:
    return {
        "group_id": str(number),
        "server_count": str(len(servers)),
        "server_list": servers,
    }
