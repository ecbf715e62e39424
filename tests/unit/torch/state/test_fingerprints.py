"""Fingerprints: no bit of a state can change unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import pytest
import torch
from torch import nn

from taskd.torch.state import fingerprints, pieces
from taskd.torch.state.protected import Protected

PLACES = (0, 5, 100, 700, 2000, 8000, -1)
"""Some of the 64-bit words of the weight, beyond the first row of the table as well."""


@pytest.fixture
def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 128)


def protect(net: nn.Module) -> Protected:
    return Protected(net, torch.optim.SGD(net.parameters(), lr=0.1), None, {})


@pytest.mark.parametrize("fingerprint", [fingerprints.of_state, pieces.fingerprint])
def test_every_flipped_bit_changes_the_fingerprint(
    fingerprint: Callable[[Protected], int], net: nn.Linear
) -> None:
    protected = protect(net)
    before = fingerprint(protected)
    words = net.weight.data.view(-1).view(torch.int64)
    for bit in range(64):
        for place in PLACES:
            mask = (1 << bit) - (1 << 64 if bit == 63 else 0)
            words[place] ^= mask
            assert fingerprint(protected) != before, f"bit {bit} of word {place}"
            words[place] ^= mask
    assert fingerprint(protected) == before


@pytest.mark.parametrize("numel", [1, 3, 7, 1024, 2050, 5001])
def test_every_flipped_bit_of_a_tensor_of_any_size_changes_its_word(numel: int) -> None:
    data = torch.arange(numel, dtype=torch.uint8)
    before = int(fingerprints.word(data))
    for place in {0, numel // 2, numel - 1}:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert int(fingerprints.word(data)) != before
            data[place] ^= 1 << bit


def test_order_of_tensors_counts() -> None:
    first, second = ("parameter", 0, ""), ("parameter", 1, "")
    one, other = torch.ones(4), torch.zeros(4)
    assert fingerprints.of_tensors([(first, one), (second, other)]) != fingerprints.of_tensors(
        [(first, other), (second, one)]
    )


def test_kinds_and_containers_count() -> None:
    alike: list[object] = [
        [1, 2], (1, 2), [True, 2], [1.0, 2], ["1", 2], {1: 2}, {"1": 2}, {1: 2.0}, [[1, 2]],
        "[1, 2]", b"[1, 2]", {1, 2}, [1, 2, None], {2: 1}, [b"1", 2], [1, [2]],
    ]  # fmt: skip
    assert len(set(map(fingerprints.of_value, alike))) == len(alike)
    assert all(fingerprints.of_value(one) == fingerprints.of_value(copy(one)) for one in alike)


@pytest.mark.parametrize("kind", [str, bytes])
def test_every_place_of_a_long_text_counts(kind: type) -> None:
    def text(place: int) -> str | bytes:
        found = ["a"] * (2 * fingerprints.LONG)
        found[place] = "b"
        return "".join(found) if kind is str else "".join(found).encode()

    prints = {fingerprints.of_value(text(place)) for place in (0, fingerprints.LONG, -1)}
    assert len(prints) == 3
    assert fingerprints.of_value(text(0)) in prints, "another object with the same content"
