"""torch/context.py: how the parts of a batch are divided when ranks are missing."""

from __future__ import annotations

from fractions import Fraction

import pytest

from taskd.torch.context import JobContext
from taskd.worker.settings import WorkerSettings

SIZE = 8


def context(rank: int, members: tuple[int, ...], elastic: str = "accumulate") -> JobContext:
    made = JobContext(WorkerSettings(), rank, SIZE)
    made.members, made.elastic = members, elastic
    return made


def test_complete_job_computes_its_own_part_only() -> None:
    complete = context(3, tuple(range(SIZE)))
    assert complete.parts() == [3]
    assert complete.loss_share() == 1.0


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (7, 2, 5), (4,)], ids=str)
def test_every_part_is_computed_once_by_the_remaining_ranks(members: tuple[int, ...]) -> None:
    parts = [part for rank in members for part in context(rank, members).parts()]
    assert sorted(parts) == list(range(SIZE))


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (7, 2, 5), (4,)], ids=str)
def test_share_makes_the_mean_over_ranks_the_mean_over_parts(members: tuple[int, ...]) -> None:
    """The groups divide by the ranks that are left; each part must count for 1 / SIZE."""
    share = context(members[0], members).loss_share()
    assert Fraction(share).limit_denominator(SIZE) / len(members) == Fraction(1, SIZE)


def test_scale_leaves_the_parts_of_missing_ranks_out() -> None:
    scaled = context(2, (1, 2), elastic="scale")
    assert scaled.parts() == [2]
    assert scaled.loss_share() == 1.0
