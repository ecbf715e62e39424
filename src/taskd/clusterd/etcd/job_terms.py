"""Who leads one job, as etcd has it: read, watched, and the small facts that outlive a leader.

Under the job's prefix:

    leader      the current term; etcd removes it when the leader's lease ends
    epoch       the number of the newest term
    run         identifies this run of the job; removed at its end
    ended       the epoch in which the job has ended
    nodes/N     the liveness port of each node's agent, written once when the node starts
    summary     the incidents so far, for the next leader and for the end of `taskd run`
    jobs/…      the record of the embedded clusterd (`etcd_records.py`)
    elsewhere   where the job runs, if not with this etcd (`agent/etcd_member/home_address.py`)

While nothing fails only the leader's renewals reach etcd, however many nodes the job has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from contextlib import aclosing
from dataclasses import asdict
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from taskd.clusterd.etcd.etcd_client import EtcdClient, Found, get, put
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.clusterd.records.packed_text import unpack
from taskd.core.election import Term, TermsSeen
from taskd.core.record import StoreUnreachable
from taskd.errors import JobElsewhere
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

FAILED = (EtcdBusy, EtcdRefused, EtcdUnanswered)
RETRY_S = 0.2
WAITS = "training goes on, and a fault waits until etcd answers. Is it running, with a quorum?"


def job_prefix(job: str, token: str) -> str:
    """The same for all nodes of the job. Jobs of other owners have another secret."""
    owner = blake2b(token.encode(), digest_size=6, person=b"taskd-job").hexdigest()
    return f"/taskd/runs/{quote(job, safe='')}-{owner}"


class JobTerms:
    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self.leader_key = f"{prefix}/leader"
        self.epoch_key = f"{prefix}/epoch"
        self.ended_key = f"{prefix}/ended"
        self.run_key = f"{prefix}/run"
        self.summary_key = f"{prefix}/summary"
        self.elsewhere_key = f"{prefix}/elsewhere"
        self.lease = 0
        """etcd's lease of the leader that was last seen."""
        self.epoch_revision = 0
        """When the epoch was last changed; 0: there is none yet."""
        self.run = ""
        """Empty: this run has had no leader yet."""

    async def look(self) -> TermsSeen:
        """Raises StoreUnreachable."""
        keys = (self.leader_key, self.epoch_key, self.ended_key, self.run_key)
        try:
            found = (await self._client.transact([], [get(key) for key in keys])).found
            leader, epoch, ended, run = (one[0] if one else None for one in found)
            self.lease = leader.lease if leader else 0
            self.epoch_revision = epoch.mod_revision if epoch else 0
            self.run = run.value.decode() if run else ""
            return TermsSeen(_term(leader), _number(epoch), _number(ended))
        except FAILED as error:
            raise StoreUnreachable(f"cannot read who leads the job: {error}; {WAITS}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreUnreachable(
                f"the keys under {self._prefix} were not written by TaskD: {error!r}"
            ) from error

    async def follow(self, changed: asyncio.Event, key: str = "") -> None:
        """Set the event when the watch is in place and after each change. Never returns.

        `key`: that of the leader, if it is empty.
        """
        while True:
            try:
                async with aclosing(self._client.watch(key or self.leader_key)) as changes:
                    async for _ in changes:
                        changed.set()
            except FAILED as error:
                log.info("the watch of %s ended: %s", key or "the job's leader", error)
            changed.set()  # a look finds the member of etcd that answers
            await asyncio.sleep(RETRY_S)

    async def incidents(self) -> list[dict[str, Any]]:
        """Those that the leaders have saved so far. Raises StoreUnreachable."""
        try:
            found = await self._client.range(self.summary_key)
        except FAILED as error:
            raise StoreUnreachable(f"cannot read the incidents of the job: {error}") from error
        try:
            saved = loads(unpack(found[0].value)) if found else []
            return [
                {**one, "incident": int(one["incident"]), "faults": list(one["faults"])}
                for one in saved
            ]
        except (KeyError, TypeError, ValueError, zlib.error):
            log.warning("the incidents of former leaders cannot be read")
            return []

    async def elsewhere(self) -> tuple[str, ...]:
        """The etcd with which the job runs; empty: it is this one. Raises StoreUnreachable."""
        try:
            found = await self._client.range(self.elsewhere_key)
            return tuple(map(str, loads(found[0].value))) if found else ()
        except FAILED as error:
            raise StoreUnreachable(f"cannot read {self.elsewhere_key}: {error}") from error
        except (TypeError, ValueError):
            log.warning("the key %s was not written by TaskD", self.elsewhere_key)
            return ()

    async def look_elsewhere(self, nodes: int) -> None:
        """Raises JobElsewhere if a job of so many nodes must be joined there, StoreUnreachable."""
        found = await self.elsewhere()
        # A job that has all its nodes here is another run, and goes on.
        if found and len(await self.liveness_ports()) < nodes:
            raise JobElsewhere(found)

    async def say_elsewhere(self, addresses: tuple[str, ...]) -> None:
        """Raises StoreUnreachable."""
        await self._put(self.elsewhere_key, json.dumps(addresses).encode())

    async def register(self, node: int, port: str) -> None:
        """Say where the agent of this node can be probed. Raises StoreUnreachable."""
        await self._put(self.node_key(node), port.encode())

    def node_key(self, node: int) -> str:
        return f"{self._prefix}/nodes/{node}"

    async def liveness_ports(self) -> dict[int, str]:
        """The nodes that have registered, and their liveness ports."""
        start = f"{self._prefix}/nodes/"
        try:
            found = await self._client.range(start, prefix=True)
        except FAILED as error:
            raise StoreUnreachable(f"cannot read the nodes of the job: {error}") from error
        names = {one.key.removeprefix(start): one.value.decode() for one in found}
        return {int(name): port for name, port in names.items() if name.isdecimal()}

    async def _put(self, key: str, value: bytes) -> None:
        try:
            await self._client.transact([], [put(key, value)])
        except FAILED as error:
            raise StoreUnreachable(f"cannot write {key}: {error}") from error


def value_of(term: Term) -> bytes:
    return json.dumps(asdict(term)).encode()


def _term(found: Found | None) -> Term | None:
    if found is None:
        return None
    body = loads(found.value)
    names = {name: str(body[name]) for name in ("manager", "liveness_port", "run")}
    return Term(int(body["epoch"]), int(body["node"]), **names)


def _number(found: Found | None) -> int:
    return int(found.value) if found is not None else 0
