"""Leaves attempts with DeepSpeed's engine at every place, in one process, and brings it back."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from taskd.errors import SettingsError
from taskd.integrations.deepspeed import EnginePart, protect
from taskd.torch.init import init

STAGE, DTYPE = int(sys.argv[1]), getattr(torch, sys.argv[2])
STEPS, BATCHES = 6, 2
PLACES = [(place, batch) for place in ("loss", "backward", "stepped") for batch in range(BATCHES)]


class Left(Exception):
    """The attempt is left inside of the update, as at the gate."""


def build() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5))
    groups: list[dict[str, Any]] = [{"params": [one]} for one in net.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": BATCHES,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": STAGE, "reduce_bucket_size": 300},
        "bf16": {"enabled": torch.bfloat16 == DTYPE},
    }
    optimizer = torch.optim.AdamW(groups, 1e-2)
    engine, zero, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return net, engine, zero


def attempt(engine: Any, inputs: torch.Tensor, leave: tuple[str, int] | None = None) -> None:
    for number, batch in enumerate(torch.split(inputs, 4)):
        loss = engine(batch.to(DTYPE)).float().square().mean()
        if leave == ("loss", number):
            return
        engine.backward(loss)
        if leave == ("backward", number):
            return
        engine.step()
        if leave == ("stepped", number) and number < BATCHES - 1:
            return


def leave_update(engine: Any, zero: Any, inputs: torch.Tensor) -> None:
    plain = zero._optimizer_step

    def fail(group: int) -> None:
        zero.optimizer.param_groups = zero.optimizer.param_groups[group:]
        raise Left

    zero._optimizer_step = fail
    with suppress(Left):
        attempt(engine, inputs)
    zero._optimizer_step = plain


def train(leaves: bool) -> list[torch.Tensor]:
    net, engine, zero = build()
    part = EnginePart(engine)
    for inputs in data:
        if leaves:
            before = part.state_dict()
            for place in PLACES[:-1]:
                attempt(engine, inputs, place)
                part.load_state_dict(before)
            leave_update(engine, zero, inputs)
            part.load_state_dict(before)
        attempt(engine, inputs)
    states = [value for state in zero.optimizer.state.values() for value in state.values()]
    return [*net.parameters(), *zero.single_partition_of_fp32_groups, *states]


def refusal(config: dict[str, Any]) -> str:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    whole = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **config}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=whole)
    try:
        protect(init(), engine)
    except SettingsError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = torch.randn(STEPS, 4 * BATCHES, 16)
    both = zip(train(leaves=False), train(leaves=True), strict=True)
    found = {
        "equal": all(torch.equal(one, other) for one, other in both),
        "stage 3": refusal({"zero_optimization": {"stage": 3}}),
        "timers": refusal({"zero_optimization": {"stage": 1}, "wall_clock_breakdown": True}),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")
