"""The process that serves torch's TCPStore for the job: nothing but the store lives in it.

It is forked from the zygote on the first node. The listening socket is the launcher's, so the port
is known before torch is imported, and a new store can take the old one's place on the same port.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import NoReturn

from taskd.agent import linux
from taskd.agent.run.node_ranks import RENEWED


def serve(host: str, port: int, listener: int, renewed: bool) -> NoReturn:
    """Serve until killed."""
    linux.name_process("taskd:store")
    from torch._C._distributed_c10d import TCPStore

    server = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener,
    )
    if renewed:
        server.set(RENEWED, "1")
    while server is not None:
        signal.pause()
    os._exit(0)
