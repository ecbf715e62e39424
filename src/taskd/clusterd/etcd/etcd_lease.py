"""The lease of the leader as one key of etcd, for the same election as in Kubernetes.

A renewal writes the same value again: only the key's revision changes. The value changes with every
term, so a write to a record can depend on it (`etcd_records.py`). etcd's own leases are not used:
`core/election.py` decides with the clocks of its own processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from taskd.clusterd.etcd.etcd_client import EtcdClient, Found, has_value, is_at, put
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.core.election import Election, LeaseSeen, Wait
from taskd.core.record import StoreUnreachable
from taskd.runtime.clock import Clock, monotonic
from taskd.wire._pb import etcd_pb2 as pb
from taskd.wire.json_reading import loads

FAILED = (EtcdBusy, EtcdRefused, EtcdUnanswered)


class EtcdLease:
    def __init__(
        self, client: EtcdClient, prefix: str, election: Election, clock: Clock = monotonic
    ) -> None:
        self._client, self._key = client, f"{prefix}/leader"
        self._election, self._clock = election, clock
        self._newest = 0
        """The newest epoch that this process has seen."""
        self.holder = ""
        """The other process that leads, as last seen."""

    @property
    def held(self) -> bool:
        return self._election.leads(self._clock())

    @property
    def is_ours(self) -> Callable[[], pb.Compare]:
        """The condition of all our writes: no later leader has begun."""
        return lambda: has_value(self._key, self._value(self._election.epoch or 0))

    async def acquire(self, above: int = 0) -> int | None:
        """Also renews: what to write depends on what the lease says. The holder of a term that is
        not `above` that epoch begins another one."""
        sent_at = self._clock()
        try:
            seen = self._seen(await self._client.range(self._key))
            decision = self._election.consider(seen, self._clock(), above)
            if isinstance(decision, Wait):
                self.holder = decision.holder
                self._election.lost()
                return None
            revision = int(decision.version or 0)
            write = put(self._key, self._value(decision.epoch))
            if not (await self._client.transact([is_at(self._key, revision)], [write])).succeeded:
                return None  # another process was faster; the next try reads what it wrote
        except FAILED as error:
            raise StoreUnreachable(f"cannot write the lease: {error}") from error
        self._newest = decision.epoch
        self._election.written(decision.epoch, sent_at)
        return decision.epoch

    async def renew(self) -> bool:
        epoch = self._election.epoch
        return epoch is not None and await self.acquire() == epoch

    async def release(self) -> None:
        epoch = self._election.epoch
        if epoch is None:
            return
        free = put(self._key, json.dumps({"holder": "", "epoch": epoch}).encode())
        try:
            await self._client.transact([self.is_ours()], [free])
        except FAILED as error:
            raise StoreUnreachable(f"cannot release the lease: {error}") from error
        finally:
            self._election.lost()

    def _value(self, epoch: int) -> bytes:
        return json.dumps({"holder": self._election.identity, "epoch": epoch}).encode()

    def _seen(self, found: tuple[Found, ...]) -> LeaseSeen | None:
        epoch, holder, version = 0, "", ""
        for one in found:
            try:
                body = loads(one.value)
                epoch, holder = int(body["epoch"]), str(body["holder"])
            except (ValueError, KeyError, TypeError) as error:
                raise StoreUnreachable(
                    f"etcd key {self._key} is not a lease: another program has written it; choose"
                    " another --etcd-prefix"
                ) from error
            version = str(one.mod_revision)
        if epoch < self._newest:
            raise StoreUnreachable(
                f"etcd is at epoch {epoch}, but epoch {self._newest} has existed: it was restored"
                " from an old backup, and decisions are missing. Restore a newer one; or restart"
                " all clusterds to continue from this one"
            )
        self._newest = epoch
        return LeaseSeen(holder, epoch, version) if found else None
