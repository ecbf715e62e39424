"""Moves the whole training state from one rank to another, and refuses what does not match.

Every parcel tells its step, incident and checksum. A rank that holds something worth keeping takes
the new state aside first and makes it its own only when all of it has come and fits; a
replacement, which holds nothing, takes it in place. `repair.py` says who gives to whom.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from taskd.torch.state.protected import Protected
from taskd.torch.state.raw_bytes import raw
from taskd.torch.state.sealed import DIGEST, BadState, seal, unseal
from taskd.torch.state.sharded import is_distributed, local
from taskd.torch.state.side_stream import Side
from taskd.torch.state.state_link import Receive, Send

MOST_PLAIN = 2**32
"""So much that is no tensor, in bytes, is believed to be one rank's state."""
LARGE = 64 << 20
"""Bytes of state that are worth more than one giver."""
PLACE = 0x9E3779B97F4A7C15
"""Odd, so that no bit is lost: the same tensors in another order are not the same state."""

Ask = Callable[[int, Callable[[Receive], None]], None]
"""Given the number of a lot: reach the helper that has it, and read what it sends."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the state."""

    key: tuple[str, int, str]
    """Kind (parameter, buffer, optimizer), place in order, name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    """It is the local part of a distributed tensor."""
    on_host: bool
    """An optimizer may keep its counters there, or with the weights."""

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a parcel holds. Small things are in it, tensors follow."""

    step: int
    incident: int
    shard: str
    pieces: tuple[Piece, ...]
    sums: tuple[int, ...]
    plain: dict[str, Any]
    """Everything that is no tensor."""


# Giving


class Parcel:
    """The state of one step, ready to be given to any number of takers.

    Made in the training thread, at once: it refers to weights and optimizer state, which do not
    change until the next update, and copies all that a forward pass may change. `seal` does the
    long part, the checksums, in whatever thread, and on the device where the state lives.
    """

    def __init__(self, kept: Protected, step: int, incident: int, shard: str) -> None:
        self._tensors: list[torch.Tensor] = []
        pieces = []
        for key, tensor in _tensors(kept):
            own = local(tensor)
            self._tensors.append(own.clone() if key[0] == "buffer" else own)
            on_host = own.device.type == "cpu"
            shape = tuple(own.shape)
            pieces.append(Piece(key, shape, own.dtype, is_distributed(tensor), on_host))
        plain = pickle.loads(pickle.dumps(plain_state(kept)))
        self._draft = Manifest(step, incident, shard, tuple(pieces), (), plain)
        self._letter = b""
        self._once = threading.Lock()
        self._side = Side(self._tensors)

    def seal(self) -> None:
        with self._once:
            if not self._letter:
                with self._side.work():
                    self._tensors = [raw(tensor) for tensor in self._tensors]
                    manifest = replace(self._draft, sums=_checksums(self._tensors))
                self._letter = seal(manifest)

    @property
    def on_device(self) -> bool:
        """Some of it is not in the memory of the host."""
        return self._side.is_needed

    @property
    def length(self) -> int:
        """In bytes, once sealed."""
        return 8 + len(self._letter) + sum(tensor.numel() for tensor in self._tensors)

    def give(self, send: Send, givers: int = 1, lot: int = 0) -> None:
        """All of it, or one of several givers' lots. The first giver tells what is in all."""
        if lot == 0:
            self.seal()
            send(memoryview(self._head()))
        with self._side.work():
            for index in share_out(self._draft.pieces, givers)[lot]:
                if self._tensors[index].numel():
                    send(raw(self._tensors[index]).cpu().numpy().data)

    def lay(self, place: torch.Tensor) -> None:
        """Write what `give` would send into these bytes: by the device itself, where it can."""
        self.seal()
        head = self._head()
        at = len(head)
        place[:at] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        with self._side.work():
            for tensor in self._tensors:
                place[at : at + tensor.numel()].copy_(tensor, non_blocking=True)
                at += tensor.numel()

    def _head(self) -> bytes:
        return len(self._letter).to_bytes(8, "little") + self._letter


# Taking


def take(
    kept: Protected,
    step: int,
    incident: int,
    shard: str,
    receive: Receive,
    aside: bool,
    helpers: Sequence[Ask] = (),
) -> None:
    """Receive that state, or raise and, if `aside`, be none the worse for it.

    A copy may be of an earlier incident than the one it is asked for in, never of a later one.
    `helpers` are asked for their lots of a large state while the first giver's comes in.
    """
    manifest = _open(receive)
    if (manifest.step, manifest.shard) != (step, shard) or manifest.incident > incident:
        raise BadState(
            f"asked for step {step} of shard {shard!r} in incident {incident}, got step "
            f"{manifest.step} of shard {manifest.shard!r} in incident {manifest.incident}"
        )
    places = _places(kept, manifest, aside)
    lots = share_out(manifest.pieces, 1 + len(helpers))

    def fetch(lot: range, source: Receive) -> None:
        for index in lot:
            _fetch(places[index], source)
            if checksum(raw(places[index])) != manifest.sums[index]:
                raise BadState(f"the checksum of {manifest.pieces[index].key} does not match")

    with ThreadPoolExecutor(max(1, len(lots) - 1)) as beside:
        asked = [
            beside.submit(ask, number, partial(fetch, lot))
            for number, (ask, lot) in enumerate(zip(helpers, lots[1:], strict=False), 1)
        ]
        fetch(lots[0], receive)
        for one in asked:
            one.result()
    _adopt(kept, manifest, places)


def check(receive: Receive) -> None:
    """Read a parcel and keep nothing of it; raise if it is damaged."""
    for _ in unpack(receive)[1]:
        pass


def unpack(receive: Receive) -> tuple[Manifest, Iterator[tuple[Piece, torch.Tensor]]]:
    """What a parcel holds, whoever's it is. Its pieces come one by one, until one is damaged."""
    manifest = _open(receive)
    return manifest, _unpacked(manifest, receive)


def _unpacked(manifest: Manifest, receive: Receive) -> Iterator[tuple[Piece, torch.Tensor]]:
    for piece, told in zip(manifest.pieces, manifest.sums, strict=True):
        place = torch.empty(piece.shape, dtype=piece.dtype)
        _fetch(place, receive)
        if checksum(raw(place)) != told:
            raise BadState(f"the checksum of {piece.key} does not match")
        yield piece, place


def is_large(kept: Protected) -> bool:
    """Whether several give parts of this state to one who needs it."""
    return _is_large(sum(local(tensor).nbytes for _, tensor in _tensors(kept)))


def _is_large(size: int) -> bool:
    return size >= LARGE


def share_out(pieces: Sequence[Piece], givers: int) -> list[range]:
    """Which pieces each giver sends, in its order: about equal lots, or one if all is small."""
    total = sum(piece.size for piece in pieces)
    if givers < 2 or not _is_large(total):
        return [range(len(pieces))]
    ends, at, size = [], 0, 0
    for lot in range(1, givers):
        while at < len(pieces) and size < total * lot / givers:
            size += pieces[at].size
            at += 1
        ends.append(at)
    starts = [0, *ends]
    return [range(*both) for both in zip(starts, [*ends, len(pieces)], strict=True)]


def _open(receive: Receive) -> Manifest:
    head = bytearray(8)
    receive(memoryview(head))
    length = int.from_bytes(head, "little")
    if not DIGEST < length <= MOST_PLAIN:
        raise BadState(f"a manifest of {length} bytes is none")
    letter = bytearray(length)
    receive(memoryview(letter))
    manifest: Manifest = unseal(letter)
    return manifest


@torch.no_grad()
def _fetch(place: torch.Tensor, receive: Receive) -> None:
    if not place.numel():
        return
    if place.is_contiguous() and place.device.type == "cpu":
        receive(raw(place).numpy().data)
        return
    landing = torch.empty(place.shape, dtype=place.dtype)
    receive(raw(landing).numpy().data)
    place.copy_(landing)


def _places(kept: Protected, manifest: Manifest, aside: bool) -> list[torch.Tensor]:
    """Where each piece is to land: on our own tensor, or on a new one."""
    own = {key: local(tensor) for key, tensor in _tensors(kept)}
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
    if piece.on_host:
        return torch.empty(0)
    return local(_optimized(kept)[piece.key[1]][1])


@torch.no_grad()
def _adopt(kept: Protected, manifest: Manifest, places: list[torch.Tensor]) -> None:
    """From here on it is our own."""
    kept.step = None
    own = dict(_tensors(kept))
    optimized = _optimized(kept)
    fresh: dict[int, dict[str, Any]] = {}
    for piece, place in zip(manifest.pieces, places, strict=True):
        kind, index, name = piece.key
        if kind == "optimizer":
            parameter = optimized[index][1]
            value = _like(parameter, place) if piece.sharded else place
            fresh.setdefault(index, {})[name] = value
        elif (mine := local(own[piece.key])) is not place:
            mine.copy_(place)
    for index, values in manifest.plain["optimizer"].items():
        fresh.setdefault(index, {}).update(values)
    for index, (optimizer, parameter) in enumerate(optimized):
        if index in fresh:
            optimizer.state[parameter] = fresh[index]
        else:
            optimizer.state.pop(parameter, None)
    adopt_plain(kept, manifest.plain)
    kept.step = manifest.step


def adopt_plain(kept: Protected, plain: dict[str, Any]) -> None:
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


def fingerprint(kept: Protected) -> int:
    """One number for all weights and optimizer state: another one if any bit is another.

    Buffers are left out: a forward pass changes them on each rank by its own batch.
    """
    raws = [raw(local(tensor)) for key, tensor in _tensors(kept) if key[0] != "buffer"]
    number = 0
    for one in _checksums(raws):
        number = (number * PLACE + one) % (1 << 63)
    return number


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


def plain_state(kept: Protected) -> dict[str, Any]:
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


def checksum(data: torch.Tensor) -> int:
    """The sum of its 64-bit words: as fast as memory, and no zero or stale payload passes."""
    return _checksums([data])[0]


def _checksums(raws: list[torch.Tensor]) -> tuple[int, ...]:
    """One for each. A device is waited for once, not once for each tensor."""
    sums = [_sum(one) for one in raws]
    on_devices = [one for one in sums if one.device.type != "cpu"]
    fetched = iter(torch.stack(on_devices).tolist() if on_devices else ())
    told = (int(one) if one.device.type == "cpu" else next(fetched) for one in sums)
    return tuple(one & 0xFFFFFFFFFFFFFFFF for one in told)


def _sum(data: torch.Tensor) -> torch.Tensor:
    whole = data.numel() // 8 * 8
    if data.data_ptr() % 8:
        data = data.clone()
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64) * 31
