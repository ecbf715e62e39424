"""Values that are packed come back as they were."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from taskd.integrations.packed_values import (
    GrowingList,
    NotLiteral,
    is_plain,
    literal,
    packed,
    read_literal,
    unpacked,
)


class Phase(enum.StrEnum):
    FIRST = "first"


def values() -> list[Any]:
    return [
        torch.tensor(0.1, requires_grad=True) * 3,
        {"loss": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "number": 3},
        (1, "text", None, {1, 2}, [True]),
        torch.randn(50, 50),
        torch.empty(0, 3),
        b"bytes",
        torch.tensor([1, 2]).t(),
        torch.tensor(1j),
        [-float("inf"), {"nothing": set(), "half": 0.5}],
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_packed_values_come_back() -> None:
    before = values()
    after = unpacked(pickle.loads(pickle.dumps(packed(before))))
    assert same(before, after)
    assert not after[0].requires_grad


def test_literal_comes_back() -> None:
    before = [one for one in values() if not isinstance(one, torch.Tensor) or one.numel() < 9][:-2]
    before = [one for one in before if type(one) is not tuple]
    before += [(1, (), [()]), (2.5,), -float("inf"), np.float32(0.5), torch.tensor(3.0), "a'b\n"]
    text = literal(before)
    assert same(unpacked(packed(before)), read_literal(text))
    assert literal(read_literal(text)) == text


@pytest.mark.parametrize(
    "value", [{1, 2}, torch.randn(50, 50), torch.tensor(1j), Phase.FIRST, object()]
)
def test_what_is_no_literal_is_left_to_another_way(value: Any) -> None:
    with pytest.raises(NotLiteral):
        literal({"one": [value]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_scalar_tensor_comes_back_in_every_bit(dtype: torch.dtype) -> None:
    numbers = [0.1, -0.0, 1e-45, 3.4e38, -7.0, float("inf"), float("-inf")]
    numbers = [0, -1, (1 << 63) - 1] if dtype == torch.int64 else numbers
    for number in numbers:
        before = torch.tensor(number, dtype=dtype)
        for after in (unpacked(packed(before)), read_literal(literal(before))):
            assert (after.dtype, after.shape) == (dtype, before.shape)
            bits = [one.reshape(1).view(torch.uint8) for one in (before, after)]
            assert torch.equal(*bits), number


def test_number_that_is_none_stays_so() -> None:
    growing, given = GrowingList(), [float("nan"), torch.tensor(float("nan"))]
    received = GrowingList().decode(growing.encode(given) or b"")
    assert all(one != one for one in received)


def test_unpacked_tensor_does_not_change_what_was_packed() -> None:
    kept = packed({"sum": torch.zeros(2)})
    unpacked(kept)["sum"].add_(1)
    assert same(unpacked(kept)["sum"], torch.zeros(2))


def test_list_that_grows_goes_to_another_process() -> None:
    here, there, given = GrowingList(), GrowingList(), values()
    for length in range(len(given) + 1):
        encoded = here.encode(given[:length])
        assert encoded is not None
        received = there.decode(encoded)
        assert same(given[:length], received)
        assert there.encode(received) == encoded
    assert here.encode([]) == b""


def test_list_with_other_objects_in_it_is_encoded_again() -> None:
    growing, given = GrowingList(), [torch.zeros(2), 1.5]
    before = growing.encode(given)
    given[0] = torch.ones(2)
    assert growing.encode(given) not in (None, before)
    assert growing.encode(given[:1]) == GrowingList().encode(given[:1])


def test_tensor_made_in_inference_mode_is_kept() -> None:
    with torch.inference_mode():
        given: list[Any] = [torch.ones(2)]
    growing = GrowingList()
    assert growing.encode(given) == growing.encode(given)
    assert same(given, GrowingList().decode(growing.encode(given) or b""))


def test_tensor_in_a_list_that_has_changed_is_encoded_again() -> None:
    growing, given = GrowingList(), [torch.zeros(2), torch.zeros(5000)]
    growing.encode(given)
    for tensor in given:
        tensor.add_(1)
        assert same(given, GrowingList().decode(growing.encode(given) or b""))


def test_list_with_an_object_is_not_encoded() -> None:
    growing = GrowingList()
    assert growing.encode([1])
    for other in (object(), Phase.FIRST, [Phase.FIRST], torch.nn.Parameter(torch.zeros(1))):
        assert growing.encode([1, other]) is None
    assert GrowingList().decode(growing.encode([1, 2]) or b"") == [1, 2]


def test_objects_are_not_plain() -> None:
    assert is_plain({"a": [torch.zeros(1), {1}]})
    assert not is_plain([object()])
    assert not is_plain(torch.nn.Parameter(torch.zeros(1)))
