"""Fingerprints of a rank's state: equal state has equal ones, in every process.

Tensors are read once, on their device, as 64-bit words. Other values are read structurally, not as
pickles: those differ by which equal objects happen to be the same one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch

from taskd.torch.state import pieces
from taskd.torch.state.pieces import Key, mixed, raw_bytes
from taskd.torch.state.protected import Protected
from taskd.torch.state.sharded import is_distributed, local

COLUMNS = 1024
MASK = (1 << 63) - 1
DEEPEST = 64
LONG = 1 << 14
"""A text of so many characters, or so many bytes, is read once, as long as it is the same."""
LARGE = 1 << 14
"""Tensors of so many bytes are read on their device, and as fast as memory."""


def of_state(protected: Protected) -> int:
    """Weights, optimizers and scalers."""
    tensors = [one for one in pieces.tensors(protected) if one[0][0] != "buffer"]
    plain = pieces.plain_state(protected, parts={})
    return mixed([of_tensors(tensors), of_value(plain)])


def of_weights(protected: Protected) -> int:
    """Weights and the tensors of the optimizers."""
    return of_tensors(one for one in pieces.tensors(protected) if one[0][0] != "buffer")


def of_buffers(protected: Protected) -> int:
    return of_tensors(one for one in pieces.tensors(protected) if one[0][0] == "buffer")


def of_gradients(protected: Protected) -> int:
    """The gradients of weights that are not known to be equal by construction."""
    known = {
        parameter for model in protected.ddp_models() for parameter in model.module.parameters()
    }
    return of_tensors(
        (("gradient", index, ""), parameter.grad)
        for index, parameter in enumerate(protected.parameters)
        if parameter not in known
        and parameter.grad is not None
        and parameter.grad.layout == torch.strided
        and not is_distributed(parameter)
    )


def of_tensors(tensors: Iterable[tuple[Key, torch.Tensor]]) -> int:
    """Names, shapes, dtypes and values. The device is waited for once."""
    described: list[Any] = []
    words: dict[torch.device, list[torch.Tensor]] = {}
    for key, tensor in tensors:
        own = local(tensor)
        described.append((key, tuple(own.shape), str(own.dtype)))
        words.setdefault(own.device, []).append(word(own))
    values = [value for ones in words.values() for value in torch.stack(ones).tolist()]
    return mixed([of_value(described), *values])


def of_value(value: object) -> int:
    """Any value of Python."""
    digest = blake2b(digest_size=8)
    _feed(digest, value, 0)
    return int.from_bytes(digest.digest(), "little") & MASK


@torch.no_grad()
def word(tensor: torch.Tensor) -> torch.Tensor:
    """One word in which every bit of the tensor counts, and its place.

    What a word of the tensor is multiplied by must be odd: the sum of its weight in the column,
    which is odd, and that of its row, which must therefore be even.
    """
    data = raw_bytes(tensor)
    if data.data_ptr() % 8:
        data = data.clone()
    whole = data.numel() // 8
    words = data[: whole * 8].view(torch.int64)
    rows = whole // COLUMNS
    table = words[: rows * COLUMNS].view(rows, COLUMNS)
    rest = torch.cat([words[rows * COLUMNS :], data[whole * 8 :].to(torch.int64)])
    columns = table.sum(0)
    total = (columns * _weights(COLUMNS, columns.device)).sum()
    total = total + (table.sum(1) * _weights(rows, columns.device)).sum() * 30
    return total + (rest * _weights(rest.numel(), columns.device)).sum() * 37


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern."""
    return torch.arange(1, count + 1, device=device) * 0x1E3779B97F4A7C15 | 1


SIMPLE = frozenset((bool, int, float, str, complex, type(None)))
"""Their `repr` shows value and kind, also inside a list or dictionary."""


def _is_simple(kind: type, value: Any) -> bool:
    """Whether it is a container of such values only: then one `repr` is enough."""
    if kind is list or kind is tuple:
        return SIMPLE.issuperset(map(type, value))
    if kind is dict:
        return SIMPLE.issuperset(map(type, value)) and SIMPLE.issuperset(map(type, value.values()))
    return False


@lru_cache(4)
def _of_long(value: str | bytes) -> bytes:
    """What grows now and then, such as a log, is the same object until then."""
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return blake2b(data, digest_size=16).digest()


@lru_cache(1024)
def _name_of(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _feed(digest: Any, value: object, depth: int) -> None:
    if depth > DEEPEST:  # it contains itself, perhaps
        digest.update(b"deep")
        return
    kind: Any = type(value)
    digest.update(_name_of(kind))
    if isinstance(value, str | bytes) and kind in (str, bytes) and len(value) >= LONG:
        digest.update(_of_long(value))
        return
    if kind in SIMPLE or _is_simple(kind, value):
        digest.update(repr(value).encode())
        return
    match value:
        case None | bool() | int() | float() | str() | complex():
            digest.update(repr(value).encode())
        case bytes() | bytearray():
            digest.update(value)
        case torch.Tensor():
            digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
            own = local(value)
            if own.nbytes >= LARGE:
                digest.update(b"%d" % int(word(own)))
            else:
                digest.update(raw_bytes(own.cpu()).numpy().tobytes())
        case dict():
            digest.update(b"%d" % len(value))
            for key, item in value.items():
                _feed(digest, key, depth + 1)
                _feed(digest, item, depth + 1)
        case list() | tuple():
            digest.update(b"%d" % len(value))
            for item in value:
                _feed(digest, item, depth + 1)
        case set() | frozenset():
            digest.update(repr(sorted(map(of_value, value))).encode())
        case _:
            _feed_object(digest, value, depth)


def _feed_object(digest: Any, value: Any, depth: int) -> None:
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a class or a function
        digest.update(f"{getattr(value, '__module__', '')}.{name}".encode())
        return
    try:
        reduced = value.__reduce_ex__(2)
    except (TypeError, pickle.PicklingError):
        return  # what cannot be copied cannot be compared
    if isinstance(reduced, str):
        digest.update(reduced.encode())
        return
    made, args, *more = reduced
    _feed(digest, made, depth + 1)
    _feed(digest, args, depth + 1)
    for item in more:
        _feed(digest, list(item) if hasattr(item, "__next__") else item, depth + 1)
