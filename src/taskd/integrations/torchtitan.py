"""torchtitan's Trainer that loses no step: `from taskd.integrations.torchtitan import Trainer`.

The loop stays that of torchtitan. One call of `train_step` is one step of the job, and is repeated
on all ranks if a rank is lost in it. Checkpoints and validation are sections. The position of the
dataloader belongs to the state of a rank, so a replacement reads on where its predecessor was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from taskd.errors import SettingsError
from taskd.integrations import process_group, versions
from taskd.runtime.private_names import PrivateName

_TRAINER = "torchtitan.trainer:Trainer"
_DCP = "torchtitan.components.checkpointer:CheckpointManager"
NAMES = (
    PrivateName(_TRAINER, "train_step", "repeating a step"),
    PrivateName(_TRAINER, "batch_generator", "giving a repeated step its batches again"),
    PrivateName(_TRAINER, "should_continue_training", "the end of the training"),
    PrivateName(_TRAINER, "num_pipeline_parallel_microbatches", "the batches of a step"),
    PrivateName(_TRAINER, "gradient_accumulation_steps", "the batches of a step"),
    PrivateName(_DCP, "_should_save", "repeating a checkpoint"),
    PrivateName("torchtitan.distributed.utils", "set_pg_timeouts", "the timeouts of a replacement"),
)
versions.check("torchtitan", "0.3", "0.4")

import torchtitan.trainer  # noqa: E402
from torchtitan.components.checkpointer import AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402

from taskd.integrations.torchtitan_state import DataPart, TrainerPart  # noqa: E402
from taskd.torch.loop.framework_loop import FrameworkLoop  # noqa: E402

versions.check("torchtitan", "0.3", "0.4", NAMES)

log = logging.getLogger(__name__)
T = TypeVar("T")
process_group.join_at_first_use()


def _keep_timeouts(*_: Any, **__: Any) -> None:
    """In place of `set_pg_timeouts`: its barrier would be one that a replacement never enters."""


distributed_utils.set_pg_timeouts = _keep_timeouts


class TrainerMixin:
    """Put it before any Trainer class that has the training loop of torchtitan's own."""

    def __init__(self: Any, config: Any) -> None:
        _check(config)
        self._loop: FrameworkLoop | None = None
        self._captured: list[Any] | None = None
        """What is logged in a section: it is logged when the section is complete."""
        super().__init__(config)  # type: ignore[call-arg]
        self._job = process_group.job()
        metrics, checkpointer = self.metrics_processor, self.checkpointer
        self._log, metrics.log = metrics.log, self._keep_log
        self._log_validation, metrics.log_validation = metrics.log_validation, self._keep_validation
        self._save, checkpointer.save = checkpointer.save, self._save_in_section
        if self._job.is_replacement:
            checkpointer.load = lambda step=-1: False  # the state comes from the other ranks
        if config.validator.enable:
            self._validate, self.validator.validate = (
                self.validator.validate,
                self._validate_in_section,
            )

    # The loop

    def train(self: Any) -> None:
        if self._loop is not None:
            raise SettingsError(["train() was called twice: a job trains once"])
        super().train()  # type: ignore[misc]
        self._finish()

    def _finish(self: Any) -> None:
        """The loop is left, after the last step or before."""
        self._part.total = self._job.step
        self._loop.finish()

    def batch_generator(self: Any, loader: Any) -> Iterator[Any]:
        """The loop begins: its set-up is complete, and a checkpoint is loaded."""
        plain = super().batch_generator  # type: ignore[misc]
        self._data = DataPart(loader, lambda: plain(loader))
        self._part = TrainerPart(self, self.config.training.steps)
        start = self.step
        self._job.protect(
            model=self.model_parts,
            optimizer=list(self.optimizers),
            scheduler=self.lr_schedulers,
            data=self._data,
            trainer=self._part,
        )
        self._loop = self._job.framework_loop(None, lambda: self._part.total, start)
        if self._loop.has_joined_late:
            log.info("continuing at step %d with the other ranks", self._job.step)
        position = self._loop.step
        self.step = self.config.training.steps if position is None else int(position)
        return iter(())  # train_step takes the batches

    def should_continue_training(self: Any) -> bool:
        if self._loop.step is None:
            return False
        if self._loop.is_pending or super().should_continue_training():  # type: ignore[misc]
            return True
        self._finish()
        return False

    def train_step(self: Any, _: Any) -> None:
        loop, plain = self._loop, super().train_step  # type: ignore[misc]
        count = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        if not loop.is_pending and self._job.step > loop.step:
            loop.begin_turn()
        while not loop.is_pending:
            try:
                loop.begin_attempt()
                self._part.logged = []
                plain(self._data.take(count))
                loop.commit()
                break
            except BaseException as error:
                if not loop.abandon(error):
                    raise
        if loop.is_pending:
            # The step is committed, but this process has not run it.
            loop.is_pending = False
            loop.load_committed()
        for args, kwargs in self._part.logged:
            if not self.metrics_processor.data_loading_times:
                self.metrics_processor.data_loading_times.append(0.0)
            self._log(*args, **kwargs)

    # Between steps

    def _keep_log(self: Any, *args: Any, **kwargs: Any) -> None:
        """In a step: it is logged when the step is committed."""
        if self._loop is not None and self._loop.is_open:
            self._part.logged.append((args, kwargs))
        else:
            self._log(*args, **kwargs)

    def _keep_validation(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._captured is None:
            self._log_validation(*args, **kwargs)
        else:
            self._captured.append((args, kwargs))

    def _save_in_section(self: Any, curr_step: int, last_step: bool = False) -> bool:
        checkpointer = self.checkpointer
        is_due = checkpointer.enable and checkpointer._should_save(curr_step, last_step)
        if self._loop is None or not is_due:
            return bool(self._save(curr_step, last_step))
        return bool(self._section("checkpoint", self._save, curr_step, last_step))

    def _validate_in_section(self: Any, *args: Any, **kwargs: Any) -> None:
        self._section("validation", self._validate, *args, **kwargs)

    def _section(self: Any, name: str, function: Callable[..., T], *args: Any, **kw: Any) -> T:
        def attempt() -> Any:
            self._captured = []
            try:
                return function(*args, **kw), self._captured
            finally:
                self._captured = None

        kept = self._loop.section(name, attempt)
        if kept is None:
            raise RuntimeError(f"the result of section {name!r} of the predecessor is lost")
        result, logged = kept
        for given, named in logged:
            self._log_validation(*given, **named)
        return result  # type: ignore[no-any-return]


class Trainer(TrainerMixin, torchtitan.trainer.Trainer):  # type: ignore[misc]
    """`torchtitan.trainer.Trainer` whose job survives the loss of a rank without losing a step.

    It takes any `torchtitan.trainer.Trainer.Config`, and `Trainer.Config(…).build()` creates it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):  # type: ignore[misc]
        """As that of torchtitan."""


def _check(config: Any) -> None:
    """Refuse what could not be repeated exactly."""
    checkpoint, parallelism = config.checkpoint, config.parallelism
    problems = [
        text
        for is_set, text in (
            (
                not config.training.disable_cuda_graphs,
                "a collective in a CUDA graph cannot be interrupted when a rank is lost: set "
                "training.disable_cuda_graphs",
            ),
            (
                config.comm.mode != "default",
                f"comm.mode={config.comm.mode!r} has process groups that cannot be formed again",
            ),
            (
                parallelism.enable_fsdp_symm_mem or config.compile.enable_async_tensor_parallel,
                "symmetric memory (enable_fsdp_symm_mem, enable_async_tensor_parallel) belongs to "
                "the processes that have exchanged it, and a replacement has none",
            ),
            (
                checkpoint.enable and not isinstance(checkpoint, CheckpointManager.Config),
                f"checkpoints by {type(checkpoint).__qualname__} cannot be repeated: use "
                "CheckpointManager",
            ),
            (
                checkpoint.enable
                and getattr(checkpoint, "async_mode", "disabled") != AsyncMode.DISABLED.value,
                "a checkpoint that is written in the background would be lost with a rank: set "
                "checkpoint.async_mode to disabled",
            ),
        )
        if is_set
    ]
    if problems:
        raise SettingsError([f"taskd.integrations.torchtitan: {text}" for text in problems])
