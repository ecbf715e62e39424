"""The address at which every node looks for the job's etcd: that of the first node.

Its keeper forwards connections from there to the members, wherever they run, and tells nodes that
ask that the job has an etcd (`choice_messages.py`). A first node that has lost its files cannot
know that the job runs: it asks all nodes what they have, or starts another etcd (`--etcd own`).
etcd's leader in the running job notices both, and says there where the job runs, so that the first
node joins it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import inf

from taskd.agent.etcd_member import choice_client, choice_server
from taskd.agent.etcd_member.choice_messages import HELLO
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.clusterd.etcd.job_terms import JobTerms
from taskd.core.etcd_choice import Runs
from taskd.core.record import StoreUnreachable
from taskd.runtime.address import Address
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

LOOK_S = 1.0
TELL_S = 3.0
"""How long another etcd must be there: a job that is just ending keeps no new one from starting."""
CALL_S = 1.0
CONNECT_S = 0.5
CHUNK = 1 << 16


@asynccontextmanager
async def forwarder(
    at: Address,
    targets: Callable[[], tuple[str, ...]],
    choice_key: str,
    serves: Callable[[], bool],
) -> AsyncIterator[None]:
    """Connect each client with the first target that accepts. Raises OSError: the port is taken.

    Clients of etcd speak first, so a node that asks about the choice is told from them. `serves`:
    whether etcd has answered, so that such a node need not wait.
    """
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_forward(reader, writer, targets, choice_key, serves))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, at.host, at.port)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    targets: Callable[[], tuple[str, ...]],
    choice_key: str,
    serves: Callable[[], bool],
) -> None:
    try:
        first = await reader.read(CHUNK)
        if first.startswith(HELLO):
            await choice_server.answer(reader, writer, choice_key, serves=serves())
            return
        for target in map(Address.parse, targets()):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    there = await asyncio.open_connection(target.host, target.port)
                break
        else:
            return
        there[1].write(first)
        try:
            ways = (_copy(reader, there[1]), _copy(there[0], writer))
            copying = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in copying:
                    task.cancel()
        finally:
            there[1].close()
    except OSError:
        pass  # the client has gone
    finally:
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


async def tell_first_node(
    home: Address,
    settings: EtcdSettings,
    prefix: str,
    choice_key: str,
    running: Callable[[], tuple[int, tuple[str, ...]]],
) -> None:
    """Say at the first node's address where the job runs, if the first node does not know it.

    `running`: the id of the cluster that this node's member leads, or 0, and its addresses. Never
    returns.
    """
    client = EtcdClient([str(home)], settings, CALL_S)
    terms = JobTerms(client, prefix)
    since = inf
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            cluster, addresses = running()
            try:
                is_other = bool(cluster) and (await client.status()).cluster != cluster
                since = min(since, monotonic()) if is_other else inf
                if monotonic() - since >= TELL_S and not await terms.elsewhere():
                    log.warning(
                        "etcd: node 0 has started again: sending it the address of the running job"
                    )
                    await terms.say_elsewhere(addresses)
            except (EtcdBusy, EtcdRefused, EtcdUnanswered, StoreUnreachable):
                since = inf
                if cluster:
                    await choice_client.tell(home, choice_key, "etcd", Runs(addresses))
    finally:
        await client.close()
