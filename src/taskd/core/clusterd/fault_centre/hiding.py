"""Faults that a job repairs by itself, and that the scheduler must not see meanwhile.

The scheduler deletes the pods on faulty devices. A job that repeats its step, or restarts its
processes in place, needs those pods. So such a fault is hidden from the scheduler and from
subscribers while the job may still repair it, and becomes visible when it has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from taskd.core.clusterd.fault_centre.fault_codes import LINKS, MEMORY, NETWORK, has
from taskd.core.clusterd.fault_centre.fault_levels import (
    IN_PLACE,
    NOT_HANDLE,
    RESTART_BUSINESS,
    SUB_HEALTH,
    level_of,
)
from taskd.model.node_faults import NodeFault

REPORT_S = 10.0
"""How long the job may take to report a repeatable fault by itself."""
REPEAT_S = 30.0
"""How long repeating the step may take, from the job's report."""
NETWORK_S = 60.0
"""How long a failed collective may go unreported before it counts as a fault of the process."""
IN_PLACE_S = 60.0
"""How long processes may take to restart in place."""

Place = tuple[str, str]
"""Node and device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRules:
    """How one job wants its faults to be handled."""

    retry: bool = False
    in_place: bool = False
    ignores_sub_health: bool = True
    master: str = ""
    """The node of pod 0."""
    leaving: frozenset[str] = frozenset()
    """The nodes whose pods are being replaced: nothing there is hidden any more."""
    reported: Mapping[Place, float] = field(default_factory=dict)
    """When the job itself last reported a repeatable fault."""


@dataclass(frozen=True, slots=True)
class Hidden:
    job: list[NodeFault]
    """What the job's own recovery sees."""
    cluster: list[NodeFault]
    """What everyone else sees."""
    again_at: float


def hide(faults: Iterable[NodeFault], rules: JobRules, now: float) -> Hidden:
    given = list(faults)
    faults = [_escalated(fault, given, rules, now) for fault in given]
    in_place = _restarted_in_place(faults, rules)
    shown, again_at = [], inf
    for fault in faults:
        until = max(_until_repeated(fault, rules), _until_restarted(fault, in_place))
        if now < until and fault.node not in rules.leaving:
            again_at = min(again_at, until)
        else:
            shown.append(fault)
        if rules.retry and has(fault, NETWORK) and now < fault.since + NETWORK_S:
            again_at = min(again_at, fault.since + NETWORK_S)
    return Hidden(faults, shown, again_at)


def _escalated(fault: NodeFault, faults: list[NodeFault], rules: JobRules, now: float) -> NodeFault:
    """A failed collective that the job has not reported within a minute blocks it, whatever its
    reporter thinks of it. With a lost link on the node, the relation of both decides instead."""
    late = has(fault, NETWORK) and now >= fault.since + NETWORK_S
    if not (rules.retry and late) or (fault.node, fault.device) in rules.reported:
        return fault
    if any(other.node == fault.node and has(other, *LINKS) for other in faults):
        return fault
    harmless = level_of(fault) in ("", NOT_HANDLE, SUB_HEALTH)
    return replace(fault, level=RESTART_BUSINESS) if harmless else fault


def _until_repeated(fault: NodeFault, rules: JobRules) -> float:
    if not (rules.retry and has(fault, MEMORY, NETWORK)):
        return -inf
    reported = rules.reported.get((fault.node, fault.device), inf)
    if reported <= fault.since + REPORT_S:
        return max(fault.since + REPORT_S, reported + REPEAT_S)
    return fault.since + (NETWORK_S if has(fault, NETWORK) else REPORT_S)


def _until_restarted(fault: NodeFault, nodes: frozenset[str]) -> float:
    if fault.node in nodes and level_of(fault) in IN_PLACE:
        return fault.since + IN_PLACE_S
    return -inf


def _restarted_in_place(faults: list[NodeFault], rules: JobRules) -> frozenset[str]:
    """The nodes whose faults a restart of processes can repair. If it cannot on the first node, the
    whole job restarts, and then it can on none."""
    if not rules.in_place:
        return frozenset()
    levels: dict[str, set[str]] = {}
    for fault in faults:
        levels.setdefault(fault.node, set()).add(level_of(fault))
    tolerated = {"", NOT_HANDLE, *IN_PLACE} | ({SUB_HEALTH} if rules.ignores_sub_health else set())
    possible = {node for node, found in levels.items() if found <= tolerated and found & IN_PLACE}
    if rules.master in levels and levels[rules.master] & IN_PLACE and rules.master not in possible:
        return frozenset()
    return frozenset(possible)
