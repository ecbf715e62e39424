"""Writes down the content of the script's objects, for a replacement."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Collection
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch

from taskd.torch.data import generators
from taskd.torch.loop import attempt_values
from taskd.torch.loop.attempt_values import Member, Record
from taskd.torch.loop.object_kinds import (
    CONSTANTS,
    MAX_DEPTH,
    MAX_PARTS,
    MAX_PLAIN,
    MAX_TOTAL,
    SCALARS,
    Kind,
    are_scalars,
    attributes,
    base_of,
    is_at_work,
    is_held,
    is_named_tuple,
    is_on_device,
    is_small,
    items_of,
    kind_of,
    name_of,
    number_of_elements,
    version_of,
)
from taskd.torch.loop.written_objects import (
    MISSING,
    Attributes,
    Held,
    Many,
    Mapping,
    NotPlain,
    State,
)

_FACTORIES = (int, float, str, bool, list, dict, set, deque, Counter)
"""What a `defaultdict` of a replacement can make."""
_SEEN = 8
"""How many values of a large dictionary are looked at, to see whether it has changed."""


def write(value: Any, others: Collection[int]) -> Any:
    """The content in a form that can be pickled without any class of the script.

    Raises:
        NotPlain: It is too large.
    """
    return Writing(others).write(value)


class Refused:
    """What was too large when it was last written down: to find that out takes time."""

    def __init__(self) -> None:
        self._before = dict[int, tuple[Any, tuple[int, ...], NotPlain]]()
        self._now = dict[int, tuple[Any, tuple[int, ...], NotPlain]]()

    def begin(self) -> None:
        """Everything is written down again. What is not there any more is forgotten."""
        self._before, self._now = self._now, {}

    def check(self, value: Any) -> None:
        """Raise NotPlain again, if its length and its first and last items are the same."""
        if (known := self._before.get(id(value))) is not None and known[1] == form(value):
            raise known[2]

    def add(self, value: Any, problem: NotPlain) -> None:
        if kind_of(type(value)) in (Kind.MANY, Kind.MAPPING):
            self._now[id(value)] = value, form(value), problem.with_traceback(None)


def form(value: Any) -> tuple[int, ...]:
    """It changes when a list grows, or is full and takes new items for old ones, and when an object
    counts something."""
    match kind_of(type(value)):
        case Kind.MANY if isinstance(value, list | tuple | deque) and value:
            return len(value), id(value[0]), id(value[-1])
        case Kind.MANY:
            return (len(value),)
        case Kind.MAPPING:
            return len(value), *map(id, islice(value.values(), _SEEN))
        case Kind.OWN:
            there = attributes(value).values()
            return tuple(hash(one) for one in there if type(one) in SCALARS)
        case _:
            return ()


class Writing:
    """One object that is being written down."""

    def __init__(self, others: Collection[int], refused: Refused | None = None) -> None:
        self._others, self._parts, self._total = others, MAX_PARTS, MAX_TOTAL
        self._refused = refused
        self._path: list[int] = []
        """The objects around the present one: one of them again would never end."""
        self.has_held = False
        """Something in it is not written down."""

    def write(self, value: Any, is_attribute: bool = False) -> Any:
        kind = kind_of(type(value))
        if kind is Kind.SCALAR:
            return value
        around = len(self._path) > MAX_DEPTH or id(value) in self._path or id(value) in self._others
        if kind is Kind.OTHER or around:
            return _write_constant(value)
        self._count(1, 0)
        self._path.append(id(value))
        try:
            return self._content(value, kind, is_attribute)
        finally:
            self._path.pop()

    def _content(self, value: Any, kind: Kind, is_attribute: bool) -> Any:
        match kind:
            case Kind.MANY if is_named_tuple(type(value)):
                return Record(self._all(value), *name_of(type(value)))
            case Kind.MANY:
                items = self._all(value)
                return Many(items, type(value), value.maxlen if type(value) is deque else None)
            case Kind.MAPPING:
                return self._mapping(value, type(value))
            case Kind.OWN if not is_at_work(there := attributes(value)):
                return self._own(value, there)
            case Kind.GENERATOR if value is not torch.default_generator:
                return State(generators.state(value))
            case Kind.LEAF:
                return self._leaf(value, is_attribute)
            case _:
                return MISSING

    def _own(self, value: Any, there: dict[str, Any]) -> Attributes:
        if not are_scalars(there.values()):
            there = {name: self._attribute(item) for name, item in there.items()}
        base, inner = base_of(value), None
        if base is not None:
            self._check_length(base.__len__(value))
            items = items_of(value)
            is_mapping = isinstance(items, dict)
            inner = self._mapping(items, base) if is_mapping else Many(self._all(items), base)
        return Attributes(there, *name_of(type(value)), inner=inner)

    def _attribute(self, value: Any) -> Any:
        """One that is too large does not keep the others from being written down."""
        if type(value) in SCALARS:
            return value
        left = self._parts, self._total
        try:
            if self._refused is not None:
                self._refused.check(value)
            return self.write(value, is_attribute=True)
        except NotPlain as problem:
            self._parts, self._total = left
            self.has_held = True
            if self._refused is not None:
                self._refused.add(value, problem)
            return Held(str(problem), id(value), hash(form(value)), is_attribute=True)

    def _leaf(self, value: Any, is_attribute: bool) -> Any:
        if is_small(value) and not is_on_device(value):
            self._count(0, number_of_elements(value))
            is_tensor = isinstance(value, torch.Tensor)
            return attempt_values.small_tensor(value) if is_tensor else value.copy()
        if not is_held(value):
            return MISSING
        self.has_held = True
        why = "it has a tensor on a device"
        if not is_small(value):
            why = f"it has {number_of_elements(value)} elements in one tensor or array"
        return Held(why, weakref.ref(value), version_of(value), is_attribute)

    def _mapping(self, value: dict[Any, Any], type_: type) -> Mapping:
        self._check_length(len(value))
        there = dict(value)  # another thread may change it
        items = self._all(there.values())
        keys = there if are_scalars(there) else map(_write_key, there)
        factory = getattr(value, "default_factory", None)
        known = factory if factory in _FACTORIES else None
        return Mapping(dict(zip(keys, items, strict=True)), type_, factory=known)

    def _all(self, items: Collection[Any]) -> list[Any]:
        self._check_length(len(items))
        self._count(0, len(items))
        there = list(items)
        return there if are_scalars(there) else [self.write(item) for item in there]

    def _check_length(self, length: int) -> None:
        if length > MAX_PLAIN:
            raise NotPlain(f"it has {length} items, more than {MAX_PLAIN}")

    def _count(self, parts: int, total: int) -> None:
        self._parts, self._total = self._parts - parts, self._total - total
        if self._parts < 0:
            raise NotPlain(f"it has more than {MAX_PARTS} parts")
        if self._total < 0:
            raise NotPlain(f"it has more than {MAX_TOTAL} numbers and strings")


def _write_key(key: Any) -> Any:
    match key:
        case Enum():
            return Member(type(key).__module__, type(key).__qualname__, key.name)
        case tuple() if type(key) is tuple:
            return tuple(map(_write_key, key))
        case bool() | str() | bytes() | None:
            return key
        case int():  # such as the number of a step
            return int(key)
        case np.generic():
            return key.item()
        case _ if type(key) in SCALARS or type(key) in CONSTANTS:
            return key
        case _:
            raise NotPlain(f"it has keys of the type {type(key).__name__}")


def _write_constant(value: Any) -> Any:
    match value:
        case Enum():
            return Member(type(value).__module__, type(value).__qualname__, value.name)
        case int():  # such as the number of a step
            return int(value)
        case float():
            return float(value)
        case str():
            return str(value)
        case _:
            return value if type(value) in CONSTANTS else MISSING
