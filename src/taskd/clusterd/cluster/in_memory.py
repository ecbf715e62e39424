"""No cluster: the objects are in memory, and all jobs are declared by their managers.

Also the object cache that the reader of a real cluster keeps: objects, owners and listeners.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from taskd.clusterd.cluster.interface import (
    Changed,
    ClusterRefused,
    Json,
    Key,
    Kind,
    merged,
    owner_of,
    uid_of,
)


class ObjectCache:
    """Objects by key and by owner. Setting one notifies all listeners."""

    def __init__(self) -> None:
        self._objects: dict[Key, Json] = {}
        self._owned: dict[tuple[Kind, str], set[Key]] = defaultdict(set)
        self._listeners: set[asyncio.Queue[Changed]] = set()

    def get(self, key: Key) -> Json | None:
        return self._objects.get(key)

    def find(self, kind: Kind, owner: str) -> list[Json]:
        return [self._objects[key] for key in sorted(self._owned.get((kind, owner), ()))]

    def all(self, kind: Kind) -> list[Json]:
        return [body for key, body in self._objects.items() if key.kind is kind]

    def set(self, key: Key, body: Json | None) -> None:
        before = self._objects.get(key)
        if before == body:
            return
        if before is not None:
            del self._objects[key]
            self._disown(key, owner_of(before)[0])
        if body is not None:
            self._objects[key] = body
            self._owned[key.kind, owner_of(body)[0]].add(key)
        for inbox in self._listeners:
            inbox.put_nowait(Changed(key, before, body))

    def problems(self) -> Mapping[Kind, str]:
        return {}

    def changes(self) -> AsyncIterator[Changed]:
        """All changes after this call, even those before the first one is awaited."""
        inbox: asyncio.Queue[Changed] = asyncio.Queue()
        self._listeners.add(inbox)
        return self._drain(inbox)

    async def _drain(self, inbox: asyncio.Queue[Changed]) -> AsyncIterator[Changed]:
        try:
            while True:
                yield await inbox.get()
        finally:
            self._listeners.discard(inbox)

    def _disown(self, key: Key, owner: str) -> None:
        keys = self._owned[key.kind, owner]
        keys.discard(key)
        if not keys:
            del self._owned[key.kind, owner]


class InMemoryCluster(ObjectCache):
    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def patch(self, key: Key, patch: Mapping[str, Any], version: str | None = None) -> Json:
        current = self.get(key)
        if current is None:
            raise ClusterRefused(f"{key} does not exist")
        if version is not None and version_of(current) != version:
            raise ClusterRefused(f"{key} has changed since it was read")
        return self._put(key, merged(current, patch), current)

    async def create(self, key: Key, body: Json) -> Json:
        if self.get(key) is not None:
            raise ClusterRefused(f"{key} already exists")
        return self._put(key, named(key, body), None)

    async def delete(self, key: Key, uid: str = "") -> None:
        known = self.get(key)
        if known is not None and uid in ("", uid_of(known)):
            self.set(key, None)

    def _put(self, key: Key, body: Json, before: Json | None) -> Json:
        count_version(body, before)
        self.set(key, body)
        return body


def named(key: Key, body: Mapping[str, Any]) -> Json:
    metadata = {"name": key.name} | ({"namespace": key.namespace} if key.namespace else {})
    return merged(body, {"kind": key.kind.value, "metadata": metadata})


def version_of(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata")
    return str(metadata.get("resourceVersion", "")) if isinstance(metadata, Mapping) else ""


def count_version(body: Json, before: Mapping[str, Any] | None) -> None:
    old = version_of(before or {})
    body["metadata"]["resourceVersion"] = str(int(old) + 1 if old.isdecimal() else 1)
