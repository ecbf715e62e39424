"""The content of the script's objects at one moment, to put it back into the same objects.

For an attempt that is abandoned, in the process that has begun it. What a replacement gets is
written down by `object_writer.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch

from taskd.torch.data import generators
from taskd.torch.loop.object_kinds import (
    MAX_DEPTH,
    MAX_PARTS,
    MAX_PLAIN,
    MAX_TOTAL,
    UNCHANGING,
    Kind,
    are_scalars,
    attributes,
    copy_of_leaf,
    is_at_work,
    is_frozen,
    is_small,
    items_of,
    kind_of,
    number_of_elements,
    put_leaf_back,
    set_attributes,
    set_items,
)

_MANY = 64
"""What a longer list contains is looked at last."""


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
            if depth < MAX_DEPTH and not are_scalars(inner):
                (few if len(inner) <= _MANY else many).extend((one, depth + 1) for one in inner)

    def _add(self, value: Any) -> tuple[Collection[Any], int] | None:
        """What is in it, and its size. None: it is not kept here."""
        kind = kind_of(type(value))
        if kind in UNCHANGING or id(value) in self._kept or id(value) in self._others:
            return None
        content: Any
        inner: Collection[Any] = ()
        match kind:
            case Kind.MANY if len(value) <= MAX_PLAIN:
                inner = content = value if is_frozen(type(value)) else value.copy()
            case Kind.MAPPING if len(value) <= MAX_PLAIN:
                content = value.copy()
                inner = content.values()
            case Kind.OWN if not is_at_work(there := attributes(value)):
                items = items_of(value)
                content = there, items
                there_in = items.values() if isinstance(items, dict) else items or ()
                inner = [*there.values(), *there_in]
            case Kind.GENERATOR if value is not torch.default_generator:
                content = generators.state(value)
            case Kind.LEAF if is_small(value):
                content = copy_of_leaf(value)
            case _:
                return None
        self._kept[id(value)] = kind, value, content
        return inner, len(inner) if kind is not Kind.LEAF else number_of_elements(value)

    def put_back(self) -> None:
        for kind, value, content in self._kept.values():
            match kind:
                case Kind.MANY if is_frozen(type(value)):
                    pass
                case Kind.MANY | Kind.MAPPING:
                    value.clear()
                    (value.update if kind is Kind.MAPPING or type(value) is set else value.extend)(
                        content
                    )
                case Kind.OWN:
                    names, items = content
                    set_attributes(value, names, attributes(value).keys() - names.keys())
                    if items is not None:
                        set_items(value, items)
                case Kind.GENERATOR:
                    generators.set_state(value, content)
                case _:
                    put_leaf_back(value, content)
