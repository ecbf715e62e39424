"""Records of jobs in ConfigMaps of clusterd's own namespace, one per job.

Compare-and-set is the API server's: an update names the `resourceVersion` that it replaces, a
delete has it as a precondition. States are compressed; a ConfigMap holds 1 MiB.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from taskd.clusterd.kubernetes.api_client import (
    CONFIG_MAPS,
    CONFLICT,
    NOT_FOUND,
    ApiClient,
    ApiFailed,
)
from taskd.clusterd.records.packed_text import pack, unpack
from taskd.core.record import Record, RecordConflict, Stored, StoreUnreachable

LABEL = "taskd/record"
LIMIT = 1_000_000
"""Of the compressed and encoded state; the API server's own limit is 1 MiB for the object."""
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, zlib.error, NotBase64)


class ConfigMapRecords:
    def __init__(self, api: ApiClient, namespace: str, kind: str = "job") -> None:
        self._api, self._namespace, self._kind = api, namespace, kind
        self.unreadable: list[str] = []
        """ConfigMaps that `read_all` could not read, with the reason. They are left alone."""

    async def read(self, name: str) -> Stored | None:
        try:
            body = await self._api.request("GET", self._path(name))
        except ApiFailed as error:
            if error.code == NOT_FOUND:
                return None
            raise StoreUnreachable(f"cannot read the record of {name}: {error}") from error
        try:
            return _read(body)[1]
        except UNREADABLE as error:
            raise StoreUnreachable(f"the record of {name} cannot be read: {error!r}") from error

    async def read_all(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        self.unreadable.clear()
        token = ""
        while True:
            params = {"labelSelector": f"{LABEL}={self._kind}", "limit": "100"}
            if token:
                params["continue"] = token
            try:
                page = await self._api.request("GET", self._path(), None, **params)
            except ApiFailed as error:
                raise StoreUnreachable(f"cannot list the records: {error}") from error
            for body in page.get("items") or ():
                try:
                    name, stored = _read(body)
                except UNREADABLE as error:
                    self.unreadable.append(f"{body.get('metadata', {}).get('name')}: {error!r}")
                else:
                    found[name] = stored
            token = str((page.get("metadata") or {}).get("continue") or "")
            if not token:
                return found

    async def write(self, name: str, record: Record, version: str | None) -> Stored:
        state = b64encode(pack(record.state)).decode()
        if len(state) > LIMIT:
            raise StoreUnreachable(
                f"the state of {name} is too large for a ConfigMap: {len(state)} bytes, at most "
                f"{LIMIT}"
            )
        metadata: dict[str, Any] = {
            "name": object_name(self._kind, name),
            "namespace": self._namespace,
            "labels": {LABEL: self._kind, "app.kubernetes.io/managed-by": "taskd-clusterd"},
        }
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"name": name, "epoch": str(record.epoch), "sequence": str(record.sequence)},
            "binaryData": {"state": state},
        }
        try:
            if version is None:
                written = await self._api.request("POST", self._path(), body)
            else:
                metadata["resourceVersion"] = version
                written = await self._api.request("PUT", self._path(name), body)
        except ApiFailed as error:
            raise _translated(error, name) from error
        return Stored(record, str(written["metadata"]["resourceVersion"]))

    async def remove(self, name: str, version: str) -> None:
        body = {"preconditions": {"resourceVersion": version}}
        try:
            await self._api.request("DELETE", self._path(name), body)
        except ApiFailed as error:
            if error.code != NOT_FOUND:
                raise _translated(error, name) from error

    def _path(self, name: str = "") -> str:
        return CONFIG_MAPS.path(self._namespace, object_name(self._kind, name) if name else "")


def object_name(kind: str, name: str) -> str:
    """Jobs that their manager has declared may have any name; objects may not."""
    return f"taskd-{kind}-{sha256(name.encode()).hexdigest()[:40]}"


def _read(body: Mapping[str, Any]) -> tuple[str, Stored]:
    data = body["data"]
    state = unpack(b64decode(body["binaryData"]["state"], validate=True))
    record = Record(int(data["epoch"]), int(data["sequence"]), state)
    return str(data["name"]), Stored(record, str(body["metadata"]["resourceVersion"]))


def _translated(error: ApiFailed, name: str) -> RecordConflict | StoreUnreachable:
    if error.code in (CONFLICT, NOT_FOUND):
        return RecordConflict(f"another process has written the record of {name}: {error}")
    return StoreUnreachable(f"cannot write the record of {name}: {error}")
