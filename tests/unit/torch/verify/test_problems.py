"""What cannot be verified is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from taskd.torch.state.protected import Protected
from taskd.torch.verify.verification import problems


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def protect() -> Protected:
    net = nn.Linear(2, 2)
    return Protected(net, torch.optim.SGD(net.parameters(), lr=0.1), None, {})


def test_deterministic_algorithms_are_required() -> None:
    torch.use_deterministic_algorithms(False)
    (problem,) = problems(protect())
    assert "torch.use_deterministic_algorithms(True)" in problem
    torch.use_deterministic_algorithms(True)
    assert problems(protect()) == []
