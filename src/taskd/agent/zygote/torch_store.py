"""torch's store for the job: the process that serves it, and one key prefix per attempt.

The store process is forked from the zygote on the first node. The listening socket belongs to the
launcher: the port is known before torch is imported, and a new store can replace a dead one on
the same port.

torch 2.13 lets restarted workers use the same keys that the dead workers left in the agent's
store; they then wait for addresses where no process answers. Therefore every attempt gets its own
prefix. Replacing the store instead would be correct on one node only: with several nodes, a worker
that restarts first could connect to the store that is about to be replaced.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import Any, NoReturn

from taskd.agent import process_lifetime
from taskd.agent.run.node_ranks import RENEWED
from taskd.agent.seams import torch_names
from taskd.config import environ


def serve(host: str, port: int, listener: int, renewed: bool) -> NoReturn:
    """Serve until killed."""
    process_lifetime.name_process("taskd:store")
    try:
        from torch.distributed import TCPStore
    except ImportError:
        _wait_until_killed()  # without torch no worker uses the store
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
    _wait_until_killed()


def _wait_until_killed() -> NoReturn:
    while True:
        signal.pause()


def prefix_keys_by_attempt() -> None:
    """Called in the zygote after the imports. Raises UnknownTorch if torch lacks the hook."""
    if "torch.distributed.rendezvous" not in sys.modules:
        return  # workers that have not imported torch create no store of it
    from torch.distributed import PrefixStore

    def with_prefix(store: Any) -> PrefixStore:
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"taskd/attempt_{attempt}", store)

    torch_names.wrap_store_creation(with_prefix)
