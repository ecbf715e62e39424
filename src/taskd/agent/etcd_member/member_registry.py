"""The nodes that could run a member of the job's etcd, as keys of that etcd."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from taskd.clusterd.etcd.etcd_client import EtcdClient, delete, put
from taskd.wire.json_reading import loads

PREFIX = "/taskd/etcd/nodes/"
MOST_CANDIDATES = 8
"""Of the regular nodes, only the first ones register: the traffic must not grow with the job."""


@dataclass(frozen=True, slots=True)
class Registered:
    name: str
    """Of the node and this incarnation of its launcher."""
    order: int
    """Lower ones are preferred."""
    peer_url: str
    client: str
    """host:port for clients."""
    liveness: str
    """The liveness port of the launcher."""


async def register(client: EtcdClient, me: Registered) -> None:
    value = json.dumps(asdict(me)).encode()
    await client.transact([], [put(PREFIX + me.name, value)])


async def forget(client: EtcdClient, name: str) -> None:
    await client.transact([], [delete(PREFIX + name)])


async def registered(client: EtcdClient) -> dict[str, Registered]:
    """By name, preferred ones first. What another program has written is ignored."""
    found = []
    for one in await client.range(PREFIX, prefix=True):
        try:
            found.append(Registered(**loads(one.value)))
        except (ValueError, TypeError):
            continue
    return {one.name: one for one in sorted(found, key=lambda one: (one.order, one.name))}
