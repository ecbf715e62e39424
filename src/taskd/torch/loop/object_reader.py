"""Puts what was written down into the objects that the script has created in a replacement."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from copy import copy
from typing import Any

import torch

from taskd.torch.data import generators
from taskd.torch.loop import attempt_values
from taskd.torch.loop.attempt_values import Member, Record, find_class
from taskd.torch.loop.object_kinds import (
    FROZEN,
    SCALARS,
    UNCHANGING,
    Kind,
    attributes,
    has_form,
    is_named_tuple,
    items_of,
    kind_of,
    name_of,
    put_leaf_back,
    set_attributes,
    set_items,
)
from taskd.torch.loop.written_objects import (
    MISSING,
    SAME,
    Attributes,
    Many,
    Mapping,
    NotPlain,
    State,
    Unknown,
    changed,
)


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
    if value is not MISSING and kind_of(type(value)) not in UNCHANGING:
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
            if isinstance(new, torch.Tensor) and has_form(value, new):
                put_leaf_back(value, new)
                return value
            return new


def _is_constant(content: Any) -> bool:
    return isinstance(content, Unknown | Member | State) or type(content) in SCALARS


def _second(value: Any) -> Any:
    """A copy of an object, to get another content. What cannot be written down is in both."""
    match kind_of(type(value)):
        case Kind.MANY | Kind.MAPPING | Kind.OWN:
            return copy(value)
        case _:
            return MISSING


def _put_attributes(content: Attributes, value: Any, done: dict[int, Any]) -> Any:
    if name_of(type(value)) != (content.module, content.name):
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
    set_attributes(value, new, content.gone)
    if problems:
        raise problems[0]
    if isinstance(content.inner, Many):
        there = items_of(value)
        set_items(value, _put_many(content.inner, there, done))
    elif isinstance(content.inner, Mapping):
        there = items_of(value)
        _put_items(content.inner, there, done)
        set_items(value, there)
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


def _read_key(key: Any) -> Any:
    match key:
        case Member():
            return _class(key.module, key.name)[key.member]
        case tuple() if type(key) is tuple:
            return tuple(map(_read_key, key))
        case _:
            return key


def _put_many(content: Many, value: Any, done: dict[int, Any]) -> Any:
    is_same = type(value) is content.type_
    old = list(value) if is_same and content.type_ not in (set, frozenset) else []
    old += [MISSING] * (len(content.items) - len(old))
    items = [put(item, old[place], done) for place, item in enumerate(content.items)]
    if not is_same or content.type_ in FROZEN:
        return deque(items, content.longest) if content.type_ is deque else content.type_(items)
    value.clear()
    (value.update if content.type_ is set else value.extend)(items)
    return value


def _put_record(content: Record, value: Any, done: dict[int, Any]) -> Any:
    class_ = _class(content.module, content.name)
    if not is_named_tuple(class_):
        raise NotPlain(f"the class {content.name} is not a named tuple here")
    old = list(value) if type(value) is class_ else [MISSING] * len(content.items)
    items = [put(item, one, done) for item, one in zip(content.items, old, strict=True)]
    return tuple.__new__(class_, items)


def _class(module: str, name: str) -> Any:
    found = find_class(module, name)
    if found is None:
        raise NotPlain(f"the class {name} is not known here")
    return found
