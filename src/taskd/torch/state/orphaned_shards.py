"""Shards of which only copies are left: which they are, and which survivor writes each of them.

Where no shard exists twice, a lost rank takes its part of the state along, but not the copies of it
in shared memory. The survivors that write a last checkpoint (`dump.py`) call `adopt` together;
each reads the copies that fall to it, and `planner.py` puts them into the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from taskd.errors import Transient
from taskd.torch.apply_plan import Holding
from taskd.torch.copies.snapshot_file import Found
from taskd.torch.state import transfer as state
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState
from taskd.torch.state.sharded import is_distributed
from taskd.torch.state.state_link import Receive

Key = tuple[str, int, str]
"""As in `state.Piece`."""
Part = tuple[int, ...]
"""A part of the model, told by the ranks that held it in the whole job."""
T = TypeVar("T")


class CannotDump(Transient):
    """The checkpoint could not be written, or not be read."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """What a lost rank held, read from a copy."""

    rank: int
    tensors: dict[Key, torch.Tensor]


def adopt(mine: Holding, stands: bool, step: int, incident: int) -> list[Orphan]:
    """What this rank is to write beside its own. All survivors call it together.

    `stands`: our own state is that of the step. A copy that turns out damaged is left to the next
    who has one, so this ends when every part was read by one of us, or one by nobody.
    """
    standing = [rank for rank in _gathered(mine.rank if stands else None) if rank is not None]
    if not standing:
        raise CannotDump(f"no survivor stands at step {step}")
    orphaned = {part for part in _parts(mine.kept) if not set(part) & set(standing)}
    read: dict[Part, Orphan] = {}
    while True:
        offered = {part for part in orphaned if _copy(mine, part, step) is not None}
        told = _gathered((orphaned, offered, set(read)))
        unread = _union(t[0] for t in told) - _union(t[2] for t in told)
        if not unread:
            return list(read.values())
        lost = unread - _union(t[1] for t in told)
        if lost:
            raise CannotDump(f"nobody has step {step} of what {_named(lost)} held")
        for part, reader in readers(unread, [t[1] for t in told]).items():
            if reader == dist.get_rank():
                read |= _read(mine, part, step, incident)


def readers(unread: Iterable[Part], offers: Sequence[set[Part]]) -> dict[Part, int]:
    """Which of those that offer a part reads it: one with as little to do as can be."""
    busy: Counter[int] = Counter()
    chosen = {}
    for part in sorted(unread):
        able = [one for one, offered in enumerate(offers) if part in offered]
        chosen[part] = min(able, key=lambda one: (busy[one], one))
        busy[chosen[part]] += 1
    return chosen


def coordinate(mesh: Any, rank: int) -> list[int] | None:
    """Where that rank stands in a mesh, which may be another one than ours."""
    found: list[list[int]] = (mesh.mesh == rank).nonzero().tolist()
    return found[0] if found else None


def _parts(kept: Protected) -> list[Part]:
    """All parts of the model that this rank knows of: those of its own meshes."""
    cut: list[Any] = [one for one in kept.parameters if is_distributed(one)]
    places: dict[int, list[Any]] = {}
    for mesh, placements in dict.fromkeys((one.device_mesh, one.placements) for one in cut):
        for rank in mesh.mesh.flatten().tolist():
            here = zip(coordinate(mesh, rank) or (), placements, strict=True)
            along = tuple(at for at, how in here if not how.is_replicate())
            places.setdefault(rank, []).append((mesh, placements, along))
    held: dict[tuple[Any, ...], list[int]] = {}
    for rank, where in sorted(places.items()):
        held.setdefault(tuple(where), []).append(rank)
    return [tuple(ranks) for ranks in held.values()]


def _copy(mine: Holding, part: Part, step: int) -> Found | None:
    return mine.snapshots.made_by(part, step) if mine.snapshots is not None else None


def _read(mine: Holding, part: Part, step: int, incident: int) -> dict[Part, Orphan]:
    """Nothing, if the copy is damaged."""
    found = _copy(mine, part, step)
    if mine.snapshots is None or found is None:
        return {}
    try:
        tensors = mine.snapshots.read(found, partial(_unpacked, step, incident))
    except BadState:
        return {}
    return {part: Orphan(part[0], tensors)}


def _unpacked(step: int, incident: int, receive: Receive) -> dict[Key, torch.Tensor]:
    manifest, pieces = state.unpack(receive)
    if manifest.step != step or manifest.incident > incident:
        raise BadState(f"a copy of step {manifest.step} in incident {manifest.incident}")
    return {piece.key: tensor for piece, tensor in pieces}


def _gathered(mine: T) -> list[T]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def _union(sets: Iterable[set[Part]]) -> set[Part]:
    return set().union(*sets)


def _named(parts: Iterable[Part]) -> str:
    return " and ".join(f"rank {' or '.join(map(str, part))}" for part in sorted(parts))
