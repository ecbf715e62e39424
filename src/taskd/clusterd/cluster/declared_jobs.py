"""Jobs without a cluster: their manager declares them, and they become cluster objects, too.

So no other module needs to know whether a job has a cluster.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

from taskd.clusterd.cluster.interface import Json, Key, Kind
from taskd.clusterd.cluster.objects import DECLARED, DEVICE_KEYS, RANK_INDEX
from taskd.core.clusterd.job_config import NO_BACKUP_NIC, ON
from taskd.model.ids import JobId
from taskd.model.strategies import parse_strategies
from taskd.runtime.plain_text import is_plain
from taskd.wire._pb import control_pb2 as pb
from taskd.wire.tagged_json import read, write

log = logging.getLogger(__name__)

MAX_NAME = 253
MAX_NODES, MAX_RANKS, MAX_STRATEGIES = 16_384, 131_072, 64


@dataclass(frozen=True, slots=True)
class DeclaredNode:
    node_rank: int
    name: str
    uid: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Declaration:
    job: JobId
    strategies: str
    name: str = ""
    namespace: str = "default"
    framework: str = "pytorch"
    nodes: tuple[DeclaredNode, ...] = field(default=())
    no_backup_nic: bool = False


TYPES: dict[str, type] = {kind.__name__: kind for kind in (Declaration, DeclaredNode)}


def declaration_of(request: pb.JobDeclaration) -> Declaration:
    """Raises ValueError, which says what is wrong."""
    if not request.job or len(request.job) > MAX_NAME:
        raise ValueError(f"the job id must have 1 to {MAX_NAME} characters")
    if len(request.nodes) > MAX_NODES or len(request.strategies) > MAX_STRATEGIES:
        raise ValueError(f"at most {MAX_NODES} nodes and {MAX_STRATEGIES} strategies are allowed")
    named = (request.job, request.name, request.namespace, request.framework)
    if any(len(name) > MAX_NAME for name in named):
        raise ValueError(f"names must have at most {MAX_NAME} characters")
    if not all(map(is_plain, (*named, *(node.name for node in request.nodes)))):
        raise ValueError("names must not contain control characters")
    strategies = ",".join(parse_strategies(",".join(request.strategies)))
    nodes = [
        DeclaredNode(
            node.node_rank,
            node.name or f"node{node.node_rank}",
            node.uid or f"{request.job}-{node.node_rank}",
            tuple(sorted(set(node.ranks))),
        )
        for node in request.nodes
    ]
    ranks = [rank for node in nodes for rank in node.ranks]
    if len(ranks) > MAX_RANKS:
        raise ValueError(f"the job is too large (at most {MAX_RANKS} ranks)")
    if len({node.node_rank for node in nodes}) != len(nodes) or len(set(ranks)) != len(ranks):
        raise ValueError("a node rank or a rank occurs twice")
    if any(rank < 0 for rank in ranks) or any(node.node_rank < 0 for node in nodes):
        raise ValueError("ranks and node ranks must not be negative")
    return Declaration(
        job=JobId(request.job),
        strategies=strategies,
        name=request.name or request.job,
        namespace=request.namespace or "default",
        framework=request.framework or "pytorch",
        nodes=tuple(nodes),
        no_backup_nic=request.no_backup_nic,
    )


def to_note(declaration: Declaration) -> tuple[str, str]:
    return note_name(declaration.job), write(declaration)


def note_name(job: JobId) -> str:
    return f"declared/{job}"


def from_notes(notes: dict[str, str]) -> list[Declaration]:
    """Those that can be read; the others are named in the log, and must be declared again."""
    found = []
    for name, text in notes.items():
        if not name.startswith("declared/"):
            continue
        try:
            declaration = read(text, TYPES)
            objects_of(declaration)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.error("note %r of the journal cannot be read: %s", name, error)
        else:
            found.append(declaration)
    return found


def objects_of(declaration: Declaration) -> list[tuple[Key, Json]]:
    owner = [{"uid": declaration.job, "name": declaration.name, "controller": True}]
    group = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "metadata": {
            "ownerReferences": owner,
            "labels": {ON: "on", "framework": declaration.framework},
            "annotations": {
                "recover-strategy": declaration.strategies,
                DECLARED: "true",
                **({NO_BACKUP_NIC: "true"} if declaration.no_backup_nic else {}),
            },
        },
        "status": {"phase": "Running"},
    }
    objects: list[tuple[Key, Json]] = [
        (Key(Kind.POD_GROUP, declaration.namespace, declaration.job), group)
    ]
    for node in declaration.nodes:
        devices = [{"device_id": str(i), "rank_id": str(r)} for i, r in enumerate(node.ranks)]
        pod = {
            "apiVersion": "v1",
            "metadata": {
                "uid": node.uid,
                "ownerReferences": owner,
                "annotations": {
                    RANK_INDEX: str(node.node_rank),
                    DEVICE_KEYS[0]: json.dumps({"devices": devices}),
                },
            },
            "spec": {"nodeName": node.name},
            "status": {"phase": "Running"},
        }
        objects.append(
            (Key(Kind.POD, declaration.namespace, f"{declaration.job}-{node.node_rank}"), pod)
        )
    return objects
