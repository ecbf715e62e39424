"""Lightning's loops, with hooks where a step begins, where it ends and where it is repeated."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from taskd.errors import SettingsError
from taskd.integrations.lightning_training import Training
from taskd.torch.loop.framework_loop import Repeat


def install(training: Training) -> None:
    """Give the hooks to the loops of the trainer."""
    trainer = training.trainer
    epoch_loop = trainer.fit_loop.epoch_loop
    _become(trainer._checkpoint_connector, CheckpointConnector, training)
    _become(trainer.fit_loop, FitLoop, training)
    _become(epoch_loop, EpochLoop, training)
    _become(epoch_loop.automatic_optimization, AutomaticOptimization, training)
    _become(epoch_loop.manual_optimization, ManualOptimization, training)


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


class CheckpointConnector(_CheckpointConnector):  # type: ignore[misc]
    """The state of a replacement comes from the other ranks."""

    _taskd: Training

    def resume_start(self, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            return super().resume_start(checkpoint_path, *args, **kwargs)  # type: ignore[no-any-return]
        is_resumed = self._taskd.agreed(checkpoint_path is not None)
        if not self._taskd.is_replacement:
            return super().resume_start(checkpoint_path, *args, **kwargs)  # type: ignore[no-any-return]
        # After a checkpoint there is no sanity check, so its predecessor has made none.
        self.trainer.fit_loop.epoch_loop.val_loop.restarting = is_resumed
        return None


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

    def on_advance_start(self) -> None:
        super().on_advance_start()
        # Lightning keeps it to the end of the epoch: the counters of a replacement would differ.
        self.reset_restart_stage()

    @property
    def done(self) -> bool:
        return self._taskd.is_over or (not self._taskd.is_skipping and super().done)

    def on_run_end(self) -> None:
        self._taskd.finish()
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


class ForwardRedirection(_DDPForwardRedirection):  # type: ignore[misc]
    """Calls a method of the module through DDP: meanwhile `forward` stands for that method."""

    def __call__(self, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        forward = module.forward
        try:
            return super().__call__(wrapper, module, *args, **kwargs)
        except BaseException:
            # The attempt may have been left before the method was called, or after it.
            module.forward = forward
            self.on_after_outer_forward(wrapper, module)
            raise


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
        module = self.trainer.lightning_module
        toggled = module._param_requires_grad_state
        needs_gradient = [(one, one.requires_grad) for one in module.parameters()]
        try:
            output = super().run(*args, **kwargs)
        except BaseException:
            # The attempt may have been left between `toggle_optimizer` and `untoggle_optimizer`.
            module._param_requires_grad_state = toggled
            for parameter, needs in needs_gradient:
                parameter.requires_grad = needs
            raise
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


def _check_data(trainer: Any, combined: Any) -> None:
    problems = []
    if len(combined.flattened) != 1:
        problems.append("several training loaders: give it one")
    elif math.isinf(trainer.num_training_batches):
        problems.append("a training loader without a length")
    if problems:
        raise SettingsError([f"taskd.integrations.lightning cannot protect {p}" for p in problems])
