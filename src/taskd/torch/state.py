"""Moves the whole training state from one rank to another, and refuses what does not match.

Every parcel tells its step, incident and checksum. A rank that holds something worth keeping takes
the new state aside first and makes it its own only when all of it has come and fits; a
replacement, which holds nothing, takes it in place. `repair.py` says who gives to whom.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from taskd.errors import Transient
from taskd.torch.protected import Protected

SMALL = 1 << 18
"""Tensors below this many bytes travel packed together."""


class BadState(Transient):
    """What came is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the state."""

    key: tuple[str, int, str]
    """Kind (parameter, buffer, optimizer), place in order, name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    """It is the local part of a distributed tensor."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a parcel holds. Small things are in it, tensors follow."""

    step: int
    incident: int
    pieces: tuple[Piece, ...]
    sums: tuple[int, ...]
    plain: dict[str, Any]
    """Everything that is no tensor."""

    def seal(self) -> bytes:
        told = (self.step, self.incident, [(p.key, p.shape, str(p.dtype)) for p in self.pieces])
        return blake2b(repr((told, self.sums)).encode(), digest_size=16).digest()


# Giving


def give(kept: Protected, step: int, incident: int, group: dist.ProcessGroup, to: int) -> None:
    """Send the state of `step` to a rank of this group."""
    found = list(_tensors(kept))
    tensors = [_plain(tensor) for _, tensor in found]
    manifest = Manifest(
        step,
        incident,
        tuple(
            Piece(key, tuple(own.shape), own.dtype, is_sharded(tensor))
            for (key, tensor), own in zip(found, tensors, strict=True)
        ),
        tuple(map(checksum, tensors)),
        _plain_state(kept),
    )
    letter = pickle.dumps((manifest, manifest.seal()))
    head = torch.tensor([len(letter)], dtype=torch.int64)
    body = torch.frombuffer(bytearray(letter), dtype=torch.uint8)
    small = _pack([one for one in tensors if _is_small(one)])
    large = [one.contiguous().cpu() for one in tensors if not _is_small(one)]
    sent = [head, body, *([small] if small.numel() else []), *large]
    works = [group.send([one], to, tag) for tag, one in enumerate(sent)]
    for work in works:
        work.wait()


# Taking


def take(
    kept: Protected, step: int, incident: int, group: dist.ProcessGroup, source: int, aside: bool
) -> None:
    """Receive that state, or raise and, if `aside`, be none the worse for it."""
    head = torch.zeros(1, dtype=torch.int64)
    group.recv([head], source, 0).wait()
    body = torch.empty(int(head), dtype=torch.uint8)
    group.recv([body], source, 1).wait()
    manifest, seal = pickle.loads(body.numpy().tobytes())
    if manifest.seal() != seal:
        raise BadState("the manifest is damaged")
    if (manifest.step, manifest.incident) != (step, incident):
        raise BadState(
            f"asked for step {step} of incident {incident}, "
            f"got step {manifest.step} of incident {manifest.incident}"
        )
    places = _places(kept, manifest, aside)
    _receive(group, source, manifest, places)
    for piece, place, told in zip(manifest.pieces, places, manifest.sums, strict=True):
        if checksum(place) != told:
            raise BadState(f"the checksum of {piece.key} does not match")
    _adopt(kept, manifest, places)


def _receive(
    group: dist.ProcessGroup, source: int, manifest: Manifest, places: list[torch.Tensor]
) -> None:
    small = [place for place in places if _is_small(place)]
    packed = torch.empty(sum(map(_bytes, small)), dtype=torch.uint8)
    landing: list[tuple[torch.Tensor, torch.Tensor]] = []
    works = [group.recv([packed], source, 2)] if packed.numel() else []
    tag = 2 + len(works)
    for place in places:
        if not _is_small(place):
            direct = place.is_contiguous() and place.device.type == "cpu"
            at = place if direct else torch.empty(place.shape, dtype=place.dtype)
            works.append(group.recv([at], source, tag))
            landing.append((place, at))
            tag += 1
    for work in works:
        work.wait()
    _unpack(packed, small)
    for place, at in landing:
        if place is not at:
            place.copy_(at)


def _places(kept: Protected, manifest: Manifest, aside: bool) -> list[torch.Tensor]:
    """Where each piece is to land: on our own tensor, or on a new one."""
    own = {key: _plain(tensor) for key, tensor in _tensors(kept)}
    places = []
    for piece in manifest.pieces:
        mine = own.get(piece.key)
        fits = mine is not None and (tuple(mine.shape), mine.dtype) == (piece.shape, piece.dtype)
        if piece.key[0] != "optimizer" and not fits:
            raise BadState(f"{piece.key} has another shape here: the models are not the same")
        if mine is not None and fits and not aside:
            places.append(mine)
        else:
            device = _home(kept, piece).device if mine is None else mine.device
            places.append(torch.empty(piece.shape, dtype=piece.dtype, device=device))
    return places


def _home(kept: Protected, piece: Piece) -> torch.Tensor:
    """The tensor that tells on which device a new optimizer tensor belongs."""
    if len(piece.shape) == 0:
        return torch.empty(0)
    return _plain(_optimized(kept)[piece.key[1]][1])


@torch.no_grad()
def _adopt(kept: Protected, manifest: Manifest, places: list[torch.Tensor]) -> None:
    """From here on it is our own."""
    own = dict(_tensors(kept))
    optimized = _optimized(kept)
    fresh: dict[int, dict[str, Any]] = {}
    for piece, place in zip(manifest.pieces, places, strict=True):
        kind, index, name = piece.key
        if kind == "optimizer":
            parameter = optimized[index][1]
            value = _like(parameter, place) if piece.sharded else place
            fresh.setdefault(index, {})[name] = value
        elif (mine := _plain(own[piece.key])) is not place:
            mine.copy_(place)
    for index, values in manifest.plain["optimizer"].items():
        fresh.setdefault(index, {}).update(values)
    for index, (optimizer, parameter) in enumerate(optimized):
        if index in fresh:
            optimizer.state[parameter] = fresh[index]
        else:
            optimizer.state.pop(parameter, None)
    _adopt_plain(kept, manifest.plain)


def _adopt_plain(kept: Protected, plain: dict[str, Any]) -> None:
    for optimizer, groups in zip(kept.optimizers, plain["groups"], strict=True):
        for group, told in zip(optimizer.param_groups, groups, strict=True):
            group.update(told)
    for scaler, told in zip(kept.scalers, plain["scalers"], strict=True):
        scaler.load_state_dict(told)
        scaler._per_optimizer_states.clear()
    for name, part in kept.parts.items():
        part.load_state_dict(plain["parts"][name])
    for parameter in kept.parameters:
        parameter.grad = None


# The pieces


def _tensors(kept: Protected) -> Iterator[tuple[tuple[str, int, str], torch.Tensor]]:
    """Every tensor of the state, in an order that is the same on every rank."""
    for index, parameter in enumerate(kept.parameters):
        yield ("parameter", index, ""), parameter.detach()
    for index, buffer in enumerate(kept.buffers()):
        yield ("buffer", index, ""), buffer
    for index, (optimizer, parameter) in enumerate(_optimized(kept)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield ("optimizer", index, name), value


def _optimized(kept: Protected) -> list[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    return [
        (optimizer, parameter)
        for optimizer in kept.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _plain_state(kept: Protected) -> dict[str, Any]:
    optimizer = {
        index: {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        }
        for index, (optimizer, parameter) in enumerate(_optimized(kept))
        if parameter in optimizer.state
    }
    groups = [
        [{name: value for name, value in group.items() if name != "params"} for group in groups]
        for groups in (optimizer.param_groups for optimizer in kept.optimizers)
    ]
    return {
        "optimizer": optimizer,
        "groups": groups,
        "scalers": [scaler.state_dict() for scaler in kept.scalers],
        "parts": {name: part.state_dict() for name, part in kept.parts.items()},
    }


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    tensor = tensor.detach()
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a distributed tensor. Their module is slow to import, and only then needed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_small(tensor: torch.Tensor) -> bool:
    return _bytes(tensor) < SMALL


def _pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([_raw(tensor.cpu()) for tensor in tensors])


def _unpack(packed: torch.Tensor, places: list[torch.Tensor]) -> None:
    at = 0
    for place in places:
        size = _bytes(place)
        if size:
            piece = packed[at : at + size].clone().view(place.dtype).view(place.shape)
            place.copy_(piece)
        at += size


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: torch.Tensor) -> int:
    """The sum of its 64-bit words: as fast as memory, and no zero or stale payload passes."""
    raw = _raw(tensor)
    whole = raw.numel() // 8 * 8
    if raw.data_ptr() % 8:
        raw = raw.clone()
    total = int(raw[:whole].view(torch.int64).sum()) if whole else 0
    tail = int(raw[whole:].sum()) if whole < raw.numel() else 0
    return (total + tail * 31) & 0xFFFFFFFFFFFFFFFF
