"""The keyed digest of tensors: which changes it notices, and that it needs the key."""

from __future__ import annotations

import pytest
import torch

from taskd.torch.state import keyed_digest
from taskd.torch.state.keyed_digest import BLOCK_ROWS, ROW, SMALL, WORD, digest, digests

KEY = b"the key of a job"
SIZES = [0, 1, 7, SMALL, SMALL + 1, SMALL + 9, ROW * WORD, 3 * ROW * WORD + 21, 20 * ROW * WORD]


def content(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_equal_bytes_have_equal_digests_wherever_they_are(size: int) -> None:
    data = content(size)
    unaligned = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert digest(data, KEY) == digest(data.clone(), KEY) == digest(unaligned, KEY)
    assert digests([data, content(5)], KEY) == (digest(data, KEY), digest(content(5), KEY))


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_flipped_bit_changes_it(size: int) -> None:
    data, before = content(size), digest(content(size), KEY)
    for at in {0, size // 3, size // 2, size - 1}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert digest(data, KEY) != before, (at, bit)
            data[at] ^= 1 << bit


def words(count: int) -> torch.Tensor:
    return content(count * WORD).view(torch.int64)


@pytest.mark.parametrize("apart", [1, 5, ROW - 1, ROW, 3 * ROW])
def test_words_that_change_places_are_noticed(apart: int) -> None:
    data = words(5 * ROW + 3)
    before = digest(data.view(torch.uint8), KEY)
    data[7], data[7 + apart] = data[7 + apart].clone(), data[7].clone()
    assert digest(data.view(torch.uint8), KEY) != before


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
@pytest.mark.parametrize("apart", [1, ROW])
def test_changes_that_compensate_each_other_are_noticed(bit: int, apart: int) -> None:
    """A sum does not change when one word grows by as much as another one shrinks."""
    data = words(5 * ROW)
    before = digest(data.view(torch.uint8), KEY)
    change = torch.tensor(1) << bit
    data[3] += change
    data[3 + apart] -= change
    assert digest(data.view(torch.uint8), KEY) != before


@pytest.mark.parametrize("size", SIZES)
def test_another_key_or_length_gives_another_digest(size: int) -> None:
    data = content(size)
    assert digest(data, KEY) != digest(data, b"the key of another job")
    longer = torch.cat([data, torch.zeros(1, dtype=torch.uint8)])
    assert digest(longer, KEY) != digest(data, KEY)


def test_rows_that_change_places_are_noticed() -> None:
    data = words(4 * ROW).view(4, ROW)
    swapped = data[torch.tensor([1, 0, 2, 3])].contiguous()
    assert digest(swapped.view(-1).view(torch.uint8), KEY) != digest(
        data.reshape(-1).view(torch.uint8), KEY
    )


@pytest.mark.parametrize("count", [0, 1, BLOCK_ROWS, BLOCK_ROWS + 3])
def test_device_computes_the_same_sums(count: int) -> None:
    low, high = keyed_digest._numbers(KEY, torch.device("cpu"))
    rows = words(count * ROW).view(count, ROW)
    host = keyed_digest._host_row_sums(rows, low, high)
    device = keyed_digest._device_row_sums(rows, low, high)
    assert torch.equal(host, device)
