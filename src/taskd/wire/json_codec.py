"""Frozen dataclasses <-> plain JSON values, by their type hints.

Used for the bodies of our own bus messages and other small files, so that a value is described
once, where it is declared. A value that does not fit its hint is refused, with its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class TypeMismatch(ValueError):
    """A plain value does not fit the expected type; the message gives its path."""


def to_plain(value: object) -> Any:
    """Any value of our dataclasses as plain JSON values."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _hints(type(value))}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(map(to_plain, value))
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], plain: object) -> T:
    """The inverse of `to_plain`, given the type that was written."""
    return _read(kind, plain, getattr(kind, "__name__", str(kind)))  # type: ignore[no-any-return]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(hint: Any, plain: Any, where: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return plain
    if origin in (Union, UnionType):
        return _read_union(arguments, plain, where)
    if origin in (tuple, frozenset, list):
        if not isinstance(plain, list):
            raise TypeMismatch(f"{where}: expected a list, got {type(plain).__name__}")
        return _read_list(origin, arguments, plain, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(plain, dict):
            raise TypeMismatch(f"{where}: expected an object, got {type(plain).__name__}")
        return {
            _read_key(arguments[0], key, where): _read(arguments[1], item, f"{where}[{key}]")
            for key, item in plain.items()
        }
    if is_dataclass(hint):
        return _read_dataclass(hint, plain, where)
    return _read_scalar(hint, plain, where)


def _read_union(arguments: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain is None and NoneType in arguments:
        return None
    problems = []
    for hint in arguments:
        if hint is not NoneType:
            try:
                return _read(hint, plain, where)
            except TypeMismatch as misfit:
                problems.append(str(misfit))
    raise TypeMismatch("; ".join(problems))


def _read_list(origin: Any, arguments: tuple[Any, ...], plain: list[Any], where: str) -> Any:
    if origin is tuple and Ellipsis not in arguments:
        if len(plain) != len(arguments):
            raise TypeMismatch(f"{where}: expected {len(arguments)} items, got {len(plain)}")
        pairs = zip(arguments, plain, strict=True)
        return tuple(_read(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(pairs))
    return origin(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(plain))


def _read_key(hint: Any, key: str, where: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    if hint is int:
        try:
            return int(key)
        except ValueError:
            raise TypeMismatch(f"{where}: key {key!r} is not a number") from None
    return _read(hint, key, where)


def _read_dataclass(kind: Any, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise TypeMismatch(f"{where}: expected an object, got {type(plain).__name__}")
    hints = _hints(kind)
    values = {}
    for item in fields(kind):
        if item.name in plain:
            values[item.name] = _read(hints[item.name], plain[item.name], f"{where}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise TypeMismatch(f"{where}: {item.name} is missing")
    return kind(**values)


def _read_scalar(hint: Any, plain: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(plain)
        except ValueError:
            raise TypeMismatch(f"{where}: {plain!r} is not a {hint.__name__}") from None
    if hint is float and isinstance(plain, int) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            raise TypeMismatch(f"{where}: the number is too large") from None
    if type(plain) is not hint:
        raise TypeMismatch(f"{where}: expected {hint.__name__}, got {type(plain).__name__}")
    return plain
