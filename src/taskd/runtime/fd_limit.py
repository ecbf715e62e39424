"""Room for connections. Used by the servers that we start ourselves: manager and clusterd.

The usual soft limit of 1,024 open files is for programs that use `select`; ours do not, and a
server that has reached it makes the next node wait at its door.
"""

from __future__ import annotations

import resource

ENOUGH = 65_536


def make_room() -> None:
    """As many open files as this process is allowed, up to ENOUGH."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
