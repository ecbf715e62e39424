"""The pieces of a rank's training state: its tensors in a fixed order, the rest, and checksums.

`transfer.py` moves them between ranks, `emergency_checkpoint.py` writes them, `guard.py` compares
their fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from taskd.torch import compat
from taskd.torch.state.protected import Protected
from taskd.torch.state.sharded import local

Key = tuple[str, int, str]
"""Kind of tensor ("parameter", "buffer", "optimizer" or "gradient"), index in order, name."""
MULTI_SENDER_BYTES = 64 << 20
"""State of at least so many bytes is sent by more than one rank."""
FACTOR, PRIME = 0x9E3779B97F4A7C15, (1 << 61) - 1
"""The same tensors in another order give another fingerprint, and no bit of a sum is lost: modulo a
power of two, the sign of every second float would be."""


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


def optimizer_names(protected: Protected) -> dict[int, list[str]]:
    """The names in the state of each parameter that has more than tensors: a checkpoint of the
    script has them in this order."""
    states = (optimizer.state.get(parameter, {}) for optimizer, parameter in optimized(protected))
    return {
        index: list(state)
        for index, state in enumerate(states)
        if not all(isinstance(value, torch.Tensor) for value in state.values())
    }


def frozen(protected: Protected) -> frozenset[Key]:
    """The weights that training does not change: without gradients, and in no optimizer."""
    trained = {parameter for _, parameter in optimized(protected)}
    return frozenset(
        ("parameter", index, "")
        for index, parameter in enumerate(protected.parameters)
        if not parameter.requires_grad and parameter not in trained
    )


def own_tensors(
    protected: Protected, step: int, gradients: bool
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Those that belong to this rank alone in the state of that step."""
    if protected.has_own_buffers(step):
        for index, buffer in enumerate(protected.buffers()):
            yield ("buffer", index, ""), buffer
    if gradients:
        for index, parameter in enumerate(protected.parameters):
            if parameter.grad is not None:
                yield ("gradient", index, ""), parameter.grad


def shared_tensors(protected: Protected, step: int) -> Iterator[tuple[Key, torch.Tensor]]:
    """Those that every rank with the same shard holds."""
    own_buffers = protected.has_own_buffers(step)
    return (one for one in tensors(protected) if not own_buffers or one[0][0] != "buffer")


def plain_state(protected: Protected, parts: dict[str, Any]) -> dict[str, Any]:
    """Everything that is not a tensor of a model or an optimizer, with the state of these parts."""
    optimizer = {
        index: {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, torch.Tensor)
        }
        for index, (optimizer, parameter) in enumerate(optimized(protected))
        if parameter in optimizer.state
    }
    return {
        "optimizer": optimizer,
        "scalers": [scaler.state_dict() for scaler in protected.scalers],
        "parts": parts,
    }


def load_plain_state(protected: Protected, plain: dict[str, Any]) -> None:
    """Load what `plain_state` gave, and drop all gradients."""
    for scaler, values in zip(protected.scalers, plain["scalers"], strict=True):
        scaler.load_state_dict(values)
        compat.forget_scaler_step(scaler)
    load_parts(protected, plain["parts"])
    for parameter in protected.parameters:
        parameter.grad = None


def load_parts(protected: Protected, states: dict[str, Any]) -> None:
    for name, state in states.items():
        if name in protected.parts:
            protected.parts[name].load_state_dict(state)


def own_part_states(protected: Protected, step: int) -> dict[str, Any]:
    """The parts that belong to this rank alone, as they are in the state of that step."""
    own = protected.own_parts(step)
    if protected.turn_parts(step) is not None:
        return {name: state for name, state in protected.recorded_parts().items() if name in own}
    return {name: protected.parts[name].state_dict() for name in own}


def turn_states(protected: Protected, step: int, *, own: bool) -> dict[str, Any]:
    """Those parts that the code after the step has changed."""
    names = protected.own_parts(step)
    changed = protected.turn_parts(step) or {}
    return {name: state for name, state in changed.items() if (name in names) == own}


def shared_part_states(protected: Protected, step: int) -> dict[str, Any]:
    """The other parts, as they were when the step was committed."""
    own = protected.own_parts(step)
    return {name: state for name, state in protected.recorded_parts().items() if name not in own}


def is_large(protected: Protected) -> bool:
    """Whether several ranks send parts of this state to one that needs it."""
    total = sum(local(tensor).nbytes for _, tensor in tensors(protected))
    return total >= MULTI_SENDER_BYTES


def fingerprint(protected: Protected) -> int:
    """One number for all weights and optimizer state; it differs if any bit differs.

    Buffers are left out: a forward pass changes them on each rank by its own batch.
    """
    own = [raw_bytes(local(tensor)) for key, tensor in tensors(protected) if key[0] != "buffer"]
    return mixed(checksums(own))


def mixed(numbers: Iterable[int]) -> int:
    """One number of 61 bits; it differs if a bit of any 64-bit number differs."""
    result = 1
    for number in numbers:
        result = (result * FACTOR + number) % PRIME
    return result


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
