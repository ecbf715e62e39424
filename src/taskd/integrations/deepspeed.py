"""DeepSpeed's ZeRO-1 and ZeRO-2 without a lost step: `protect(job, engine)`.

The loop is the script's own. Each rank holds one flat part of the fp32 weights and of the
optimizer's state, and no other rank has it: it is copied in each step, like a shard of FSDP2. The
gate is before the first update in `engine.step()`. What an abandoned attempt has left in the engine
(buckets, gradients that are reduced in part) is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from taskd.errors import SettingsError
from taskd.integrations import versions
from taskd.runtime.private_names import PrivateName
from taskd.torch.job import Job
from taskd.torch.state.protected import PLAIN

_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"


def _names(owner: str, names: str, purpose: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(owner, name, purpose) for name in names.split())


NAMES = (
    *_names(
        _ZERO,
        "single_partition_of_fp32_groups loss_scaler _global_grad_norm",
        "the parts of the weights and of the optimizer's state",
    ),
    *_names(_ZERO, "_optimizer_step", "the gate before the update"),
    *_names(
        _ZERO,
        "ipg_buckets extra_large_param_to_reduce previous_reduced_grads params_already_reduced "
        "averaged_gradients all_grad_tensors micro_step_id zero_grad _release_ipg_buffers "
        "_release_preflattened_grad_buffers reset_partition_gradient_structures "
        "_backward_hook_state _hp_optimizer_states_linked",
        "undoing an attempt",
    ),
    *_names(
        _ENGINE,
        "global_steps global_samples micro_steps skipped_steps",
        "the counters of a replacement",
    ),
    *_names(_ENGINE, "_running_engine_step", "undoing an attempt"),
    *_names("deepspeed.ops", "__compatible_ops__", "leaving out an operation for inference"),
)
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
versions.check("deepspeed", "0.19", "0.20")

import deepspeed.ops  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import (  # noqa: E402
    INITIAL_MICRO_STEP_ID,
    DeepSpeedZeroOptimizer,
)

versions.check("deepspeed", "0.19", "0.20", NAMES)

# On CPUs DeepSpeed would compile a reduction in shared memory, for inference. All ranks meet when
# it is loaded, and a replacement would wait for them.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def protect(job: Job, engine: Any, **options: Any) -> None:
    """Declare what belongs to the training state: call it instead of `Job.protect`.

    Args:
        job: What `taskd.torch.init` has returned, before `deepspeed.initialize` was called.
        engine: What `deepspeed.initialize` has returned first, with ZeRO stage 1 or 2.
        **options: As in `Job.protect`, without `model`, `optimizer` and `scaler`. The scheduler of
            the engine is protected.

    Raises:
        SettingsError: The engine has options with which a step could not be repeated exactly.
    """
    _check(engine)
    zero, partitions = engine.optimizer, Partitions(engine.optimizer)
    update, part = Update(zero), EnginePart(engine)
    plain = zero._optimizer_step

    def optimizer_step(group: int) -> None:
        if group == 0:
            update.run = lambda: plain(0)
            update.step()
        else:
            plain(group)

    zero._optimizer_step = optimizer_step
    _end_with(engine, part)
    job.protect(
        model=[engine.module, partitions],
        optimizer=update,
        engine=part,
        engine_scheduler=engine.lr_scheduler,
        **options,
    )


def _end_with(engine: Any, part: EnginePart) -> None:
    """The engine has made its update when `step` returns."""
    plain = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        part.is_updating = True
        try:
            return plain(*args, **kwargs)
        finally:
            part.is_updating = False

    engine.step = step


class Partitions(nn.Module):
    """The fp32 weights that only this rank has. They are tensors, not parameters of a module."""

    def __init__(self, zero: Any) -> None:
        super().__init__()
        self._flat = list(zero.single_partition_of_fp32_groups)
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.shard_name = f"{rank}of{size}.zero"

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self._flat)


class Update(Optimizer):
    """The optimizer inside of DeepSpeed's, whose updates of all groups count as one."""

    def __init__(self, zero: Any) -> None:
        inner = zero.optimizer
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
        # DeepSpeed shows its inner optimizer one group at a time, in another list.
        self.param_groups, self.state = inner.param_groups, inner.state
        self.run: Callable[[], None] = lambda: None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.run()


class EnginePart:
    """The engine's counters and loss scale. Loading it ends what an attempt has begun."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._groups = self._zero.optimizer.param_groups
        self.is_updating = False

    def state_dict(self) -> dict[str, Any]:
        engine, zero = self._engine, self._zero
        if not self.is_updating and engine.micro_steps % engine.gradient_accumulation_steps():
            raise SettingsError(
                [
                    "an attempt has ended between two batches of one update: do all "
                    f"{engine.gradient_accumulation_steps()} of them in one attempt, and call "
                    "engine.step() after each"
                ]
            )
        return {
            "counters": {name: getattr(engine, name) for name in COUNTERS},
            "scale": {
                name: value
                for name, value in vars(zero.loss_scaler).items()
                if type(value) in PLAIN
            },
            "norm": _number(zero._global_grad_norm),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._forget_attempt()
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)
        vars(self._zero.loss_scaler).update(state["scale"])
        self._zero._global_grad_norm = self._engine._global_grad_norm = state["norm"]

    def _forget_attempt(self) -> None:
        """As between two steps, wherever the attempt was left."""
        engine, zero = self._engine, self._zero
        zero.optimizer.param_groups = self._groups
        zero.zero_grad()
        for flat in zero.single_partition_of_fp32_groups:
            flat.grad = None
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
            bucket.index = 0
        zero._release_ipg_buffers()
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._release_preflattened_grad_buffers()
        zero.averaged_gradients.clear()
        zero.all_grad_tensors.clear()
        zero.reset_partition_gradient_structures()
        zero.micro_step_id = INITIAL_MICRO_STEP_ID
        zero._backward_hook_state.reset_for_new_step()
        zero._backward_hook_state.remaining_grad_acc_hooks = 0
        zero._backward_hook_state.backward_active_depth = 0
        zero._hp_optimizer_states_linked = False
        engine._running_engine_step = False
        self.is_updating = False


def _number(norm: Any) -> Any:
    return norm.item() if isinstance(norm, torch.Tensor) else norm


def _check(engine: Any) -> None:
    """Refuse what could not be repeated exactly."""
    if type(engine) is not DeepSpeedEngine:
        raise SettingsError(
            [f"taskd.integrations.deepspeed: {type(engine).__name__} is not a DeepSpeedEngine"]
        )
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage not in (1, 2) or type(zero) is not DeepSpeedZeroOptimizer:
        raise SettingsError(
            [
                f"taskd.integrations.deepspeed: ZeRO stage {stage} with {type(zero).__name__} "
                "cannot be protected, only stages 1 and 2: stage 3 also divides the weights, and "
                "an interrupted pass would leave some of them gathered"
            ]
        )
    problems = [
        text
        for is_set, text in (
            (zero.cpu_offload, "offload_optimizer: copies to the host may be on their way"),
            (zero.has_moe_layers, "MoE layers: their experts have groups of their own"),
            (zero.torch_autocast_gradscaler, "torch_autocast with fp16: use fp16 of DeepSpeed"),
            (engine.mpu is not None, "an mpu: only data parallelism was tested"),
            (engine.wall_clock_breakdown(), "wall_clock_breakdown: its timers cannot start twice"),
            (
                not engine.managed_gradient_accumulation(),
                "managed_gradient_accumulation=false: the engine would not know where an update "
                "begins",
            ),
            (
                engine.training_dataloader is not None,
                "training_data: give the dataset to a DataLoader, and that to job.batches",
            ),
        )
        if is_set
    ]
    if problems:
        raise SettingsError([f"taskd.integrations.deepspeed cannot protect {p}" for p in problems])
