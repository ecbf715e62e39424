"""Samples of the state show after a fault whether two ranks have held the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from taskd.torch.state.protected import Protected
from taskd.torch.state.samples import KEPT, SampleChain


def protect() -> tuple[Protected, nn.Sequential]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), *(nn.Linear(64, 64) for _ in range(9)))
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.register_buffer("queue", torch.zeros(100))
    return Protected(net, torch.optim.SGD(net.parameters()), None, {}), net


def run(chain: SampleChain, steps: range, incident: int = 0) -> None:
    for step in steps:
        chain.extend(incident, 0, step, gradients=True)


def test_equal_ranks_have_equal_samples_and_their_replacements_know_them(tmp_path: Path) -> None:
    chains = [SampleChain(tmp_path, rank, protect()[0]) for rank in range(2)]
    for chain in chains:
        run(chain, range(20))
    shown = chains[0].shown(is_new=False)
    assert shown == chains[1].shown(is_new=False)
    assert len(shown) == KEPT
    assert SampleChain(tmp_path, 1, protect()[0]).shown(is_new=True) == shown
    assert SampleChain(tmp_path, 2, protect()[0]).shown(is_new=True) == {}


def test_difference_is_remembered_until_the_next_incident(tmp_path: Path) -> None:
    same, (other, net) = protect()[0], protect()
    chains = [SampleChain(tmp_path, 0, same), SampleChain(tmp_path, 1, other)]
    with torch.no_grad():
        list(net.parameters())[8].add_(1)
    for chain in chains:
        run(chain, range(20))
    with torch.no_grad():
        list(net.parameters())[8].sub_(1)
    for chain in chains:
        run(chain, range(20, 23))
    first, second = (chain.shown(is_new=False) for chain in chains)
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())
    for chain in chains:
        run(chain, range(23, 25), incident=1)
    first, second = (chain.shown(is_new=False) for chain in chains)
    assert first[1, 0, 24] == second[1, 0, 24]
