"""Lightning's Trainer that loses no step: `Trainer(strategy=ResilientStrategy())`.

The loops stay those of Lightning. One training batch is one step: it begins where the batch is
fetched and ends before `on_train_batch_end`; if a rank is lost in between, the batch is repeated on
all ranks. Between steps, each exchange between the ranks goes through the strategy, and is a
section: the replacement of a rank runs the code after the step again, gets the results of the
exchanges that are complete, and meets the others in the first one that is not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from taskd.errors import SettingsError
from taskd.integrations import process_group, versions

versions.check("lightning", "2.6", "2.7")

from lightning.pytorch import Callback, LightningModule, callbacks  # noqa: E402
from lightning.pytorch.loggers.csv_logs import CSVLogger  # noqa: E402
from lightning.pytorch.loops.fetchers import _DataFetcher  # noqa: E402
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop  # noqa: E402
from lightning.pytorch.loops.optimization.automatic import (  # noqa: E402
    Closure,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.manual import _ManualOptimization  # noqa: E402
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.connectors.checkpoint_connector import (  # noqa: E402
    _CheckpointConnector,
)
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from torchmetrics import Metric  # noqa: E402
from torchmetrics.utilities.distributed import gather_all_tensors  # noqa: E402

from taskd.integrations.lightning_state import (  # noqa: E402
    AttributesPart,
    ContinuedWriter,
    CsvPart,
    LoopPart,
    MetricsPart,
    ResultsPart,
)
from taskd.torch.groups import sealed_objects  # noqa: E402
from taskd.torch.job import Job  # noqa: E402
from taskd.torch.loop.framework_loop import FrameworkLoop, Repeat  # noqa: E402

log = logging.getLogger(__name__)
T = TypeVar("T")
process_group.join_at_first_use()

NO_END = 1 << 60
"""The number of steps of a training without a limit."""


class ResilientStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP strategy for a job that survives the loss of a rank without losing a step.

    It takes the same arguments as `lightning.pytorch.strategies.DDPStrategy`.
    """

    strategy_name = "taskd"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._training: Training | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.lightning_module.trainer
        job = process_group.job()
        if trainer.state.fn == TrainerFn.FITTING:
            if self._training is not None:
                raise SettingsError(["fit() was called twice: a job trains once"])
            _check(trainer, self)
            self._training = Training(trainer, job)
            self._training.prepare()

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        return HeldLoader(loader) if self._training and trainer.training else loader

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._exchange("barrier", super().barrier, *args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        received: T = self._exchange("broadcast", super().broadcast, obj, src)
        return received

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if reduce_op not in ("mean", "avg") or self.root_device.type != "cpu":
            return self._exchange("reduce", super().reduce, tensor, group, reduce_op)
        # Lightning knows gloo, which cannot average, by its name; the name of our groups is taskd.
        total = self._exchange("reduce", super().reduce, tensor, group, "sum")
        if not isinstance(total, torch.Tensor):
            return total
        mean = total / torch.distributed.get_world_size(group)
        return mean.to(total.dtype)

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self._exchange("all_gather", super().all_gather, tensor, *args, **kwargs)

    def _exchange(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        training = self._training
        if training is None:
            return function(*args, **kwargs)
        return training.exchange(name, function, *args, **kwargs)


class Training:
    """One call of `fit`: what its loops share."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self.trainer, self._job = trainer, job
        self.loop: FrameworkLoop | None = None
        """None before the first step."""
        self.is_skipping = False
        """The step is committed, and the code after it is to run with the results of then."""
        self._is_exchanging = False
        self._batch: list[Any] | None = None
        """The batch of the attempt that has begun, until the loop fetches it."""
        self._lines: list[Callable[[], None]] = []
        """What was logged in the attempt: it is logged when the step is committed."""

    def prepare(self) -> None:
        """Before Lightning restores a checkpoint and opens its loggers."""
        trainer = self.trainer
        _become(trainer._checkpoint_connector, CheckpointConnector, self)
        _become(trainer.fit_loop, FitLoop, self)
        _become(trainer.fit_loop.epoch_loop, EpochLoop, self)
        _become(trainer.fit_loop.epoch_loop.automatic_optimization, AutomaticOptimization, self)
        _become(trainer.fit_loop.epoch_loop.manual_optimization, ManualOptimization, self)
        trainer.callbacks.insert(0, CommitStep(self))
        self._agree_on_loggers()
        for logger in trainer.loggers:
            logger.log_metrics = partial(self._log, logger.log_metrics)
        for metric in trainer.lightning_module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn = self._gather_metric

    @property
    def is_replacement(self) -> bool:
        return self._job.is_replacement

    def _agree_on_loggers(self) -> None:
        """The replacement of rank 0 writes where its predecessor has written."""
        loggers = [one for one in self.trainer.loggers if hasattr(one, "_version")]
        mine = [one.version if self._job.rank == 0 else None for one in loggers]
        versions = sealed_objects.all_gather(mine)[0] if self._job.world_size > 1 else mine
        for logger, version in zip(loggers, versions, strict=True):
            logger._version = version
            if self.is_replacement and self._job.rank == 0 and isinstance(logger, CSVLogger):
                logger._experiment = ContinuedWriter(log_dir=logger.log_dir)

    def _log(self, plain: Callable[..., None], metrics: Any, *args: Any, **kwargs: Any) -> None:
        line = partial(plain, dict(metrics), *args, **kwargs)
        if self.is_skipping or (self.loop is not None and self.loop.is_open):
            self._lines.append(line)
        else:
            line()

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
        others = [one for one in trainer.callbacks if not isinstance(one, CommitStep)]
        self.results = ResultsPart(trainer)
        self._csv = CsvPart(trainer.loggers)
        schedulers = {
            f"scheduler_{number}": config.scheduler
            for number, config in enumerate(trainer.lr_scheduler_configs)
        }
        job.protect(
            model=trainer.strategy.model,
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            trainer_loops=LoopPart(trainer),
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
        self.loop = job.framework_loop(loader, _total(trainer), done)
        if self.loop.has_joined_late:
            self._csv.cut()
            fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
            fit_loop.epoch_loop.has_joined = True
            log.info("continuing at batch %d with the other ranks", job.step)
        self.is_skipping = self.loop.is_pending

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
        lines, self._lines = self._lines, []
        for line in lines:
            line()

    def repeats(self, error: BaseException) -> bool:
        """Whether the step, or the code after it, is to be run again. False: the script's error."""
        assert self.loop is not None
        self._batch, self._lines = None, []
        if not self.loop.abandon(error):
            return False
        self.is_skipping = self.loop.is_pending
        self.trainer.lightning_module._current_fx_name = None
        return True


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


class Fetcher(_DataFetcher):  # type: ignore[misc]
    """Gives the batch of the present step."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training

    def __next__(self) -> tuple[Any, int, int]:
        self._start_profiler()
        try:
            batch = self._training.take()
        finally:
            self._stop_profiler()
        self.fetched: int = self.fetched + 1
        self.done = self.fetched >= self.length
        return batch, self.fetched - 1, 0


class CommitStep(Callback):  # type: ignore[misc]
    """The first callback: the step ends before any other learns of its end."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def on_train_batch_end(self, *_: Any) -> None:
        self._training.commit()


class CheckpointConnector(_CheckpointConnector):  # type: ignore[misc]
    """The state of a replacement comes from the other ranks."""

    _taskd: Training

    def resume_start(self, *args: Any, **kwargs: Any) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING or not self._taskd.is_replacement:
            super().resume_start(*args, **kwargs)


class FitLoop(_FitLoop):  # type: ignore[misc]
    """The loop over the epochs."""

    _taskd: Training

    def setup_data(self) -> None:
        if isinstance(vars(self).get("_data_fetcher"), Fetcher):
            return
        super().setup_data()
        if self._combined_loader is not None:
            _check_data(self.trainer, self._combined_loader)
            self._data_fetcher = Fetcher(self._taskd)
            self._data_fetcher.setup(self._combined_loader)
            iter(self._data_fetcher)

    def on_run_start(self) -> None:
        super().on_run_start()
        self._taskd.start()

    @property
    def done(self) -> bool:
        return self._taskd.is_over or (not self._taskd.is_skipping and super().done)

    def on_run_end(self) -> None:
        if self._taskd.loop is not None:
            self._taskd.loop.finish()
        super().on_run_end()


class EpochLoop(_TrainingEpochLoop):  # type: ignore[misc]
    """The loop over the batches of an epoch."""

    _taskd: Training
    has_joined = False
    """This process has joined in the middle of an epoch, with the counters of the other ranks."""

    @property
    def done(self) -> bool:
        return not self._taskd.is_skipping and super().done

    def reset(self) -> None:
        if self.has_joined:
            self.has_joined = False
        else:
            super().reset()

    def advance(self, data_fetcher: Fetcher) -> None:
        while True:
            try:
                if self._taskd.is_skipping and self._taskd.loop is not None:
                    self._taskd.loop.load_committed()
                    self.batch_progress.current.ready -= 1  # set again when the step ends
                data_fetcher.fetched, data_fetcher.done = self.batch_progress.current.ready, False
                return super().advance(data_fetcher)  # type: ignore[no-any-return]
            except BaseException as error:
                if isinstance(error, StopIteration) and self._ends_epoch():
                    raise
                if not self._taskd.repeats(error):
                    raise

    def _ends_epoch(self) -> bool:
        """`on_train_batch_start` has ended the epoch: the step ends without an update."""
        try:
            self._taskd.commit()
        except Repeat as repeat:
            return not self._taskd.repeats(repeat)
        return True

    def _broadcast_sigterm_tensor(self) -> None:
        self._taskd.begin()
        if not self._taskd.is_skipping:
            super()._broadcast_sigterm_tensor()

    def update_lr_schedulers(self, *args: Any, **kwargs: Any) -> None:
        if not self._taskd.is_skipping:
            super().update_lr_schedulers(*args, **kwargs)


class KeptClosure(Closure):  # type: ignore[misc]
    """Keeps what the training step has returned before the weights are updated."""

    _taskd: Training

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        result = super().closure(*args, **kwargs)
        self._taskd.results.output = {} if result.loss is None else result.asdict()
        return result


class AutomaticOptimization(_AutomaticOptimization):  # type: ignore[misc]
    """Forward and backward passes and the update."""

    _taskd: Training

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._taskd.is_skipping:
            return dict(self._taskd.results.output)
        return super().run(*args, **kwargs)

    def _make_closure(self, *args: Any, **kwargs: Any) -> Any:
        closure = super()._make_closure(*args, **kwargs)
        return _become(closure, KeptClosure, self._taskd)


class ManualOptimization(_ManualOptimization):  # type: ignore[misc]
    """The same in a module with `automatic_optimization = False`."""

    _taskd: Training

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._taskd.is_skipping:
            return dict(self._taskd.results.output)
        output = super().run(*args, **kwargs)
        self._taskd.results.output = dict(output)
        return output


def _become(one: Any, kind: Any, training: Training) -> Any:
    """Make an object of Lightning one of a subclass that adds no constructor."""
    expected = kind.__base__
    if type(one) is not expected:
        raise SettingsError(
            [
                f"taskd.integrations.lightning: {type(one).__qualname__} takes the place of "
                f"Lightning's {expected.__qualname__}, and could not be repeated exactly"
            ]
        )
    one.__class__ = kind
    one._taskd = training
    return one


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


NOT_PROTECTED = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.StochasticWeightAveraging,
    callbacks.WeightAveraging,
)


def _check(trainer: Any, strategy: ResilientStrategy) -> None:
    """Refuse what could not be repeated exactly."""
    problems = [
        text
        for is_set, text in (
            (trainer.reload_dataloaders_every_n_epochs, "loaders that are replaced during fit"),
            (trainer._val_check_time_interval, "a time as val_check_interval"),
            (strategy._ddp_comm_state is not None, "ddp_comm_state"),
            (strategy._model_averaging_period is not None, "model_averaging_period"),
        )
        if is_set
    ]
    problems += [
        f"the callback {type(one).__name__}: it keeps weights or changes the optimizer by itself"
        for one in trainer.callbacks
        if isinstance(one, NOT_PROTECTED)
    ]
    if problems:
        raise SettingsError([f"taskd.integrations.lightning cannot protect {p}" for p in problems])


def _check_data(trainer: Any, combined: Any) -> None:
    problems = []
    if len(combined.flattened) != 1:
        problems.append("several training loaders: give it one")
    elif math.isinf(trainer.num_training_batches):
        problems.append("a training loader without a length")
    if problems:
        raise SettingsError([f"taskd.integrations.lightning cannot protect {p}" for p in problems])
