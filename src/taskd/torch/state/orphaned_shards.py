"""Shards of which only copies are left: which they are, and which survivor writes each of them.

Where no shard exists twice, a lost rank's state is gone, but not the copies of it in shared memory.
The survivors that write the emergency checkpoint call `read_orphans` together; each reads the
copies that are assigned to it, and `checkpoint_planner.py` puts them into the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from taskd.errors import Transient
from taskd.torch.copies.snapshot_file import SnapshotInfo
from taskd.torch.copies.snapshots import LocalState
from taskd.torch.groups import sealed_objects
from taskd.torch.state import transfer
from taskd.torch.state.pieces import Key
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState
from taskd.torch.state.sharded import is_distributed
from taskd.torch.state.state_link import Receive

Part = tuple[int, ...]
"""A part of the model, named by the ranks that held it in the complete job."""


class CheckpointFailed(Transient):
    """The emergency checkpoint could not be written or read."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """The state of a lost rank, read from a copy."""

    rank: int
    tensors: dict[Key, torch.Tensor]


def read_orphans(mine: LocalState, has_step: bool, step: int, incident: int) -> list[Orphan]:
    """What this rank has to write in addition to its own part. All survivors call it together.

    `has_step`: our own state is that of the step. A damaged copy is left to the next rank that has
    one, so this ends when every part was read by one rank, or when no rank has a part.
    """
    holders = [
        rank
        for rank in sealed_objects.all_gather(mine.rank if has_step else None)
        if rank is not None
    ]
    if not holders:
        raise CheckpointFailed(f"no survivor holds step {step}")
    orphaned = {part for part in _parts(mine.protected) if not set(part) & set(holders)}
    read: dict[Part, Orphan] = {}
    while True:
        offered = {part for part in orphaned if _copy(mine, part, step) is not None}
        replies = sealed_objects.all_gather((orphaned, offered, set(read)))
        unread = _union(reply[0] for reply in replies) - _union(reply[2] for reply in replies)
        if not unread:
            return list(read.values())
        lost = unread - _union(reply[1] for reply in replies)
        if lost:
            raise CheckpointFailed(f"no survivor has a copy of step {step} of {_named(lost)}")
        for part, reader in assign_readers(unread, [reply[1] for reply in replies]).items():
            if reader == dist.get_rank():
                read |= _read(mine, part, step, incident)


def assign_readers(unread: Iterable[Part], offers: Sequence[set[Part]]) -> dict[Part, int]:
    """For each part, one of the ranks that offer it: the one with the least to read so far."""
    assigned: Counter[int] = Counter()
    readers = {}
    for part in sorted(unread):
        able = [rank for rank, offered in enumerate(offers) if part in offered]
        readers[part] = min(able, key=lambda rank: (assigned[rank], rank))
        assigned[readers[part]] += 1
    return readers


def coordinate(mesh: Any, rank: int) -> list[int] | None:
    """Where that rank is in a mesh, which may be another one than ours."""
    found: list[list[int]] = (mesh.mesh == rank).nonzero().tolist()
    return found[0] if found else None


def _parts(protected: Protected) -> list[Part]:
    """All parts of the model that this rank knows of: those of its own meshes."""
    distributed: list[Any] = [one for one in protected.parameters if is_distributed(one)]
    places: dict[int, list[Any]] = {}
    for mesh, placements in dict.fromkeys((one.device_mesh, one.placements) for one in distributed):
        for rank in mesh.mesh.flatten().tolist():
            here = zip(coordinate(mesh, rank) or (), placements, strict=True)
            along = tuple(at for at, how in here if not how.is_replicate())
            places.setdefault(rank, []).append((mesh, placements, along))
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, where in sorted(places.items()):
        holders.setdefault(tuple(where), []).append(rank)
    return [tuple(ranks) for ranks in holders.values()]


def _copy(mine: LocalState, part: Part, step: int) -> SnapshotInfo | None:
    return mine.snapshots.made_by(part, step) if mine.snapshots is not None else None


def _read(mine: LocalState, part: Part, step: int, incident: int) -> dict[Part, Orphan]:
    """Empty if the copy is damaged."""
    found = _copy(mine, part, step)
    if mine.snapshots is None or found is None:
        return {}
    try:
        tensors = mine.snapshots.read(found, partial(_unpack, step, incident))
    except BadState:
        return {}
    return {part: Orphan(part[0], tensors)}


def _unpack(step: int, incident: int, receive: Receive) -> dict[Key, torch.Tensor]:
    manifest, pieces = transfer.unpack(receive)
    if manifest.step != step or manifest.incident > incident:
        raise BadState(
            f"expected a copy of step {step} up to incident {incident}, got step {manifest.step} "
            f"of incident {manifest.incident}"
        )
    return {piece.key: tensor for piece, tensor in pieces}


def _union(sets: Iterable[set[Part]]) -> set[Part]:
    return set().union(*sets)


def _named(parts: Iterable[Part]) -> str:
    return " and ".join(f"rank {' or '.join(map(str, part))}" for part in sorted(parts))
