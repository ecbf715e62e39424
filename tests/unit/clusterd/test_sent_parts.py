from __future__ import annotations

from taskd.clusterd.services.control_service import STEPS_AGAIN_S, Sent
from taskd.runtime.clock import wall
from taskd.wire._pb import control_pb2 as pb


def test_ranks_are_left_out_while_only_their_steps_change() -> None:
    sent = Sent(pb.JobProgress(rank_version=7, step=1), wall())
    assert sent.has_ranks(pb.JobProgress(rank_version=7, step=2))
    assert not sent.has_ranks(pb.JobProgress(rank_version=8, step=2))
    assert not sent.has_ranks(None)
    assert not Sent().has_ranks(pb.JobProgress(rank_version=7))


def test_manager_that_does_not_count_sends_all_ranks() -> None:
    first = pb.JobProgress(step=1)
    sent = Sent(first, wall())
    assert sent.has_ranks(first)
    assert not sent.has_ranks(pb.JobProgress(step=2))


def test_steps_are_sent_again_after_a_while() -> None:
    sent = Sent(pb.JobProgress(rank_version=7), wall() - STEPS_AGAIN_S - 1)
    assert not sent.has_ranks(pb.JobProgress(rank_version=7))
