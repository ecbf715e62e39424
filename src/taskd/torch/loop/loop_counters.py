"""Finds what counts the rounds of the script's loop beside us, such as `enumerate`.

A replacement enters the loop in the middle: `enumerate` would count from 0 there, and `zip` would
begin with the first elements of what it combines with the steps.
"""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Iterator
from types import FrameType, GeneratorType
from typing import Any

_COUNTERS = (enumerate, zip, itertools.islice, itertools.zip_longest)
_BETWEEN = (map, filter, itertools.takewhile, tuple)
"""They pass on what they get, and count nothing. `zip` and `map` keep their iterators in a tuple.
"""
_DEPTH = 4


def names_around(steps: Iterator[Any], frame: FrameType | None) -> list[str]:
    """What the loop of this function iterates over, besides the steps and progress bars.

    Called by the steps, when that loop asks for the first one. It looks at every object of the
    process, which takes a tenth of a second.
    """
    found, inner = set[str](), [steps, *_generators_below(frame)]
    for _ in range(_DEPTH):
        around = gc.get_referrers(*inner)
        # Of a proxy, isinstance would ask the object behind it.
        found |= {type(one).__name__ for one in around if issubclass(type(one), _COUNTERS)}
        inner = [one for one in around if issubclass(type(one), _BETWEEN)]
        if found or not inner:
            break
    return sorted(found)


def _generators_below(frame: FrameType | None) -> list[Any]:
    """Generators between that function and us, such as a progress bar: the garbage collector does
    not see what a running one refers to."""
    running, below = set[FrameType](), inspect.currentframe()
    while below is not None and below is not frame:
        if below.f_code.co_flags & inspect.CO_GENERATOR:
            running.add(below)
        below = below.f_back
    if below is None:
        return []
    generators = (one for one in gc.get_objects() if type(one) is GeneratorType)
    return [one for one in generators if one.gi_frame in running]
