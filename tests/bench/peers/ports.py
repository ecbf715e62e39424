"""Free ports, for programs that cannot choose one themselves and report it."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. All stay bound until the last is found, so they differ."""
    held = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
