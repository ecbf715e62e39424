"""The content of the script's own objects: to put it back after an attempt, or into a new process.

A list of results, a dictionary of counters, an `AverageMeter`, a deque of rewards, a random
generator: a step changes such an object in place, and no variable shows it. Within a process the
content is put back into the same objects (`Content`). For a replacement it is written down
(`write`) and put into the objects that the script has created there (`put`). Objects of other kinds
(models, files, functions) are left as they are.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, auto
from fractions import Fraction
from functools import cache
from itertools import islice
from pathlib import Path, PosixPath, PurePosixPath
from types import MemberDescriptorType, SimpleNamespace
from typing import Any
from uuid import UUID
from zlib import crc32

import numpy as np
import torch
from torch import nn

from taskd.torch import compat
from taskd.torch.data import generators
from taskd.torch.loop import attempt_values
from taskd.torch.loop.attempt_values import Member, Record, find_class

MAX_PLAIN, MAX_PARTS, MAX_DEPTH = 4096, 512, 6
"""Of numbers and strings in one list, of anything else in one object, and of objects in objects."""
MAX_TOTAL = 16 * MAX_PLAIN
"""Of numbers and strings in one object, with all that is in it."""
_MANY = 64
"""What a longer list contains is looked at last."""
_SEEN = 8
"""How many values of a large dictionary are looked at, to see whether it has changed."""
_CHECKED = 1 << 16
"""How many bytes of an array that is too large are read, to see whether it has changed."""


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
_CONSTANTS = frozenset[type](
    (
        *(datetime, date, time, timedelta, timezone, Decimal, Fraction, UUID),
        *(PosixPath, PurePosixPath, range, torch.Size, torch.dtype, torch.device),
    )
)
"""Other values that never change, and that any process can read."""
_BASES = (OrderedDict, defaultdict, dict, list, set, deque)
"""What a class of the script may be derived from."""
_FACTORIES = (int, float, str, bool, list, dict, set, deque, Counter)
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
_UNCHANGING = (Kind.SCALAR, Kind.OTHER)


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
        return Kind.OTHER if issubclass(type_, random.SystemRandom) else Kind.GENERATOR
    if issubclass(type_, (*_OTHERS, int, float, str, bytes)):
        return Kind.OTHER
    if not type_.__dictoffset__ and not _slots(type_) and not issubclass(type_, _BASES):
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
        return _is_small(value) or _is_held(value)
    return kind not in _UNCHANGING


def functions_of(value: object) -> Iterator[Any]:
    """The methods of an object of the script: they may use other objects."""
    for type_ in type(value).__mro__:
        if _is_of_script(type_.__module__):
            yield from vars(type_).values()


def attributes(value: object) -> dict[str, Any]:
    """Those of an object of the script."""
    there = dict(vars(value)) if type(value).__dictoffset__ else {}
    for name in _slots_of(value):
        try:
            there[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return there


def _set_attributes(value: object, names: dict[str, Any], gone: Iterable[str]) -> None:
    slots, there = _slots_of(value), vars(value) if type(value).__dictoffset__ else {}
    for name in gone:
        if name not in slots:
            there.pop(name, None)
        elif hasattr(value, name):
            object.__delattr__(value, name)
    for name, item in names.items():
        if name in slots:
            object.__setattr__(value, name, item)
        else:
            there[name] = item


def _slots_of(value: Any) -> frozenset[str]:
    return _slots(type(value))


_SLOTS: dict[type, frozenset[str]] = {}


def _slots(type_: type) -> frozenset[str]:
    known = _SLOTS.get(type_)
    return known if known is not None else _SLOTS.setdefault(type_, _find_slots(type_))


def _find_slots(type_: type) -> frozenset[str]:
    return frozenset(
        name
        for one in type_.__mro__
        for name, member in vars(one).items()
        if isinstance(member, MemberDescriptorType) and _is_of_script(one.__module__)
    )


def _base(value: object) -> Any:
    """The class whose items the object has besides its attributes. None: it has no items."""
    if type(value).__dictoffset__ and vars(value) is value:  # its items are its attributes
        return None
    return next((one for one in _BASES if isinstance(value, one)), None)


def _items_of(value: Any) -> Any:
    """A copy of the items of an object that is derived from a list or dictionary. None: of another
    one, or of one with too many."""
    base = _base(value)
    if base is None or base.__len__(value) > MAX_PLAIN:
        return None
    if not issubclass(base, dict):
        return base(base.__iter__(value))
    return dict(zip(base.keys(value), base.values(value), strict=True))


def _set_items(value: Any, items: Any) -> None:
    base = _base(value)
    if base is not None:
        base.clear(value)
        (base.extend if base in (list, deque) else base.update)(value, items)


# Within a process


class Content:
    """What some objects contain at this moment."""

    def __init__(self, roots: Iterable[object], others: Collection[int]) -> None:
        """`others`: the objects that are kept in another way, by their ids."""
        self._others, self._kept = others, dict[int, tuple[Kind, Any, Any]]()
        for root in roots:
            self._add_all(root)

    def _add_all(self, root: object) -> None:
        """First what is near to the root: a large object must not keep others from being kept."""
        few, many = deque([(root, 0)]), deque[tuple[Any, int]]()
        parts, total = MAX_PARTS, MAX_TOTAL
        while (few or many) and parts > 0 and total > 0:
            value, depth = (few or many).popleft()
            found = self._add(value)
            if found is None:
                continue
            inner, size = found
            parts, total = parts - 1, total - size
            if depth < MAX_DEPTH and not _are_scalars(inner):
                (few if len(inner) <= _MANY else many).extend((one, depth + 1) for one in inner)

    def _add(self, value: Any) -> tuple[Collection[Any], int] | None:
        """What is in it, and its size. None: it is not kept here."""
        kind = kind_of(type(value))
        if kind in _UNCHANGING or id(value) in self._kept or id(value) in self._others:
            return None
        content: Any
        inner: Collection[Any] = ()
        match kind:
            case Kind.MANY if len(value) <= MAX_PLAIN:
                inner = content = value if _is_frozen(type(value)) else value.copy()
            case Kind.MAPPING if len(value) <= MAX_PLAIN:
                content = value.copy()
                inner = content.values()
            case Kind.OWN if not _is_at_work(there := attributes(value)):
                items = _items_of(value)
                content = there, items
                there_in = items.values() if isinstance(items, dict) else items or ()
                inner = [*there.values(), *there_in]
            case Kind.GENERATOR if value is not torch.default_generator:
                content = generators.state(value)
            case Kind.LEAF if _is_small(value):
                content = copy_of_leaf(value)
            case _:
                return None
        self._kept[id(value)] = kind, value, content
        return inner, len(inner) if kind is not Kind.LEAF else _number_of_elements(value)

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
                    names, items = content
                    _set_attributes(value, names, attributes(value).keys() - names.keys())
                    if items is not None:
                        _set_items(value, items)
                case Kind.GENERATOR:
                    generators.set_state(value, content)
                case _:
                    put_leaf_back(value, content)


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
    """It changes when a list grows, or is full and takes new items for old ones."""
    match kind_of(type(value)):
        case Kind.MANY if isinstance(value, list | tuple | deque) and value:
            return len(value), id(value[0]), id(value[-1])
        case Kind.MANY:
            return (len(value),)
        case Kind.MAPPING:
            return len(value), *map(id, islice(value.values(), _SEEN))
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
            case Kind.MANY if _is_named_tuple(type(value)):
                return Record(self._all(value), *_name_of(type(value)))
            case Kind.MANY:
                items = self._all(value)
                return Many(items, type(value), value.maxlen if type(value) is deque else None)
            case Kind.MAPPING:
                return self._mapping(value, type(value))
            case Kind.OWN if not _is_at_work(there := attributes(value)):
                return self._own(value, there)
            case Kind.GENERATOR if value is not torch.default_generator:
                return State(generators.state(value))
            case Kind.LEAF:
                return self._leaf(value, is_attribute)
            case _:
                return MISSING

    def _own(self, value: Any, there: dict[str, Any]) -> Attributes:
        if not _are_scalars(there.values()):
            there = {name: self._attribute(item) for name, item in there.items()}
        base, inner = _base(value), None
        if base is not None:
            self._check_length(base.__len__(value))
            items = _items_of(value)
            is_mapping = isinstance(items, dict)
            inner = self._mapping(items, base) if is_mapping else Many(self._all(items), base)
        return Attributes(there, *_name_of(type(value)), inner=inner)

    def _attribute(self, value: Any) -> Any:
        """One that is too large does not keep the others from being written down."""
        if type(value) in _SCALARS:
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
        if _is_small(value) and not _is_on_device(value):
            self._count(0, _number_of_elements(value))
            is_tensor = isinstance(value, torch.Tensor)
            return attempt_values.small_tensor(value) if is_tensor else value.copy()
        if not _is_held(value):
            return MISSING
        self.has_held = True
        why = "it has a tensor on a device"
        if not _is_small(value):
            why = f"it has {_number_of_elements(value)} elements in one tensor or array"
        return Held(why, weakref.ref(value), _version(value), is_attribute)

    def _mapping(self, value: dict[Any, Any], type_: type) -> Mapping:
        self._check_length(len(value))
        there = dict(value)  # another thread may change it
        items = self._all(there.values())
        keys = there if _are_scalars(there) else map(_write_key, there)
        factory = getattr(value, "default_factory", None)
        known = factory if factory in _FACTORIES else None
        return Mapping(dict(zip(keys, items, strict=True)), type_, factory=known)

    def _all(self, items: Collection[Any]) -> list[Any]:
        self._check_length(len(items))
        self._count(0, len(items))
        there = list(items)
        return there if _are_scalars(there) else [self.write(item) for item in there]

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
        case _ if type(key) in _SCALARS or type(key) in _CONSTANTS:
            return key
        case _:
            raise NotPlain(f"it has keys of the type {type(key).__name__}")


def _read_key(key: Any) -> Any:
    match key:
        case Member():
            return _class(key.module, key.name)[key.member]
        case tuple() if type(key) is tuple:
            return tuple(map(_read_key, key))
        case _:
            return key


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
            if is_same and _are_scalars(now.items.values()) and _equal(first.items, now.items):
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
            if is_same and _are_scalars(now.items):
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
        case Many() | Record() if not _are_scalars(now.items):
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


def put(content: Any, value: Any = MISSING, done: dict[int, Any] | None = None) -> Any:
    """Put what was written down into this object, or into a new one. Returns the object.

    `done`: the objects that have got their content. One of them that had become two different ones
    in the other process gets a second object.

    Raises:
        NotPlain: There is no such object here, and none can be made.
    """
    done = {} if done is None else done
    known = done.get(id(value), content)
    if known is not content and not _is_constant(content) and changed(known, content) is not SAME:
        value = _second(value)
    if value is not MISSING and kind_of(type(value)) not in _UNCHANGING:
        done[id(value)] = content
    match content:
        case Unknown():
            if value is MISSING:
                raise NotPlain("it contains an object that only the lost process had")
            return value
        case Many():
            return _put_many(content, value, done)
        case Record():
            return _put_record(content, value, done)
        case Mapping():
            mapping: Any = value if type(value) is content.type_ else content.type_()
            if content.factory is not None and mapping is not value:
                mapping.default_factory = content.factory
            _put_items(content, mapping, done)
            return mapping
        case Attributes():
            return _put_attributes(content, value, done)
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
                put_leaf_back(value, new)
                return value
            return new


def _is_constant(content: Any) -> bool:
    return isinstance(content, Unknown | Member | State) or type(content) in _SCALARS


def _second(value: Any) -> Any:
    """A copy of an object, to get another content. What cannot be written down is in both."""
    match kind_of(type(value)):
        case Kind.MANY | Kind.MAPPING | Kind.OWN:
            return copy(value)
        case _:
            return MISSING


def _put_attributes(content: Attributes, value: Any, done: dict[int, Any]) -> Any:
    if _name_of(type(value)) != (content.module, content.name):
        class_ = _class(content.module, content.name)
        try:
            value = class_.__new__(class_)
        except TypeError as problem:
            raise NotPlain(f"no object of the class {content.name} can be made") from problem
    there = attributes(value)
    new, problems = dict[str, Any](), list[NotPlain]()
    for name, item in content.items.items():
        try:
            new[name] = put(item, there.get(name, MISSING), done)
        except NotPlain as problem:
            problems.append(problem)
    _set_attributes(value, new, content.gone)
    if problems:
        raise problems[0]
    if isinstance(content.inner, Many):
        there = _items_of(value)
        _set_items(value, _put_many(content.inner, there, done))
    elif isinstance(content.inner, Mapping):
        there = _items_of(value)
        _put_items(content.inner, there, done)
        _set_items(value, there)
    return value


def _put_items(content: Mapping, there: Any, done: dict[int, Any]) -> None:
    new, factory = {}, getattr(there, "default_factory", None)
    for written, item in content.items.items():
        key = _read_key(written)
        old = there.get(key, MISSING)
        if old is MISSING and isinstance(item, Mapping) and factory is not None:
            old = factory()
        new[key] = put(item, old, done)
    if content.type_ is OrderedDict:
        there.clear()
    for written in content.gone:
        there.pop(_read_key(written), None)
    if isinstance(there, Counter):  # its own update adds
        dict.update(there, new)
    else:
        there.update(new)


def _put_many(content: Many, value: Any, done: dict[int, Any]) -> Any:
    is_same = type(value) is content.type_
    old = list(value) if is_same and content.type_ not in (set, frozenset) else []
    old += [MISSING] * (len(content.items) - len(old))
    items = [put(item, old[place], done) for place, item in enumerate(content.items)]
    if not is_same or content.type_ in _FROZEN:
        return deque(items, content.longest) if content.type_ is deque else content.type_(items)
    value.clear()
    (value.update if content.type_ is set else value.extend)(items)
    return value


def _put_record(content: Record, value: Any, done: dict[int, Any]) -> Any:
    class_ = _class(content.module, content.name)
    if not _is_named_tuple(class_):
        raise NotPlain(f"the class {content.name} is not a named tuple here")
    old = list(value) if type(value) is class_ else [MISSING] * len(content.items)
    items = [put(item, one, done) for item, one in zip(content.items, old, strict=True)]
    return tuple.__new__(class_, items)


def _name_of(type_: type) -> tuple[str, str]:
    return type_.__module__, type_.__qualname__


def _class(module: str, name: str) -> Any:
    found = find_class(module, name)
    if found is None:
        raise NotPlain(f"the class {name} is not known here")
    return found


def _is_at_work(names: dict[str, Any]) -> bool:
    """Whether other threads or processes use the object with these attributes: they must not change
    under them."""
    others = set(map(type, names.values())) - _SCALARS
    return any(type_.__module__.partition(".")[0] in _WORKERS for type_ in others)


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
            return value if type(value) in _CONSTANTS else MISSING


def _are_scalars(items: Iterable[Any]) -> bool:
    return _SCALARS.issuperset(map(type, items))


# Tensors and arrays


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and value.grad_fn is None
        return is_plain and value.numel() <= attempt_values.MAX_ELEMENTS
    return bool(value.dtype != object and value.size <= attempt_values.MAX_ELEMENTS)


def _is_held(value: Any) -> bool:
    """Whether a step can change it in place, if it is too large or on a device."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and value.grad_fn is None
    return isinstance(value, np.ndarray)


def _has_form(value: Any, of: torch.Tensor) -> bool:
    is_plain = type(value) is torch.Tensor and value.grad_fn is None
    return is_plain and (value.shape, value.dtype) == (of.shape, of.dtype)


def _number_of_elements(value: Any) -> int:
    return int(value.numel() if isinstance(value, torch.Tensor) else value.size)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _version(value: Any) -> int:
    """A number that changes when the tensor or array is changed in place."""
    if isinstance(value, torch.Tensor):
        return compat.version(value)
    if value.dtype == object or not value.flags.c_contiguous:
        return 0
    flat = value.reshape(-1).view(np.uint8)
    return crc32(flat[:: flat.size // _CHECKED + 1].tobytes())


def copy_of_leaf(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def put_leaf_back(value: Any, content: Any) -> None:
    """Give a tensor or an array this content."""
    if isinstance(value, torch.Tensor):
        is_expanded = 0 in value.stride() and value.numel() > 1
        if is_expanded:
            return  # it cannot be changed in place
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            if value.shape == content.shape:
                value.copy_(content)
            else:
                value.data = content.clone()
    elif isinstance(value, np.ndarray) and value.flags.writeable and value.shape == content.shape:
        value[...] = content
