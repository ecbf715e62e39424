"""The content of the script's own objects: to put it back after an attempt, or into a new process.

A list of results, a dictionary of counters, an `AverageMeter`, a deque of rewards, a random
generator: a step changes such an object in place, and no variable shows it. Within a process the
content is put back into the same objects (`Content`). For a replacement it is written down
(`write`) and put into the objects that the script has created there (`put`). Objects of other kinds
(models, files, functions) are left as they are.
"""

from __future__ import annotations

import sys
import sysconfig
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from taskd.torch.data import generators
from taskd.torch.loop import attempt_values

MAX_PLAIN, MAX_PARTS, MAX_DEPTH = 4096, 512, 6
"""Of numbers and strings in one list, of anything else in one object, and of objects in objects."""


class Kind(Enum):
    """How the content of an object is read and set."""

    SCALAR = auto()
    MANY = auto()
    MAPPING = auto()
    LEAF = auto()
    """A tensor or an array."""
    GENERATOR = auto()
    OWN = auto()
    """An object of a class of the script, with attributes."""
    OTHER = auto()


_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
_FROZEN = (tuple, frozenset)
_OTHERS = (
    nn.Module,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    torch.utils.data.Sampler,
    BaseException,
    Enum,
    type,
)
_WORKERS = frozenset(("_thread", "threading", "queue", "_queue", "multiprocessing", "concurrent"))
"""Modules whose objects belong to several threads or processes."""
_PACKAGE = __name__.partition(".")[0]


def kind_of(type_: type) -> Kind:
    known = _KINDS.get(type_)
    return known if known is not None else _KINDS.setdefault(type_, _find_kind(type_))


_KINDS: dict[type, Kind] = {}


def _find_kind(type_: type) -> Kind:
    if type_ in _SCALARS:
        return Kind.SCALAR
    if type_ in (list, tuple, set, frozenset, deque) or _is_named_tuple(type_):
        return Kind.MANY
    if type_ in (dict, OrderedDict, defaultdict, Counter):
        return Kind.MAPPING
    if type_ in (torch.Tensor, np.ndarray) or issubclass(type_, np.generic):
        return Kind.LEAF
    if issubclass(type_, generators.Generator):
        return Kind.GENERATOR
    if issubclass(type_, _OTHERS) or not type_.__dictoffset__:
        return Kind.OTHER
    is_own = type_ in (Namespace, SimpleNamespace) or _is_of_script(type_.__module__)
    return Kind.OWN if is_own else Kind.OTHER


def _is_named_tuple(type_: type) -> bool:
    return issubclass(type_, tuple) and hasattr(type_, "_fields")


def _is_frozen(type_: type) -> bool:
    return type_ in _FROZEN or issubclass(type_, tuple)


def _is_of_script(module: str) -> bool:
    if module == "__main__":
        return True
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module.partition(".")[0] == _PACKAGE:
        return False
    return not any(Path(path).is_relative_to(folder) for folder in _libraries())


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) for name in names} | {str(Path(torch.__file__).parent)})


def is_changeable(value: Any) -> bool:
    """Whether a step can change it in place, and we can bring it back."""
    kind = kind_of(type(value))
    if _is_frozen(type(value)):
        return len(value) <= MAX_PARTS and any(map(is_changeable, value))
    if kind is Kind.LEAF:
        return _is_small(value)
    return kind not in (Kind.SCALAR, Kind.OTHER)


def functions_of(value: object) -> Iterator[Any]:
    """The methods of an object of the script: they may use other objects."""
    for type_ in type(value).__mro__:
        if _is_of_script(type_.__module__):
            yield from vars(type_).values()


# Within a process


class Content:
    """What some objects contain at this moment."""

    def __init__(self, roots: Iterable[object], others: Collection[int]) -> None:
        """`others`: the objects that are kept in another way, by their ids."""
        self._others, self._kept = others, dict[int, tuple[Kind, Any, Any]]()
        self._add_all(roots, 0)

    def _add_all(self, items: Iterable[Any], depth: int) -> None:
        for item in items:
            if type(item) not in _SCALARS:
                self._add(item, depth)

    def _add(self, value: Any, depth: int) -> None:
        kind = kind_of(type(value))
        is_known = id(value) in self._kept or id(value) in self._others
        if kind is Kind.OTHER or is_known or depth > MAX_DEPTH or len(self._kept) >= MAX_PARTS:
            return
        match kind:
            case Kind.MANY | Kind.MAPPING:
                if len(value) <= MAX_PLAIN:
                    copy = value if _is_frozen(type(value)) else value.copy()
                    self._kept[id(value)] = kind, value, copy
                    items = value.values() if kind is Kind.MAPPING else value
                    if not _are_scalars(items):
                        self._add_all(items, depth + 1)
            case Kind.OWN if not _is_at_work(value):
                self._kept[id(value)] = kind, value, dict(vars(value))
                self._add_all(vars(value).values(), depth + 1)
            case Kind.GENERATOR if value is not torch.default_generator:
                self._kept[id(value)] = kind, value, generators.state(value)
            case Kind.LEAF if _is_small(value):
                self._kept[id(value)] = kind, value, _copy_of_leaf(value)

    def put_back(self) -> None:
        for kind, value, content in self._kept.values():
            match kind:
                case Kind.MANY if _is_frozen(type(value)):
                    pass
                case Kind.MANY | Kind.MAPPING:
                    value.clear()
                    (value.update if kind is Kind.MAPPING or type(value) is set else value.extend)(
                        content
                    )
                case Kind.OWN:
                    there = vars(value)
                    for name in there.keys() - content.keys():
                        del there[name]
                    there.update(content)
                case Kind.GENERATOR:
                    generators.set_state(value, content)
                case _:
                    _put_leaf_back(value, content)


# For another process


class NotPlain(Exception):
    """It has something in it that cannot be written down, or too much."""


@dataclass(frozen=True, slots=True)
class Many:
    """A list, tuple, set or deque."""

    items: list[Any]
    type_: type
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A named tuple."""

    items: list[Any]
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary."""

    items: dict[Any, Any]
    type_: type
    gone: frozenset[Any] = frozenset()


@dataclass(frozen=True, slots=True)
class Attributes:
    """An object of a class of the script."""

    items: dict[str, Any]
    module: str
    name: str
    gone: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class State:
    """That of a random generator."""

    value: Any


@dataclass(frozen=True, slots=True)
class Member:
    """One of an enumeration of the script."""

    module: str
    name: str
    member: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something of another kind: the new process has its own."""


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing has changed."""


MISSING, SAME = Unknown(), Same()


def write(value: Any, others: Collection[int]) -> Any:
    """The content in a form that can be pickled without any class of the script.

    Raises:
        NotPlain: It is too large.
    """
    return _Writing(others).write(value)


class _Writing:
    """One object that is being written down."""

    def __init__(self, others: Collection[int]) -> None:
        self._others, self._left = others, MAX_PARTS
        self._path: list[int] = []
        """The objects around the present one: one of them again would never end."""

    def write(self, value: Any) -> Any:
        kind = kind_of(type(value))
        if kind is Kind.SCALAR:
            return value
        around = len(self._path) > MAX_DEPTH or id(value) in self._path or id(value) in self._others
        if kind is Kind.OTHER or around:
            return _write_constant(value)
        self._left -= 1
        if self._left < 0:
            raise NotPlain(f"it has more than {MAX_PARTS} parts")
        self._path.append(id(value))
        try:
            return self._content(value, kind)
        finally:
            self._path.pop()

    def _content(self, value: Any, kind: Kind) -> Any:
        match kind:
            case Kind.MANY if _is_named_tuple(type(value)):
                return Record(self._all(value), *_name_of(type(value)))
            case Kind.MANY:
                items = self._all(value)
                return Many(items, type(value), value.maxlen if type(value) is deque else None)
            case Kind.MAPPING:
                if not _are_scalars(value):
                    return MISSING
                items = self._all(value.values())
                return Mapping(dict(zip(value, items, strict=True)), type(value))
            case Kind.OWN if not _is_at_work(value):
                attributes = dict(vars(value))
                if not _are_scalars(attributes.values()):
                    attributes = {name: self.write(item) for name, item in attributes.items()}
                return Attributes(attributes, type(value).__module__, type(value).__qualname__)
            case Kind.GENERATOR if value is not torch.default_generator:
                return State(generators.state(value))
            case Kind.LEAF if _is_small(value):
                is_tensor = isinstance(value, torch.Tensor)
                return attempt_values.small_tensor(value) if is_tensor else value.copy()
            case _:
                return MISSING

    def _all(self, items: Collection[Any]) -> list[Any]:
        if len(items) > MAX_PLAIN:
            raise NotPlain(f"it has {len(items)} items, more than {MAX_PLAIN}")
        return list(items) if _are_scalars(items) else [self.write(item) for item in items]


def changed(first: Any, now: Any) -> Any:
    """What is not as it was at first. `SAME`: nothing.

    The rest, such as the settings of the script, may be another one in a new process.
    """
    if type(first) is not type(now):
        return now
    match now:
        case Mapping() | Attributes():
            if not _is_of_same_class(first, now):
                return now
            if _are_scalars(now.items.values()) and _equal(first.items, now.items):
                return SAME
            found = {
                name: new
                for name, item in now.items.items()
                if (new := changed(first.items.get(name, MISSING), item)) is not SAME
            }
            gone = frozenset(first.items.keys() - now.items.keys())
            return replace(now, items=found, gone=gone) if found or gone else SAME
        case Many() | Record():
            is_same = _is_of_same_class(first, now) and len(first.items) == len(now.items)
            if is_same and _are_scalars(now.items):
                return SAME if _equal(first.items, now.items) else now
            pairs = zip(first.items, now.items, strict=True) if is_same else ()
            return SAME if is_same and all(changed(*pair) is SAME for pair in pairs) else now
        case np.ndarray():
            return SAME if np.array_equal(first, now) else now
        case _:
            return SAME if first == now else now


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


def put(content: Any, value: Any = MISSING) -> Any:
    """Put what was written down into this object, or into a new one. Returns the object.

    Raises:
        NotPlain: There is no such object here, and none can be made.
    """
    match content:
        case Unknown():
            if value is MISSING:
                raise NotPlain("it contains an object that only the lost process had")
            return value
        case Many():
            return _put_many(content, value)
        case Record():
            return _put_record(content, value)
        case Mapping():
            mapping = value if type(value) is content.type_ else content.type_()
            _put_items(content, mapping)
            return mapping
        case Attributes():
            if _name_of(type(value)) != (content.module, content.name):
                class_ = _class(content.module, content.name)
                value = class_.__new__(class_)
            _put_items(content, vars(value))
            return value
        case Member():
            return _class(content.module, content.name)[content.member]
        case State():
            if kind_of(type(value)) is not Kind.GENERATOR:
                raise NotPlain("it contains a generator that only the lost process had")
            generators.set_state(value, content.value)
            return value
        case _:
            new = attempt_values.large(content, is_known=True)
            if isinstance(new, torch.Tensor) and _has_form(value, new):
                _put_leaf_back(value, new)
                return value
            return new


def _put_items(content: Mapping | Attributes, there: Any) -> None:
    new = {name: put(item, there.get(name, MISSING)) for name, item in content.items.items()}
    if isinstance(content, Mapping) and content.type_ is OrderedDict:
        there.clear()
    for name in content.gone:
        there.pop(name, None)
    if isinstance(there, Counter):  # its own update adds
        dict.update(there, new)
    else:
        there.update(new)


def _put_many(content: Many, value: Any) -> Any:
    is_same = type(value) is content.type_
    old = list(value) if is_same and content.type_ not in (set, frozenset) else []
    old += [MISSING] * (len(content.items) - len(old))
    items = [put(item, old[place]) for place, item in enumerate(content.items)]
    if not is_same or content.type_ in _FROZEN:
        return deque(items, content.longest) if content.type_ is deque else content.type_(items)
    value.clear()
    (value.update if content.type_ is set else value.extend)(items)
    return value


def _put_record(content: Record, value: Any) -> Any:
    class_ = _class(content.module, content.name)
    if not _is_named_tuple(class_):
        raise NotPlain(f"the class {content.name} is not a named tuple here")
    old = list(value) if type(value) is class_ else [MISSING] * len(content.items)
    items = [put(item, one) for item, one in zip(content.items, old, strict=True)]
    return tuple.__new__(class_, items)


def _name_of(type_: type) -> tuple[str, str]:
    return type_.__module__, type_.__qualname__


def _class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise NotPlain(f"the class {name} is not known here")
    return found


def _is_at_work(value: object) -> bool:
    """Whether other threads or processes use it: its attributes must not change under them."""
    others = set(map(type, vars(value).values())) - _SCALARS
    return any(type_.__module__.partition(".")[0] in _WORKERS for type_ in others)


def _write_constant(value: Any) -> Any:
    match value:
        case Enum():
            return Member(type(value).__module__, type(value).__qualname__, value.name)
        case int():  # such as the number of a step
            return int(value)
        case _:
            return MISSING


def _are_scalars(items: Iterable[Any]) -> bool:
    return _SCALARS.issuperset(map(type, items))


# Tensors and arrays


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and value.grad_fn is None
        return is_plain and value.numel() <= attempt_values.MAX_ELEMENTS
    return bool(value.dtype != object and value.size <= attempt_values.MAX_ELEMENTS)


def _has_form(value: Any, of: torch.Tensor) -> bool:
    is_plain = type(value) is torch.Tensor and value.grad_fn is None
    return is_plain and (value.shape, value.dtype) == (of.shape, of.dtype)


def _copy_of_leaf(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def _put_leaf_back(value: Any, content: Any) -> None:
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = content
