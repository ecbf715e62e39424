"""The written form of the script's objects, and what has changed between two of them.

`object_writer.py` makes it and `object_reader.py` puts it into the objects of a replacement. It can
be pickled without any class of the script.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from taskd.torch.loop.attempt_values import Record
from taskd.torch.loop.object_kinds import are_scalars


class NotPlain(Exception):
    """It has something in it that cannot be written down, or too much."""


@dataclass(frozen=True, slots=True)
class Many:
    """A list, tuple, set or deque."""

    items: list[Any]
    type_: type
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary."""

    items: dict[Any, Any]
    type_: type
    gone: frozenset[Any] = frozenset()
    factory: type | None = None
    """What a `defaultdict` makes."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """An object of a class of the script."""

    items: dict[str, Any]
    module: str
    name: str
    gone: frozenset[str] = frozenset()
    inner: Any = None
    """Its items, if its class is derived from a list or dictionary."""


@dataclass(frozen=True, slots=True)
class State:
    """That of a random generator."""

    value: Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something of another kind: the new process has its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Held(Unknown):
    """Something that could change, and that only this process has."""

    why: str
    source: Any
    """The object. One of the same place may be gone: then it is another one."""
    version: int
    """It changes when the object is changed in place."""
    is_attribute: bool = False
    """Often it is what a step has left there, and the next one sets again."""

    def is_as(self, first: Any) -> bool:
        if not isinstance(first, Held):
            return self.is_attribute
        is_id = type(self.source) is int
        if self.source is not first.source and not (is_id and self.source == first.source):
            return self.is_attribute and not is_id
        return self.version == first.version

    def __reduce__(self) -> tuple[type[Unknown], tuple[()]]:
        return Unknown, ()


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing has changed."""


MISSING, SAME = Unknown(), Same()


def changed(first: Any, now: Any) -> Any:
    """What is not as it was at first. `SAME`: nothing.

    The rest, such as the settings of the script, may be another one in a new process.
    """
    if isinstance(now, Held):
        return SAME if now.is_as(first) else now
    if type(first) is not type(now):
        return now
    match now:
        case Mapping() | Attributes():
            if not _is_of_same_class(first, now):
                return now
            inner = _changed_inner(first, now)
            is_same = inner is None and first.items.keys() == now.items.keys()
            if is_same and are_scalars(now.items.values()) and _equal(first.items, now.items):
                return SAME
            found = {
                name: new
                for name, item in now.items.items()
                if (new := changed(first.items.get(name, MISSING), item)) is not SAME
            }
            gone = frozenset(first.items.keys() - now.items.keys())
            if not found and not gone and inner is None:
                return SAME
            new = replace(now, items=found, gone=gone)
            return new if isinstance(new, Mapping) else replace(new, inner=inner)
        case Many() | Record():
            is_same = _is_of_same_class(first, now) and len(first.items) == len(now.items)
            if is_same and are_scalars(now.items):
                return SAME if _equal(first.items, now.items) else now
            pairs = zip(first.items, now.items, strict=True) if is_same else ()
            return SAME if is_same and all(changed(*pair) is SAME for pair in pairs) else now
        case np.ndarray():
            return SAME if np.array_equal(first, now) else now
        case _:
            return SAME if first == now else now


def _changed_inner(first: Mapping | Attributes, now: Mapping | Attributes) -> Any:
    if isinstance(first, Mapping) or isinstance(now, Mapping):
        return None
    found = changed(first.inner, now.inner)
    return None if found is SAME else found


def lost(first: Any, now: Any) -> str:
    """Why something that has changed is not written down. Empty: everything is."""
    if isinstance(now, Held):
        return "" if now.is_as(first) else now.why
    pairs: Iterable[tuple[Any, Any]] = ()
    match now:
        case Mapping() | Attributes():
            there = first.items if type(first) is type(now) else {}
            pairs = [(there.get(name, MISSING), item) for name, item in now.items.items()]
            if isinstance(now, Attributes):
                pairs.append((getattr(first, "inner", None), now.inner))
        case Many() | Record() if not are_scalars(now.items):
            old = first.items if type(first) is type(now) else []
            pairs = zip(old + [MISSING] * (len(now.items) - len(old)), now.items, strict=False)
    return next(filter(None, (lost(*pair) for pair in pairs)), "")


def _equal(first: Any, now: Any) -> bool:
    """Where one of them has only numbers and strings, and the other perhaps an array."""
    try:
        return bool(first == now)
    except ValueError:
        return False


def _is_of_same_class(first: Any, now: Many | Record | Mapping | Attributes) -> bool:
    if isinstance(now, Record | Attributes):
        return bool((first.module, first.name) == (now.module, now.name))
    return first.type_ is now.type_ and now.type_ is not OrderedDict  # its order counts
