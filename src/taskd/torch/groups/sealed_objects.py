"""Objects that ranks exchange over a group: as tensors, with a seal, and never unpickled without.

gloo does not authenticate its peers: a process that takes the place of a late rank could send any
pickle to torch's own object collectives. Here each rank sends bytes, and `sealed.py` unpickles
only what carries the job's seal. The seal is bound to the sender, the receiver and this exchange:
each rank contributes a random number to it, so that an object of an earlier one is refused.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from taskd.torch import compat
from taskd.torch.state.sealed import DIGEST, BadState, sign, unseal

MAX_BYTES = 1 << 32
"""A longer object is not one of ours."""
PLACE = "object collective"

Group = dist.ProcessGroup | None


def gather_numbers(mine: Sequence[int], group: Group = None) -> list[list[int]]:
    """The same number of integers from each rank, in the order of the ranks."""
    device = compat.device_for_objects(group)
    received = [
        torch.zeros(len(mine), dtype=torch.int64, device=device)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(received, torch.tensor(mine, dtype=torch.int64, device=device), group=group)
    return [one.tolist() for one in received]


def all_gather(mine: Any, group: Group = None) -> list[Any]:
    """The object of each rank."""
    body = pickle.dumps(mine)
    sizes, exchange = _open(len(body) + DIGEST, group)
    own = _sealed(body, exchange, dist.get_rank(group))
    received = [_empty(max(sizes), group) for _ in sizes]
    dist.all_gather(received, _padded(own, max(sizes), group), group=group)
    return _read_all(received, sizes, exchange)


def gather(mine: Any, to: int, group: Group = None) -> list[Any] | None:
    """The object of each rank, on the rank `to` of the whole job; None on the others."""
    body = pickle.dumps(mine)
    sizes, exchange = _open(len(body) + DIGEST, group)
    own = _sealed(body, exchange, dist.get_rank(group))
    received = None
    if dist.get_rank() == to:
        received = [_empty(max(sizes), group) for _ in sizes]
    dist.gather(_padded(own, max(sizes), group), received, dst=to, group=group)
    return None if received is None else _read_all(received, sizes, exchange)


def broadcast(mine: Any, source: int, group: Group = None) -> Any:
    """The object of the rank `source` of the whole job."""
    is_source = dist.get_rank() == source
    body = pickle.dumps(mine) if is_source else b""
    sizes, exchange = _open(len(body) + DIGEST, group)
    size, place = max(sizes), f"{exchange} to all"
    own = sign(body, place) + body
    shared = _padded(own, size, group) if is_source else _empty(size, group)
    dist.broadcast(shared, source, group=group)
    return _read(shared, size, place)


def scatter(mine: Sequence[Any] | None, source: int, group: Group = None) -> Any:
    """This rank's object of those that the rank `source` of the whole job has."""
    is_source = dist.get_rank() == source
    bodies = [pickle.dumps(one) for one in mine] if is_source and mine else []
    sizes, exchange = _open(max(map(len, bodies), default=0) + DIGEST, group)
    size = max(sizes)
    parts = [
        _padded((len(body) + DIGEST).to_bytes(8, "little") + sealed, size + 8, group)
        for rank, body in enumerate(bodies)
        if (sealed := _sealed(body, exchange, rank))
    ]
    received = _empty(size + 8, group)
    dist.scatter(received, parts or None, src=source, group=group)
    length = int.from_bytes(bytes(received[:8].tolist()), "little")
    return _read(received[8:], length, _place(exchange, dist.get_rank(group)))


def _open(mine: int, group: Group) -> tuple[list[int], str]:
    """The size of each rank's object, and what this exchange differs in from all others."""
    gathered = gather_numbers([mine, secrets.randbits(63)], group)
    sizes = [size for size, _ in gathered]
    if not all(0 <= size <= MAX_BYTES for size in sizes):
        raise BadState(f"invalid sizes of objects: {sizes}, at most {MAX_BYTES} bytes are expected")
    return sizes, f"{PLACE} {[number for _, number in gathered]}"


def _place(exchange: str, rank: int) -> str:
    return f"{exchange} of rank {rank} in the group"


def _sealed(body: bytes, exchange: str, rank: int) -> bytes:
    return sign(body, _place(exchange, rank)) + body


def _read_all(received: list[torch.Tensor], sizes: list[int], exchange: str) -> list[Any]:
    return [
        _read(one, size, _place(exchange, rank))
        for rank, (one, size) in enumerate(zip(received, sizes, strict=True))
    ]


def _empty(size: int, group: Group) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=compat.device_for_objects(group))


def _padded(data: bytes, size: int, group: Group) -> torch.Tensor:
    tensor = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    return tensor.to(compat.device_for_objects(group))


def _read(tensor: torch.Tensor, size: int, place: str) -> Any:
    return unseal(tensor[:size].cpu().numpy().tobytes(), place)
