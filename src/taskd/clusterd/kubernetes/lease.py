"""The lease of the leader: a `coordination.k8s.io/v1` Lease, as other controllers use it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from taskd.clusterd.kubernetes.api_client import CONFLICT, LEASES, NOT_FOUND, ApiClient, ApiFailed
from taskd.core.election import Election, LeaseSeen, Take, Wait
from taskd.core.record import StoreUnreachable
from taskd.runtime.clock import Clock, monotonic, wall

NAME = "taskd-clusterd"


class KubernetesLease:
    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        election: Election,
        clock: Clock = monotonic,
        name: str = NAME,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._election, self._clock = election, clock
        self.holder = ""
        """The other process that leads, as last seen."""

    @property
    def held(self) -> bool:
        return self._election.leads(self._clock())

    async def acquire(self, above: int = 0) -> int | None:
        """Also renews: what to write depends on what the lease says. The holder of a term that is
        not `above` that epoch begins another one."""
        sent_at = self._clock()
        try:
            body = await self._read()
            decision = self._election.consider(_seen(body), self._clock(), above)
            if isinstance(decision, Wait):
                self.holder = decision.holder
                self._election.lost()
                return None
            await self._write(body, decision.epoch, isinstance(decision, Take))
        except ApiFailed as error:
            if error.code == CONFLICT:
                return None  # another process was faster; the next try reads what it wrote
            raise StoreUnreachable(f"cannot write lease {self._name}: {error}") from error
        self._election.written(decision.epoch, sent_at)
        return decision.epoch

    async def renew(self) -> bool:
        epoch = self._election.epoch
        return epoch is not None and await self.acquire() == epoch

    async def release(self) -> None:
        if self._election.epoch is None:
            return
        try:
            body = await self._read()
            seen = _seen(body)
            if body is not None and seen is not None and seen.holder == self._election.identity:
                await self._put(body, {"holderIdentity": "", "leaseDurationSeconds": 1})
        except ApiFailed as error:
            raise StoreUnreachable(f"cannot release lease {self._name}: {error}") from error
        finally:
            self._election.lost()

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._api.request("GET", LEASES.path(self._namespace, self._name))
        except ApiFailed as error:
            if error.code == NOT_FOUND:
                return None
            raise

    async def _write(self, body: dict[str, Any] | None, epoch: int, new_term: bool) -> None:
        now = datetime.fromtimestamp(wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": self._election.identity,
            "leaseDurationSeconds": int(self._election.config.duration_s),
            "leaseTransitions": epoch,
            "renewTime": now,
        }
        if new_term:
            spec["acquireTime"] = now
        if body is not None:
            await self._put(body, spec)
            return
        fresh = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": spec,
        }
        await self._api.request("POST", LEASES.path(self._namespace), fresh)

    async def _put(self, body: dict[str, Any], spec: Mapping[str, Any]) -> None:
        changed = {**body, "spec": {**(body.get("spec") or {}), **spec}}
        await self._api.request("PUT", LEASES.path(self._namespace, self._name), changed)


def _seen(body: Mapping[str, Any] | None) -> LeaseSeen | None:
    if body is None:
        return None
    spec = body.get("spec") or {}
    return LeaseSeen(
        holder=str(spec.get("holderIdentity") or ""),
        epoch=int(spec.get("leaseTransitions") or 0),
        version=str(body["metadata"]["resourceVersion"]),
    )
