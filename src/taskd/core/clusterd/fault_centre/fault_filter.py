"""The user's own filter: faults that a job wants to wait for, because they often heal.

Two annotations of the PodGroup list codes or levels, each with the seconds that a fault may last
before it counts: `8C1F8608:30,4C1F8608` or `RestartRequest:60`. As in Ascend's ClusterD, a switch's
code in brackets may contain commas, and full-width punctuation is understood.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from taskd.core.clusterd.fault_centre.fault_levels import level_of
from taskd.model.node_faults import NodeFault

CODES = "huawei.com/schedule.filter.faultCode"
LEVELS = "huawei.com/schedule.filter.faultLevel"
DEFAULT_S, MAX_S = 60.0, 86_400.0
_WIDE = str.maketrans("，：【】", ",:[]")  # noqa: RUF001 - full-width on purpose


@dataclass(frozen=True, slots=True)
class FaultFilter:
    codes: Mapping[str, float] = field(default_factory=dict)
    """How many seconds a fault with this code may last."""
    levels: Mapping[str, float] = field(default_factory=dict)

    def wait_s(self, fault: NodeFault) -> float:
        found = [seconds for code, seconds in self.codes.items() if code in fault.code]
        found += [seconds for level, seconds in self.levels.items() if level == level_of(fault)]
        return max(found, default=0.0)


def read_filter(annotations: Mapping[str, str]) -> tuple[FaultFilter, tuple[str, ...]]:
    """The filter, and the mistakes in it. A mistake costs its own entry only."""
    mistakes: list[str] = []
    codes = _read(annotations.get(CODES, ""), CODES, mistakes)
    return FaultFilter(codes, _read(annotations.get(LEVELS, ""), LEVELS, mistakes)), tuple(mistakes)


def still_waiting(
    faults: Iterable[NodeFault], chosen: FaultFilter, now: float
) -> tuple[list[NodeFault], float]:
    """The faults that count now, and when the next of the others will."""
    counted, again_at = [], inf
    for fault in faults:
        at = fault.since + chosen.wait_s(fault)
        if at <= now:
            counted.append(fault)
        else:
            again_at = min(again_at, at)
    return counted, again_at


def _read(text: str, name: str, mistakes: list[str]) -> dict[str, float]:
    found = {}
    for entry in _entries(text.translate(_WIDE)):
        key, colon, seconds = entry.rpartition(":") if entry[-1] != "]" else (entry, "", "")
        key = (key if colon else entry).strip()
        if not colon:
            found[key] = DEFAULT_S
        elif seconds.strip().isdecimal() and int(seconds) <= MAX_S and key:
            found[key] = float(int(seconds))
        else:
            mistakes.append(
                f"{name}: invalid entry {entry!r} (expected KEY or KEY:SECONDS, at most "
                f"{MAX_S:.0f}); ignoring it"
            )
    return found


def _entries(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    entries, depth = [""], 0
    for letter in text:
        depth = max(0, depth + (letter == "[") - (letter == "]"))
        if letter == "," and not depth:
            entries.append("")
        else:
            entries[-1] += letter
    return [entry.strip() for entry in entries if entry.strip()]
