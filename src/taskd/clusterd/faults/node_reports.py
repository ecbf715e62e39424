"""Reads what device plugins and NodeD report about each node. Broken reports end here.

`mindx-dl-deviceinfo-<node>` describes the devices of a node, and its switches where it has some.
`mindx-dl-nodeinfo-<node>` describes the rest: processors, memory, disks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from taskd.clusterd.cluster.interface import Json
from taskd.core.clusterd.fault_centre.fault_levels import FREE_RESTART, MANUALLY_SEPARATE
from taskd.model.node_faults import NODE, SWITCH, WHOLE_NODE, NodeFault
from taskd.wire.json_reading import loads

DEVICE_REPORT, NODE_REPORT = "mindx-dl-deviceinfo-", "mindx-dl-nodeinfo-"
DEVICES, SWITCHES, OF_NODE = "DeviceInfoCfg", "SwitchInfoCfg", "NodeInfo"
"""The keys in their data."""
MANUALLY = "ManuallySeparateNPU"
ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""What Go's JSON escapes and Python's does not."""
_BAD = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
_STATUS = {"UnHealthy": "Separate", "SubHealthy": "SubHealthFault", "PreSeparate": "PreSeparate"}
"""The level of a switch or node that reports only its status."""


class InvalidReport(ValueError):
    """The message says why the report is ignored."""


def device_report(node: str, body: Json) -> tuple[NodeFault, ...]:
    """The faults of a node's devices and switches. Raises InvalidReport."""
    try:
        data = body["data"]
        report = loads(data[DEVICES])
        info = report["DeviceInfo"]
        counted = {
            "DeviceList": dict(sorted(info["DeviceList"].items())),
            "UpdateTime": info.get("UpdateTime", 0),
        }
        if checksum(counted) != report["CheckCode"]:
            raise InvalidReport("its CheckCode does not match its DeviceInfo")
        return (
            *_devices(node, info["DeviceList"]),
            *_separated(node, data.get(MANUALLY)),
            *_switches(node, loads(data.get(SWITCHES) or "{}")),
        )
    except InvalidReport:
        raise
    except _BAD as error:
        raise InvalidReport(f"it cannot be read: {type(error).__name__} {error}"[:200]) from error


def node_report(node: str, body: Json) -> tuple[NodeFault, ...]:
    """The faults of the node itself. Raises InvalidReport."""
    try:
        report = loads(body["data"][OF_NODE])
        info = report["NodeInfo"]
        if checksum(info) != report["CheckCode"]:
            raise InvalidReport("its CheckCode does not match its NodeInfo")
        faults = [
            NodeFault(node, WHOLE_NODE, str(code), str(entry["FaultLevel"]), part=_part(entry))
            for entry in info.get("FaultDevList") or []
            for code in entry.get("FaultCode") or [""]
        ]
        if info.get("NodeStatus") == "UnHealthy":
            faults.append(NodeFault(node, level="SeparateFault", part=NODE))
        return tuple(faults)
    except InvalidReport:
        raise
    except _BAD as error:
        raise InvalidReport(f"it cannot be read: {type(error).__name__} {error}"[:200]) from error


def checksum(info: object) -> str:
    """The SHA-256 of Go's compact JSON; the keys are in the order in which they were sent."""
    text = json.dumps(info, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.translate(ESCAPED).encode()).hexdigest()


def _devices(node: str, lists: dict[str, str]) -> Iterator[NodeFault]:
    unhealthy = {
        name.strip()
        for key, text in lists.items()
        if key.endswith(("-Unhealthy", "-NetworkUnhealthy"))
        for name in str(text).split(",")
    }
    for key, text in lists.items():
        if not key.endswith("-Fault"):
            continue
        for entry in loads(text or "[]"):
            name = str(entry.get("npu_name", ""))
            for fault in _device(node, name, entry):
                if fault.level != FREE_RESTART or name in unhealthy:
                    yield fault


def _device(node: str, name: str, entry: dict[str, Any]) -> Iterator[NodeFault]:
    level = entry.get("fault_level") or entry.get("large_model_fault_level") or ""
    times = entry.get("fault_time_and_level_map") or {}
    for code in str(entry.get("fault_code", "")).split(","):
        own = times.get(code.strip()) or {}
        yield NodeFault(
            node,
            name.rpartition("-")[2],
            code.strip(),
            str(own.get("fault_level") or entry.get("fault_handling") or level),
            _seconds(own.get("fault_time"), 1000.0),
            network=entry.get("fault_type") == "CardNetworkUnhealthy",
        )


def _separated(node: str, names: object) -> Iterator[NodeFault]:
    """Devices that the device plugin has taken out of use because they failed too often."""
    for name in str(names or "").split(","):
        if name.strip():
            device = name.strip().rpartition("-")[2]
            yield NodeFault(node, device, MANUALLY, MANUALLY_SEPARATE)


def _switches(node: str, info: dict[str, Any]) -> Iterator[NodeFault]:
    levels = info.get("FaultTimeAndLevelMap") or {}
    found = set()
    for text in info.get("FaultCode") or []:
        one = loads(text) if isinstance(text, str) else text
        code, chip, port = (
            str(one.get(name, ""))
            for name in ("AssembledFaultCode", "SwitchChipId", "SwitchPortId")
        )
        own = levels.get(f"{code}_{chip}_{port}") or {}
        level = str(own.get("fault_level") or info.get("FaultLevel") or "")
        found.add(level)
        since = _seconds(one.get("AlarmRaisedTime"), 1.0)
        yield NodeFault(node, WHOLE_NODE, code, level, since, SWITCH, chip=chip, port=port)
    status = _STATUS.get(str(info.get("NodeStatus", "")))
    if status is not None and not found:
        yield NodeFault(node, level=status, part=SWITCH)


def _part(entry: dict[str, Any]) -> str:
    return str(entry.get("DeviceType") or NODE)


def _seconds(value: object, per_second: float) -> float:
    """0: unknown."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15
    return value / per_second if known else 0.0  # type: ignore[operator]
