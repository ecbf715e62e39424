"""Names of a framework that are not part of its public API, and the check that they exist.

A seam lists every such name in one table and calls `check` once, before anything is built on them.
A framework that lacks one is refused with its version, the missing name and what it is needed for.
Three tables use this: `torch/compat/` for training processes, `agent/seams/torch_names.py` for
the launcher, and `integrations/lightning_names.py` for Lightning.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import CodeType
from typing import Any

from taskd.errors import UnknownTorch
from taskd.runtime.torch_versions import Support, judge, minor, supported_torch

_STORE_ATTR = dis.opmap["STORE_ATTR"]


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One name that we rely on."""

    owner: str
    """Where it is: `module:Class`, or `module` for a function."""
    name: str
    """Spellings separated by a space where torch has renamed it: one of them is enough."""
    purpose: str
    """What TaskD needs it for."""
    optional_owner: bool = False
    """The owner itself may be missing, such as NCCL's class in a build for the CPU."""
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (99, 0)
    """It is needed from this version of torch on, and before that one."""

    def needed_by(self, version: tuple[int, int]) -> bool:
        return self.since <= version < self.until

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name.split()[0]}"


Find = Callable[[PrivateName], Any]
"""Gets what has to have the name, as `find_owner` does."""


def private_names(
    owner: str,
    names: str,
    purpose: str,
    *,
    optional_owner: bool = False,
    since: tuple[int, int] = (0, 0),
    until: tuple[int, int] = (99, 0),
) -> tuple[PrivateName, ...]:
    """One entry for each name; `old|new` where torch has renamed it."""
    return tuple(
        PrivateName(owner, name.replace("|", " "), purpose, optional_owner, since, until)
        for name in names.split()
    )


def find_owner(entry: PrivateName) -> Any:
    """The module or class that has to have the name; None if it does not exist."""
    module, _, path = entry.owner.partition(":")
    try:
        owner: Any = import_module(module)
    except ImportError:
        return None
    for part in filter(None, path.split(".")):
        owner = getattr(owner, part, None)
    return owner


def missing(table: Iterable[PrivateName], find: Find = find_owner) -> list[PrivateName]:
    """The entries that the installed framework does not have."""
    return [entry for entry in table if not _has(find(entry), entry)]


def check_torch(table: Iterable[PrivateName], find: Find = find_owner) -> None:
    """Raise UnknownTorch if the installed torch is too old or lacks any name of the table."""
    import torch

    version = torch.__version__
    support = judge(version)
    if support is Support.UNREADABLE:
        raise UnknownTorch(
            f"cannot parse the version of torch {version!r}. Supported: {supported_torch()}"
        )
    if support is Support.TOO_OLD:
        raise UnknownTorch(f"torch {version} is too old. Supported: {supported_torch()}")
    table = [entry for entry in table if entry.needed_by(minor(version))]
    lacking = missing(table, find)
    if not lacking:
        return
    raise UnknownTorch(
        f"torch {version} lacks {with_purposes(lacking)}. Supported: {supported_torch()}"
    )


def with_purposes(lacking: Iterable[PrivateName]) -> str:
    """The names, and what each is needed for."""
    return "; ".join(f"{entry}, which TaskD needs for {entry.purpose}" for entry in lacking)


def _has(owner: Any, entry: PrivateName) -> bool:
    if owner is None:
        return entry.optional_owner
    return any(hasattr(owner, name) or _sets(owner, name) for name in entry.name.split())


def _sets(owner: Any, name: str) -> bool:
    """Whether a method of the class sets it: attributes of instances are not in the class."""
    if not inspect.isclass(owner):
        return False
    functions = (value for one in owner.__mro__ for value in vars(one).values())
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in functions if callable(one))
    return any(code is not None and _stores(code, name) for code in codes)


def _stores(code: CodeType, name: str) -> bool:
    """The bytecode is read directly: `dis` takes ten times as long, and every rank waits for it."""
    if name not in code.co_names:
        return False
    wanted, extended = code.co_names.index(name), 0
    for at in range(0, len(code.co_code), 2):
        operation, argument = code.co_code[at], code.co_code[at + 1] | extended
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation == _STORE_ATTR and argument == wanted:
            return True
    return False
