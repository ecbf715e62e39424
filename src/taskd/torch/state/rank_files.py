"""The parts of an emergency checkpoint that only some ranks may load: one file for each.

`torch.distributed.checkpoint` writes each name once, so it can hold neither pipeline stages nor
experts that have the same names on every rank, nor what only one rank has. These go into files of
ours beside it, from a survivor or from the copy of a lost rank, and can be loaded only by a job of
the same size. All survivors call `write` together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from taskd.core.worker.state_classes import Agreement
from taskd.model.ids import Rank
from taskd.model.messages import own_name
from taskd.torch.copies.snapshots import LocalState
from taskd.torch.groups import sealed_objects
from taskd.torch.state import transfer
from taskd.torch.state.orphaned_shards import CheckpointFailed
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState, checkpoint_key, seal, unseal
from taskd.torch.state.state_link import Receive
from taskd.torch.state.transfer import Manifest, StateImage

Content = tuple[Manifest, list[torch.Tensor]]
HERE, COPIED = 0, 1


def divided_shards(agreement: Agreement | None) -> Mapping[Rank, str]:
    """The shard of each rank, if some are not shards of distributed tensors. Empty: they are."""
    if agreement is None or not agreement.is_divided:
        return {}
    return dict(agreement.shards)


def names(agreement: Agreement | None, step: int) -> list[str]:
    """What has to be in files of its own."""
    if agreement is None:
        return []
    own = 0 <= agreement.own_since <= step
    alone = [own_name(rank) for rank in sorted(agreement.shards) if own]
    return sorted(set(divided_shards(agreement).values())) + alone


def write(mine: LocalState, has_step: bool, step: int, incident: int, folder: Path) -> None:
    """Write what this rank was chosen for, once for the whole job."""
    for name, how in _chosen(mine, has_step, step, names(mine.protected.agreement, step)):
        content = _content(mine, name, step, incident, from_copy=how == COPIED)
        sealed = seal(content, place(name, step), checkpoint_key())
        (folder / file_name(name)).write_bytes(sealed)


def _chosen(
    mine: LocalState, has_step: bool, step: int, needed: list[str]
) -> Iterator[tuple[str, int]]:
    """What of it this rank is to write, and from where."""
    if not needed:
        return
    offers = sealed_objects.all_gather((mine.rank, _offers(mine, has_step, step, needed)))
    for name in needed:
        able = [(offered[name], rank) for rank, offered in offers if name in offered]
        if not able:
            raise CheckpointFailed(f"no survivor has step {step} of {name}")
        how, writer = min(able)
        if writer == mine.rank:
            yield name, how


def sharded_names(agreement: Agreement | None) -> list[str]:
    """The shards of distributed tensors: the ranks that hold them may differ in their parts, too.

    The tensors are in DCP's files, which a job of any size can load, and the parts of each shard in
    one of ours. Where a job of another size has other shards, it begins with those of the first.
    """
    if agreement is None or agreement.is_divided:
        return []
    return sorted({*agreement.shards.values()} - {""})


def write_parts(mine: LocalState, has_step: bool, step: int, incident: int, folder: Path) -> None:
    """Write the parts of the shards that this rank was chosen for."""
    for shard, how in _chosen(mine, has_step, step, sharded_names(mine.protected.agreement)):
        if how == COPIED:
            plain = _content(mine, shard, step, incident, from_copy=True)[0].plain
            parts = plain["parts"] | plain["turn"]
        else:
            parts = mine.protected.parts_to_resume(step)
        (folder / file_name(parts_of(shard))).write_bytes(sealed_parts(shard, step, parts))


def sealed_parts(shard: str, step: int, parts: dict[str, Any]) -> bytes:
    return seal(parts, place(parts_of(shard), step), checkpoint_key())


def read_parts(folder: Path, shard: str, step: int) -> dict[str, Any]:
    """The parts of one shard: raises OSError or BadState."""
    data = (folder / file_name(parts_of(shard))).read_bytes()
    parts: dict[str, Any] = unseal(data, place(parts_of(shard), step), checkpoint_key())
    return parts


def parts_of(shard: str) -> str:
    return f"parts of {shard}"


def read(protected: Protected, folder: Path, name: str, step: int) -> None:
    """Load one of the files: raises OSError or BadState."""
    data = (folder / file_name(name)).read_bytes()
    manifest, tensors = unseal(data, place(name, step), checkpoint_key())
    transfer.load(protected, manifest, tensors)


def part_names(folder: Path, name: str, step: int) -> set[str]:
    """The objects of the script whose state is in that file: raises OSError or BadState."""
    manifest, _ = unseal(
        (folder / file_name(name)).read_bytes(), place(name, step), checkpoint_key()
    )
    return set(manifest.plain["parts"])


def file_name(name: str) -> str:
    """Names of shards may contain any character."""
    return f"taskd-{blake2b(name.encode(), digest_size=8).hexdigest()}.state"


def _offers(mine: LocalState, has_step: bool, step: int, needed: list[str]) -> dict[str, int]:
    found = {}
    for name in needed:
        if has_step and name == mine.shard:
            found[name] = HERE
        elif mine.snapshots is not None and mine.snapshots.find(name, step) is not None:
            found[name] = COPIED
    return found


def _content(mine: LocalState, name: str, step: int, incident: int, from_copy: bool) -> Content:
    if not from_copy:
        data = bytearray()
        StateImage(mine.protected, step, incident, name).send(data.extend)
        return _unpack(step, incident, _Reader(data).receive)
    snapshots = mine.snapshots
    found = snapshots.find(name, step) if snapshots is not None else None
    if snapshots is None or found is None:
        raise CheckpointFailed(f"the copy of {name} at step {step} is not there any more")
    return snapshots.read(found, partial(_unpack, step, incident))


def _unpack(step: int, incident: int, receive: Receive) -> Content:
    manifest, pieces = transfer.unpack(receive)
    if manifest.step != step or manifest.incident > incident:
        raise BadState(
            f"expected a copy of step {step} up to incident {incident}, got step {manifest.step} "
            f"of incident {manifest.incident}"
        )
    return manifest, [tensor for _, tensor in pieces]


def place(name: str, step: int) -> str:
    return f"state of {name} at step {step}"


class _Reader:
    """Gives what an image has sent."""

    def __init__(self, data: bytearray) -> None:
        self._data, self._at = memoryview(data), 0

    def receive(self, target: memoryview) -> None:
        target = target.cast("B")
        target[:] = self._data[self._at : self._at + target.nbytes]
        self._at += target.nbytes
