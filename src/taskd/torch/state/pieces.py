"""The pieces of a rank's training state: its tensors in a fixed order, the rest, and checksums.

`transfer.py` moves them between ranks, `emergency_checkpoint.py` writes them, `guard.py` compares
their fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from taskd.torch import compat
from taskd.torch.state.protected import Protected
from taskd.torch.state.sharded import local

Key = tuple[str, int, str]
"""Kind of tensor ("parameter", "buffer" or "optimizer"), index in order, name."""
MULTI_SENDER_BYTES = 64 << 20
"""State of at least so many bytes is sent by more than one rank."""
FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that no bit is lost: the same tensors in another order give another fingerprint."""


def tensors(protected: Protected) -> Iterator[tuple[Key, torch.Tensor]]:
    """Every tensor of the state, in an order that is the same on every rank."""
    for index, parameter in enumerate(protected.parameters):
        yield ("parameter", index, ""), parameter.detach()
    for index, buffer in enumerate(protected.buffers()):
        yield ("buffer", index, ""), buffer
    for index, (optimizer, parameter) in enumerate(optimized(protected)):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield ("optimizer", index, name), value


def optimized(protected: Protected) -> list[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    """Every parameter of every optimizer, in order."""
    return [
        (optimizer, parameter)
        for optimizer in protected.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def plain_state(protected: Protected) -> dict[str, Any]:
    """Everything that is not a tensor of a model or an optimizer."""
    optimizer = {
        index: {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        }
        for index, (optimizer, parameter) in enumerate(optimized(protected))
        if parameter in optimizer.state
    }
    groups = [
        [{name: value for name, value in group.items() if name != "params"} for group in groups]
        for groups in (optimizer.param_groups for optimizer in protected.optimizers)
    ]
    return {
        "optimizer": optimizer,
        "groups": groups,
        "scalers": [scaler.state_dict() for scaler in protected.scalers],
        "parts": {name: part.state_dict() for name, part in protected.parts.items()},
    }


def load_plain_state(protected: Protected, plain: dict[str, Any]) -> None:
    """Load what `plain_state` gave, and drop all gradients."""
    for optimizer, groups in zip(protected.optimizers, plain["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
    for scaler, values in zip(protected.scalers, plain["scalers"], strict=True):
        scaler.load_state_dict(values)
        compat.forget_scaler_step(scaler)
    for name, part in protected.parts.items():
        part.load_state_dict(plain["parts"][name])
    for parameter in protected.parameters:
        parameter.grad = None


def is_large(protected: Protected) -> bool:
    """Whether several ranks send parts of this state to one that needs it."""
    total = sum(local(tensor).nbytes for _, tensor in tensors(protected))
    return total >= MULTI_SENDER_BYTES


def fingerprint(protected: Protected) -> int:
    """One number for all weights and optimizer state; it differs if any bit differs.

    Buffers are left out: a forward pass changes them on each rank by its own batch.
    """
    own = [raw_bytes(local(tensor)) for key, tensor in tensors(protected) if key[0] != "buffer"]
    number = 0
    for one in checksums(own):
        number = (number * FACTOR + one) % (1 << 63)
    return number


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def checksum(data: torch.Tensor) -> int:
    """The sum of its 64-bit words: as fast as memory, and zero or stale data does not pass."""
    return checksums([data])[0]


def checksums(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """One for each. The device is waited for once, not once per tensor."""
    sums = [_sum(one) for one in tensors]
    on_devices = [one for one in sums if one.device.type != "cpu"]
    fetched = iter(torch.stack(on_devices).tolist() if on_devices else ())
    values = (int(one) if one.device.type == "cpu" else next(fetched) for one in sums)
    return tuple(one & 0xFFFFFFFFFFFFFFFF for one in values)


def _sum(data: torch.Tensor) -> torch.Tensor:
    whole = data.numel() // 8 * 8
    if data.data_ptr() % 8:
        data = data.clone()
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64) * 31
