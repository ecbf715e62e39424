"""The address at which every node looks for the job's etcd: that of the first node.

Its keeper forwards connections from there to the members, wherever they run. A first node that has
lost its files cannot know that the job runs: it starts another etcd. etcd's leader in the running
job notices that, and writes there where the job runs, so that the first node joins it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import inf

from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.clusterd.etcd.etcd_settings import EtcdSettings
from taskd.clusterd.etcd.job_terms import JobTerms
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
async def forwarder(at: Address, targets: Callable[[], tuple[str, ...]]) -> AsyncIterator[None]:
    """Connect each client with the first target that accepts. Raises OSError: the port is taken."""
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_forward(reader, writer, targets()))
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
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, targets: tuple[str, ...]
) -> None:
    try:
        for target in map(Address.parse, targets):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    there = await asyncio.open_connection(target.host, target.port)
                break
        else:
            return
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
    running: Callable[[], tuple[int, tuple[str, ...]]],
) -> None:
    """Say at the first node's address where the job runs, if another etcd answers there.

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
    finally:
        await client.close()
