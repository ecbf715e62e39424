"""Elements of tensors are read as arrays of NumPy."""

from __future__ import annotations

import pytest
import torch

from taskd.torch.state.host_memory import array_of

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)


@pytest.mark.parametrize("dtype", TYPES)
def test_array_has_the_bits_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4).to(dtype)
    array = array_of(tensor[::2, 1:])
    assert array is not None
    bits = tensor[::2, 1:].contiguous().view(torch.uint8)
    assert array.tobytes() == bits.numpy().tobytes()


def test_array_follows_the_tensor_and_leaves_its_storage_resizable() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    array = array_of(weight)
    assert array is not None
    weight.data.fill_(1)
    assert array.tobytes() == torch.ones(4).numpy().tobytes()
    assert weight.untyped_storage().resizable()


def test_special_tensors_have_no_array() -> None:
    assert array_of(torch.zeros(2, 2).to_sparse()) is None
    assert array_of(torch.zeros(2, dtype=torch.complex64).conj()) is None
    assert array_of(torch.zeros(2, dtype=torch.complex128)) is None
    assert array_of(torch.zeros(2, device="meta")) is None
    assert array_of(torch.zeros(0)) is None
