"""Faults that mean something only together: a link that was lost, and an error that it explains.

A link that goes down for a moment is normal, and a failed collective may have many causes. Both
within minutes show which node must go. The pairs and times are Ascend's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from taskd.core.clusterd.fault_centre.fault_codes import (
    CQE,
    LINK_DOWN,
    LINKS,
    NETWORK,
    SWITCH_LINK_DOWN,
    has,
)
from taskd.core.clusterd.fault_centre.fault_levels import SEPARATE, SUB_HEALTH
from taskd.model.node_faults import FaultKey, NodeFault

LIFETIME_S = 300.0
"""How long a lost link can explain an error."""


class Verdict(StrEnum):
    """The value of the pod's label `fault-type`."""

    SEPARATE = "Separate"
    SUB_HEALTH = "SubHealth"

    @property
    def level(self) -> str:
        return SEPARATE if self is Verdict.SEPARATE else SUB_HEALTH


PAIRS = {
    ("8C1F8609", LINK_DOWN): Verdict.SUB_HEALTH,
    (NETWORK, LINK_DOWN): Verdict.SEPARATE,
    (NETWORK, SWITCH_LINK_DOWN): Verdict.SEPARATE,
    **{(code, LINK_DOWN): Verdict.SEPARATE for code in CQE},
}
"""Error and lost link."""
TRIGGERS = tuple(sorted({trigger for trigger, _ in PAIRS}))


@dataclass(frozen=True, slots=True)
class Related:
    """The node of a lost link is at fault."""

    link: NodeFault
    verdict: Verdict
    because: str
    pods: str
    """The pods (uids) there: what follows applies to them, not to those that replace them."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one job has seen. Lost links and errors stay known after their report has gone."""

    links: Mapping[FaultKey, NodeFault] = field(default_factory=dict)
    triggers: Mapping[str, float] = field(default_factory=dict)
    """By code: when it was last seen."""
    judged: Mapping[str, Related] = field(default_factory=dict)
    """By node. Kept until the pod there has been replaced."""


def relate(
    evidence: Evidence, faults: Iterable[NodeFault], pods: Mapping[str, str], now: float
) -> tuple[Evidence, float]:
    """Add what is seen now. `pods`: the job's pods (uids) by node. Also: when to look again."""
    faults = list(faults)
    present = {fault.key for fault in faults}
    known = {key: link for key, link in evidence.links.items() if link.node in pods}
    lost = {fault.key: fault for fault in faults if has(fault, *LINKS)}
    links = {**lost, **known}
    triggers = {code: at for code, at in evidence.triggers.items() if now < at + LIFETIME_S}
    for fault in faults:
        for code in TRIGGERS:
            if has(fault, code):
                triggers[code] = now
    judged = {
        node: found for node, found in evidence.judged.items() if pods.get(node) == found.pods
    }
    alive = {key: link for key, link in links.items() if now < link.since + LIFETIME_S}
    for link in alive.values():
        for (trigger, lost_link), verdict in PAIRS.items():
            if has(link, lost_link) and trigger in triggers:
                because = f"{trigger} and the lost link {link.code}"
                _judge(judged, Related(link, verdict, because, pods[link.node]))
    for key, link in links.items():
        # A switch that lost a link for so long is not healthy, even if no rank has noticed it yet.
        if key not in alive and key in present and has(link, SWITCH_LINK_DOWN):
            because = f"the lost link {link.code} did not come back"
            _judge(judged, Related(link, Verdict.SUB_HEALTH, because, pods[link.node]))
    again_at = min((link.since + LIFETIME_S for link in alive.values()), default=inf)
    kept = {key: link for key, link in links.items() if key in alive or key in present}
    return Evidence(kept, triggers, judged), again_at


def _judge(judged: dict[str, Related], found: Related) -> None:
    """A verdict gets worse, never better."""
    known = judged.get(found.link.node)
    if known is None or (known.verdict is Verdict.SUB_HEALTH and found.verdict is Verdict.SEPARATE):
        judged[found.link.node] = found
