"""Writes the reports of all nodes for the scheduler: `cluster-info-device-<i>` and its siblings.

Volcano's plugin reads them, and deletes the pods on faulty devices. Faults that a job repairs by
itself are left out for as long as it may (`core/clusterd/fault_centre/hiding.py`). Written when
something has changed, a moment later, and only where devices or nodes report at all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection
from typing import Any

from taskd.clusterd.cluster.interface import (
    Changed,
    Cluster,
    ClusterRefused,
    ClusterUnreachable,
    Json,
    Key,
    Kind,
    key_of,
)
from taskd.clusterd.faults import node_reports as reports
from taskd.clusterd.faults.fault_centre import FaultCentre
from taskd.core.clusterd.fault_centre.fault_levels import SEPARATE, level_of
from taskd.core.clusterd.fault_centre.public_faults import as_node_faults
from taskd.model.node_faults import NPU, SWITCH, FaultKey, NodeFault
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

NAMESPACE = "mindx-dl"
NODE_MAP, DEVICE_MAPS, SWITCH_MAPS = (
    "cluster-info-node-cm",
    "cluster-info-device-",
    "cluster-info-switch-",
)
SWITCH_NAME = "mindx-dl-switchinfo-"
OF_SUPER_POD = ("SuperPodID", "RackID", "ServerIndex")
LABELS = {"mx-consumer-volcano": "true"}
MAX_BYTES = 800 << 10
GATHER_S = 0.2
"""At most five writes per second."""
AGAIN_S = 5.0


class ClusterInfo:
    def __init__(self, faults: FaultCentre, cluster: Cluster) -> None:
        self._faults, self._cluster = faults, cluster
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._written: dict[str, str] = {}

    def start(self) -> None:
        self._wake.set()
        self._task = asyncio.create_task(self._work(), name="cluster-info")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self, change: Changed | None) -> None:
        if change is None or self._faults.node_of(change.key) is not None:
            self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(GATHER_S)
            try:
                await self._write()
            except (ClusterRefused, ClusterUnreachable) as error:
                log.warning("cluster-info not written, trying again: %s", error)
                asyncio.get_running_loop().call_later(AGAIN_S, self._wake.set)
            except Exception:
                log.exception("cluster-info cannot be computed")

    async def _write(self) -> None:
        devices, switches, nodes = self._content()
        texts = {
            **_parts(DEVICE_MAPS, devices),
            **_parts(SWITCH_MAPS, switches),
            **({NODE_MAP: _text(nodes)} if nodes else {}),
        }
        for name in set(self._written) - set(texts):
            texts[name] = "{}"
        for name, text in texts.items():
            key = Key(Kind.CONFIG_MAP, NAMESPACE, name)
            current = self._cluster.get(key)
            if current is None:
                body = {"apiVersion": "v1", "metadata": {"labels": LABELS}, "data": {name: text}}
                await self._cluster.create(key, body)
            elif (current.get("data") or {}).get(name) != text:
                patch = {"metadata": {"labels": LABELS}, "data": {name: text}}
                await self._cluster.patch(key, patch)
            self._written[name] = text

    def _content(self) -> tuple[Json, Json, Json]:
        """By the name of the report's ConfigMap: devices, switches, nodes."""
        withheld = self._faults.withheld()
        devices, switches, nodes = Json(), Json(), Json()
        for body in self._cluster.all(Kind.CONFIG_MAP):
            key = key_of(body)
            node = self._faults.node_of(key)
            if node is None or not self._faults.is_valid(key):
                continue
            data = body["data"]
            if key.name.startswith(reports.NODE_REPORT):
                nodes[key.name] = loads(data[reports.OF_NODE])["NodeInfo"]
                continue
            info = loads(data[reports.DEVICES])
            public = list(as_node_faults(self._faults.public.on(node)))
            devices[key.name] = {
                "DeviceList": device_list(info["DeviceInfo"]["DeviceList"], node, withheld, public),
                "UpdateTime": info["DeviceInfo"].get("UpdateTime", 0),
                "CmName": key.name,
                **{name: info[name] for name in OF_SUPER_POD if name in info},
            }
            if data.get(reports.SWITCHES):
                switch = _switch(loads(data[reports.SWITCHES]), node, withheld)
                name = f"{SWITCH_NAME}{node}"
                switches[name] = {**switch, "CmName": name}
        return devices, switches, nodes


def device_list(
    lists: dict[str, str], node: str, withheld: frozenset[FaultKey], public: list[NodeFault]
) -> dict[str, str]:
    """The lists of a device report without hidden faults, and with public ones."""
    shown = dict(lists)
    for key, text in lists.items():
        if not key.endswith("-Fault"):
            continue
        kind = key.removesuffix("-Fault")
        entries = [entry for entry in loads(text or "[]") if isinstance(entry, dict)]
        shortened = [_without(entry, node, withheld) for entry in entries]
        kept = [entry for entry in shortened if entry]
        hidden = _names(entries) - _names(kept)
        prefix = kind.rpartition("/")[2]
        kept += [_entry(f"{prefix}-{fault.device}", fault) for fault in public]
        broken = {f"{prefix}-{fault.device}" for fault in public if level_of(fault) == SEPARATE}
        # A device whose faults are hidden is in use: it is not free because it looks healthy.
        for name in (f"{kind}-Unhealthy", f"{kind}-NetworkUnhealthy"):
            shown[name] = _changed_list(lists.get(name), without=hidden)
        shown[kind] = _changed_list(lists.get(kind), without=broken)
        unhealthy = f"{kind}-Unhealthy"
        shown[unhealthy] = _changed_list(shown[unhealthy], adding=broken)
        shown[key] = _text(kept)
    return shown


def _names(entries: list[Json]) -> set[str]:
    return {str(entry.get("npu_name", "")) for entry in entries}


def _changed_list(text: object, without: Collection[str] = (), adding: Collection[str] = ()) -> str:
    names = [name for name in str(text or "").split(",") if name and name not in without]
    return ",".join([*names, *sorted(set(adding) - set(names))])


def _without(entry: Json, node: str, withheld: frozenset[FaultKey]) -> Json:
    """The entry without its hidden codes; empty if none is left."""
    device = str(entry.get("npu_name", "")).rpartition("-")[2]
    codes = [code.strip() for code in str(entry.get("fault_code", "")).split(",")]
    left = [code for code in codes if (node, NPU, device, code, "", "") not in withheld]
    if len(left) == len(codes):
        return entry
    if not left:
        return {}
    times = entry.get("fault_time_and_level_map") or {}
    kept = {code: times[code] for code in left if code in times}
    return {**entry, "fault_code": ",".join(left), "fault_time_and_level_map": kept}


def _entry(name: str, fault: NodeFault) -> Json:
    level = fault.level
    times = {fault.code: {"fault_time": round(fault.since * 1000), "fault_level": level}}
    return {
        "fault_type": "PublicFault",
        "npu_name": name,
        "large_model_fault_level": level,
        "fault_level": level,
        "fault_handling": level,
        "fault_code": fault.code,
        "fault_time_and_level_map": times,
    }


def _switch(info: Json, node: str, withheld: frozenset[FaultKey]) -> Json:
    codes = []
    for text in info.get("FaultCode") or []:
        one = loads(text) if isinstance(text, str) else text
        code, chip = str(one.get("AssembledFaultCode", "")), str(one.get("SwitchChipId", ""))
        port = str(one.get("SwitchPortId", ""))
        if (node, SWITCH, "-1", code, chip, port) not in withheld:
            codes.append(text)
    healed = not codes and bool(info.get("FaultCode"))
    return {**info, "FaultCode": codes} | (
        {"FaultLevel": "NotHandle", "NodeStatus": "Healthy"} if healed else {}
    )


def _parts(prefix: str, content: Json) -> dict[str, str]:
    """The content in as many ConfigMaps as it needs."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in sorted(content):
        entry = f"{json.dumps(name)}:{_text(content[name])}"
        if parts[-1] and size + len(entry) > MAX_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += len(entry) + 1
    if not content:
        return {}
    return {f"{prefix}{i}": f"{{{','.join(entries)}}}" for i, entries in enumerate(parts)}


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
