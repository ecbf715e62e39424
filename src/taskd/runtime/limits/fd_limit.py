"""Raises the limit of open files for the servers that we start: manager and clusterd.

The usual soft limit of 1,024 protects programs that use `select`. Ours do not, and a server at the
limit cannot accept the connection of the next node.
"""

from __future__ import annotations

import resource

ENOUGH = 65_536


def raise_fd_limit() -> None:
    """Allow as many open files as the hard limit permits, up to ENOUGH."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
