"""Where values of the script are that no variable of the loop leads to.

A function keeps them in the variables of the function around it, in its defaults and in its
attributes; a class in its attributes; another module of the script in its global variables; a model
in attributes that are neither weights nor buffers,
such as a temperature or the rate of a dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from torch import nn

from taskd.torch.loop import carried_names, frame_locals, object_kinds
from taskd.torch.loop.object_kinds import Kind
from taskd.torch.loop.written_objects import MISSING

MAX_REACHED = 1000
"""How many functions, classes and objects of the script are searched."""
_FEW = 64
"""Of a longer list, only the first items are searched for functions."""


class Place(Protocol):
    """Something that has a value."""

    def read(self) -> Any:
        """`MISSING`: it has none."""

    def set(self, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Cell:
    """A variable of a function that has returned, and that a function inside of it uses."""

    cell: CellType

    def read(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclass(frozen=True, slots=True)
class Attribute:
    """Of a function, a class or a model."""

    owner: Any
    name: str

    def read(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def set(self, value: Any) -> None:
        if value is not MISSING:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


@dataclass(frozen=True, slots=True)
class Default:
    """The default of an argument: the same object in each call."""

    value: Any

    def read(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        """It cannot be another one."""


class Reached:
    """What the loop can call, and what these functions use."""

    def __init__(
        self, frame: FrameType, names: Iterable[str], models: Collection[nn.Module] = ()
    ) -> None:
        self._space, present = frame.f_globals, frame_locals.read(frame)
        self._own = {id(cell) for cell in _cells_of(frame, present)}
        self._functions: dict[FunctionType, None] = {}
        self._classes: dict[type, None] = {}
        self._models = [part for model in models for part in model.modules()]
        self._modules: dict[ModuleType, None] = {}
        """Other modules of the script that the loop, or one of the functions, names."""
        self._frame_code = frame.f_code
        space = self._space
        types = dict.fromkeys(map(type, self._models))
        self._search([present.get(name, space.get(name)) for name in sorted(names)], types)

    def _search(self, todo: list[Any], model_types: Iterable[type]) -> None:
        seen = set[int]()
        for one in model_types:
            todo += _methods(one)
        while todo and len(seen) < MAX_REACHED:
            one = todo.pop()
            if id(one) not in seen:
                seen.add(id(one))
                todo += self._found_in(one)
            if not todo:  # another function may have used more of a module
                used = self._names_used()
                inner = (vars(one).get(name) for one in self._modules for name in sorted(used))
                todo = [one for one in inner if one is not None and id(one) not in seen]

    def _names_used(self) -> frozenset[str]:
        codes = [self._frame_code, *(one.__code__ for one in self._functions)]
        return frozenset[str]().union(*map(carried_names.names_used, codes))

    def _found_in(self, one: Any) -> Iterable[Any]:
        if isinstance(one, MethodType):
            return one.__func__, one.__self__
        if isinstance(one, partial):
            return one.func, *one.args, *one.keywords.values()
        if isinstance(one, property):
            return one.fget, one.fset
        if isinstance(one, staticmethod | classmethod):
            return (one.__func__,)
        if isinstance(one, FunctionType):
            if not object_kinds.is_of_script(one.__module__ or ""):
                return ()
            self._functions[one] = None
            inner = [cell.read() for cell in map(Cell, one.__closure__ or ())]
            names = carried_names.globals_of(one.__code__)
            return *inner, *(one.__globals__.get(name) for name in sorted(names))
        if type(one) in (list, tuple, dict):
            return islice(one.values() if type(one) is dict else one, _FEW)
        if isinstance(one, type):
            if object_kinds.is_of_script(one.__module__) and not issubclass(one, nn.Module):
                self._classes[one] = None
                return _methods(one)
            return ()
        if isinstance(one, ModuleType):
            if object_kinds.is_of_script(one.__name__) and vars(one) is not self._space:
                self._modules[one] = None
            return ()
        if object_kinds.kind_of(type(one)) is Kind.OWN:
            return type(one), *object_kinds.attributes(one).values()
        return ()

    def _is_here(self, function: FunctionType) -> bool:
        return function.__globals__ is self._space

    def codes(self) -> Iterator[CodeType]:
        """Of the functions in the file of the loop: they see its global variables."""
        yield from (one.__code__ for one in self._functions if self._is_here(one))

    def places(self) -> dict[str, Place]:
        """All of them, each with a name that is the same in all processes of this rank."""
        found = dict[str, Place]()
        codes = [self._frame_code]
        codes += [one.__code__ for one in self._functions if one.__name__ != "__init__"]
        stored = frozenset[str]().union(*map(carried_names.attributes_set, codes))
        seen = {*self._own}
        for function in self._functions:
            for name, place in _of_function(function, stored):
                if isinstance(place, Cell):
                    if id(place.cell) in seen:
                        continue
                    seen.add(id(place.cell))
                _add(found, f"{name} of {function.__qualname__}", place)
        for module, names in self._variables_of_modules(stored).items():
            for name in sorted(names):
                _add(found, f"{module.__name__}.{name}", Attribute(module, name))
        for class_ in self._classes:
            for name, value in vars(class_).items():
                if not name.startswith("__") and _may_change(value, name in stored):
                    _add(found, f"{name} of {class_.__qualname__}", Attribute(class_, name))
        shared, types = set[int](), dict.fromkeys(map(type, self._models))
        by_methods = {one: _set_by_methods(one) for one in types}
        for number, part in enumerate(self._models):
            for name in _of_model(part, by_methods[type(part)], stored, shared):
                _add(found, f"{name} of {type(part).__name__} {number}", Attribute(part, name))
        return found

    def _variables_of_modules(self, stored: Collection[str]) -> dict[ModuleType, set[str]]:
        used, found = self._names_used(), dict[ModuleType, set[str]]()
        for module in self._modules:
            space = vars(module)
            names = {one for one in used & space.keys() if _may_change(space[one], one in stored)}
            found.setdefault(module, set()).update(names)
        for function in self._functions:
            home, space = sys.modules.get(function.__module__), function.__globals__
            if home is None or vars(home) is not space or space is self._space:
                continue
            read = carried_names.globals_of(function.__code__) & space.keys()
            names = {one for one in read if object_kinds.is_changeable(space[one])}
            names |= carried_names.globals_set(function.__code__)
            found.setdefault(home, set()).update(names)
        return found


def _may_change(value: Any, is_set: bool) -> bool:
    is_plain = is_set and type(value) in object_kinds.SCALARS
    return is_plain or object_kinds.is_changeable(value)


def _add(found: dict[str, Place], name: str, place: Place) -> None:
    number = 1
    while (full := f"{name} ({number})" if number > 1 else name) in found:
        number += 1
    found[full] = place


def _cells_of(frame: FrameType, present: dict[str, Any]) -> Iterator[CellType]:
    """The variables of the loop that its inner functions use: these are kept by their names."""
    names = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    for value in present.values():
        if isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if name in names and Cell(cell).read() is present.get(name, MISSING):
                    yield cell


def _methods(type_: type) -> list[Any]:
    return [
        one
        for base in type_.__mro__
        if object_kinds.is_of_script(base.__module__)
        for one in vars(base).values()
    ]


def _of_function(function: FunctionType, stored: Collection[str]) -> Iterator[tuple[str, Place]]:
    sets = carried_names.set_outside(function.__code__)
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if name in sets or object_kinds.is_changeable(Cell(cell).read()):
            yield name, Cell(cell)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in filter(object_kinds.is_changeable, defaults):
        yield "a default", Default(value)
    for name, value in vars(function).items():
        if name in stored or object_kinds.is_changeable(value):
            yield name, Attribute(function, name)


def _of_model(
    part: nn.Module, own: frozenset[str], stored: Collection[str], shared: set[int]
) -> Iterator[str]:
    """What a step may set. What only belongs to its structure is not looked at in each step.

    `own`: what its methods set. `shared`: objects that other models have as well, such as settings.
    """
    present = vars(part)
    is_own = bool(_methods(type(part)))
    for name in sorted(present.keys() | own):
        if name == "training" or name in _OF_MODULES:
            continue
        value = present.get(name)
        if name in own or name in stored:
            yield name
        elif is_own and object_kinds.is_changeable(value) and id(value) not in shared:
            shared.add(id(value))
            yield name


def _set_by_methods(type_: type) -> frozenset[str]:
    """The attributes that methods of a model of the script set, after it was made."""
    methods = (one for one in _methods(type_) if isinstance(one, FunctionType))
    codes = (one.__code__ for one in methods if one.__name__ != "__init__")
    return frozenset[str]().union(*map(carried_names.attributes_set, codes))


_OF_MODULES = frozenset(vars(nn.Module()))
