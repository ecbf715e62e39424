"""Severities: one scale for what devices, nodes and switches report.

The names are Ascend's. Devices use the long list; nodes and switches have names of their own, which
count as one of the device's.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from taskd.model.node_faults import NPU, SWITCH, NodeFault

SEPARATE, PRE_SEPARATE, SUB_HEALTH = "SeparateNPU", "PreSeparateNPU", "SubHealthFault"
RESTART_BUSINESS, RESTART_REQUEST, NOT_HANDLE = (
    "RestartBusiness",
    "RestartRequest",
    "NotHandleFault",
)
FREE_RESTART = "FreeRestartNPU"
MANUALLY_SEPARATE = "ManuallySeparateNPU"
IN_PLACE = frozenset((RESTART_REQUEST, RESTART_BUSINESS))
"""A new process on the same device can help."""

SEVERITY = (
    "NormalNetwork",
    "NormalNPU",
    NOT_HANDLE,
    SUB_HEALTH,
    RESTART_REQUEST,
    RESTART_BUSINESS,
    FREE_RESTART,
    "RestartNPU",
    PRE_SEPARATE,
    SEPARATE,
    MANUALLY_SEPARATE,
)
"""From harmless to worst."""
_RANKS = {level: rank for rank, level in enumerate(SEVERITY)}
_UNKNOWN = _RANKS["RestartNPU"]
"""A name that is newer than this list is a fault, and not one that a process can repair."""
_OF_NODES = {
    "SeparateFault": SEPARATE,
    "PreSeparateFault": PRE_SEPARATE,
    "NotHandleFault": NOT_HANDLE,
}
_OF_SWITCHES = {
    "NotHandle": NOT_HANDLE,
    "SubHealthFault": SUB_HEALTH,
    "RestartRequest": SEPARATE,
    "RestartRequestFault": SEPARATE,
    "PreSeparate": PRE_SEPARATE,
    "PreSeparateFault": PRE_SEPARATE,
    "Separate": SEPARATE,
    "SeparateFault": SEPARATE,
    "ResetFault": SEPARATE,
}


class Health(StrEnum):
    HEALTHY = "Healthy"
    SUB_HEALTHY = "SubHealthy"
    UNHEALTHY = "UnHealthy"


def level_of(fault: NodeFault) -> str:
    """The fault's severity on the scale of devices."""
    if fault.part == NPU:
        return fault.level
    names = _OF_SWITCHES if fault.part == SWITCH else _OF_NODES
    return names.get(fault.level, fault.level)


def worst(levels: Iterable[str]) -> str:
    return max(levels, key=lambda level: _RANKS.get(level, _UNKNOWN) if level else -1, default="")


def health_of(level: str) -> Health:
    if level in (SUB_HEALTH, PRE_SEPARATE):
        return Health.SUB_HEALTHY
    if level in ("", NOT_HANDLE, "NormalNPU", "NormalNetwork"):
        return Health.HEALTHY
    return Health.UNHEALTHY


def worst_health(levels: Iterable[str]) -> Health:
    found = {health_of(level) for level in levels}
    for health in (Health.UNHEALTHY, Health.SUB_HEALTHY):
        if health in found:
            return health
    return Health.HEALTHY
