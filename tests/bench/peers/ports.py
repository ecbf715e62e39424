"""Ports for programs that cannot be told to choose one themselves and to say which."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Nobody has them now; all are held until the last is found, so that they differ."""
    held = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
