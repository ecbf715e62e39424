"""Which objects of the script can be kept over an attempt, and how their content is read and set.

A list of results, a dictionary of counters, an `AverageMeter`, a deque of rewards, a random
generator: a step changes such an object in place, and no variable shows it. Objects of other kinds
(models, files, functions) are left as they are.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, auto
from fractions import Fraction
from functools import cache
from io import IOBase
from pathlib import Path, PosixPath, PurePosixPath
from types import GeneratorType, MemberDescriptorType, SimpleNamespace
from typing import Any
from uuid import UUID
from zlib import crc32

import numpy as np
import torch
from torch import nn

from taskd.torch import compat
from taskd.torch.data import generators
from taskd.torch.loop import attempt_values

MAX_PLAIN, MAX_PARTS, MAX_DEPTH = 4096, 512, 6
"""Of numbers and strings in one list, of anything else in one object, and of objects in objects."""
MAX_TOTAL = 16 * MAX_PLAIN
"""Of numbers and strings in one object, with all that is in it."""
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


SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
FROZEN = (tuple, frozenset)
CONSTANTS = frozenset[type](
    (
        *(datetime, date, time, timedelta, timezone, Decimal, Fraction, UUID),
        *(PosixPath, PurePosixPath, range, torch.Size, torch.dtype, torch.device),
    )
)
"""Other values that never change, and that any process can read."""
_BASES = (OrderedDict, defaultdict, dict, list, set, deque)
"""What a class of the script may be derived from."""
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
UNCHANGING = (Kind.SCALAR, Kind.OTHER)


def _find_kind(type_: type) -> Kind:
    if type_ in SCALARS:
        return Kind.SCALAR
    if type_ in (list, tuple, set, frozenset, deque, bytearray) or is_named_tuple(type_):
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
    is_own = type_ in (Namespace, SimpleNamespace) or is_of_script(type_.__module__)
    return Kind.OWN if is_own else Kind.OTHER


def is_named_tuple(type_: type) -> bool:
    return issubclass(type_, tuple) and hasattr(type_, "_fields")


def is_frozen(type_: type) -> bool:
    return type_ in FROZEN or issubclass(type_, tuple)


def is_of_script(module: str) -> bool:
    if module == "__main__":
        return True
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module.partition(".")[0] == _PACKAGE:
        return False
    return not _is_in_library(path)


@cache
def _is_in_library(path: str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in _libraries())


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) for name in names} | {str(Path(torch.__file__).parent)})


def is_changeable(value: Any) -> bool:
    """Whether a step can change it in place, and we can bring it back."""
    kind = kind_of(type(value))
    if is_frozen(type(value)):
        return len(value) <= MAX_PARTS and any(map(is_changeable, value))
    if kind is Kind.LEAF:
        return is_small(value) or is_held(value)
    return kind not in UNCHANGING


def is_iterator(value: Any) -> bool:
    """Whether it has a position that no other process can have."""
    if isinstance(value, GeneratorType):  # one that runs is around us
        return not value.gi_running
    return hasattr(type(value), "__next__") and not isinstance(value, IOBase)


def attributes(value: object) -> dict[str, Any]:
    """Those of an object of the script."""
    there = dict(vars(value)) if type(value).__dictoffset__ else {}
    for name in _slots_of(value):
        try:
            there[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return there


def set_attributes(value: object, names: dict[str, Any], gone: Iterable[str]) -> None:
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
        if isinstance(member, MemberDescriptorType) and is_of_script(one.__module__)
    )


def base_of(value: object) -> Any:
    """The class whose items the object has besides its attributes. None: it has no items."""
    if type(value).__dictoffset__ and vars(value) is value:  # its items are its attributes
        return None
    return next((one for one in _BASES if isinstance(value, one)), None)


def items_of(value: Any) -> Any:
    """A copy of the items of an object that is derived from a list or dictionary. None: of another
    one, or of one with too many."""
    base = base_of(value)
    if base is None or base.__len__(value) > MAX_PLAIN:
        return None
    if not issubclass(base, dict):
        return base(base.__iter__(value))
    return dict(zip(base.keys(value), base.values(value), strict=True))


def set_items(value: Any, items: Any) -> None:
    base = base_of(value)
    if base is not None:
        base.clear(value)
        (base.extend if base in (list, deque) else base.update)(value, items)


def is_at_work(names: dict[str, Any]) -> bool:
    """Whether other threads or processes use the object with these attributes: they must not change
    under them."""
    others = set(map(type, names.values())) - SCALARS
    return any(type_.__module__.partition(".")[0] in _WORKERS for type_ in others)


def is_shared(value: Any) -> bool:
    return kind_of(type(value)) is Kind.OWN and is_at_work(attributes(value))


def name_of(type_: type) -> tuple[str, str]:
    return type_.__module__, type_.__qualname__


def are_scalars(items: Iterable[Any]) -> bool:
    return SCALARS.issuperset(map(type, items))


# Tensors and arrays


def is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and value.grad_fn is None
        return is_plain and value.numel() <= attempt_values.MAX_ELEMENTS
    return bool(value.dtype != object and value.size <= attempt_values.MAX_ELEMENTS)


def is_held(value: Any) -> bool:
    """Whether a step can change it in place, if it is too large or on a device."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and value.grad_fn is None
    return isinstance(value, np.ndarray)


def has_form(value: Any, of: torch.Tensor) -> bool:
    is_plain = type(value) is torch.Tensor and value.grad_fn is None
    return is_plain and (value.shape, value.dtype) == (of.shape, of.dtype)


def number_of_elements(value: Any) -> int:
    return int(value.numel() if isinstance(value, torch.Tensor) else value.size)


def is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def version_of(value: Any) -> int:
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
