"""Small values that are copied, compared and given away several times in each step.

A tensor of a few bytes costs a hundred times as much as its bytes, above all when it is pickled. So
small tensors on the host become bytes, and a list that grows is encoded as it grows.
"""

from __future__ import annotations

import io
import math
import operator
import struct
from ast import literal_eval
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from taskd.torch import compat
from taskd.torch.state.pieces import raw_bytes

PLAIN = (bool, int, float, str, bytes, type(None))
DEEPEST = 8


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it can be copied, and given to another process."""
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.layout == torch.strided
    if depth >= DEEPEST or type(value) not in (list, tuple, dict, set):
        return False
    if isinstance(value, dict):
        return is_plain(list(value), depth) and is_plain(list(value.values()), depth)
    return all(is_plain(one, depth + 1) for one in value)


LENGTH = struct.Struct("<I")


class GrowingList:
    """A list to which every step appends: only what is new is encoded in a step."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        """How often each tensor in the list had changed when it was encoded."""
        self._encoded = b""

    def encode(self, values: list[Any]) -> bytes | None:
        """None: it has other things than numbers, texts, tensors and containers of them."""
        if not self._begins(values):
            self._forget()
        known = len(self._seen)
        if len(values) > known:
            new, written = values[known:], io.BytesIO()
            if not is_plain(new):
                return None
            if is_basic(short := packed(new)):
                written.write(repr(short).encode())  # a literal, which cannot run code
            elif is_basic(whole := packed(new, largest=-1), with_tensors=True):
                torch.save(whole, written)
            else:
                return None
            self._encoded += LENGTH.pack(written.tell()) + written.getvalue()
            self._add(new)
        return self._encoded

    def _begins(self, values: list[Any]) -> bool:
        """Whether the list begins with what is encoded. It is asked several times in each step."""
        return (
            len(values) >= len(self._seen)
            and all(map(operator.is_, values, self._seen))
            and compat.versions(self._tensors) == self._versions
        )

    def _forget(self) -> None:
        self._seen, self._tensors, self._versions, self._encoded = [], [], [], b""

    def _add(self, new: list[Any]) -> None:
        self._seen += new  # no other object can get the identity of one of these
        counted = [one for one in new if isinstance(one, torch.Tensor) and not one.is_inference()]
        self._tensors += counted
        self._versions += compat.versions(counted)

    def decode(self, encoded: bytes) -> list[Any]:
        values: list[Any] = []
        place = 0
        while place < len(encoded):
            begin = place + LENGTH.size
            place = begin + LENGTH.unpack_from(encoded, place)[0]
            values += unpacked(_read(encoded[begin:place]))
        self._forget()
        self._add(values)
        self._encoded = encoded
        return values


def is_basic(value: Any, *, with_tensors: bool = False) -> bool:
    """Whether it consists of numbers, texts and containers only, of no subclass of them."""
    if type(value) in (list, tuple, set):
        return all(is_basic(one, with_tensors=with_tensors) for one in value)
    if type(value) is dict:
        both = [*value, *value.values()]
        return all(is_basic(one, with_tensors=with_tensors) for one in both)
    if type(value) is torch.Tensor:
        return with_tensors and value.layout == torch.strided
    return type(value) in PLAIN


def _read(written: bytes) -> Any:
    if written.startswith(b"PK"):  # an archive, as torch writes it
        return torch.load(io.BytesIO(written), weights_only=True)
    return literal_eval(written.decode())


TENSOR, FLOAT = "taskd.integrations: a tensor", "taskd.integrations: a number"
FLOAT_BYTES = struct.Struct("<d")
SCALARS = {
    torch.float32: ("float32", struct.Struct("=f")),
    torch.float64: ("float64", struct.Struct("=d")),
    torch.int64: ("int64", struct.Struct("=q")),
}
SMALL = 1 << 12
"""A tensor of at most so many bytes, on the host, is kept as bytes: that takes a tenth of the time
to copy, to compare and to give away."""


def packed(value: Any, largest: int = SMALL) -> Any:
    """The same without its history, because only a tensor without one can be copied.

    Tensors of at most so many bytes become bytes.
    """
    match value:
        case torch.Tensor():
            if not value.dim() and value.dtype in SCALARS and value.is_cpu and largest >= 0:
                name, form = SCALARS[value.dtype]  # nearly all that is logged
                return TENSOR, name, (), form.pack(value.item())
            value = value.detach()
            if value.is_cpu and value.nbytes <= largest and not value.is_complex():
                name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
                return TENSOR, name, shape, raw_bytes(value).numpy().tobytes()
            return value
        case dict():
            return {name: packed(one, largest) for name, one in value.items()}
        case list() | tuple():
            return type(value)(packed(one, largest) for one in value)
        case np.generic():
            return packed(value.item())
        case float() if not math.isfinite(value) and type(value) is float:
            return FLOAT, FLOAT_BYTES.pack(value)  # no literal
        case _:
            return value


class NotLiteral(Exception):
    """A value has something in it that is no number, text, small tensor or container of them."""


def literal(value: Any) -> str:
    """What is packed, as a text: it is copied and compared at no cost. `read_literal` reads it.

    Raises:
        NotLiteral: It has to stay as it is.
    """
    written: list[str] = []
    _write(value, written.append)
    return "".join(written)


def read_literal(text: str) -> Any:
    return unpacked(literal_eval(text))


def _write(value: Any, write: Callable[[str], None]) -> None:
    kind = type(value)
    if kind in PLAIN and (kind is not float or math.isfinite(value)):
        write(repr(value))
    elif kind is dict:
        write("{")
        for name, one in value.items():
            _write(name, write)
            write(": ")
            _write(one, write)
            write(", ")
        write("}")
    elif kind is list or kind is tuple:
        write("[" if kind is list else "(")
        for one in value:
            _write(one, write)
            write(", ")
        write("]" if kind is list else ")")
    else:
        short = packed(value)
        if type(short) not in PLAIN and type(short) is not tuple:
            raise NotLiteral
        write(repr(short))


def unpacked(value: Any) -> Any:
    """What was packed, in new containers."""
    match value:
        case (str() as mark, name, shape, data) if mark == TENSOR:
            dtype = getattr(torch, name)
            if not data:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        case (str() as mark, bytes() as data) if mark == FLOAT:
            return FLOAT_BYTES.unpack(data)[0]
        case dict():
            return {name: unpacked(one) for name, one in value.items()}
        case list() | tuple():
            return type(value)(map(unpacked, value))
        case _:
            return value
