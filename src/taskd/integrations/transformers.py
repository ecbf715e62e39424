"""transformers' Trainer that loses no step: `from taskd.integrations.transformers import Trainer`.

The loop stays that of transformers. A step begins where it asks for the batches of an update and
ends where it reports the end of the step; if a rank is lost in between, the loop is left and
entered again at the same step, as after a checkpoint. Logging, evaluation and saving are sections.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from taskd.errors import SettingsError
from taskd.integrations import process_group, versions
from taskd.torch import compat

versions.check("transformers", "5.22", "5.23")
versions.check("accelerate", "1.15", "1.16")

import transformers  # noqa: E402
from transformers.trainer_callback import CallbackHandler, ProgressCallback  # noqa: E402

from taskd.integrations.trainer_state import (  # noqa: E402
    AttributesPart,
    CallbackParts,
    HistoryPart,
    PositionPart,
    RankPart,
    SharedPart,
)
from taskd.integrations.transformers_checks import check, check_prepared  # noqa: E402
from taskd.torch.loop.framework_loop import FrameworkLoop  # noqa: E402

log = logging.getLogger(__name__)
T = TypeVar("T")
process_group.join_at_first_use()


class StepCallbacks(CallbackHandler):  # type: ignore[misc]
    """Ends the step before its callbacks run, and leaves out what a predecessor has reported."""

    def __init__(self, trainer: TrainerMixin, plain: CallbackHandler) -> None:
        super().__init__(
            plain.callbacks,
            plain.model,
            plain.processing_class,
            plain.optimizer,
            plain.lr_scheduler,
        )
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = super().on_train_begin(args, state, control, **kwargs)
        return self._trainer._resume(control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._trainer._is_past_epoch():
            return control
        return super().on_epoch_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._trainer._commit_step()
        return super().on_step_end(args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        if self._trainer._is_capturing():
            return control  # called again when the section is complete
        return super().on_evaluate(args, state, control, metrics, **kwargs)


class TrainerMixin:
    """Put it before any Trainer class that has the training loop of `transformers.Trainer`."""

    protected_attributes: tuple[str, ...] = ()
    """Attributes that such a class changes in a step or in an evaluation, and reads later."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop: FrameworkLoop | None = None
        self._captured: list[dict[str, Any]] | None = None
        """What is logged in a section: it is logged when the section is complete."""
        self._in_section = False
        self._has_begun = False
        """This process has begun a step."""
        self._joins_late: bool = False
        """The training had begun on the other ranks when this process joined them."""
        self._epochs_begun = self._first_epoch = 0
        super().__init__(*args, **kwargs)
        self._job = process_group.job()
        this: Any = self
        this.callback_handler = StepCallbacks(self, this.callback_handler)
        check(self)

    # The set-up

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._loop is not None:
            raise SettingsError(["train() was called twice: a job trains once"])
        if self._job.is_replacement:
            resume_from_checkpoint = None  # the state comes from the other ranks
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _prepare_for_training(self: Any, max_steps: int, loader: Any, resume: Any) -> Any:
        _forget_evaluation(self)
        model, loader = super()._prepare_for_training(max_steps, loader, resume)  # type: ignore[misc]
        check_prepared(self, model)
        transformers.set_seed(self.args.seed)  # so that a replacement has the same seeds
        shared = self._shared = SharedPart(self, max_steps)
        self._position = PositionPart(self)
        self._rank_part = RankPart(self)
        self._attributes = AttributesPart(self, self.protected_attributes)
        callbacks = self._callback_parts = CallbackParts(
            self, left_out=(ProgressCallback,)
        )  # a bar belongs to its process
        self._parts = {
            "trainer": self._shared,
            "trainer_position": self._position,
            "trainer_rank": self._rank_part,
            "trainer_history": HistoryPart(self),
            "trainer_callbacks": callbacks,
        }
        if self.protected_attributes:
            self._parts["trainer_attributes"] = self._attributes
        self._job.protect(
            model=model,
            optimizer=self.optimizer.optimizer,
            scaler=self.accelerator.scaler,
            scheduler=self.lr_scheduler,
            **self._parts,
        )
        self._start = self.state.global_step
        self._loop = self._job.framework_loop(loader, lambda: shared.total, self._start)
        self._received_epoch = shared.epoch
        self._joins_late = self._loop.has_joined_late or shared.epoch >= 0
        self._received = {name: part.state_dict() for name, part in self._parts.items()}
        self._received["trainer_callbacks"] = callbacks.loaded
        return model, loader

    def _init_training_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        self._epochs_begun = self._first_epoch = found[0]
        return found

    def _resume(self: Any, control: Any) -> Any:
        """The loop has set its sums to 0: in a replacement, bring back those of its predecessor."""
        self.control = control
        if self._loop is not None:
            self._callback_parts.notice_objects()
        if self._joins_late:
            self._bring_back()
            log.info("continuing at step %d with the other ranks", self.state.global_step)
        return self.control

    def _bring_back(self: Any) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(self._received[name])

    def _evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super()._evaluate  # type: ignore[misc]
        if not self._joins_late or self._epochs_begun > self._first_epoch:
            return plain(*args, **kwargs)
        # eval_on_start: the predecessor has done it. It counts as a section of the first turn.
        if self._loop.step is not None and int(self._loop.step) == self._start:
            self._captured = []
            try:
                plain(*args, **kwargs)
            finally:
                self._captured = None
            self._bring_back()
        return {}

    # The loop

    def _is_past_epoch(self: Any) -> bool:
        """Whether the epoch that begins has begun in the predecessor already."""
        self._epochs_begun += 1
        is_past: bool = self._epochs_begun - 1 <= self._received_epoch
        return self._joins_late and is_past

    def _run_epoch(self: Any, **kw: Any) -> None:
        loop, shared, per_step = self._loop, self._shared, self.args.gradient_accumulation_steps
        if kw["epoch"] < shared.epoch or loop.step is None:
            return  # it was done before this process has joined
        if kw["epoch"] > shared.epoch:
            is_resumed = kw["resume_from_checkpoint"] and kw["epoch"] == kw["epochs_trained"]
            done = kw["steps_trained_in_current_epoch"] // per_step if is_resumed else 0
            shared.epoch, shared.epoch_start = kw["epoch"], self.state.global_step - done
        self._no_data: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(1)))
        self._first_batch = kw["epoch"] * kw["steps_in_epoch"]
        while True:
            try:
                if loop.is_pending:
                    self._after_step(kw)
                done = self.state.global_step - shared.epoch_start
                is_over = self.control.should_epoch_stop or self.control.should_training_stop
                here = {
                    "train_dataloader": self._no_data,  # get_batch_samples has the data
                    "resume_from_checkpoint": "the running job",
                    "epochs_trained": kw["epoch"],
                    "steps_trained_in_current_epoch": done * per_step,
                }
                if is_over:
                    here["num_update_steps_per_epoch"] = done
                return super()._run_epoch(**kw | here)  # type: ignore[misc, no-any-return]
            except BaseException as error:
                if not loop.abandon(error):
                    raise

    def _after_step(self: Any, kw: dict[str, Any]) -> None:
        """A step is committed, but this process has not run it: do what follows it."""
        self._loop.is_pending = False
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(
            self._tr_loss,
            None,
            kw["model"],
            kw["trial"],
            kw["epoch"],
            kw["ignore_keys_for_eval"],
            kw["start_time"],
        )

    def get_batch_samples(self: Any, iterator: Iterator[Any], count: int, device: Any) -> Any:
        """Begin the step."""
        loop = self._loop
        if loop is None or loop.step is None:
            return super().get_batch_samples(iterator, count, device)  # type: ignore[misc]
        if self.state.global_step > loop.step:
            loop.begin_turn()
        elif not self._has_begun:
            loop.record_turn()
        self._has_begun = True
        done = self.state.global_step - self._shared.epoch_start
        first = self._first_batch + done * self.args.gradient_accumulation_steps
        given = loop.begin_attempt(list(range(first, first + count)))
        return super().get_batch_samples(iter(given), count, device)  # type: ignore[misc]

    def _commit_step(self: Any) -> None:
        if self._loop is not None:
            self._loop.commit()

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Random numbers belong to the step."""

    def _get_grad_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]
        if self._loop is not None:
            self._shared.notice_configured()
            self._shared.grad_norm = norm.item() if isinstance(norm, torch.Tensor) else norm
        return norm

    def _get_learning_rate(self: Any) -> Any:
        rate = super()._get_learning_rate()  # type: ignore[misc]
        if self._loop is not None and self._loop.is_open:
            self._position.learning_rate = rate
        return rate

    # Between steps

    def _maybe_log_save_evaluate(
        self: Any, loss: Any, norm: Any, *args: Any, learning_rate: Any = None
    ) -> None:
        norm = self._shared.grad_norm if norm is None else norm
        rate = self._position.learning_rate if learning_rate is None else learning_rate
        plain = super()._maybe_log_save_evaluate  # type: ignore[misc]

        def gather() -> None:
            control = self.control
            wanted = control.should_evaluate, control.should_save
            control.should_evaluate = control.should_save = False
            plain(self._tr_loss, norm, *args, learning_rate=rate)
            control.should_evaluate, control.should_save = wanted

        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            _, logged = self._section("log", gather)
            for logs in logged:
                self.log(logs, args[-1])
        self.control.should_log = False
        plain(self._tr_loss, norm, *args, learning_rate=rate)

    def evaluate(self: Any, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        plain = super().evaluate  # type: ignore[misc]
        several = isinstance(self.eval_dataset if eval_dataset is None else eval_dataset, dict)
        if self._loop is None or several:
            return plain(eval_dataset, *args, **kwargs)

        def attempt() -> Any:
            # A loader that was left halfway would count as the present one.
            self.accelerator.gradient_state.dataloader_references = [None]
            found = plain(eval_dataset, *args, **kwargs)
            times = _times_of_rank_0(found)
            for logs in (found, *self._captured):
                logs.update((name, times[name]) for name in times.keys() & logs.keys())
            return found

        metrics, logged = self._section("evaluation", attempt)
        for logs in logged:
            self.log(logs)
            metrics |= logs
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        self._section("checkpoint", super()._save_checkpoint, model, trial)  # type: ignore[misc]

    def store_flos(self: Any) -> None:
        plain = super().store_flos  # type: ignore[misc]
        if self._loop is None or self._in_section:
            plain()
        else:
            self._section("operations", plain)

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._captured is not None:
            self._captured.append(logs)
        else:
            super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _is_capturing(self) -> bool:
        return self._captured is not None

    def _section(
        self: Any, name: str, function: Callable[..., T], *args: Any
    ) -> tuple[T, list[dict[str, float]]]:
        """The result of the function, and what it has logged."""

        changed = self._shared, self._rank_part, self._attributes

        def attempt() -> Any:
            self._captured, self._in_section = [], True
            try:
                result = function(*args)
                logged = self._captured
            finally:
                self._captured, self._in_section = None, False
            self._shared.notice_configured()
            parts = [one.state_dict() for one in changed]
            return result, logged, parts, self.model.training

        kept = self._loop.section(name, attempt)
        if kept is None:
            raise RuntimeError(f"the result of section {name!r} of the predecessor is lost")
        result, logged, parts, is_training = kept
        for part, state in zip(changed, parts, strict=True):
            part.load_state_dict(state)
        if self.model.training != is_training:
            self.model.train(is_training)
        return result, logged

    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._shared.total = self._job.step  # it may have been told to stop
        self._loop.finish()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose job survives the loss of a rank without losing a step."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer`, in the same way."""


TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def _times_of_rank_0(metrics: dict[str, Any]) -> dict[str, float]:
    """The times that an evaluation has taken: the log would differ between the ranks by them alone,
    and each rank would have to copy all of its own log in every step."""
    found = [name for name in metrics if name.endswith("_runtime")]
    if len(found) != 1 or not dist.is_initialized():
        return {}
    names = [found[0].removesuffix(TIMES[0]) + name for name in TIMES]
    times = torch.tensor(
        [float(metrics.get(name, math.nan)) for name in names], dtype=torch.float64
    )
    times = times.to(compat.device_for_objects(None))
    dist.broadcast(times, 0)
    return dict(zip(names, times.tolist(), strict=True))


def _forget_evaluation(trainer: Any) -> None:
    """After `evaluate()` accelerate takes the model for prepared, and would not wrap it in DDP.

    All ranks would then train models of their own, without an error.
    """
    if trainer.args.world_size > 1:
        vars(trainer.model).pop("_is_accelerate_prepared", None)
