"""The objects of the script that its steps change in place, found through the code of the loop.

The variables that the loop reads lead to them, and those of the functions that it calls. What they
contain is brought back after an abandoned attempt, and is there again in a replacement.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from taskd.torch.loop import (
    carried_names,
    frame_locals,
    object_kinds,
    object_reader,
    object_writer,
    written_objects,
)
from taskd.torch.loop.attempt_values import put_into
from taskd.torch.loop.hidden_places import Place, Reached
from taskd.torch.loop.object_content import Content
from taskd.torch.loop.object_kinds import Kind
from taskd.torch.loop.written_objects import NotPlain

log = logging.getLogger(__name__)

_STATEFUL = (Optimizer, LRScheduler, AveragedModel)
"""They have no other use than to go from step to step."""
_OF_OPTIMIZERS = frozenset(("defaults", "state", "param_groups", "_zero_grad_profile_name"))
"""Attributes of every optimizer. They are protected, or never change."""


@dataclass(frozen=True, slots=True)
class Names:
    """Where the objects are."""

    local: tuple[str, ...] = ()
    """Variables of the function with the loop."""
    outer: tuple[str, ...] = ()
    """Variables of its module."""
    rebound: frozenset[str] = frozenset()
    """Of both, the ones that functions set: the variable has to be set again, not an object."""
    read: tuple[str, ...] = ()
    """All variables that the loop reads."""
    called: frozenset[str] = frozenset()
    """Global variables that the functions read which it calls."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Variables that go from one step to the next, and may have objects in them."""

    others: tuple[str, ...] = ()
    """They are set again in each step, also to objects that are not kept by themselves."""
    states: tuple[str, ...] = ()
    """Their tensors are a part of the protected state."""


NOTHING_KEPT = Kept()


class LoopObjects:
    """Those of one loop."""

    def __init__(self) -> None:
        self._names = Names()
        self._frame: FrameType | None = None
        self._carried: tuple[str, ...] = ()
        self._kept = NOTHING_KEPT
        self._content: Content | None = None
        self._bound: dict[str, Any] = {}
        self._others = set[int]()
        """The ids of objects that are kept in another way."""
        self._optimizers: dict[str, Optimizer] = {}
        """The protected ones whose class is not torch's, by the names for their attributes."""
        self._models: Sequence[nn.Module] = ()
        self._reached: Reached | None = None
        self._places: dict[str, Place] = {}
        self._absent: list[Place] = []
        """Those that had no value when the attempt began."""
        self._first: dict[str, Any] | None = None
        """What they contained before the first step of this process, written down."""
        self._has_put = False
        """This process has got what its predecessor had at another moment."""
        self._refused = object_writer.Refused()
        self._forms: dict[str, tuple[int, ...]] = {}
        self._with_held = set[str]()
        """The names of objects with something in them that is not written down."""
        self._named = set[str]()

    def bind(
        self, frame: FrameType | None, carried: tuple[str, ...], kept: Kept = NOTHING_KEPT
    ) -> None:
        """`carried`: variables of the loop that are kept by themselves."""
        if frame is None:
            self._names, self._reached, self._places = Names(), None, {}
        elif frame is not self._frame or (carried, kept) != (self._carried, self._kept):
            if frame is not self._frame or self._reached is None:
                read = carried_names.uses_of_loop(frame.f_code, frame.f_lasti).read
                self._reached = Reached(frame, read, self._models)
                self._places = self._reached.places()
            self._names = _find(frame, self._reached, carried, kept.others)
        self._frame, self._carried, self._kept = frame, carried, kept

    def leave_to_others(self, *objects: object) -> None:
        """They are protected, or kept in another way."""
        self._others.update(map(id, objects))

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """An optimizer of the script may have counters and the like besides its state."""
        self._optimizers = {
            f"{type(one).__name__} {index}" if index else type(one).__name__: one
            for index, one in enumerate(optimizers)
            if not type(one).__module__.startswith("torch.")
        }

    def add_models(self, models: Sequence[nn.Module]) -> None:
        """A model may have counters and the like besides its weights and buffers."""
        self._models = models

    def covers(self, function: object) -> bool:
        """Whether variables around this function are among those of the loop."""
        space = getattr(function, "__globals__", None)
        return self._frame is not None and space is self._frame.f_globals

    def forgotten(self) -> list[str]:
        """Optimizers, schedulers and averages that the loop uses and that are not protected."""
        found = self._used()
        return sorted(
            name
            for name, value in found.items()
            if isinstance(value, _STATEFUL) and not self._is_protected(value)
        )

    def iterators(self) -> list[str]:
        """What the loop, or a function that it calls, may take the next element of."""
        if self._frame is None:
            return []
        space, places = self._frame.f_globals, self._places
        found = self._used() | {one: space[one] for one in self._names.called if one in space}
        found |= {name: place.read() for name, place in places.items()}
        return sorted(name for name, value in found.items() if object_kinds.is_iterator(value))

    def other_modules(self) -> dict[str, nn.Module]:
        """Modules that the loop uses and that are not protected."""
        modules = {name: one for name, one in self._used().items() if isinstance(one, nn.Module)}
        return {
            name: one
            for name, one in modules.items()
            if not any(id(part) in self._others for part in one.modules())
        }

    def _used(self) -> dict[str, Any]:
        """What the loop's variables refer to, and the attributes of the script's objects."""
        if self._frame is None:
            return {}
        space = {**self._frame.f_globals, **frame_locals.read(self._frame)}
        found = {name: space[name] for name in self._names.read if name in space}
        for name, value in [*found.items()]:
            if object_kinds.kind_of(type(value)) is Kind.OWN and id(value) not in self._others:
                inner = object_kinds.attributes(value)
                found |= {f"{name}.{one}": inner[one] for one in inner}
        return found

    def _is_protected(self, value: Any) -> bool:
        """Also an optimizer around a protected one."""
        inner = (one for one in vars(value).values() if isinstance(one, Optimizer))
        is_around = isinstance(value, Optimizer) and any(id(one) in self._others for one in inner)
        return id(value) in self._others or is_around

    def begin_attempt(self) -> None:
        """Remember what they contain."""
        present = dict(self._present())
        self._content = Content(present.values(), self._others)
        self._bound = {name: value for name, value in present.items() if self._is_set(name)}
        places = self._places.values()
        self._absent = [one for one in places if one.read() is written_objects.MISSING]

    def undo(self) -> None:
        """The attempt was abandoned."""
        if self._content is not None:
            self._content.put_back()
            for name, value in self._bound.items():
                self._set(name, value)
            for place in self._absent:
                place.set(written_objects.MISSING)

    def written(self) -> dict[str, Any]:
        """What has changed in them since the first step, in a form for another process."""
        now, first = self._written(), self._first
        if first is None:
            self._first = now
            return {}
        found = {}
        for name, one in now.items():
            old = first.get(name, written_objects.MISSING)
            if (new := written_objects.changed(old, one)) is not written_objects.SAME:
                found[name] = new
                if name in self._with_held - self._named - {*self._kept.states}:
                    self._warn(name, written_objects.lost(old, one))
        return found

    def _written(self) -> dict[str, Any]:
        found = {}
        self._refused.begin()
        for name, value in self._present():
            if type(value) in object_kinds.SCALARS:
                found[name] = value
                continue
            if object_kinds.is_shared(value):
                self._warn_if_changed(name, value, NotPlain("other threads or processes use it"))
            writing = object_writer.Writing(self._others, self._refused)
            try:
                self._refused.check(value)
                found[name] = writing.write(value, is_attribute=name in self._places)
            except NotPlain as problem:
                self._refused.add(value, problem)
                self._warn_if_changed(name, value, problem)
            if writing.has_held:
                self._with_held.add(name)
        return found

    def put(self, content: dict[str, Any]) -> None:
        """A replacement gets what its predecessor had."""
        if self._first is None:
            self._first = self._written()
        elif self._has_put:
            self._put(self._changed_since_start())
        self._has_put = True
        self._put(content)

    def _changed_since_start(self) -> dict[str, Any]:
        """What differs from the first content, as it was at first: it is not written down."""
        now, first = self._written(), self._first or {}
        return {
            name: old
            for name, one in now.items()
            if name in first
            and (old := written_objects.changed(one, first[name])) is not written_objects.SAME
        }

    def _put(self, content: dict[str, Any]) -> None:
        present, done = dict(self._present()), dict[int, Any]()
        for name, one in content.items():
            old = present.get(name, written_objects.MISSING)
            if old is written_objects.MISSING and not self._is_set(name):
                continue
            try:
                new = object_reader.put(one, old, done)
            except NotPlain as problem:
                log.warning("%s is not what it was in the lost process: %s", name, problem)
                continue
            if new is not old:
                self._set(name, new)

    def _is_set(self, name: str) -> bool:
        """Whether the name gets the object, and not only the object its content."""
        is_attribute = name.rpartition(".")[0] in self._optimizers
        return name in self._names.rebound or name in self._places or is_attribute

    def _set(self, name: str, value: Any) -> None:
        if self._frame is None:
            return
        owner, _, attribute = name.rpartition(".")
        if name in self._places:
            self._places[name].set(value)
        elif owner in self._optimizers:
            setattr(self._optimizers[owner], attribute, value)
        elif name in self._names.outer:
            self._frame.f_globals[name] = value
        else:
            put_into(self._frame, {name: value})

    def _present(self) -> Iterator[tuple[str, Any]]:
        """The objects that can change, and what functions have put into variables."""
        names, rebound = self._names, self._names.rebound
        if self._frame is None or not (names.local or names.outer or self._optimizers):
            return
        spaces = (names.local, frame_locals.read(self._frame)), (names.outer, self._frame.f_globals)
        for some, space in spaces:
            for name in some:
                value = space.get(name, written_objects.MISSING)
                is_kept = id(value) not in self._others and value is not written_objects.MISSING
                if is_kept and (name in rebound or object_kinds.is_changeable(value)):
                    yield name, value
        yield from self._attributes_of_optimizers()
        for name, place in self._places.items():
            value = place.read()
            is_kept = value is not written_objects.MISSING and id(value) not in self._others
            is_plain = type(value) in object_kinds.SCALARS
            if is_kept and (is_plain or object_kinds.is_changeable(value)):
                yield name, value

    def _attributes_of_optimizers(self) -> Iterator[tuple[str, Any]]:
        for owner, optimizer in self._optimizers.items():
            for attribute, value in vars(optimizer).items():
                is_known = attribute in _OF_OPTIMIZERS or attribute.startswith("_optimizer_")
                is_plain = type(value) in object_kinds.SCALARS
                if not is_known and (is_plain or object_kinds.is_changeable(value)):
                    yield f"{owner}.{attribute}", value

    def _warn_if_changed(self, name: str, value: Any, problem: NotPlain) -> None:
        """It grows from step to step, and a replacement would begin with an empty one."""
        if name in self._kept.states:
            return
        form = object_writer.form(value)
        if self._forms.setdefault(name, form) != form:
            self._warn(name, str(problem))

    def _warn(self, name: str, why: str) -> None:
        if name in self._named or not why:
            return
        self._named.add(name)
        log.warning(
            "%s changes from step to step and is not kept, because %s: an abandoned step is not "
            "undone in it, and a replacement would begin with its first content. If anything "
            "depends on it, give an object with state_dict and load_state_dict to protect()",
            name,
            why,
        )


def _find(
    frame: FrameType, reached: Reached, carried: Collection[str], set_again: Collection[str]
) -> Names:
    uses = carried_names.uses_of_loop(frame.f_code, frame.f_lasti)
    if not (uses.read or uses.set_outside or set_again):
        return Names()
    read, rebound = set(uses.read), set(uses.set_outside)
    for function in reached.codes():
        read |= carried_names.globals_of(function)
        rebound |= carried_names.set_outside(function)
    is_module = frame_locals.is_module(frame)
    own = set(frame.f_code.co_varnames) | set(frame.f_code.co_cellvars + frame.f_code.co_freevars)
    own = set() if is_module else own
    rebound |= set(set_again)
    mine = ((uses.read | rebound) & own) - uses.fresh - set(carried)
    theirs = (read | rebound) - own - (uses.fresh | set(carried) if is_module else set())
    outer = {name for name in theirs if name in rebound or _may_change(name, frame.f_globals)}
    return Names(
        tuple(sorted(mine)),
        tuple(sorted(outer)),
        frozenset(rebound),
        read=tuple(sorted(uses.read)),
        called=frozenset(read - uses.read),
    )


def _may_change(name: str, present: dict[str, Any]) -> bool:
    return name in present and object_kinds.is_changeable(present[name])
