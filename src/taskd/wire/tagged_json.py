"""Our values <-> JSON with type names, for the journal, which other versions must read.

Every dataclass is written with its name, so that unions are unambiguous. A field that a newer
version added gets its default; a field that it removed is ignored. Names are looked up among the
types that the caller gives; nothing is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

from taskd.wire.json_reading import loads

IS, TUPLE, SET, MAP, ENUM = "~", "~tuple", "~set", "~map", "~enum"


class UnreadableRecord(ValueError):
    """The text cannot be read by this version; the message says why."""


def write(value: object) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def read(text: str, types: Mapping[str, type]) -> Any:
    try:
        plain = loads(text)
    except ValueError as error:
        raise UnreadableRecord(f"invalid JSON: {error}") from error
    return _value(plain, types)


def types_of(*modules: ModuleType) -> dict[str, type]:
    """The dataclasses and enums that these modules define or import."""
    found = {}
    for module in modules:
        for name, thing in vars(module).items():
            if isinstance(thing, type) and (is_dataclass(thing) or issubclass(thing, Enum)):
                found[name] = thing
    return found


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    names = _names(kind)  # type: ignore[arg-type]
    if names is not None:
        plain = {IS: kind.__name__}
        for name in names:
            plain[name] = _plain(getattr(value, name))
        return plain
    if isinstance(value, Enum):
        return {ENUM: [kind.__name__, value.value]}
    if isinstance(value, tuple | list):
        return {TUPLE: [_plain(item) for item in value]}
    if isinstance(value, frozenset | set):
        return {SET: _sorted(value)}
    if isinstance(value, Mapping):
        return {MAP: [[_plain(key), _plain(item)] for key, item in value.items()]}
    raise TypeError(f"{kind.__name__} cannot be written as JSON")


def _sorted(items: Iterable[Any]) -> list[Any]:
    return sorted((_plain(item) for item in items), key=repr)


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for anything else."""
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else None


def _value(plain: Any, types: Mapping[str, type]) -> Any:
    if not isinstance(plain, dict):
        return plain
    if IS in plain:
        return _object(plain, types)
    match plain:
        case {"~tuple": list(items)}:
            return tuple(_value(item, types) for item in items)
        case {"~set": list(items)}:
            return frozenset(_value(item, types) for item in items)
        case {"~map": list(items)}:
            return {_value(key, types): _value(item, types) for key, item in items}
        case {"~enum": [str(name), value]}:
            try:
                return _type(name, types)(value)
            except ValueError as error:
                raise UnreadableRecord(str(error)) from error
        case _:
            raise UnreadableRecord(f"an object has no type tag; its keys are {sorted(plain)}")


def _object(plain: dict[str, Any], types: Mapping[str, type]) -> Any:
    kind = _type(plain[IS], types)
    known = set(_names(kind) or ())
    values = {name: _value(item, types) for name, item in plain.items() if name in known}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UnreadableRecord(f"{kind.__name__}: {error}") from error


def _type(name: str, types: Mapping[str, type]) -> type:
    if name not in types:
        raise UnreadableRecord(f"unknown type {name}")
    return types[name]
