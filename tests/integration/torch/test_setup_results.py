"""A replacement gets the results of the collectives in the script's set-up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from taskd.torch.groups.works import Finished
from taskd.torch.startup.setup_results import WEIGHTS_BYTES, SetupResults
from taskd.torch.state.sealed import BadState
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import setup


def test_replacement_gets_the_results_of_its_predecessor(tmp_path: Path) -> None:
    """The seed differs in every run, so the ranks of one run are compared."""
    results = ends(run(tmp_path / "run", setup, steps=6, kills=[(2, 0, 3, "in forward")]))
    first = results[0]["agreed"]
    assert first["found"] == 1.0
    assert first["plan"] == [{"width": 48, "seed": first["seed"]}]
    assert first["names"] == [f"rank {rank}" for rank in range(4)]
    for rank, end in enumerate(results):
        assert end["agreed"] == {**first, "pair": 5.0 if rank > 1 else 1.0}, rank
        assert same(end["model"], results[0]["model"])


def test_second_replacement_gets_the_same_results(tmp_path: Path) -> None:
    kills = [(0, 0, 2, "in forward"), (0, 1, 3, "in forward")]
    world = run(tmp_path / "run", setup, steps=6, kills=kills)
    results = ends(world)
    assert world.incarnations[0] == 2
    assert len({end["agreed"]["seed"] for end in results}) == 1
    assert len({end["agreed"]["stamp"][0] for end in results}) == 1, "also on the source"


def two_processes() -> tuple[SetupResults, SetupResults]:
    store, first, second = HashStore(), SetupResults(), SetupResults()
    first.start(store, 3)
    second.start(store, 3)
    return first, second


def test_different_set_up_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    _, replaying = two_processes()
    outputs = [torch.zeros(2)]
    assert replaying.replay("0", "broadcast", (outputs,)) is None
    assert replaying.replay("0", "allreduce", (outputs,)) is None
    [warning] = caplog.messages
    assert "the result of broadcast, number 1 in group '0', is not known" in warning


def test_weights_are_left_out_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first, second = two_processes()
    weights, flag = torch.ones(WEIGHTS_BYTES), torch.ones(1)
    for value in (weights, flag):
        handle = first.record("0", "broadcast", ([value],), Finished([value]))
        assert handle is not None
        handle.wait()
    assert second.replay("0", "broadcast", ([torch.zeros(WEIGHTS_BYTES)],)) is None
    replayed = second.replay("0", "broadcast", ([torch.zeros(1)],))
    assert replayed is not None
    assert replayed[0].item() == 1.0
    assert not caplog.messages


def test_large_objects_are_saved() -> None:
    first, second = two_processes()
    pickled = torch.arange(3 * WEIGHTS_BYTES).to(torch.uint8)
    handle = first.record("0", "broadcast", ([pickled],), Finished([pickled]))
    assert handle is not None
    handle.wait()
    place = torch.zeros(3 * WEIGHTS_BYTES, dtype=torch.uint8)
    assert second.replay("0", "broadcast", ([place],)) == [place]
    assert torch.equal(place, pickled)


def test_results_without_wait_or_handle_are_saved() -> None:
    first, second = two_processes()
    in_stream, by_future, twice = (torch.full((2,), value) for value in (1.0, 2.0, 3.0))
    assert first.record("0", "allreduce", ([in_stream],), None) is None
    handle = first.record("0", "allreduce", ([by_future],), Finished([by_future]))
    assert handle is not None
    assert handle.get_future().wait() == [by_future]
    handle = first.record("0", "allreduce", ([twice],), Finished([twice]))
    assert handle is not None
    handle.wait()
    twice.zero_()
    handle.wait()
    for expected in (1.0, 2.0, 3.0):
        parameter = torch.nn.Parameter(torch.zeros(2))  # which may be broadcast as it is
        assert second.replay("0", "allreduce", ([parameter],)) == [parameter]
        assert parameter.tolist() == [expected, expected]


def test_sparse_results_and_other_calls_are_not_replayed() -> None:
    first, second = two_processes()
    sparse = torch.eye(2).to_sparse()
    for value in (sparse, torch.ones(2)):
        handle = first.record("0", "allreduce", ([value],), Finished([value]))
        assert handle is not None
        handle.wait()
    assert second.replay("0", "allreduce", ([sparse],)) is None
    assert second.replay("0", "broadcast", ([torch.ones(2)],)) is None


def test_paused_collectives_are_neither_recorded_nor_counted() -> None:
    first, second = two_processes()
    with first.paused():
        work = Finished([])
        assert first.record("0", "allgather", ([torch.ones(1)],), work) is work
    handle = first.record("0", "allreduce", ([torch.ones(1)],), Finished([torch.ones(1)]))
    assert handle is not None
    handle.wait()
    place = torch.zeros(1)
    assert second.replay("0", "allreduce", ([place],)) == [place]
    assert place.item() == 1.0


def test_result_of_an_older_attempt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process that reaches the store can put an older value in the place of a newer one."""
    first, second = two_processes()
    handle = first.record("0", "allreduce", ([torch.ones(1)],), Finished([torch.ones(1)]))
    assert handle is not None
    handle.wait()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(BadState):
        second.replay("0", "allreduce", ([torch.zeros(1)],))


def test_nothing_is_recorded_after_the_first_step() -> None:
    first, second = two_processes()
    first.stop()
    work = Finished([])
    assert first.record("0", "allreduce", ([torch.ones(1)],), work) is work
    second.stop()
    assert second.replay("0", "allreduce", ([torch.ones(1)],)) is None
