"""The inputs of a pass travel as bytes, and come back the same in every bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from taskd.torch import random_state
from taskd.torch.state.sealed import BadState
from taskd.torch.verify.packed_call import NotData, pack, unpack


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskd.torch.state.sealed._key", lambda: b"key of the test")


@dataclass
class Batch:
    images: torch.Tensor
    names: list[str]


def test_nested_data_comes_back_the_same() -> None:
    batch = Batch(torch.randn(3, 4), ["a", "b"])
    empty, half = torch.empty(0, 5), torch.randn(7).to(torch.bfloat16)
    call = unpack(pack((batch, [empty, half]), {"mask": torch.tensor([True, False])}))
    (found, (nothing, short)), mask = call.args, call.kwargs["mask"]
    assert found.names == batch.names
    assert torch.equal(found.images, batch.images)
    assert (nothing.shape, short.dtype) == ((0, 5), torch.bfloat16)
    assert torch.equal(short, half)
    assert mask.tolist() == [True, False]


def test_only_the_part_of_a_dataset_that_is_used_travels() -> None:
    dataset = torch.randn(1000, 1000)
    assert len(pack((dataset[10:12],), {})) < 50_000


def test_order_in_memory_is_kept() -> None:
    """Kernels are chosen by it, and round differently."""
    image = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    (found,) = unpack(pack((image,), {})).args
    assert found.stride() == image.stride()
    assert torch.equal(found, image)


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (nn.Linear(2, 2), "contains a Linear"),
        ([nn.Parameter(torch.ones(2))], "contains a Parameter"),
        (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0), "contains a SGD"),
        ({"x": torch.ones(2, requires_grad=True)}, "requires grad"),
        (lambda: 0, "cannot be pickled"),
    ],
)
def test_what_is_not_data_is_refused(argument: Any, why: str) -> None:
    with pytest.raises(NotData, match=why):
        pack((argument,), {})


def draw() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())


def test_random_numbers_of_the_sender_are_drawn_and_given_back() -> None:
    call = unpack(pack((), {}))
    expected = draw()
    torch.manual_seed(99)
    own = random_state.read()
    with random_state.borrowed(call.random):
        assert draw() == expected
    assert random_state.read().torch == own.torch


def test_changed_bytes_are_refused() -> None:
    data = bytearray(pack((torch.ones(4),), {}))
    data[-20] ^= 1
    with pytest.raises(BadState):
        unpack(bytes(data))
