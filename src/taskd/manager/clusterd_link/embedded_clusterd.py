"""clusterd inside the manager's process, for jobs without a cluster.

It is the same gRPC server on a loopback port, with its journal in the state directory, or in etcd.
So a restarted manager finds all earlier decisions, and `taskd status` finds it by the job's name.
It requires a token that only the job's owner can read, because a loopback port is open to every
user of the machine. Imported only when it is needed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from taskd.bus.security import ClusterdTlsSettings
from taskd.clusterd import locate
from taskd.clusterd.auth import Tokens
from taskd.clusterd.main import Server, ServerConfig, serve
from taskd.errors import SettingsError
from taskd.manager.settings import ManagerConfig
from taskd.runtime.files.private_files import write_private
from taskd.runtime.journal.journal import Journal
from taskd.runtime.tokens import OPERATOR, token_for
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
JOURNAL, PORT_FILE = "clusterd.journal", "clusterd.json"


@asynccontextmanager
async def clusterd(
    config: ManagerConfig, journal: Journal | None = None
) -> AsyncIterator[ManagerConfig]:
    """Run it; yields the config with its address and token. The previous port is used if free.

    `journal`: of the manager's term, if there are several managers.
    """
    state = config.state_dir
    token = config.clusterd_token or token_for(config.token or token_hex(32), OPERATOR)
    server_config = ServerConfig(
        listen=f"{LOOPBACK}:{_previous_port(state)}", tokens=Tokens({token: OPERATOR})
    )
    if state is not None:
        state.mkdir(parents=True, exist_ok=True)
        server_config = replace(server_config, journal=state / JOURNAL)
    async with AsyncExitStack() as stack:
        server = await _start(stack, server_config, journal)
        _save_port(state, server.port)
        _announce(config.job_id, server.address, token)
        try:
            yield replace(
                config,
                clusterd=server.address,
                clusterd_token=token,
                clusterd_token_file="",
                clusterd_tls=ClusterdTlsSettings(),  # the loopback interface of this process
            )
        finally:
            with suppress(OSError, SettingsError):
                locate.withdraw(config.job_id)


async def _start(
    stack: AsyncExitStack, server_config: ServerConfig, journal: Journal | None
) -> Server:
    try:
        return await stack.enter_async_context(serve(server_config, journal))
    except SettingsError:
        if server_config.listen.endswith(":0"):
            raise
        any_port = replace(server_config, listen=f"{LOOPBACK}:0")
        return await stack.enter_async_context(serve(any_port, journal))


def _announce(job: str, address: str, token: str) -> None:
    """For `taskd status` and other commands on this machine. The job does not need it."""
    try:
        locate.announce(job, address, token)
    except (OSError, SettingsError) as error:
        log.warning("`taskd status` needs --clusterd for this job: %s", error)


def _save_port(state: Path | None, port: int) -> None:
    if state is not None:
        write_private(state / PORT_FILE, json.dumps({"port": port}))


def _previous_port(state: Path | None) -> int:
    if state is None:
        return 0
    try:
        saved = loads((state / PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0
    port = saved.get("port") if isinstance(saved, dict) else None
    return port if isinstance(port, int) and 0 < port < 65536 else 0
