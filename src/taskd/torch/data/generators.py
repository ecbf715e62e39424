"""Random numbers that belong to a batch, whichever process draws them and whatever it drew before.

Loaders, datasets and samplers draw from the generators of their process, and often from generators
of their own. Each of them is seeded again for every batch, from the number of the batch. So a batch
is the same in a replacement, whose loader starts in the middle of an epoch, and in a worker process
that is kept from epoch to epoch.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

MAX_OBJECTS = 10_000
"""How many objects of a dataset are searched for generators."""
MAX_ITEMS = 100
"""How many items of a list or dictionary are."""
LEAVES = (str, bytes, int, float, complex, bool, type, types.ModuleType, torch.Tensor, np.ndarray)

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


@dataclass(frozen=True, slots=True)
class Seeds:
    """One seed for each kind of generator, so that a script needs to seed only those it uses."""

    torch: bytes
    python: bytes
    numpy: bytes
    own: bytes
    """For generators that belong to a loader, its samplers or its dataset."""

    def of(self, *parts: int | str) -> Seeds:
        """The seeds of something that these parts name."""
        return Seeds(*(_derive(seed, *parts) for seed in self._all()))

    def numbers(self) -> list[int]:
        return [int.from_bytes(seed[:8], "little", signed=True) for seed in self._all()]

    @staticmethod
    def of_numbers(numbers: list[int]) -> Seeds:
        return Seeds(*(number.to_bytes(8, "little", signed=True) for number in numbers))

    def _all(self) -> tuple[bytes, ...]:
        return self.torch, self.python, self.numpy, self.own

    def in_workers(self) -> Seeds:
        """The seeds in a worker process, where torch seeds the others from its own."""
        return replace(self, python=self.torch, numpy=self.torch)


def _derive(seed: bytes, *parts: int | str) -> bytes:
    return blake2b(repr(parts).encode(), key=seed, digest_size=16).digest()


@contextmanager
def restored() -> Iterator[None]:
    """What is drawn in here does not change the generators of this process."""
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])


def seed_process(seeds: Seeds) -> None:
    """Seed the generators that every module of this process shares."""
    torch.default_generator.manual_seed(_number(seeds.torch) >> 1)
    random.seed(_number(seeds.python))
    np.random.seed(_number(seeds.numpy) & 0xFFFFFFFF)


def _number(seed: bytes) -> int:
    return int.from_bytes(seed[:8], "little")


def find(owner: Any) -> dict[str, Generator]:
    """The generators that an object holds, directly or in its attributes, by their paths."""
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([("", owner)])
    while queue and len(seen) < MAX_OBJECTS:
        path, one = queue.popleft()
        if one is None or id(one) in seen or isinstance(one, LEAVES):
            continue
        seen.add(id(one))
        if isinstance(one, Generator):
            if one is not torch.default_generator and not isinstance(one, random.SystemRandom):
                found[path] = one
            continue
        queue.extend((f"{path}.{name}", child) for name, child in _children(one))
    return found


def reseed(found: dict[str, Generator], seeds: Seeds) -> None:
    """Seed each of them differently."""
    for path, one in found.items():
        number = _number(_derive(seeds.own, path))
        match one:
            case torch.Generator():
                one.manual_seed(number >> 1)
            case random.Random():
                one.seed(number)
            case np.random.Generator():
                one.bit_generator.state = type(one.bit_generator)(number).state
            case np.random.RandomState():
                one.seed(number & 0xFFFFFFFF)


def fingerprint(found: dict[str, Generator]) -> bytes:
    """A hash of their states."""
    return _derive(b"", *(f"{path} {state(one)!r}" for path, one in found.items()))


def state(one: Generator) -> Any:
    """It can be compared and pickled."""
    match one:
        case torch.Generator():
            return one.get_state().numpy().tobytes()
        case random.Random():
            return one.getstate()
        case np.random.Generator():
            return _without_arrays(one.bit_generator.state)
        case np.random.RandomState():
            kind, words, *rest = one.get_state(legacy=True)
            return kind, words.tobytes(), *rest  # type: ignore[union-attr]


def set_state(one: Generator, value: Any) -> None:
    """Set what `state` has returned."""
    match one:
        case torch.Generator():
            one.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        case random.Random():
            one.setstate(value)
        case np.random.Generator():
            one.bit_generator.state = _with_arrays(value)
        case np.random.RandomState():
            kind, words, *rest = value
            one.set_state((kind, np.frombuffer(words, dtype=np.uint32), *rest))


def _without_arrays(value: Any) -> Any:
    """Some of NumPy's generators have arrays in their states, which cannot be compared."""
    match value:
        case dict():
            return {name: _without_arrays(item) for name, item in value.items()}
        case np.ndarray():
            return value.dtype.str, value.tobytes()
        case _:
            return value


def _with_arrays(value: Any) -> Any:
    match value:
        case dict():
            return {name: _with_arrays(item) for name, item in value.items()}
        case (str(type_), bytes(data)):
            return np.frombuffer(data, dtype=type_).copy()
        case _:
            return value


def _children(one: Any) -> Iterator[tuple[str, Any]]:
    match one:
        case dict():
            pairs = zip(range(MAX_ITEMS), one.items(), strict=False)
            yield from ((str(key), value) for _, (key, value) in pairs)
        case list() | tuple():
            yield from ((str(at), value) for at, value in enumerate(one[:MAX_ITEMS]))
        case types.FunctionType():
            yield from _used_by(one)
        case types.MethodType():
            yield from (("self", one.__self__), ("function", one.__func__))
        case partial():
            yield from (("function", one.func), ("args", one.args), ("keywords", one.keywords))
        case _:
            yield from list(getattr(one, "__dict__", {}).items())
            for kind in type(one).__mro__:
                if not kind.__module__.startswith(("builtins", "torch.", "typing")):
                    for name, value in list(vars(kind).items()):
                        if isinstance(value, types.FunctionType):
                            yield f"{kind.__name__}.{name}", value


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to: the variables around it, and generators of its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, Generator):
            yield name, value
