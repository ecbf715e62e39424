"""The fault codes with rules of their own. A report may join several codes, so parts count."""

from __future__ import annotations

from taskd.model.node_faults import NodeFault

MEMORY = "80E01801"
"""An error in on-chip memory (UCE): the step can be repeated."""
NETWORK = "8C1F860B"
"""A collective failed (HCCL): the step can be repeated."""
CORES = ("80C98009", "80CB8009")
"""Errors of the vector and matrix cores, which may only accompany a memory error."""
LINK_DOWN, SWITCH_LINK_DOWN = "81078603", "[0x08520003,na,L2,na]"
LINKS = (LINK_DOWN, SWITCH_LINK_DOWN)
CQE = ("8C1F8608", "4C1F8608")
"""Completion errors of a device and of a host."""


def has(fault: NodeFault, *codes: str) -> bool:
    return any(code in fault.code for code in codes)
