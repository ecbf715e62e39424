"""Which objects of the cluster clusterd keeps, and which of their parts. Pure functions.

A large cluster has many more pods and ConfigMaps than training jobs use, and most of a pod's text
is of no interest: keeping all of it would cost ten times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from taskd.clusterd.cluster.inference_table import is_inference_part
from taskd.clusterd.cluster.interface import Json, Key, Kind, owner_of
from taskd.clusterd.cluster.objects import (
    DEVICE_KEYS,
    FAULT_JOB_INFO,
    RANK_INDEX,
    is_public_fault,
)

PREFIXES = (
    "reset-config-",
    "data-trace-",
    "mindx-dl-deviceinfo-",
    "mindx-dl-nodeinfo-",
    "job-summary-",
    "cluster-info-",
    "rings-config-",
)
OF_A_JOB = frozenset((RANK_INDEX, "scheduling.k8s.io/group-name", *DEVICE_KEYS))
IDENTITY = ("name", "namespace", "uid", "resourceVersion")
METADATA = (
    *IDENTITY,
    "labels",
    "annotations",
    "ownerReferences",
)


def relevant(key: Key, body: Json) -> Json | None:
    """The parts that clusterd reads. None: clusterd does not need the object."""
    metadata = _map(body.get("metadata"))
    kept: Json = {"kind": key.kind.value, "metadata": _parts(metadata, METADATA)}
    match key.kind:
        case Kind.POD:
            trains = owner_of(body)[0] and not OF_A_JOB.isdisjoint(
                _map(metadata.get("annotations"))
            )
            if not trains and not is_inference_part(body):
                return None
            spec = _map(body.get("spec"))
            containers = _list(spec.get("containers"), _container)
            kept["spec"] = _parts(spec, ("nodeName",)) | {"containers": containers}
            kept["status"] = _parts(_map(body.get("status")), ("phase", "hostIP", "podIP"))
        case Kind.CONFIG_MAP:
            named = key == FAULT_JOB_INFO or key.name.startswith(PREFIXES)
            if not named and not is_public_fault(body):
                return None
            kept |= _parts(body, ("data",))
        case Kind.POD_GROUP:
            kept["spec"] = _parts(_map(body.get("spec")), ("minMember",))
            kept["status"] = _parts(_map(body.get("status")), ("phase",))
        case Kind.NODE:
            pass
    return kept


def shrunk(kind: Kind, body: Json) -> Json:
    """The same object without what clusterd does not read; of those that it does not keep, only
    the identity. A cluster may have gigabytes of other people's ConfigMaps."""
    metadata = _map(body.get("metadata"))
    key = Key(kind, str(metadata.get("namespace", "")), str(metadata.get("name", "")))
    return relevant(key, body) or {"metadata": _parts(metadata, IDENTITY)}


def _container(container: Mapping[str, Any]) -> Json:
    return {
        "env": _list(container.get("env"), lambda one: _parts(one, ("name", "value"))),
        "volumeMounts": _list(
            container.get("volumeMounts"), lambda one: _parts(one, ("mountPath",))
        ),
    }


def _parts(body: Mapping[str, Any], names: tuple[str, ...]) -> Json:
    return {name: body[name] for name in names if name in body}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object, each: Callable[[Mapping[str, Any]], Json]) -> list[Json]:
    return [each(_map(item)) for item in value] if isinstance(value, list) else []
