"""clusterd in the manager's own process, for jobs that have no cluster.

It is the same server behind the same wire, on a loopback port, with its journal in the state
directory; so a manager that is restarted finds every decision again. Its package is a
neighbour, not a part of the manager, and is loaded by name only when it is wanted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from taskd.errors import SettingsError
from taskd.manager.settings import ManagerConfig

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PORT_FILE = "clusterd.json"


@asynccontextmanager
async def clusterd(config: ManagerConfig) -> AsyncIterator[str]:
    """Yields its address: the one of its former life if that is free."""
    package: Any = import_module("taskd.clusterd.main")
    state = config.state_dir
    journal = None
    if state is not None:
        state.mkdir(parents=True, exist_ok=True)
        journal = state / "clusterd.journal"
    before = _former_port(state)
    try:
        serving = package.serve(
            package.ServerConfig(listen=f"{LOOPBACK}:{before}", journal=journal)
        )
        server = await serving.__aenter__()
    except SettingsError:
        if not before:
            raise
        serving = package.serve(package.ServerConfig(listen=f"{LOOPBACK}:0", journal=journal))
        server = await serving.__aenter__()
    try:
        if state is not None:
            (state / PORT_FILE).write_text(json.dumps({"port": server.port}))
        yield server.address
    finally:
        await serving.__aexit__(None, None, None)


def _former_port(state: Path | None) -> int:
    if state is None:
        return 0
    try:
        told = json.loads((state / PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0
    port = told.get("port") if isinstance(told, dict) else None
    return port if isinstance(port, int) and 0 < port < 65536 else 0
