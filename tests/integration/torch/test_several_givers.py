"""A large state comes from several holders at once, each giving its lot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from taskd.torch.state import state_link as courier
from taskd.torch.state import transfer as state
from taskd.torch.state.state_link import Wanted
from taskd.torch.state.transfer import Piece, share_out
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run

STEPS = 6


def from_several(told: dict[str, Any]) -> None:
    """Every state is large enough, and each rank writes down what it asked for."""
    state.LARGE = 1
    take, give = courier.take, courier.give
    log = Path(told["folder"]) / f"took-{told['rank']}"

    def noted(meeting: Any, source: int, wanted: Wanted, read: Any) -> None:
        take(meeting, source, wanted, read)
        with log.open("a") as file:
            file.write(f"{source} {wanted.lot} of {wanted.givers}\n")

    def dying(*args: Any) -> None:
        if (told["rank"], told["life"]) == tuple(told["dies_giving"]):
            os.kill(os.getpid(), signal.SIGKILL)
        give(*args)

    setattr(courier, "take", noted)  # noqa: B010 - for the whole life of this process
    if told.get("dies_giving"):
        setattr(courier, "give", dying)  # noqa: B010
    scripts.ddp(told)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.ddp, steps=STEPS))


def test_a_replacement_takes_from_all_survivors(calm: list[Any], tmp_path: Path) -> None:
    kills = [(2, 0, 3, "in backward")]
    world = run(tmp_path / "run", from_several, steps=STEPS, kills=kills)
    took = sorted((world.folder / "took-2").read_text().splitlines())
    assert took == ["0 0 of 3", "1 1 of 3", "3 2 of 3"]
    assert_same(calm, world)


def test_one_of_them_dies_before_it_has_given_its_lot(calm: list[Any], tmp_path: Path) -> None:
    kills = [(2, 0, 3, "in backward")]
    world = run(tmp_path / "run", from_several, steps=STEPS, kills=kills, dies_giving=(3, 0))
    assert world.lives[3] == 1
    assert world.incident >= 2
    assert_same(calm, world)


def pieces(*sizes: int) -> list[Piece]:
    return [
        Piece(("parameter", index, ""), (size,), torch.uint8, sharded=False, on_host=True)
        for index, size in enumerate(sizes)
    ]


def test_lots_are_about_equal_and_together_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LARGE", 100)
    assert share_out(pieces(10, 10, 10), 3) == [range(3)], "too small to be shared out"
    assert share_out(pieces(100, 100), 1) == [range(2)]
    assert share_out(pieces(*[10] * 30), 3) == [range(10), range(10, 20), range(20, 30)]
    for sizes in ([500, 1, 1, 1], [1, 1, 1, 500], [0, 200, 0, 0], [200]):
        lots = share_out(pieces(*sizes), 4)
        assert [index for lot in lots for index in lot] == list(range(len(sizes)))
        assert len(lots) == 4
