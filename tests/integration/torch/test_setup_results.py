"""What a script exchanges before its first step reaches a replacement, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from taskd.torch.groups.works import Finished
from taskd.torch.setup_results import LARGE, Setup
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import setup


def test_a_replacement_gets_what_its_predecessor_got(tmp_path: Path) -> None:
    """The seed is another one in every run, so the ranks of one run are compared."""
    told = ends(run(tmp_path / "run", setup, steps=6, kills=[(2, 0, 3, "in forward")]))
    first = told[0]["agreed"]
    assert first["found"] == 1.0
    assert first["plan"] == [{"width": 48, "seed": first["seed"]}]
    assert first["names"] == [f"rank {rank}" for rank in range(4)]
    for rank, end in enumerate(told):
        assert end["agreed"] == {**first, "pair": 5.0 if rank > 1 else 1.0}, rank
        assert same(end["model"], told[0]["model"])


def test_a_killed_replacement_is_replaced_with_the_same(tmp_path: Path) -> None:
    kills = [(0, 0, 2, "in forward"), (0, 1, 3, "in forward")]
    world = run(tmp_path / "run", setup, steps=6, kills=kills)
    told = ends(world)
    assert world.lives[0] == 2
    assert len({end["agreed"]["seed"] for end in told}) == 1


def two_lives() -> tuple[Setup, Setup]:
    store, first, second = HashStore(), Setup(), Setup()
    first.begin(store, 3)
    second.begin(store, 3)
    return first, second


def test_another_way_through_the_set_up_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _, recalling = two_lives()
    outputs = [torch.zeros(2)]
    assert recalling.recall("0", "broadcast", (outputs,)) is None
    assert recalling.recall("0", "allreduce", (outputs,)) is None
    [said] = caplog.messages
    assert "what broadcast, number 1 of group '0', gave" in said


def test_weights_are_left_out_and_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    first, second = two_lives()
    weights, flag = torch.ones(LARGE), torch.ones(1)
    for value in (weights, flag):
        handle = first.keep("0", "broadcast", ([value],), Finished([value]))
        assert handle is not None
        handle.wait()
    assert second.recall("0", "broadcast", ([torch.zeros(LARGE)],)) is None
    recalled = second.recall("0", "broadcast", ([torch.zeros(1)],))
    assert recalled is not None
    assert recalled[0].item() == 1.0
    assert not caplog.messages


def test_large_objects_are_not_left_out() -> None:
    first, second = two_lives()
    pickled = torch.arange(3 * LARGE).to(torch.uint8)
    handle = first.keep("0", "broadcast", ([pickled],), Finished([pickled]))
    assert handle is not None
    handle.wait()
    place = torch.zeros(3 * LARGE, dtype=torch.uint8)
    assert second.recall("0", "broadcast", ([place],)) == [place]
    assert torch.equal(place, pickled)


def test_what_nobody_waits_for_and_what_has_no_handle() -> None:
    first, second = two_lives()
    in_stream, by_future, twice = (torch.full((2,), value) for value in (1.0, 2.0, 3.0))
    assert first.keep("0", "allreduce", ([in_stream],), None) is None
    handle = first.keep("0", "allreduce", ([by_future],), Finished([by_future]))
    assert handle is not None
    assert handle.get_future().wait() == [by_future]
    handle = first.keep("0", "allreduce", ([twice],), Finished([twice]))
    assert handle is not None
    handle.wait()
    twice.zero_()
    handle.wait()
    for expected in (1.0, 2.0, 3.0):
        parameter = torch.nn.Parameter(torch.zeros(2))  # which may be broadcast as it is
        assert second.recall("0", "allreduce", ([parameter],)) == [parameter]
        assert parameter.tolist() == [expected, expected]


def test_sparse_results_and_other_calls_are_not_recalled() -> None:
    first, second = two_lives()
    sparse = torch.eye(2).to_sparse()
    for value in (sparse, torch.ones(2)):
        handle = first.keep("0", "allreduce", ([value],), Finished([value]))
        assert handle is not None
        handle.wait()
    assert second.recall("0", "allreduce", ([sparse],)) is None
    assert second.recall("0", "broadcast", ([torch.ones(2)],)) is None


def test_after_the_first_step_nothing_is_kept() -> None:
    first, second = two_lives()
    first.end()
    work = Finished([])
    assert first.keep("0", "allreduce", ([torch.ones(1)],), work) is work
    second.end()
    assert second.recall("0", "allreduce", ([torch.ones(1)],)) is None
