"""With which turn of the loop a replacement begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.model.ids import Incident, Step
from taskd.model.messages import NO_TURN, Repair
from taskd.torch.loop.loop_position import LoopPosition


def replacement(folder: Path, resume: int, turn: int, sections: int = 0) -> LoopPosition:
    position = LoopPosition(folder, 0)
    plan = Repair(Incident(1), "recover", (), Step(resume), {}, "", 1.0, turn=Step(turn))
    position.resumed(plan)
    return position


def predecessor(folder: Path, turn: int, exchanges: bool = False) -> None:
    position = LoopPosition(folder, 0)
    position.begin_turn(turn)
    if exchanges:
        position.note_exchange()


@pytest.mark.parametrize(
    ("was_in", "others_in", "begins"),
    [
        (6, 7, 6),  # it had not completed the code after step 6
        (7, 7, 7),
        (6, 6, 6),  # all ranks are in the code after step 6
        (7, 6, 7),  # it had completed it
        (9, 7, 7),  # the job has gone back
        (2, 7, 7),  # it was on this node long ago
        (None, 7, 7),
        (None, 6, 6),
        (6, NO_TURN, 7),  # the loop is one without attempts
    ],
)
def test_replacement_completes_the_turn_of_its_predecessor(
    tmp_path: Path, was_in: int | None, others_in: int, begins: int
) -> None:
    if was_in is not None:
        predecessor(tmp_path, was_in)
    position = replacement(tmp_path, resume=7, turn=others_in)
    position.join(7, has_values=True)
    assert position.next_turn(7) == begins


def test_turn_with_a_bare_collective_is_not_repeated_without_the_others(tmp_path: Path) -> None:
    predecessor(tmp_path, 6, exchanges=True)
    position = replacement(tmp_path, resume=7, turn=7)
    position.join(7, has_values=True)
    assert position.next_turn(7) == 7


def test_report_names_the_line_of_a_bare_collective(tmp_path: Path) -> None:
    position = LoopPosition(tmp_path, 0)
    position.note_exchange()
    assert position.report()["outside"] == "", "the set-up can be repeated"
    position.begin_turn(3)
    position.note_exchange()
    assert __file__ in position.report()["outside"]
    position.begin_turn(4)
    assert position.report()["outside"] == ""
