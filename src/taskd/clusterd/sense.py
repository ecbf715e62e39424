"""Reads device faults and stragglers from the cluster's objects. Broken objects end here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from taskd.clusterd.cluster.interface import Json, Key, Kind
from taskd.clusterd.cluster.objects import JobFacts
from taskd.model.faults import SeenFault
from taskd.model.ids import Rank

DEVICE_REPORT = "mindx-dl-deviceinfo-"
ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""What Go's JSON escapes and Python's does not."""
STRAGGLER, SUB_HEALTH = "straggler", "SubHealthFault"


def device_report(node: str) -> Key:
    return Key(Kind.CONFIG_MAP, "kube-system", f"{DEVICE_REPORT}{node}")


def is_valid(body: Json) -> bool:
    """Does the report's CheckCode match? It is the SHA-256 of DeviceInfo in Go's JSON."""
    try:
        report = json.loads(body["data"]["DeviceInfoCfg"])
        info = report["DeviceInfo"]
        counted = {
            "DeviceList": dict(sorted(info["DeviceList"].items())),
            "UpdateTime": info.get("UpdateTime", 0),
        }
        text = json.dumps(counted, separators=(",", ":"), ensure_ascii=False)
        found = hashlib.sha256(text.translate(ESCAPED).encode()).hexdigest()
        return bool(found == report["CheckCode"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def faults_seen(facts: JobFacts, device_maps: Iterable[tuple[str, Json]]) -> tuple[SeenFault, ...]:
    """The faults in the nodes' device reports that concern devices of the job's ranks."""
    reports = {node: list(device_faults(body)) for node, body in device_maps}
    seen = []
    for pod in facts.pods:
        for rank, device in zip(pod.ranks, pod.devices, strict=False):
            for name, code, level in reports.get(pod.node, ()):
                if name.rpartition("-")[2] == device:
                    seen.append(SeenFault(rank, code, level, pod.uid))
    return tuple(sorted(seen))


def stragglers_seen(facts: JobFacts, ranks: Iterable[Rank]) -> list[SeenFault]:
    """A straggler counts as a sub-healthy device; the job's settings say what follows."""
    slow = set(ranks)
    return [
        SeenFault(rank, STRAGGLER, SUB_HEALTH, pod.uid)
        for pod in facts.pods
        for rank in pod.ranks
        if rank in slow
    ]


def device_faults(body: Json) -> Iterable[tuple[str, str, str]]:
    """(device name, code, level) from a `mindx-dl-deviceinfo-<node>` ConfigMap."""
    try:
        report = json.loads(body["data"]["DeviceInfoCfg"])
        lists = report.get("DeviceInfo", {}).get("DeviceList", {})
        entries = [
            entry
            for key, text in lists.items()
            if key.endswith("-Fault")
            for entry in json.loads(text or "[]")
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return
    for entry in entries:
        if isinstance(entry, dict):
            level = entry.get("fault_level") or entry.get("large_model_fault_level") or ""
            for code in str(entry.get("fault_code", "")).split(","):
                yield str(entry.get("npu_name", "")), code.strip(), str(level)
