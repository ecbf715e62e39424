"""Public faults: what third parties and NodeD report about nodes and devices.

A fault has the id that its reporter gave it, per node. It stays for at least 5 s, so that a short
one is noticed, too; `once` means exactly that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from taskd.core.clusterd.fault_centre.fault_levels import (
    NOT_HANDLE,
    PRE_SEPARATE,
    SEPARATE,
    SUB_HEALTH,
)
from taskd.model.node_faults import NodeFault

STAY_S = 5.0
MAX_FAULTS = 50_000
VERSION = "1.0"
RESOURCES = ("CCAE", "fd-online", "pingmesh", "Netmind", "dpcStorage", "dtfsStorage")
LISTS = {
    "NotHandleFaultCodes": NOT_HANDLE,
    "SubHealthFaultCodes": SUB_HEALTH,
    "SeparateNPUCodes": SEPARATE,
    "PreSeparateNPUCodes": PRE_SEPARATE,
}
TYPES = ("NPU", "Node", "Network", "Storage")
ASSERTIONS = ("occur", "recover", "once")
MAX_IN_REQUEST, MAX_INFLUENCE, MAX_DEVICES = 100, 1000, 32
_ID = re.compile(r"[a-zA-Z0-9-_.]{8,128}")
_NODE = re.compile(r"[a-z0-9]([a-z0-9-.]{0,251}[a-z0-9])?")
_DESCRIPTION = re.compile(r"[\S ]{0,512}")
_EPOCH_MS = 1_735_689_600_000
"""2025-01-01: nothing older can be a time of such a report."""


@dataclass(frozen=True, slots=True)
class PublicCodes:
    """Who may report, and which level each code has."""

    levels: Mapping[str, str] = field(default_factory=dict)
    resources: tuple[str, ...] = RESOURCES


@dataclass(frozen=True, slots=True)
class Influence:
    node: str
    serial: str
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicFault:
    id: str
    type: str
    code: str
    time_ms: int
    assertion: str
    location: Mapping[str, str] = field(default_factory=dict)
    influence: tuple[Influence, ...] = ()
    description: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicReport:
    id: str
    timestamp_ms: int
    version: str
    resource: str
    faults: tuple[PublicFault, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One fault on one node."""

    code: str
    level: str
    time_ms: int
    devices: tuple[int, ...]
    added_at: float
    ends_at: float = inf


Key = tuple[str, str, str]
"""Node, resource, fault id."""


def problem_of(report: PublicReport, codes: PublicCodes) -> str:
    """Why nothing of the report counts; empty if some of it may."""
    if not _ID.fullmatch(report.id):
        return "id must have 8 to 128 letters, digits, dots, dashes or underscores"
    if not _is_time(report.timestamp_ms):
        return "timestamp must be in milliseconds, and not before 2025"
    if report.version != VERSION:
        return f"unknown version {report.version[:16]!r} (expected {VERSION})"
    if report.resource not in codes.resources:
        return f"unknown resource (expected {', '.join(codes.resources)})"
    if not 1 <= len(report.faults) <= MAX_IN_REQUEST:
        return f"a request must have 1 to {MAX_IN_REQUEST} faults"
    return ""


def problem_of_fault(fault: PublicFault, codes: PublicCodes) -> str:
    """Why this fault does not count; the others of its report may."""
    if not _ID.fullmatch(fault.id):
        return "faultId must have 8 to 128 letters, digits, dots, dashes or underscores"
    if fault.type not in TYPES:
        return f"unknown faultType (expected {', '.join(TYPES)})"
    if len(fault.code) != 9 or fault.code not in codes.levels:
        return f"unknown faultCode {fault.code[:16]!r}: it is in no list of the code file"
    if not _is_time(fault.time_ms):
        return "faultTime must be in milliseconds, and not before 2025"
    if fault.assertion not in ASSERTIONS:
        return f"unknown assertion (expected {', '.join(ASSERTIONS)})"
    if len(fault.location) > 10 or any(
        len(key) > 16 or len(value) > 128 for key, value in fault.location.items()
    ):
        return "faultLocation may have 10 entries of 16 and 128 characters"
    if not 1 <= len(fault.influence) <= MAX_INFLUENCE:
        return f"influence must have 1 to {MAX_INFLUENCE} entries"
    if not _DESCRIPTION.fullmatch(fault.description):
        return "description may have 512 printable characters"
    for one in fault.influence:
        if not _NODE.fullmatch(one.node):
            return "influence must name a node, or a serial number that is known"
        if not 1 <= len(one.devices) <= MAX_DEVICES or len(set(one.devices)) < len(one.devices):
            return f"deviceIds must be 1 to {MAX_DEVICES} different numbers"
        if any(not 0 <= device < MAX_DEVICES for device in one.devices):
            return f"deviceIds must be from 0 to {MAX_DEVICES - 1}"
    return ""


def _is_time(ms: int) -> bool:
    return len(str(ms)) == 13 and ms >= _EPOCH_MS


class PublicFaults:
    """All public faults of the cluster."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}

    def apply(self, report: PublicReport, codes: PublicCodes, now: float) -> set[str]:
        """Take the faults of a report that are valid. Returns the nodes that have changed."""
        changed: set[str] = set()
        for fault in report.faults:
            if problem_of_fault(fault, codes):
                continue
            for one in fault.influence:
                key = one.node, report.resource, fault.id
                if self._apply(key, fault, one, codes, now):
                    changed.add(one.node)
        return changed

    def _apply(
        self, key: Key, fault: PublicFault, one: Influence, codes: PublicCodes, now: float
    ) -> bool:
        known = self.entries.get(key)
        if fault.assertion == "recover":
            if known is None or known.ends_at < inf:
                return False
            ends_at = max(now, known.added_at + STAY_S)
            self.entries[key] = _ending(known, ends_at)
            return True
        if known is not None or len(self.entries) >= MAX_FAULTS:
            return False
        ends_at = now + STAY_S if fault.assertion == "once" else inf
        level = codes.levels[fault.code]
        self.entries[key] = Entry(fault.code, level, fault.time_ms, one.devices, now, ends_at)
        return True

    def expire(self, now: float) -> set[str]:
        """Remove what has ended. Returns the nodes that have changed."""
        over = [key for key, entry in self.entries.items() if entry.ends_at <= now]
        for key in over:
            del self.entries[key]
        return {node for node, _, _ in over}

    @property
    def next_end(self) -> float:
        return min((entry.ends_at for entry in self.entries.values()), default=inf)

    def on(self, node: str) -> dict[Key, Entry]:
        return {key: entry for key, entry in self.entries.items() if key[0] == node}


def _ending(entry: Entry, at: float) -> Entry:
    return Entry(entry.code, entry.level, entry.time_ms, entry.devices, entry.added_at, at)


def as_node_faults(entries: Mapping[Key, Entry]) -> Iterable[NodeFault]:
    for (node, resource, _), entry in entries.items():
        for device in entry.devices:
            yield NodeFault(
                node,
                str(device),
                entry.code,
                entry.level,
                min(entry.time_ms / 1000, entry.added_at),
                reporter=resource,
            )


def codes_of(settings: object) -> PublicCodes:
    """From the JSON of Ascend's code file. Raises ValueError, which says what is wrong."""
    if not isinstance(settings, dict) or not isinstance(settings.get("publicFaultCode"), dict):
        raise ValueError("publicFaultCode is missing")  # noqa: TRY004 - content, not a type
    levels: dict[str, str] = {}
    for name, level in LISTS.items():
        listed = settings["publicFaultCode"].get(name) or []
        if not isinstance(listed, list):
            raise ValueError(f"{name} must be a list")  # noqa: TRY004 - content, not a type
        levels |= {code: level for code in listed if isinstance(code, str)}
    resources = settings.get("publicFaultResource") or list(RESOURCES)
    if not isinstance(resources, list):
        raise ValueError("publicFaultResource must be a list")  # noqa: TRY004
    return PublicCodes(levels, tuple(str(name) for name in resources))
