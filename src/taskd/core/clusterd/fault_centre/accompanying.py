"""Errors of a device's cores that only accompany an error in its memory.

The memory error alone can be repaired by repeating the step. Its companions would make it look like
a broken device. So they wait for 5 s: with a memory error at about the same time they are dropped,
otherwise they count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from taskd.core.clusterd.fault_centre.fault_codes import CORES, MEMORY, has
from taskd.model.node_faults import NodeFault

WINDOW_S = 5.0


def without_companions(
    faults: Iterable[NodeFault], reported: Mapping[tuple[str, str], float], now: float
) -> tuple[list[NodeFault], float]:
    """The faults that count now, and when to look again.

    `reported`: when the job itself reported a repeatable fault, by node and device.
    """
    faults = list(faults)
    memory: dict[tuple[str, str], list[float]] = {}
    for fault in faults:
        if has(fault, MEMORY):
            memory.setdefault((fault.node, fault.device), []).append(fault.since)
    for place, at in reported.items():
        memory.setdefault(place, []).append(at)
    counted, again_at = [], inf
    for fault in faults:
        if has(fault, *CORES) and not has(fault, MEMORY):
            errors = memory.get((fault.node, fault.device), ())
            if any(abs(fault.since - at) <= WINDOW_S for at in errors):
                continue
            if now < fault.since + WINDOW_S:
                again_at = min(again_at, fault.since + WINDOW_S)
                continue
        counted.append(fault)
    return counted, again_at
