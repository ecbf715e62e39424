"""What a request weighs before it is parsed: empty parts count, at any depth."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

from taskd.wire._pb import control_pb2 as pb
from taskd.wire._pb import recover_pb2
from taskd.wire.request_weight import NUMBER_BYTES, RequestWeight

MOST, PART = 2 << 20, 64


def weight(request: Any) -> int:
    return RequestWeight(request.DESCRIPTOR, PART)(request.SerializeToString(), MOST)


def test_request_without_parts_weighs_its_size() -> None:
    request = pb.JobDeclaration(job="a", name="b" * 1_000)
    assert weight(request) == request.ByteSize()


def test_parts_count_more_than_their_bytes() -> None:
    assert weight(pb.JobDeclaration(nodes=[pb.Node()] * 100)) == 100 * PART
    assert weight(pb.JobDeclaration(strategies=[""] * 100)) == 100 * PART
    assert weight(pb.JobDeclaration(nodes=[pb.Node(name="x" * 100)] * 100)) == pytest.approx(
        100 * 102, rel=0.1
    )


def test_numbers_of_a_list_count_also_inside_of_parts() -> None:
    many = pb.Node(ranks=range(10_000))
    assert weight(pb.JobDeclaration(nodes=[many])) >= 10_000 * NUMBER_BYTES
    zeros = pb.JobDeclaration(nodes=[pb.Node(ranks=[0] * 10_000)])
    assert weight(zeros) >= 10_000 * NUMBER_BYTES
    inner = {str(number): recover_pb2.StressTestOpResult() for number in range(100)}
    result = recover_pb2.StressTestResult(
        stressResult={"0": recover_pb2.StressTestRankResult(rankResult=inner)}
    )
    assert weight(result) > 200 * PART


@pytest.mark.parametrize(
    "raw",
    [b"\x32\x00" * 1_000_000, b"\x38\x01" * 1_000_000, b"\x0a\x00" * 1_000_000],
    ids=["parts", "numbers", "texts"],
)
def test_counting_ends_at_the_limit(raw: bytes) -> None:
    """Also where the same single field comes again and again, of which only the last counts."""
    weigh = RequestWeight(pb.JobDeclaration.DESCRIPTOR, PART)
    began = process_time()
    assert weigh(raw, MOST) > MOST
    limited = process_time() - began
    began = process_time()
    weigh(raw, 100 * MOST)
    assert limited < (process_time() - began) / 3


@pytest.mark.parametrize("raw", [b"\xff" * 100, b"\x32\xff\xff\xff\xff\x0f", b"\x33\x34", b"\x32"])
def test_what_is_no_request_is_left_to_the_parser(raw: bytes) -> None:
    assert RequestWeight(pb.JobDeclaration.DESCRIPTOR, PART)(raw, MOST) >= len(raw)
