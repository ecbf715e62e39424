"""The cluster behind the Kubernetes API server.

Pods, PodGroups and ConfigMaps are watched; reads come from that copy. Nodes are only annotated.
PodGroups and pods that clusterd is asked to create belong to jobs that their manager has declared:
such a job has no objects in Kubernetes, so they stay in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from taskd.clusterd.cluster.in_memory import InMemoryCluster, named, version_of
from taskd.clusterd.cluster.interface import ClusterRefused, ClusterUnreachable, Json, Key, Kind
from taskd.clusterd.kubernetes.api_client import (
    CONFIG_MAPS,
    CONFLICT,
    MERGE_PATCH,
    NODES,
    NOT_FOUND,
    POD_GROUPS,
    PODS,
    ApiClient,
    ApiFailed,
)
from taskd.clusterd.kubernetes.reflect import reflect
from taskd.clusterd.kubernetes.relevant import relevant, shrunk
from taskd.core.clusterd.reflector import Change, Reflector, ReflectorConfig
from taskd.runtime.clock import wait_until

log = logging.getLogger(__name__)

SYNC_S = 60.0
"""How long the first lists may take, all together."""
RESOURCES = {
    Kind.POD: PODS,
    Kind.POD_GROUP: POD_GROUPS,
    Kind.CONFIG_MAP: CONFIG_MAPS,
    Kind.NODE: NODES,
}
WATCHED = (Kind.POD_GROUP, Kind.POD, Kind.CONFIG_MAP)
DECLARED_KINDS = (Kind.POD_GROUP, Kind.POD)


class KubernetesCluster(InMemoryCluster):
    def __init__(
        self,
        api: ApiClient,
        random: Random,
        config: ReflectorConfig | None = None,
    ) -> None:
        super().__init__()
        self._api = api
        self.reflectors = {
            kind: Reflector(config or ReflectorConfig(), random.random) for kind in WATCHED
        }
        self._declared: set[Key] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._synced = asyncio.Event()

    @property
    def synced(self) -> bool:
        return self._synced.is_set()

    def problems(self) -> Mapping[Kind, str]:
        return {kind: core.problem for kind, core in self.reflectors.items() if core.problem}

    async def start(self) -> None:
        """Raises ClusterUnreachable if the objects cannot be listed in time."""
        for kind, core in self.reflectors.items():
            apply, shrink = partial(self._apply, kind), partial(shrunk, kind)
            running = reflect(self._api, RESOURCES[kind], core, apply, shrink)
            self._tasks.append(asyncio.create_task(running, name=f"reflector of {kind}"))
        if await wait_until(self._synced, SYNC_S):
            return
        missing = {kind: core.problem for kind, core in self.reflectors.items() if not core.synced}
        await self.close()
        reasons = "; ".join(f"{kind}: {problem}" for kind, problem in missing.items())
        raise ClusterUnreachable(f"cannot list the objects of the cluster: {reasons}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def patch(self, key: Key, patch: Mapping[str, Any], version: str | None = None) -> Json:
        if key in self._declared:
            return await super().patch(key, patch, version)
        body = dict(patch)
        if version is not None:
            body["metadata"] = {**body.get("metadata", {}), "resourceVersion": version}
        return await self._write(key, "PATCH", _path(key), body, MERGE_PATCH)

    async def create(self, key: Key, body: Json) -> Json:
        if key.kind in DECLARED_KINDS:
            created = await super().create(key, body)
            self._declared.add(key)
            return created
        path = RESOURCES[key.kind].path(key.namespace)
        return await self._write(key, "POST", path, named(key, body))

    async def delete(self, key: Key, uid: str = "") -> None:
        """What was declared; of the objects of the cluster only pods, named by their uid."""
        if key in self._declared:
            self._declared.discard(key)
            await super().delete(key)
        elif key.kind is Kind.POD and uid:
            await self._delete_pod(key, uid)
        else:
            raise ClusterRefused(f"{key} belongs to the cluster, which alone deletes it")

    async def _delete_pod(self, key: Key, uid: str) -> None:
        """At once: the kubelet of a lost node would never confirm it. Volcano does the same."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": uid},
        }
        try:
            await self._api.request("DELETE", _path(key), body)
        except ApiFailed as error:
            if error.code in (NOT_FOUND, CONFLICT):
                return  # it has gone already, and perhaps another one has its name
            message = f"cannot delete {key}: {error}"
            if error.unreachable:
                raise ClusterUnreachable(message) from error
            raise ClusterRefused(message) from error

    async def _write(
        self, key: Key, method: str, path: str, body: Json, content_type: str = "application/json"
    ) -> Json:
        try:
            written = await self._api.request(method, path, body, content_type)
        except ApiFailed as error:
            message = f"cannot write {key}: {error}"
            # After a conflict the watch brings the new version, and the same write may succeed.
            if error.unreachable or error.code == CONFLICT:
                raise ClusterUnreachable(message) from error
            raise ClusterRefused(message) from error
        # The next write must know the new version before the watch brings it. But an object that
        # is not in the cache may have been deleted meanwhile: the watch alone adds objects.
        known = self.get(key)
        if known is not None and _uid(known) == _uid(written):
            self._there(key, written)
        return written

    # From the API server into the cache

    def _apply(self, kind: Kind, changes: list[Change]) -> None:
        for change in changes:
            namespace, _, name = change.name.partition("/")
            key = Key(kind, namespace, name)
            if key in self._declared and change.body is not None:
                log.error("%s of the cluster replaces that of a declared job of its name", key)
                self._declared.discard(key)
                self.set(key, None)
            if change.body is not None:
                self._there(key, change.body)
            elif key not in self._declared:
                self.set(key, None)
        if all(core.synced for core in self.reflectors.values()):
            self._synced.set()

    def _there(self, key: Key, body: Json) -> None:
        if key.kind not in WATCHED:
            return
        kept, known = relevant(key, body), self.get(key)
        if kept is None or known is None or not _is_older(kept, known):
            self.set(key, kept)


def _uid(body: Json) -> object:
    return body["metadata"].get("uid")


def _is_older(body: Json, known: Json) -> bool:
    """The answer to a write may overtake the watch, and the other way round."""
    old, new = version_of(known), version_of(body)
    return _uid(body) == _uid(known) and old.isdecimal() and new.isdecimal() and int(new) < int(old)


def _path(key: Key) -> str:
    return RESOURCES[key.kind].path(key.namespace, key.name)
