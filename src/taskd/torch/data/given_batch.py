"""A batch that was given to the script, and what brings it back to how it was.

An attempt at a step may change its batch: take the labels out of a dictionary, or add noise to a
tensor in place. The next attempt needs the batch as it was, in the same objects. Copying every
batch would cost too much, so only its containers are copied. torch counts the changes of each
tensor; one that has changed is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from taskd.torch import compat

MAX_DEPTH = 8

ReadAgain = Callable[[], Any]


class GivenBatch:
    """One batch, for as many attempts as its step needs."""

    def __init__(self, batch: Any, read_again: ReadAgain) -> None:
        self._batch, self._read_again = batch, read_again
        self._fetched = _Snapshot(batch)
        self._at_attempt: _Snapshot | None = None
        self._is_given = False

    def give(self) -> Any:
        """As it came from the loader."""
        if self._is_given:
            self._bring_back(self._fetched)
        self._is_given, self._at_attempt = True, None
        return self._batch

    def begin_attempt(self) -> None:
        """As it was at the first attempt: the script may have prepared it before."""
        if self._at_attempt is None:
            self._at_attempt = _Snapshot(self._batch, self._fetched)
        else:
            self._bring_back(self._at_attempt)

    def _bring_back(self, snapshot: _Snapshot) -> None:
        if changed := snapshot.restore():
            self._fetched.copy_from(_Snapshot(self._read_again()), changed)
            snapshot.count_versions()


class _Snapshot:
    """What a batch consisted of at some moment."""

    def __init__(self, batch: Any, known: _Snapshot | None = None) -> None:
        """A tensor that is not as it is known cannot be read again, so it is copied."""
        self._containers: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.tensors: list[torch.Tensor] = []
        self._add(batch, 0)
        self.count_versions()
        self._copies = {} if known is None else known.copies_of_others(self.tensors)

    def count_versions(self) -> None:
        self._versions = {id(tensor): compat.version(tensor) for tensor in self.tensors}

    def copies_of_others(self, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copies of those tensors that are not in here, or have changed since."""
        return {
            id(tensor): tensor.detach().clone()
            for tensor in tensors
            if self._versions.get(id(tensor), -1) != compat.version(tensor)
        }

    @torch.no_grad()
    def restore(self) -> set[int]:
        """Returns the ids of the tensors that have changed and have to be read again."""
        for container, before in self._containers:
            container.clear()
            container.update(before) if isinstance(before, dict) else container.extend(before)
        for array, values in self._arrays:
            array[...] = values
        changed = set()
        for tensor in self.tensors:
            if tensor.is_leaf:
                tensor.grad = None
            if self._versions[id(tensor)] == compat.version(tensor):
                continue
            if (copy := self._copies.get(id(tensor))) is not None:
                _assign(tensor, copy)
                self._versions[id(tensor)] = compat.version(tensor)
            else:
                changed.add(id(tensor))
        return changed

    @torch.no_grad()
    def copy_from(self, other: _Snapshot, changed: set[int]) -> None:
        """Bring these tensors back, from an equal batch."""
        for tensor, source in zip(self.tensors, other.tensors, strict=True):
            if id(tensor) in changed:
                _assign(tensor, source)
                self._versions[id(tensor)] = compat.version(tensor)

    def _add(self, one: Any, depth: int) -> None:
        match one:
            case _ if depth > MAX_DEPTH:
                return
            case torch.Tensor():
                self.tensors.append(one)
            case np.ndarray() if one.flags.writeable:
                self._arrays.append((one, one.copy()))
            case dict():
                self._containers.append((one, dict(one)))
                self._add_all(one.values(), depth)
            case list():
                self._containers.append((one, list(one)))
                self._add_all(one, depth)
            case tuple():
                self._add_all(one, depth)
            case _ if isinstance(attributes := getattr(one, "__dict__", None), dict):
                self._add(attributes, depth + 1)
            case _:
                pass

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._add(value, depth + 1)


def _assign(tensor: torch.Tensor, source: torch.Tensor) -> None:
    tensor.detach_().requires_grad_(False)
    if tensor.shape == source.shape:
        tensor.copy_(source)
    else:
        tensor.set_(source.clone())  # type: ignore[call-overload]
