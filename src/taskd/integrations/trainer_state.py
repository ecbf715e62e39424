"""The state of a transformers Trainer, as parts that a job can protect.

What all ranks hold alike, what belongs to a rank, the log, and the callbacks are separate parts:
a part that differs between ranks is copied in every step.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import torch

from taskd.wire.json_reading import loads

POSITION = ("epoch", "global_step")
BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
"""Attributes of `TrainerState`."""
LOSS = "_tr_loss"
POSITIONS = ("_globalstep_last_logged", "_initial_global_step")
SUMS = ("_total_loss_scalar", "current_flos", "_initial_num_input_tokens_seen")
"""Attributes of `Trainer`, which exist when its loop has begun: numbers."""
PLAIN = (bool, int, float, str, type(None))


def _plain(value: Any) -> Any:
    """A number of NumPy or torch, or any other object that was logged."""
    return value.item() if hasattr(value, "item") else str(value)


ENCODER = json.JSONEncoder(sort_keys=True, default=_plain)


class TextPart:
    """A part whose state is a text: it is read several times per step, and a text is cheap."""

    def state_dict(self) -> str:
        return ENCODER.encode(self.values())

    def load_state_dict(self, state: str) -> None:
        self.set_values(loads(state))

    def values(self) -> dict[str, Any]:
        raise NotImplementedError

    def set_values(self, values: dict[str, Any]) -> None:
        raise NotImplementedError


class PositionPart(TextPart):
    """What follows from the number of the step. It changes after the optimizer's update."""

    follows_from_step = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.learning_rate: float | None = None

    def values(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "state": {name: getattr(state, name) for name in POSITION},
            "learning_rate": self.learning_rate,
        }

    def set_values(self, values: dict[str, Any]) -> None:
        for name, value in values["state"].items():
            setattr(self._trainer.state, name, value)
        self.learning_rate = values["learning_rate"]


class SharedPart(TextPart):
    """The best result, the switches of the callbacks, what a model has configured.

    Nothing in it changes after the optimizer's update: what a lost rank has made of it then would
    not be known (`core/worker/state_evidence.py`).
    """

    def __init__(self, trainer: Any, total: int) -> None:
        """`total`: the number of steps of the training, if nothing ends it early."""
        self._trainer, self.total = trainer, total
        self.epoch = -1
        """The epoch that has begun. -1: none has."""
        self.epoch_start = 0
        """The number of steps before this epoch."""
        self.grad_norm: float | None = None
        self._configs = [
            Changes(config)
            for name in ("config", "generation_config")
            if hasattr(config := getattr(trainer.model, name, None), "__dict__")
        ]
        self._configured: list[dict[str, Any]] = [{} for _ in self._configs]

    def notice_configured(self) -> None:
        """A pass of the model is over: it may have changed its configuration."""
        self._configured = [one.found() for one in self._configs]

    def values(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "state": {name: getattr(trainer.state, name) for name in BEST},
            "control": trainer.control.state()["args"],
            "positions": {name: getattr(trainer, name, 0) for name in POSITIONS},
            "place": (self.epoch, self.epoch_start, self.total),
            "grad_norm": self.grad_norm,
            "configured": self._configured,
        }

    def set_values(self, values: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in values["state"].items():
            setattr(trainer.state, name, value)
        for name, value in values["control"].items():
            setattr(trainer.control, name, value)
        for name, value in values["positions"].items():
            setattr(trainer, name, value)
        self.epoch, self.epoch_start, self.total = values["place"]
        self.grad_norm = values["grad_norm"]
        self._configured = values["configured"]
        for one, found in zip(self._configs, self._configured, strict=True):
            one.put(found)


MISSING = object()


class Changes:
    """What has changed since now in the numbers, strings and switches of an object.

    The forward pass of a model may set them: `problem_type` of a classifier, for example.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = vars(owner)
        self._before = {name: value for name, value in self._owner.items() if type(value) in PLAIN}

    def found(self) -> dict[str, Any]:
        before = self._before
        return {
            name: value
            for name, value in self._owner.items()
            if before.get(name, MISSING) is not value  # nearly all are the same objects
            and type(value) in PLAIN
            and (name not in before or before[name] != value)
        }

    def put(self, found: dict[str, Any]) -> None:
        for name in self.found().keys() - found.keys():
            if name in self._before:
                self._owner[name] = self._before[name]
            else:
                del self._owner[name]
        self._owner.update(found)


class RankPart(TextPart):
    """Sums of this rank, and what it has saved. Nothing changes after the optimizer's update."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def values(self) -> dict[str, Any]:
        trainer = self._trainer
        loss = getattr(trainer, LOSS, None)
        return {
            "stateful_callbacks": trainer.state.stateful_callbacks,
            "loss": 0.0 if loss is None else loss.item(),
            "sums": {name: getattr(trainer, name, 0) for name in SUMS},
            "operations": trainer.state.total_flos,
            "tokens": trainer.state.num_input_tokens_seen,
        }

    def set_values(self, values: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.state.stateful_callbacks = values["stateful_callbacks"]
        setattr(trainer, LOSS, torch.tensor(values["loss"], device=trainer.args.device))
        for name, value in values["sums"].items():
            setattr(trainer, name, value)
        trainer.state.total_flos = values["operations"]
        trainer.state.num_input_tokens_seen = values["tokens"]


class AttributesPart:
    """Attributes that a subclass of the Trainer has added: sums, lists and dictionaries of them."""

    def __init__(self, trainer: Any, names: tuple[str, ...]) -> None:
        self._trainer, self._names = trainer, names

    def state_dict(self) -> dict[str, Any]:
        return {name: deepcopy(getattr(self._trainer, name)) for name in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._trainer, name, deepcopy(value))


class HistoryPart:
    """The log. It only grows, so what is new is encoded, and not all of it in every step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._entries: list[str] = []
        self._encoded = "[]"

    def state_dict(self) -> str:
        """The same object as the last time, if nothing is new: then nothing reads it again."""
        history, entries = self._trainer.state.log_history, self._entries
        if len(history) != len(entries):
            del entries[len(history) :]
            entries += [json.dumps(one, default=_plain) for one in history[len(entries) :]]
            self._encoded = f"[{', '.join(entries)}]"
        return self._encoded

    def load_state_dict(self, state: str) -> None:
        if state != self.state_dict():
            self._trainer.state.log_history[:] = loads(state)
            self._entries, self._encoded = [], "[]"
            self.state_dict()


class CallbackParts(TextPart):
    """Numbers, strings and switches that callbacks keep as attributes."""

    def __init__(self, trainer: Any, left_out: tuple[type, ...] = ()) -> None:
        """`left_out`: kinds of callbacks whose state is not that of the job."""
        self._trainer, self._left_out = trainer, left_out
        self.loaded = "{}"
        """What was loaded last. `state_dict` can have more: attributes that are None here, but were
        objects in the process that the state comes from."""
        self._begun: dict[str, Any] = self.values()
        self._objects: dict[str, set[str]] = {}
        """Attributes that are objects since the training has begun, as an open file."""

    def notice_objects(self) -> None:
        """The training begins. A state from before must not take away what it has opened."""
        now = self.values()
        self._objects = {
            number: kept.keys() - now.get(number, {}).keys() for number, kept in self._begun.items()
        }

    def values(self) -> dict[str, Any]:
        return {
            str(number): {
                name: value for name, value in vars(callback).items() if type(value) in PLAIN
            }
            for number, callback in enumerate(self._callbacks)
        }

    def load_state_dict(self, state: str) -> None:
        self.loaded = state
        super().load_state_dict(state)

    def set_values(self, values: dict[str, Any]) -> None:
        for number, callback in enumerate(self._callbacks):
            kept = self._objects.get(str(number), set())
            found = values.get(str(number), {})
            vars(callback).update({name: found[name] for name in found.keys() - kept})

    @property
    def _callbacks(self) -> list[Any]:
        found: list[Any] = self._trainer.callback_handler.callbacks
        return [one for one in found if not isinstance(one, self._left_out)]
