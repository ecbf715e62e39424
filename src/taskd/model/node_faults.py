"""Faults of nodes and devices, as the cluster reports them, before they are related to jobs."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_NODE = "-1"
"""The device of a fault that concerns every device of its node."""
NPU, NODE, SWITCH = "NPU", "Node", "Switch"
"""Kinds of parts, with Ascend's names. A node's own report names others, too (CPU, Memory …)."""

FaultKey = tuple[str, ...]
"""The same fault in a later report has the same key."""


@dataclass(frozen=True, slots=True, order=True)
class NodeFault:
    """One fault of one part of a node."""

    node: str
    device: str = WHOLE_NODE
    code: str = ""
    level: str = ""
    """The reporter's own name of the severity."""
    since: float = 0.0
    """When it began, in seconds of the wall clock; never later than clusterd first saw it."""
    part: str = NPU
    network: bool = False
    """The device's network is faulty, not the device."""
    chip: str = ""
    port: str = ""
    """Of a switch."""
    reporter: str = ""
    """Who sent a public fault."""

    @property
    def key(self) -> FaultKey:
        return self.node, self.part, self.device, self.code, self.chip, self.port
