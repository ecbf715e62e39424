"""What a script exchanges before its first step reaches a replacement, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from taskd.torch.setup import LARGE, Setup
from taskd.torch.works import Finished
from tests.integration.torch_runs import ends, run, same
from tests.integration.torch_scripts import setup


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


def test_another_way_through_the_set_up_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    recalling = Setup()
    outputs = [torch.zeros(2)]
    assert recalling.recall("0", "broadcast", (outputs,)) is None
    assert recalling.recall("0", "allreduce", (outputs,)) is None
    [said] = caplog.messages
    assert "broadcast, number 1 of group '0', sees only this rank's own data" in said


def test_large_results_are_left_out_and_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    store, first, second = HashStore(), Setup(), Setup()
    weights, flag = torch.ones(LARGE), torch.ones(1)
    for value in (weights, flag):
        first.keep("0", "broadcast", ([value],), Finished([value])).wait()
    first.publish(store, 3)
    second.read(store, 3)
    assert second.recall("0", "broadcast", ([torch.zeros(LARGE)],)) is None
    recalled = second.recall("0", "broadcast", ([torch.zeros(1)],))
    assert recalled is not None
    assert recalled[0].item() == 1.0
    assert not caplog.messages
