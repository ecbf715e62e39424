"""clusterd in the manager's own process, for jobs that have no cluster.

It is the same server behind the same wire, on a loopback port, with its journal in the state
directory; so a manager that is restarted finds every decision again, and `taskd status` finds it
by the job's name. It asks for a token that only the job's owner can read: a loopback port is open
to every user of the machine. Loaded only when it is wanted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from taskd.bus.clusterd_tls import ClusterdTlsSettings
from taskd.clusterd import locate
from taskd.clusterd.auth import Tokens
from taskd.clusterd.main import Server, ServerConfig, serve
from taskd.errors import SettingsError
from taskd.manager.settings import ManagerConfig
from taskd.runtime.tokens import OPERATOR, token_for

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
JOURNAL, PORT_FILE = "clusterd.journal", "clusterd.json"


@asynccontextmanager
async def clusterd(config: ManagerConfig) -> AsyncIterator[ManagerConfig]:
    """Yields what was given, with the address (the one of its former life if that is free) and
    the token."""
    state = config.state_dir
    token = config.clusterd_token or token_for(config.token or token_hex(32), OPERATOR)
    wanted = ServerConfig(
        listen=f"{LOOPBACK}:{_former_port(state)}", tokens=Tokens({token: OPERATOR})
    )
    if state is not None:
        state.mkdir(parents=True, exist_ok=True)
        wanted = replace(wanted, journal=state / JOURNAL)
    async with AsyncExitStack() as stack:
        server = await _served(stack, wanted)
        _remember(state, server.port)
        _announce(config.job_id, server.address, token)
        try:
            yield replace(
                config,
                clusterd=server.address,
                clusterd_token=token,
                clusterd_tls=ClusterdTlsSettings(),  # the loopback of this very process
            )
        finally:
            with suppress(OSError, SettingsError):
                locate.withdraw(config.job_id)


async def _served(stack: AsyncExitStack, wanted: ServerConfig) -> Server:
    try:
        return await stack.enter_async_context(serve(wanted))
    except SettingsError:
        if wanted.listen.endswith(":0"):
            raise
        anywhere = replace(wanted, listen=f"{LOOPBACK}:0")
        return await stack.enter_async_context(serve(anywhere))


def _announce(job: str, address: str, token: str) -> None:
    """For `taskd status` and its like, typed on this machine. The job can do without."""
    try:
        locate.announce(job, address, token)
    except (OSError, SettingsError) as error:
        log.warning("`taskd status` will not find the job by itself: %s", error)


def _remember(state: Path | None, port: int) -> None:
    if state is not None:
        (state / PORT_FILE).write_text(json.dumps({"port": port}))


def _former_port(state: Path | None) -> int:
    if state is None:
        return 0
    try:
        told = json.loads((state / PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0
    port = told.get("port") if isinstance(told, dict) else None
    return port if isinstance(port, int) and 0 < port < 65536 else 0
