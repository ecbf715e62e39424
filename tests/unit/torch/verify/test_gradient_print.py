"""The fingerprint of the gradients of one pass."""

from __future__ import annotations

import torch
from torch import nn

from taskd.torch.verify.gradient_print import GradientPrint


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))


def of_pass(net: nn.Module, batch: torch.Tensor) -> int:
    printed = GradientPrint()
    with printed.recording(list(net.parameters())):
        net(batch).square().mean().backward()
    assert not printed.is_empty
    return printed.value()


def test_same_pass_has_the_same_fingerprint_whatever_was_accumulated_before() -> None:
    net, batch = network(), torch.randn(5, 8)
    first = of_pass(net, batch)
    assert of_pass(net, batch) == first
    net.zero_grad()
    assert of_pass(net, batch) == first
    assert of_pass(net, batch + 1e-4) != first


def test_one_flipped_bit_in_the_result_of_a_product_is_seen() -> None:
    net, batch = network(), torch.randn(5, 8)
    first = of_pass(net, batch)

    def flip(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        changed = output.detach().clone()
        changed.view(torch.int32)[2, 3] ^= 1 << 18
        return output + (changed - output.detach())

    handle = net[0].register_forward_hook(flip)
    assert of_pass(net, batch) != first
    handle.remove()
    assert of_pass(net, batch) == first


def test_frozen_and_sparse_parameters() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    printed = GradientPrint()
    with printed.recording(list(table.parameters())):
        table(torch.tensor([1, 1, 7])).sum().backward()
    other = GradientPrint()
    with other.recording(list(table.parameters())):
        table(torch.tensor([1, 1, 8])).sum().backward()
    assert printed.value() != other.value()


def test_hooks_are_gone_afterwards() -> None:
    net, printed = network(), GradientPrint()
    with printed.recording(list(net.parameters())):
        pass
    net(torch.randn(2, 8)).sum().backward()
    assert printed.is_empty
