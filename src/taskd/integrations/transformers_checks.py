"""What transformers' Trainer can do, but a step could then not be repeated exactly: refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from taskd.errors import SettingsError

SIZES = ("dp_replicate_size", "tp_size", "cp_size", "sp_size")
"""Of accelerate's ParallelismConfig: all but the one that FSDP2 has without it."""


def check(trainer: Any) -> None:
    """Refuse what is known when the trainer is created."""
    args = trainer.args
    _refuse(
        text
        for is_set, text in (
            (args.auto_find_batch_size, "auto_find_batch_size changes the batches of a step"),
            (args.ignore_data_skip, "with ignore_data_skip a step would be repeated on other data"),
            (trainer.is_deepspeed_enabled, "DeepSpeed keeps its state outside of the optimizer"),
            *_fsdp(trainer),
        )
        if is_set
    )


def _fsdp(trainer: Any) -> Iterable[tuple[bool, str]]:
    """What is not possible with FSDP, or was never tried."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = {name: getattr(config, name, 1) for name in SIZES}
    found = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    yield bool(found), f"parallelism_config with {found} was never tried: only FSDP2 by itself was"
    yield bool(trainer.is_fsdp_xla_enabled), "FSDP of XLA: there are no process groups to repair"
    if not trainer.is_fsdp_enabled:
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    yield (
        plugin.fsdp_version != 2,
        "a step that was interrupted in FSDP1 cannot be undone: set fsdp_config={'version': 2}",
    )
    yield (
        isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "FSDP2 with cpu_offload was never tried: the weights are on the CPU, and copies of them on "
        "their way to the device would have to be undone",
    )
    yield (
        plugin.ignored_modules is not None,
        "FSDP2 with ignored_modules was never tried: no rank exchanges their gradients",
    )


def check_prepared(trainer: Any, model: Any) -> None:
    """Refuse what is known only when the training begins."""
    kind = FSDPModule if trainer.is_fsdp_enabled else DistributedDataParallel
    name = "sharded by accelerate's FSDP2" if trainer.is_fsdp_enabled else "wrapped in DDP"
    schedule = type(trainer.lr_scheduler).__name__
    _refuse(
        text
        for is_set, text in (
            (
                trainer.args.world_size > 1 and not isinstance(model, kind),
                f"{type(model).__name__} is not {name}: ranks would train apart",
            ),
            (
                schedule in ("ReduceLROnPlateau", "GreedyLR"),
                f"{schedule} changes the learning rate between steps",
            ),
            (
                trainer.args.max_steps > 0 and not hasattr(trainer.train_dataset, "__len__"),
                "the training dataset has no length",
            ),
        )
        if is_set
    )


def _refuse(problems: Iterable[str]) -> None:
    found = [f"taskd.integrations.transformers: {text}" for text in problems]
    if found:
        raise SettingsError(found)
