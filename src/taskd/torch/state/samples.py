"""Samples of a rank's state in each step, chained into one number that outlives the process.

Between two comparisons of the whole state no rank can see that another one has become different,
and reading all weights in each step would be slow. So each rank reads a few elements of a few
tensors at the gate of each step, other ones each time, and adds them to a running number. The last
numbers are in the node's shared memory. When a rank is lost, its replacement shows them, and the
survivors know whether it held the same as they (`core/worker/state_evidence.py`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from taskd.core.worker.state_evidence import SampleKey
from taskd.torch.state.host_memory import PLAIN, array_of
from taskd.torch.state.protected import Protected
from taskd.torch.state.sharded import is_distributed, local

TENSORS, BUFFERS, ELEMENTS = 4, 2, 64
"""How much is read in a step: weights with their gradients, buffers, and elements of each."""
DEVICE_EVERY = 8
"""State on a device is read only in every so many steps: the step waits for it."""
KEPT = 8
_SLOT = struct.Struct("<qqqQ")
"""Incident, version and step of a number, and the number. Step -1: empty."""
_EMPTY = _SLOT.pack(0, 0, -1, 0)


class SampleChain:
    """The samples of one rank, and those that its predecessor has left."""

    def __init__(self, folder: Path | None, rank: int, protected: Protected) -> None:
        """`folder` is in the node's shared memory; None: there is no such folder."""
        path = None if folder is None else folder / f"samples-{rank}"
        self._predecessor = {} if path is None else _read(path)
        self._map = _open(path)
        self._protected = protected
        self._kept: dict[SampleKey, int] = {}
        self._since: tuple[int, int] | None = None
        self._number, self._count = b"", 0
        self._arrays: dict[Place, tuple[Memory, np.ndarray[Any, Any]]] = {}
        tensors = [*protected.parameters, *protected.buffers()]
        self._every = 1 if all(one.device.type == "cpu" for one in tensors) else DEVICE_EVERY
        known = {p for model in protected.ddp_models() for p in model.module.parameters()}
        self._are_plain = not any(map(is_distributed, protected.parameters))
        self._own_gradients = {
            p for p in protected.parameters if p not in known and not is_distributed(p)
        }
        """Weights whose gradients are not equal by construction."""

    def extend(self, incident: int, version: int, step: int, *, gradients: bool) -> None:
        """Add the samples of this step, on all ranks with the same incident and version."""
        if self._since != (incident, version):
            self._since, self._number = (incident, version), b""
        if step % self._every:
            return
        digest = blake2b(self._number, digest_size=8)
        for sample in self._samples(step, gradients):
            digest.update(sample)
        self._number = digest.digest()
        (number,) = struct.unpack("<Q", self._number)
        self._keep((incident, version, step), number)

    def shown(self, is_new: bool) -> dict[SampleKey, int]:
        """What this process shows to the others. `is_new`: it has none, but its predecessor had."""
        return self._predecessor if is_new else dict(self._kept)

    def _keep(self, key: SampleKey, number: int) -> None:
        at = self._count % KEPT * _SLOT.size
        self._count += 1
        self._map[at : at + _SLOT.size] = _SLOT.pack(*key, number)
        self._kept[key] = number
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    def _samples(self, step: int, gradients: bool) -> Iterator[bytes]:
        on_devices: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for place, tensor in self._chosen(step, gradients):
            if (array := self._array(place, tensor)) is not None:
                if array.size:
                    yield _of_array(array, step)
            elif type(tensor) in PLAIN and tensor.layout == torch.strided and tensor.numel():
                kind = tensor.device, tensor.dtype
                on_devices.setdefault(kind, []).append(_elements(tensor.detach(), step))
        for tensors in on_devices.values():
            yield torch.cat(tensors).cpu().view(torch.uint8).numpy().tobytes()

    def _array(self, place: Place, tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
        """The tensor at this place, if it is on the host."""
        if place is None:
            return array_of(tensor)
        memory = tensor.data_ptr(), tensor.shape, tensor.stride()
        known = self._arrays.get(place)
        if known is not None and known[0] == memory:
            return known[1]
        if (array := array_of(tensor)) is not None:
            self._arrays[place] = memory, array
        return array

    def _chosen(self, step: int, gradients: bool) -> Iterator[tuple[Place, torch.Tensor]]:
        protected = self._protected
        for at, parameter in _some(protected.parameters, step, TENSORS):
            yield ("weight", at), parameter if self._are_plain else local(parameter)
            if gradients and parameter in self._own_gradients and parameter.grad is not None:
                yield None, local(parameter.grad)
        if not protected.has_own_buffers(step + 1):
            for at, buffer in _some(protected.buffers(), step, BUFFERS):
                yield ("buffer", at), local(buffer)


Memory = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides of a tensor on the host."""
Place = tuple[str, int] | None
"""Of a weight or a buffer in the list of all; None: it is another tensor in each step."""


def _some(
    tensors: Sequence[torch.Tensor], step: int, count: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Other ones in each step; all of them in turn."""
    count = min(count, len(tensors))
    places = ((step * count + index) % len(tensors) for index in range(count))
    return ((place, tensors[place]) for place in places)


def _of_array(array: np.ndarray[Any, Any], step: int) -> bytes:
    if not array.flags.c_contiguous:
        array = array[step % array.shape[0]]  # the whole of it would be copied
    flat = array.reshape(-1)
    gap = max(1, flat.size // ELEMENTS)
    return flat[step % gap :: gap][:ELEMENTS].tobytes()


def _elements(tensor: torch.Tensor, step: int) -> torch.Tensor:
    if not tensor.is_contiguous():
        tensor = tensor[step % tensor.shape[0]]
        tensor = tensor.reshape(-1)
    size = tensor.numel()
    gap = max(1, size // ELEMENTS)
    first = step % gap
    count = min(ELEMENTS, (size - first + gap - 1) // gap)
    return tensor.as_strided((count,), (gap,), tensor.storage_offset() + first)


def _read(path: Path) -> dict[SampleKey, int]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    if len(data) != KEPT * _SLOT.size:
        return {}
    return {
        (incident, version, step): number
        for incident, version, step, number in _SLOT.iter_unpack(data)
        if step >= 0
    }


def _open(path: Path | None) -> mmap.mmap:
    size = KEPT * _SLOT.size
    if path is None:
        return mmap.mmap(-1, size)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size != size:
            os.ftruncate(file, 0)
            os.write(file, _EMPTY * KEPT)
        return mmap.mmap(file, size)
    finally:
        os.close(file)
