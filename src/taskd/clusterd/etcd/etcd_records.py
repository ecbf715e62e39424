"""Records of jobs as keys of etcd, one per job.

A write depends on the version that it replaces, and on the lease: a process that still believes to
lead can neither change nor create a record once the next leader has begun.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from urllib.parse import quote

from taskd.clusterd.etcd.etcd_client import EtcdClient, Found, delete, is_at, put
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdRefused, EtcdUnanswered
from taskd.clusterd.records.packed_text import pack, unpack
from taskd.core.record import Record, RecordConflict, Stored, StoreUnreachable
from taskd.wire._pb import etcd_pb2 as pb
from taskd.wire.json_reading import loads

LIMIT = 1_400_000
"""Bytes of a compressed state; etcd's own limit for a request is 1.5 MiB."""
FAILED = (EtcdBusy, EtcdRefused, EtcdUnanswered)
UNREADABLE = (KeyError, TypeError, ValueError, zlib.error)


class EtcdRecords:
    def __init__(self, client: EtcdClient, prefix: str, leads: Callable[[], pb.Compare]) -> None:
        self._client, self._prefix, self._leads = client, f"{prefix}/jobs/", leads
        self.unreadable: list[str] = []
        """Keys that `read_all` could not read, with the reason. They are left alone."""

    async def read(self, name: str) -> Stored | None:
        try:
            found = await self._client.range(self._key(name))
        except FAILED as error:
            raise StoreUnreachable(f"cannot read the record of {name}: {error}") from error
        try:
            return _read(found[0])[1] if found else None
        except UNREADABLE as error:
            raise StoreUnreachable(f"the record of {name} cannot be read: {error!r}") from error

    async def read_all(self) -> dict[str, Stored]:
        try:
            found = await self._client.range(self._prefix, prefix=True)
        except FAILED as error:
            raise StoreUnreachable(f"cannot read the records: {error}") from error
        records: dict[str, Stored] = {}
        self.unreadable.clear()
        for one in found:
            try:
                name, stored = _read(one)
            except UNREADABLE as error:
                self.unreadable.append(f"{one.key}: {error!r}")
            else:
                records[name] = stored
        return records

    async def write(self, name: str, record: Record, version: str | None) -> Stored:
        body = {"name": name, "epoch": record.epoch, "sequence": record.sequence}
        value = pack(json.dumps({**body, "state": record.state}))
        if len(value) > LIMIT:
            raise StoreUnreachable(
                f"the state of {name} is too large for etcd: {len(value)} bytes, at most {LIMIT}"
            )
        revision = await self._change(name, put(self._key(name), value), version)
        return Stored(record, str(revision))

    async def remove(self, name: str, version: str) -> None:
        await self._change(name, delete(self._key(name)), version)

    async def _change(self, name: str, change: pb.RequestOp, version: str | None) -> int:
        conditions = [is_at(self._key(name), int(version or 0)), self._leads()]
        try:
            answer = await self._client.transact(conditions, [change])
        except FAILED as error:
            raise StoreUnreachable(f"cannot write the record of {name}: {error}") from error
        if not answer.succeeded:
            raise RecordConflict(f"another process leads, or has written the record of {name}")
        return answer.revision

    def _key(self, name: str) -> str:
        return self._prefix + quote(name, safe="")


def _read(found: Found) -> tuple[str, Stored]:
    body = loads(unpack(found.value))
    record = Record(int(body["epoch"]), int(body["sequence"]), str(body["state"]))
    return str(body["name"]), Stored(record, str(found.mod_revision))
