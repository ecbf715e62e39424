"""Lightning's Trainer that loses no step: `Trainer(strategy=ResilientStrategy())`.

The loops stay those of Lightning. One training batch is one step: it begins where the batch is
fetched and ends before `on_train_batch_end`; if a rank is lost in between, the batch is repeated on
all ranks. Between steps, each exchange between the ranks goes through the strategy, and is a
section: the replacement of a rank runs the code after the step again, gets the results of the
exchanges that are complete, and meets the others in the first one that is not.

`lightning_training.py` keeps the steps of the job, `lightning_loops.py` has the hooks in
Lightning's loops, `lightning_state.py` the state, `lightning_names.py` the names that all of them
need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from taskd.errors import SettingsError
from taskd.integrations import lightning_names, process_group

lightning_names.check()

from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

from taskd.integrations import lightning_loops  # noqa: E402
from taskd.integrations.lightning_training import HeldLoader, Training  # noqa: E402

T = TypeVar("T")
process_group.join_at_first_use()


class ResilientStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP strategy for a job that survives the loss of a rank without losing a step.

    It takes the same arguments as `lightning.pytorch.strategies.DDPStrategy`.
    """

    strategy_name = "taskd"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forward_redirection = lightning_loops.ForwardRedirection()
        self._training: Training | None = None
        """None: `fit` has not begun."""
        self._prepared: Training | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.lightning_module.trainer
        job = process_group.job()
        if self._prepared is None:
            self._prepared = Training(trainer, job)
            self._prepared.prepare_loggers()
        if trainer.state.fn == TrainerFn.FITTING:
            if self._training is not None:
                raise SettingsError(["fit() was called twice: a job trains once"])
            _check(trainer, self)
            self._training = self._prepared
            lightning_loops.install(self._training)
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
            (not hasattr(trainer, "val_check_interval"), "a time as val_check_interval"),
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
