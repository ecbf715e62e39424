"""torch/groups/sealed_objects.py between two real ranks, one of which does not know the key."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from taskd.torch.groups import sealed_objects
from taskd.torch.state.sealed import BadState

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "taskd.torch", __name__])


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


def exchange(rank: int, folder: str, key: str, results: Any) -> None:
    os.environ["TASKD_SEAL"] = key
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results.put((rank, _exchange(rank, folder)))
    dist.barrier()


def _exchange(rank: int, folder: str) -> list[Any]:
    mine: Any = [rank]
    if os.environ["TASKD_SEAL"] != "ours":
        mine = Trap(f"{folder}/opened")
        sealed_objects._read = lambda tensor, size, place: None
    calls: list[Callable[[], Any]] = [
        lambda: sealed_objects.gather_numbers([rank, -rank]),
        lambda: sealed_objects.all_gather(mine),
        lambda: sealed_objects.gather(mine, 0),
        lambda: sealed_objects.broadcast(mine, 1),
        lambda: sealed_objects.scatter([mine, {"long": "x" * 1000}], 1),
    ]
    found: list[Any] = []
    for call in calls:
        try:
            found.append(call())
        except BadState as error:
            found.append(type(error).__name__)
    return found


def run(folder: Path, keys: list[str]) -> dict[int, list[Any]]:
    results = context.Queue()
    ranks = [
        context.Process(target=exchange, args=(rank, str(folder), key, results))
        for rank, key in enumerate(keys)
    ]
    for one in ranks:
        one.start()
    try:
        return dict(results.get(timeout=120) for _ in ranks)
    finally:
        for one in ranks:
            one.join(60)
            one.kill()


def test_objects_are_exchanged_between_ranks_of_one_job(tmp_path: Path) -> None:
    found = run(tmp_path, ["ours", "ours"])
    assert found[0] == [[[0, 0], [1, -1]], [[0], [1]], [[0], [1]], [1], [1]]
    assert found[1] == [[[0, 0], [1, -1]], [[0], [1]], None, [1], {"long": "x" * 1000}]


def test_pickle_of_a_stranger_in_the_seat_of_a_rank_does_not_run(tmp_path: Path) -> None:
    found = run(tmp_path, ["ours", "theirs"])
    assert found[0] == [[[0, 0], [1, -1]], *["BadState"] * 4]
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("place", [("exchange", 0), ("an earlier exchange", 1)])
def test_object_of_another_rank_or_exchange_is_refused(place: tuple[str, int]) -> None:
    sealed = sealed_objects._sealed(pickle.dumps("value"), "exchange", 1)
    tensor = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
    read = sealed_objects._read
    assert read(tensor, len(sealed), sealed_objects._place("exchange", 1)) == "value"
    with pytest.raises(BadState):
        read(tensor, len(sealed), sealed_objects._place(*place))


def test_absurd_size_is_refused_before_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_objects, "gather_numbers", lambda mine, group: [mine, [1 << 62, 0]])
    with pytest.raises(BadState, match="invalid sizes"):
        sealed_objects.all_gather("x")


def test_trap_would_run_without_the_seal(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(str(tmp_path / "opened")))).close()
    assert (tmp_path / "opened").exists()
