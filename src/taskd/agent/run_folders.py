"""What a node's run stands on, made before anything slow is imported (`node.py` builds on it)."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from taskd.agent.zygote.worker_processes import Nursery


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a node's run stands on: known addresses, and processes that are warming up."""

    nursery: Nursery
    run_dir: str
    beacons: str
    store: str
    """host:port where the ranks meet."""
    listener: socket.socket | None = None
    """The store's, where this node has to serve it."""
    serves: bool = False
    """Whether the store lives and dies with this node."""
