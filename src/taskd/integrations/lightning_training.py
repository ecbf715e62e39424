"""One training by Lightning's Trainer: its batches as steps of the job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers.csv_logs import CSVLogger
from lightning.pytorch.loops.fit_loop import RestartStage
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from taskd.integrations.lightning_state import (
    AttributesPart,
    ContinuedWriter,
    CsvPart,
    MetricsPart,
    PositionPart,
    ResultsPart,
    SwitchPart,
)
from taskd.torch.groups import sealed_objects
from taskd.torch.job import Job
from taskd.torch.loop.framework_loop import FrameworkLoop

log = logging.getLogger(__name__)
T = TypeVar("T")

NO_END = 1 << 60
"""The number of steps of a training without a limit."""


class Training:
    """One call of `fit`: what its loops share. It begins with the first use of the trainer."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self.trainer, self._job = trainer, job
        self.loop: FrameworkLoop | None = None
        """None before the first step."""
        self.is_skipping = False
        """The step is committed, and the code after it is to run with the results of then."""
        self._is_exchanging = False
        self._batch: list[Any] | None = None
        """The batch of the attempt that has begun, until the loop fetches it."""
        self._log_plainly: list[Callable[..., None]] = []
        """`log_metrics` of each logger."""

    def prepare_loggers(self) -> None:
        """Before Lightning opens them, for `fit` or for a `validate` before it."""
        self._agree_on_loggers()
        for number, logger in enumerate(self.trainer.loggers):
            self._log_plainly.append(logger.log_metrics)
            logger.log_metrics = partial(self._log, number)

    def prepare(self) -> None:
        """Before Lightning restores a checkpoint."""
        trainer = self.trainer
        trainer.callbacks.insert(0, CommitStep(self))
        for metric in trainer.lightning_module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn = self._gather_metric

    @property
    def is_replacement(self) -> bool:
        return self._job.is_replacement

    def agreed(self, mine: T) -> T:
        """What rank 0 has said when the job started."""
        if self._job.world_size == 1:
            return mine
        said: T = sealed_objects.all_gather(mine)[0]
        return said

    def _agree_on_loggers(self) -> None:
        """The replacement of rank 0 writes where its predecessor has written."""
        loggers = [one for one in self.trainer.loggers if hasattr(one, "_version")]
        versions = self.agreed([one.version if self._job.rank == 0 else None for one in loggers])
        for logger, version in zip(loggers, versions, strict=True):
            logger._version = version
            if self.is_replacement and self._job.rank == 0 and isinstance(logger, CSVLogger):
                logger._experiment = ContinuedWriter(log_dir=logger.log_dir)

    def _log(self, number: int, metrics: Any, step: int | None = None) -> None:
        if self.is_skipping or (self.loop is None and self.is_replacement):
            return  # its predecessor has logged it
        if self.loop is not None and self.loop.is_open:
            self.results.lines.append((number, dict(metrics), step))
        else:
            self._log_plainly[number](metrics, step)

    def _gather_metric(self, result: Any, group: Any = None) -> Any:
        return self.exchange("metric", gather_all_tensors, result, group)

    def exchange(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Between steps: repeated after a fault, with the same arguments."""
        loop = self.loop
        if loop is None or loop.is_open or self._is_exchanging:
            return function(*args, **kwargs)

        def attempt() -> tuple[T]:
            self._is_exchanging = True
            try:
                copied = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
                return (function(*copied, **kwargs),)
            finally:
                self._is_exchanging = False

        kept = loop.section(name, attempt)
        if kept is None:
            raise RuntimeError(f"the result of {name!r} that the predecessor has received is lost")
        return kept[0]

    # The loop

    def start(self) -> None:
        """The first step. A replacement joins the other ranks."""
        trainer, job = self.trainer, self._job
        fit_loop, module = trainer.fit_loop, trainer.lightning_module
        # A progress bar belongs to its process.
        left_out = CommitStep, ProgressBar
        others = [one for one in trainer.callbacks if not isinstance(one, left_out)]
        self.results, self._position = ResultsPart(trainer), PositionPart(trainer)
        self._switches = SwitchPart(trainer, _total(trainer))
        self._csv = CsvPart(trainer.loggers)
        schedulers = {
            f"scheduler_{number}": config.scheduler
            for number, config in enumerate(trainer.lr_scheduler_configs)
        }
        job.protect(
            model=trainer.strategy.model,
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            trainer_position=self._position,
            trainer_switches=self._switches,
            trainer_results=self.results,
            trainer_metrics=MetricsPart(module),
            trainer_csv=self._csv,
            module_attributes=AttributesPart([module], LightningModule()),
            callback_attributes=AttributesPart(others, Callback()),
            **schedulers,
        )
        loader = fit_loop._combined_loader.flattened[0].loader
        self._epoch_length = len(loader)
        done = fit_loop.epoch_loop.batch_progress.total.processed
        self.loop = job.framework_loop(loader, lambda: self._switches.total, done)
        if self.loop.has_joined_late:
            if self.is_replacement:
                self._csv.cut()
            else:
                self._csv.begin_files()
        if self._position.has_begun:
            fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
            fit_loop.epoch_loop.has_joined = True
            log.info("continuing at batch %d with the other ranks", job.step)
        self.is_skipping = self.loop.is_pending

    def finish(self) -> None:
        """Lightning has left its loop, after the last batch or because it was told to stop."""
        if self.loop is not None:
            self._switches.total = self._job.step
            self.loop.finish()

    @property
    def is_over(self) -> bool:
        """All steps were done before this process has joined."""
        return self.loop is not None and self.loop.step is None

    def begin(self) -> None:
        """Begin an attempt at the present step, if none has begun."""
        loop = self.loop
        assert loop is not None
        if loop.is_open or self._batch is not None:
            return
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        number = epoch * self._epoch_length + self.trainer.fit_loop.epoch_loop.batch_idx + 1
        if self.is_skipping:
            self._batch = loop.batch(number)
        else:
            if loop.step is not None and self._job.step > loop.step:
                loop.begin_turn()
            if not self._position.has_begun:
                self._position.has_begun = True
                loop.record_turn()
            self.results.lines = []
            self._batch = loop.begin_attempt([number])

    def take(self) -> Any:
        self.begin()
        assert self._batch is not None
        (batch,), self._batch = self._batch, None
        return batch

    def commit(self) -> None:
        """The end of the step."""
        assert self.loop is not None
        if self.is_skipping:
            self.is_skipping = False
            self.loop.is_pending = False
            self.loop.load_committed()
        else:
            self.loop.commit()
        lines, self.results.lines = self.results.lines, []
        for number, metrics, step in lines:
            self._log_plainly[number](metrics, step)

    def repeats(self, error: BaseException) -> bool:
        """Whether the step, or the code after it, is to be run again. False: the script's error."""
        assert self.loop is not None
        self._batch = None
        if not self.loop.abandon(error):
            return False
        self.is_skipping = self.loop.is_pending
        self.trainer.lightning_module._current_fx_name = None
        return True


class CommitStep(Callback):  # type: ignore[misc]
    """The first callback: the step ends before any other learns of its end."""

    def __init__(self, training: Training) -> None:
        self._training = training

    # Lightning leaves out what cannot be called, and with it the profiling around each call.
    on_train_batch_start = on_before_zero_grad = on_before_backward = None
    on_after_backward = on_before_optimizer_step = None

    def on_train_batch_end(self, *_: Any) -> None:
        self._training.commit()


class HeldLoader:
    """A training loader whose batches are read by the job, by the number of the step."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


def _total(trainer: Any) -> int:
    """The number of batches, of all epochs together, if nothing ends the training early."""
    per_epoch, limits = trainer.num_training_batches, [NO_END]
    if trainer.fit_loop.max_epochs not in (None, -1):
        limits.append(per_epoch * trainer.fit_loop.max_epochs)
    if trainer.max_steps != -1 and trainer.lightning_module.automatic_optimization:
        each = trainer.accumulate_grad_batches
        epochs, updates = divmod(trainer.max_steps, math.ceil(per_epoch / each))
        limits.append(epochs * per_epoch + updates * each)
    return int(min(limits))
