"""The script's own variables that go from one step to the next, without any call of ours.

A running average, the best result so far, a hidden state, a batch that is fetched one step ahead:
the next step depends on them as it does on the weights. An abandoned attempt is undone in them, too
(`Undone`), and a replacement begins with what its predecessor had in them.

Small ones are kept in the node's shared memory. Tensors and arrays are a part of the protected
state, like the script's objects: ranks compare them, and copy those that only one of them has.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator
from copy import copy
from enum import Enum
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from taskd.torch.loop import (
    carried_names,
    frame_locals,
    loop_counters,
    object_kinds,
    peer_values,
)
from taskd.torch.loop.attempt_values import (
    MAX_ITEMS,
    OBJECTS,
    AttemptValues,
    Completed,
    Values,
    put_into,
)
from taskd.torch.loop.loop_objects import Kept, LoopObjects
from taskd.torch.loop.object_kinds import is_iterator

log = logging.getLogger(__name__)

PART = "variables of the loop"
"""The name of their part in the protected state."""
WATCHED_TURNS = 4
"""In so many turns of a process, iterators are looked for in all that the loop uses."""
_PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]


class Kind(Enum):
    """How the value of a variable is kept."""

    SMALL = "in shared memory"
    STATE = "as a part of the state"
    OTHER = "not at all"


class LoopVariables:
    """Those of the function that has the loop over the steps."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder` is in the node's shared memory; None: nothing is kept."""
        # A rank that is lost may have begun the turn after the one at which the job resumes.
        self._folder = folder
        self._turns = [AttemptValues(folder, rank, f"turn{last}-values") for last in (0, 1)]
        self._frame: FrameType | None = None
        self.names: tuple[str, ...] = ()
        self._last_names: tuple[str, ...] = ()
        """Of the last step, read after the loop: a process that begins there has no round of it."""
        self.objects = LoopObjects()
        """What the steps change in place."""
        self._has_warned = False
        self._looked_at = 0
        self._is_off = False

    def switch_off(self) -> None:
        """The loop belongs to a framework, whose adapter keeps what is needed."""
        self._is_off = True

    def forget_predecessor(self) -> None:
        """All ranks start together."""
        for one in self._turns:
            one.forget_predecessor()

    def bind(self) -> None:
        """The loop over the steps asks for the next one."""
        frame = None if self._is_off else _loop_frame()
        self._frame = frame
        self.names = () if frame is None else carried_names.of_loop(frame.f_code, frame.f_lasti)
        last = () if frame is None else carried_names.of_last_round(frame.f_code, frame.f_lasti)
        self._last_names = tuple(name for name in last if name not in self.names) if last else ()
        self._bind_objects(frame)
        if not self._has_warned:
            self._warn()

    def _bind_objects(self, frame: FrameType | None) -> None:
        if frame is None or not self.names:
            return self.objects.bind(frame, ())
        present = frame_locals.read(frame)
        kinds = {name: _kind(present[name]) for name in self.names if name in present}
        # A list or dictionary can also be changed in place, within an attempt.
        simple = tuple(
            name
            for name, kind in kinds.items()
            if kind is not Kind.OTHER and not isinstance(present[name], list | dict | tuple)
        )
        others = tuple(name for name in kinds if name not in simple)
        states = tuple(name for name in others if kinds[name] is Kind.STATE)
        self.objects.bind(frame, simple, Kept(others, states))

    def counters(self, iterator: Iterator[Any]) -> list[str]:
        """What counts the rounds of the loop beside this iterator over the steps."""
        return [] if self._is_off else loop_counters.names_around(iterator, self._frame)

    def begin_turn(self, number: int, joins: bool) -> None:
        """`joins`: this process has run none of the turns before."""
        self.bind()
        turns, frame = self._turns[number % 2], self._frame
        if frame is None:
            return
        if joins and number:
            kept = turns.of_step(number)
            if kept is not None:
                names = self.names + self._last_names
                self._put({name: kept[name] for name in names if name in kept})
                self.objects.put(kept.get(OBJECTS, {}))
            else:
                self.warn_about_first_values(number)
        small = dict(self._values(Kind.SMALL)) | dict(self._of_last_step())
        turns.save(number, small | self.written())

    def completed(
        self, step: int, peers: Collection[int], at_update: Values | None = None
    ) -> Completed | None:
        """What the attempt at this step would have left, as far as a peer shows it.

        `at_update`: what it had left when the update began.
        """
        mine = self._turns[step % 2].kept_at(step)
        if self._folder is None or mine is None:
            return None
        return peer_values.complete(self._folder, step, mine, at_update, self.names, peers)

    def written(self) -> Values:
        """The content of the objects of the loop, as one value."""
        return {OBJECTS: self.objects.written()}

    def put(self, frame: FrameType, values: Values) -> None:
        """What the attempts at a step have left."""
        put_into(frame, values)
        self.objects.put(values.get(OBJECTS, {}))

    def warn_about_first_values(self, number: int) -> None:
        """The process of this rank that was lost has left nothing on this node."""
        if small := sorted(dict(self._values(Kind.SMALL))):
            log.warning(
                "what the lost process had in %s at step %d is not known: they begin with their "
                "first values. If the training depends on them, give them to protect()",
                ", ".join(small),
                number,
            )

    def end(self, values: dict[str, Any]) -> None:
        """This process has joined after the last step: what the attempts at it have left."""
        if self._frame is not None:
            self.put(self._frame, values)

    def leave(self) -> None:
        """The loop has ended."""
        self._frame, self.names, self._last_names = None, (), ()
        self.objects.bind(None, ())

    # The part of the protected state

    @property
    def may_differ(self) -> bool:
        """Whether there is a tensor or an array, or may be later."""
        unset = any(value is None for _, value in self._values(Kind.SMALL))
        return unset or any(True for _ in self._values(Kind.STATE))

    def state_dict(self) -> dict[str, Any]:
        if not self.names:
            return {}
        return {name: _detached(value) for name, value in self._values(Kind.STATE)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put({name: state[name] for name in self.names if name in state})

    def _put(self, values: Values) -> None:
        if self._frame is None or not values:
            return
        present = frame_locals.read(self._frame)
        for name, new in values.items():
            old = present.get(name)
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.is_leaf:
                new.requires_grad_(old.requires_grad)
        put_into(self._frame, values)

    def _values(self, *kinds: Kind) -> Iterator[tuple[str, Any]]:
        if self._frame is None or not self.names:
            return
        present = frame_locals.read(self._frame)
        for name in self.names:
            if name in present and _kind(present[name]) in kinds:
                yield name, present[name]

    def _of_last_step(self) -> Iterator[tuple[str, Any]]:
        if self._frame is None or not self._last_names:
            return
        present = frame_locals.read(self._frame)
        for name in self._last_names:
            if name in present and _kind(present[name]) is Kind.SMALL:
                yield name, present[name]

    def _warn(self) -> None:
        """An iterator has a position that no other process can have."""
        carried = (name for name, value in self._values(Kind.OTHER) if is_iterator(value))
        self._looked_at += 1
        if self._looked_at == 1:
            self._warn_about_loops_around()
        names = {*carried, *(self.objects.iterators() if self._looked_at <= WATCHED_TURNS else ())}
        for name in sorted(names):
            self._has_warned = True
            log.warning(
                "the iterator %r goes from one step to the next: a repeated step and a "
                "replacement would get other data. Use job.batches(loader), or choose the "
                "batch by the number of the step",
                name,
            )

    def _warn_about_loops_around(self) -> None:
        """The attempts are in a generator of the script, and another loop takes its elements."""
        frame, inner = self._frame, ""
        while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            inner, frame = inner or frame.f_code.co_name, frame.f_back
            if frame is None or not (names := _kept_around(frame)):
                continue
            log.warning(
                "the attempts are in the generator %s(), and the loop over it in %s() has state of "
                "its own, which a replacement would not get: %s. Move this state into %s(), into "
                "an object that %s() uses, or into an object with state_dict and load_state_dict "
                "that is given to protect()",
                inner,
                frame.f_code.co_name,
                ", ".join(names),
                inner,
                inner,
            )


def _kept_around(frame: FrameType) -> list[str]:
    carried = {*carried_names.of_loop(frame.f_code, frame.f_lasti)}
    uses = carried_names.uses_of_loop(frame.f_code, frame.f_lasti)
    present = frame_locals.read(frame)
    changed = (name for name in uses.read - uses.fresh if name in present)
    return sorted(carried.union(one for one in changed if object_kinds.is_changeable(present[one])))


class Undone:
    """The variables that an attempt reads and then sets, as they were when it began.

    They are the same objects again, with the content that they had: other variables may refer to
    them, and an optimizer to a tensor.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        names = carried_names.of_innermost_loop(frame.f_code, frame.f_lasti)
        present = frame_locals.read(frame) if names else {}
        self._values = {name: present[name] for name in names if name in present}
        self._copies = [(value, _saved(value)) for value in self._values.values()]

    def restore(self) -> None:
        if not self._values:
            return
        for value, copied in self._copies:
            if copied is value:
                continue
            if isinstance(value, list):
                value[:] = copied
            elif isinstance(value, dict):
                value.clear()
                value.update(copied)
            else:
                object_kinds.put_leaf_back(value, copied)
        put_into(self._frame, self._values)

    def warn_about_loss(self, step: int) -> None:
        """The step was completed by another rank, and the state after it came from there."""
        names = [*sorted(self._values), "objects that steps change"]
        log.warning(
            "this rank has received the state after step %d from a peer: %s are those before it. "
            "If the training depends on them, give them to protect()",
            step,
            ", ".join(names),
        )


def unprotected_attributes(frame: FrameType, protected: Collection[object]) -> list[str]:
    """Attributes that an attempt reads and then sets, of objects that are neither protected nor of
    a class or module of the script."""
    names = carried_names.attributes_of_innermost_loop(frame.f_code, frame.f_lasti)
    found = []
    present = frame_locals.read(frame) if names else {}
    for variable, attribute in names:
        owner = present.get(variable, frame.f_globals.get(variable))
        is_own = object_kinds.kind_of(type(owner)) is object_kinds.Kind.OWN
        is_own |= isinstance(owner, ModuleType) and object_kinds.is_of_script(owner.__name__)
        is_known = owner is None or is_own or any(owner is one for one in protected)
        if not is_known and _kind(getattr(owner, attribute, owner)) is not Kind.OTHER:
            found.append(f"{variable}.{attribute}")
    return found


def _loop_frame() -> FrameType | None:
    """The function with the loop over the steps.

    A progress bar or a generator of the script may be between that loop and us: it has no attempts.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        if carried_names.has_with(frame.f_code, frame.f_lasti):
            break
        frame = frame.f_back
    return frame


def _kind(value: Any) -> Kind:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return Kind.SMALL
        case torch.Tensor():
            if type(value) is not torch.Tensor or value.layout != torch.strided:
                return Kind.OTHER
            is_small = value.numel() <= 1 and value.device.type == "cpu"
            return Kind.SMALL if is_small or value.grad_fn is not None else Kind.STATE
        case list() | tuple() | dict():
            if len(value) > MAX_ITEMS:
                return Kind.OTHER
            kinds = set(map(_kind, [*value.values()] if isinstance(value, dict) else value))
            if Kind.OTHER in kinds:
                return Kind.OTHER
            return Kind.STATE if Kind.STATE in kinds else Kind.SMALL
        case _:
            is_array = type(value).__module__ == "numpy" and hasattr(value, "dtype")
            return Kind.STATE if is_array and value.dtype != object else Kind.OTHER


def _detached(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.detach()
        case list() | tuple():
            return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
        case dict():
            return {name: _detached(item) for name, item in value.items()}
        case _:
            return value


def _saved(value: Any) -> Any:
    """What a change in place does not reach."""
    if isinstance(value, torch.Tensor):
        is_kept = type(value) is torch.Tensor and value.layout == torch.strided
        return value.detach().clone() if is_kept and value.grad_fn is None else value
    if type(value) in (list, dict) or type(value) is np.ndarray:
        return copy(value)
    return value
