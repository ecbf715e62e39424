"""The interface to a cluster: objects of four kinds, changed by merge patches, watched.

Implementations: a directory of YAML files (yaml_directory.py), or no cluster (in_memory.py).
The names of labels, annotations and keys are in objects.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from taskd.errors import Permanent, Transient

Json = dict[str, Any]


class Kind(StrEnum):
    POD_GROUP = "PodGroup"
    POD = "Pod"
    CONFIG_MAP = "ConfigMap"
    NODE = "Node"


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies an object. A node has no namespace."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else str(self.name)


@dataclass(frozen=True, slots=True)
class Changed:
    """An object appeared, changed, or is gone (`after` is None)."""

    key: Key
    before: Json | None
    after: Json | None


class ClusterUnreachable(Transient):
    """The cluster did not accept the write; the same write may succeed later."""


class ClusterRefused(Permanent):
    """The object does not exist, or has changed since it was read."""


class Cluster(Protocol):
    """Reads come from a local cache and never wait. Writes wait until they are done."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def get(self, key: Key) -> Json | None: ...

    def all(self, kind: Kind) -> list[Json]: ...

    def find(self, kind: Kind, owner: str) -> list[Json]:
        """All objects of a kind whose controlling owner has this uid, in order of name."""
        ...

    async def patch(self, key: Key, patch: Mapping[str, Any], version: str | None = None) -> Json:
        """Merge; None deletes a key. With a version: only if the object still has that version."""
        ...

    async def create(self, key: Key, body: Json) -> Json: ...

    async def delete(self, key: Key, uid: str = "") -> None:
        """With a uid: only if the object still has it; a newer one of the same name stays."""
        ...

    def problems(self) -> Mapping[Kind, str]:
        """Kinds of objects whose local cache may be out of date, and why."""
        ...

    def changes(self) -> AsyncIterator[Changed]:
        """All changes from now on."""
        ...


def merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> Json:
    """A JSON merge patch (RFC 7386), as Kubernetes applies it."""
    result = deepcopy(dict(target))
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            old = result.get(name)
            result[name] = merged(old if isinstance(old, dict) else {}, value)
        else:
            result[name] = deepcopy(value)
    return result


def key_of(body: Mapping[str, Any]) -> Key:
    """Raises ValueError if the object is not of one of the four kinds, or has no name."""
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise ValueError("metadata.name is missing")  # noqa: TRY004 - content, not a type
    kind = Kind(str(body.get("kind")))
    namespace = "" if kind is Kind.NODE else str(metadata.get("namespace", "default"))
    return Key(kind, namespace, metadata["name"])


def owner_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """(uid, name) of the object that controls this one; empty if there is none."""
    for reference in _list(_map(body.get("metadata")).get("ownerReferences")):
        if _map(reference).get("controller"):
            return str(_map(reference).get("uid", "")), str(_map(reference).get("name", ""))
    return "", ""


def uid_of(body: Mapping[str, Any]) -> str:
    return str(_map(body.get("metadata")).get("uid", ""))


def owners_of(body: Mapping[str, Any]) -> list[Json]:
    """The controlling owner as a reference for other objects: they go when it goes."""
    references = _list(_map(body.get("metadata")).get("ownerReferences"))
    return [dict(one) for one in references if _map(one).get("controller")]


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
