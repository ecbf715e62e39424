"""What the script asked to protect, and how its pieces are reached.

`undo.py` saves the small ones for a step, `transfer.py` moves all of them between ranks,
`emergency_checkpoint.py` writes them to a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from taskd.core.worker.state_classes import Agreement
from taskd.errors import SettingsError
from taskd.torch import compat
from taskd.torch.groups import ddp_buffers

OPTIONS = "options of the optimizers"
"""A name that no keyword argument of `protect` can have."""


class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`: schedulers, samplers, your own objects."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class OptimizerOptions:
    """Learning rates and the like. Schedulers change them, inside of steps or between them.

    The last dictionary of each optimizer is what it holds for all its parameters together.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: list[list[dict[str, Any]]] | None = None

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """A copy, which must not be changed: it is the same one until something has changed."""
        if self._last is None or not all(map(_holds, self._optimizers, self._last)):
            self._last = self._copied()
        return self._last

    def _copied(self) -> list[list[dict[str, Any]]]:
        return [
            [
                *(
                    {name: _copy(value) for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ),
                {name: _copy(optimizer.state[name]) for name in _common_names(optimizer)},
            ]
            for optimizer in self._optimizers
        ]

    def load_state_dict(self, state: list[list[dict[str, Any]]]) -> None:
        for optimizer, (*groups, common) in zip(self._optimizers, state, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - values.keys() - {"params"}:
                    del group[name]
                group.update(deepcopy(values))
            for name in {*_common_names(optimizer)} - common.keys():
                del optimizer.state[name]
            own: dict[Any, Any] = optimizer.state
            own.update(deepcopy(common))


def _holds(optimizer: Optimizer, known: list[dict[str, Any]]) -> bool:
    """Whether its options are those that were copied."""
    *groups, common = known
    state: dict[Any, Any] = optimizer.state
    return (
        len(groups) == len(optimizer.param_groups)
        and all(map(_has_options, optimizer.param_groups, groups))
        and _common_names(optimizer) == list(common)
        and all(_is_equal(state[name], value) for name, value in common.items())
    )


def _has_options(group: dict[str, Any], known: dict[str, Any]) -> bool:
    if len(group) != len(known) + 1:
        return False
    for name, value in known.items():
        present = group.get(name, _MISSING)
        # What is the same object in a copy never changes.
        if present is not value and not _is_equal(present, value):
            return False
    return True


_MISSING = object()


def _common_names(optimizer: Optimizer) -> list[Any]:
    """The keys of its state that are not parameters."""
    return [name for name in optimizer.state if not isinstance(name, torch.Tensor)]


class Protected:
    """The protected objects of one training job in this process."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scaler: torch.amp.GradScaler | Sequence[torch.amp.GradScaler] | None,
        parts: dict[str, Stateful],
    ) -> None:
        self.models: list[nn.Module] = _listed(model)
        self.optimizers: list[Optimizer] = _listed(optimizer)
        # A scaler that is disabled, as usual with bfloat16, has no state.
        self.scalers: list[torch.amp.GradScaler] = [
            one for one in _listed(scaler) if one.is_enabled()
        ]
        self.parts: dict[str, Stateful] = {**parts, OPTIONS: OptimizerOptions(self.optimizers)}
        """The script's own objects, and what belongs to no tensor of an optimizer."""
        self.step: int | None = None
        """In a repair: the step whose state this is. None: of no step, or partly of another."""
        self.parameters = list(dict.fromkeys(p for m in self.models for p in m.parameters()))
        self.has_left_gradients = False
        """The last step made no update: its gradients belong to the next one, too."""
        self.agreement: Agreement | None = None
        """What the ranks know about each other's state. None: they have not compared it yet."""
        self._recorded: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._turn: tuple[int, dict[str, Any]] = (-1, {})
        """The last turn that has begun, and the parts that have changed since the step before."""
        self.received_turn: dict[str, Any] = {}
        """Parts that a peer had changed between the last step and the turn that it has begun."""
        self._slots = [slot for model in self.models for slot in ddp_buffers.buffer_slots(model)]
        _check(self)

    def objects(self) -> list[object]:
        """Everything that was given to `protect`, and the modules in it."""
        modules = [module for model in self.models for module in model.modules()]
        return [*self.parts.values(), *self.optimizers, *self.scalers, *modules]

    def record_parts(self) -> None:
        """Remember the parts as they are now, when a step is committed.

        What the script does with them between two steps is not part of the committed step: a
        replacement does it, too, before its first step.
        """
        self._before = self._recorded
        self._recorded = self.copy_parts()

    def copy_parts(self) -> dict[str, Any]:
        """The state of each part, which the script cannot change any more."""
        return {
            name: part.state_dict()
            if isinstance(part, OptimizerOptions)
            else _copy(part.state_dict())
            for name, part in self.parts.items()
        }

    def record_before(self) -> None:
        """The step that was last recorded is abandoned."""
        self._recorded = self._before

    def recorded_parts(self) -> dict[str, Any]:
        """The state of each part when the last step was committed."""
        if not self._recorded:
            return {name: part.state_dict() for name, part in self.parts.items()}
        return self._recorded

    def load_recorded(self) -> None:
        """Bring the parts back to the last commit."""
        for name, state in self._recorded.items():
            self.parts[name].load_state_dict(_copy(state))

    def record_turn(self, turn: int) -> None:
        """Remember what the code between two steps has done to the parts: the next one begins."""
        changed, recorded = {}, self._recorded
        for name, part in self.parts.items():
            state = part.state_dict()
            before = recorded.get(name, _MISSING)
            if state is not before and not _is_equal(state, before):
                changed[name] = _copy(state)
        self._turn = turn, changed

    def turn_parts(self, step: int) -> dict[str, Any] | None:
        """The parts that have changed after the last step. None: its code is not complete here."""
        turn, changed = self._turn
        return changed if turn == step else None

    def keep_turn(self, step: int) -> None:
        """The state of this step was received: what this process itself has done after it counts.

        It has run the code after that step, and does not run it again.
        """
        self.received_turn |= _copy(self.turn_parts(step) or {})

    def parts_to_resume(self, step: int) -> dict[str, Any]:
        """Every part as the step after needs it, as far as this process knows."""
        return self.recorded_parts() | (self.turn_parts(step) or {})

    def enter_turn(self) -> None:
        """This process begins with the next step: the code before it has run in the peers."""
        for name, state in self.received_turn.items():
            if name in self.parts:
                self.parts[name].load_state_dict(state)
        self.received_turn = {}

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """As if nothing belonged to this rank alone: for a copy that no other rank reads."""
        agreement, self.agreement = self.agreement, None
        try:
            yield
        finally:
            self.agreement = agreement

    def own_parts(self, step: int) -> set[str]:
        """The parts that belong to this rank alone in the state of that step."""
        own = self.agreement.own_parts if self.agreement is not None else {}
        return {name for name in self.parts if 0 <= own.get(name, -1) <= step}

    def has_own_buffers(self, step: int) -> bool:
        """Whether the buffers belong to this rank alone in the state of that step."""
        since = self.agreement.buffers_since if self.agreement is not None else -1
        return 0 <= since <= step

    def buffers(self) -> list[torch.Tensor]:
        """Every buffer of every model."""
        return ddp_buffers.read_slots(self._slots)

    def buffer_name(self, place: int) -> str:
        """The name of one of `buffers`, as in the model."""
        module, name = self._slots[place]
        paths = (
            path
            for model in self.models
            for path, one in getattr(model, "module", model).named_modules()
            if one is module
        )
        return f"{next(paths, '')}.{name}".lstrip(".")

    def put_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        for (module, name), buffer in zip(self._slots, buffers, strict=True):
            compat.buffers_of(module)[name] = buffer

    def ddp_models(self) -> list[DistributedDataParallel]:
        return [model for model in self.models if isinstance(model, DistributedDataParallel)]


PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
MAX_DEPTH = 16


def _copy(value: Any, depth: int = 0) -> Any:
    """As `deepcopy`, which takes ten times as long for plain numbers in lists and dictionaries."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if depth < MAX_DEPTH:  # deeper ones may contain themselves
        if kind is dict:
            return {
                key: one if type(one) in PLAIN else _copy(one, depth + 1)
                for key, one in value.items()
            }
        if kind is tuple and PLAIN.issuperset(map(type, value)):
            return value
        if kind is list or kind is tuple:
            return kind([one if type(one) in PLAIN else _copy(one, depth + 1) for one in value])
    return deepcopy(value)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two states are the same. False if that is not easy to tell."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in PLAIN:
        return bool(one == other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _is_equal(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, torch.Tensor):
        is_alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return is_alike and torch.equal(one, other)
    return isinstance(one, bool | int | float | str | bytes) and bool(one == other)


def _check(protected: Protected) -> None:
    problems = [
        f"protect({name}=…): {type(part).__name__} has no state_dict and load_state_dict"
        for name, part in protected.parts.items()
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict"))
    ]
    if any(model.static_graph for model in protected.ddp_models()):
        problems.append(
            "DDP(static_graph=True) cannot be protected: a rank that joins later would not know "
            "the graph that the others have recorded; leave static_graph out"
        )
    first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if first and any(
        isinstance(module, first.FullyShardedDataParallel)
        for model in protected.models
        for module in model.modules()
    ):
        problems.append(
            "FullyShardedDataParallel (FSDP1) cannot be protected: a step that was interrupted in "
            "it cannot be undone; use fully_shard (FSDP2)"
        )
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero and any(isinstance(one, zero.ZeroRedundancyOptimizer) for one in protected.optimizers):
        problems.append(
            "ZeroRedundancyOptimizer cannot be protected: each rank holds another part of its "
            "state, and no rank could give it to a replacement; use fully_shard"
        )
    if any(_package(one) == "deepspeed" for one in (*protected.models, *protected.optimizers)):
        problems.append(
            "DeepSpeed cannot be protected by protect(): its engine updates flat copies of the "
            "weights, each rank its own part, and counts its own steps. For ZeRO stages 1 and 2 "
            "use taskd.integrations.deepspeed.protect, otherwise fully_shard"
        )
        raise SettingsError(problems)  # what follows would read a torch optimizer
    for optimizer in protected.optimizers:
        problems += _problems_of_optimizer(optimizer, protected.optimizers)
    if problems:
        raise SettingsError(problems)
    known = set(protected.parameters)
    for optimizer in protected.optimizers:
        for group in optimizer.param_groups:
            if not known.issuperset(group["params"]):
                problems.append("the optimizer has parameters that no protected model has")
                break
    if problems:
        raise SettingsError(problems)


def _problems_of_optimizer(optimizer: Any, others: Sequence[object]) -> list[str]:
    """An optimizer around another one (SAM, Lookahead) leaves most of the state to that one."""
    name, is_optimizer = type(optimizer).__name__, isinstance(optimizer, Optimizer)
    if not (is_optimizer or hasattr(optimizer, "register_step_pre_hook")):
        found = _optimizers_in(optimizer)
        instead = f": give it {name}.{found[0][0]}" if found else ""
        return [f"protect(optimizer=…): {name} is not a torch.optim.Optimizer{instead}"]
    return [
        f"{name} updates by another optimizer, {attribute}, which has a state of its own: give "
        f"that one to protect(), or both if {name} itself remembers something from step to step"
        for attribute, inner in _optimizers_in(optimizer)
        if inner.state is not optimizer.state and not any(inner is one for one in others)
    ]


def _optimizers_in(one: object) -> list[tuple[str, Optimizer]]:
    there = getattr(one, "__dict__", {})
    return [(name, value) for name, value in there.items() if isinstance(value, Optimizer)]


def _package(one: object) -> str:
    return type(one).__module__.partition(".")[0]
