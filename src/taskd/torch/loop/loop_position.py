"""Where this process is in the script's loop over the steps, and where its predecessor was.

A *turn* is one run of the loop's body: the code before the attempts at a step, the attempts, and
the code after them. The turn is also in a small file in the node's shared memory, so that a
replacement knows whether its predecessor had completed it.
"""

from __future__ import annotations

import inspect
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taskd.model.ids import Step
from taskd.model.messages import NO_TURN, Repair

ALL_SECTIONS = 1 << 20
"""More sections than any turn has."""
_MARK = struct.Struct("<QQ")
"""The turn plus one (0: none), and whether data was exchanged outside of steps and sections."""
_OURS = tuple(str(Path(path)) + os.sep for path in (torch.__path__[0], Path(__file__).parents[1]))


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The turn in which the predecessor was lost."""

    turn: int
    has_exchanged: bool
    """It exchanged data in this turn outside of steps and sections."""


class LoopPosition:
    """One per process. Changed by the loop, the steps and the sections."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder` is in the node's shared memory; None: there is no such folder."""
        path = None if folder is None else folder / f"turn-{rank}"
        self.predecessor = None if path is None else _read(path)
        self._mark = _open(path)
        self.turn: int = NO_TURN
        """The step whose turn it is. NO_TURN: the set-up, or a loop without attempts."""
        self.sections = 0
        """How many sections of this turn are complete."""
        self.earliest = 0
        """The script cannot go back before this step."""
        self.done_until: tuple[int, int] = (NO_TURN, 0)
        """The first section, as turn and number, that not all ranks have completed."""
        self._outside = ""
        self._thread = 0
        """The thread that runs the loop."""
        self._first_turn: int | None = None

    def forget_predecessor(self) -> None:
        """All ranks start together."""
        self.predecessor = None
        _MARK.pack_into(self._mark, 0, 0, 0)

    def begin_turn(self, number: int) -> None:
        self.turn, self.sections, self._outside = number, 0, ""
        self._thread, self._first_turn = threading.get_ident(), None
        _MARK.pack_into(self._mark, 0, number + 1, 0)

    def leave_turns(self) -> None:
        """The script does not iterate over attempts, so its loop can go back to any step."""
        self.turn, self.sections, self.earliest = NO_TURN, ALL_SECTIONS, 0
        self._outside = ""
        _MARK.pack_into(self._mark, 0, 0, 0)

    def end_turns(self, total: int) -> None:
        """The loop has ended on all ranks. Their meeting there counts as a section."""
        self.begin_turn(total)
        self.sections, self.earliest = 1, total

    @property
    def is_beyond_setup(self) -> bool:
        """The other ranks were in the loop, or behind it, when this process joined them."""
        return self.done_until >= (NO_TURN, ALL_SECTIONS)

    def note_exchange(self) -> None:
        """The script has called a collective outside of steps and sections."""
        in_loop = self.turn != NO_TURN and self._thread == threading.get_ident()
        if in_loop and not self._outside:
            self._outside = calling_line()
            _MARK.pack_into(self._mark, 0, self.turn + 1, 1)

    def report(self) -> dict[str, Any]:
        """For the manager, when this process parks."""
        return {
            "earliest": Step(self.earliest),
            "turn": Step(self.turn),
            "sections": self.sections,
            "outside": self._outside,
        }

    def resumed(self, plan: Repair) -> None:
        self.done_until = max(self.done_until, (int(plan.turn), plan.sections))

    def join(self, resume: int, has_values: bool) -> None:
        """This process is a replacement, and has joined the others at this step.

        `has_values`: it is known which values the predecessor's attempts have left.
        """
        self._first_turn = self._choose_first_turn(resume, has_values)

    def next_turn(self, step: int) -> int:
        """With which turn the loop begins, if so many steps are committed."""
        return step if self._first_turn is None else self._first_turn

    def _choose_first_turn(self, resume: int, has_values: bool) -> int:
        """The turn with which a replacement begins.

        It completes the turn of its predecessor if its peers are in the same turn, or if it can do
        without them: there was no collective in it outside of steps and sections.
        """
        turn, last = self.done_until[0], self.predecessor
        if turn == NO_TURN:
            return resume
        if last is None or last.turn < turn - 1:  # or it was lost on another node, long ago
            return turn
        if last.turn >= turn:
            return min(last.turn, resume)
        return last.turn if has_values and not last.has_exchanged else turn


def calling_line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _read(path: Path) -> LastTurn | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    turn, has_exchanged = _MARK.unpack_from(data) if len(data) >= _MARK.size else (0, 0)
    return LastTurn(turn - 1, bool(has_exchanged)) if turn else None


def _open(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, _MARK.size)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, _MARK.size)
        return mmap.mmap(file, _MARK.size)
    finally:
        os.close(file)
