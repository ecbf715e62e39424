"""What the code after a step has changed in the protected parts, kept for a replacement.

The state of a step is recorded when the step is committed. The code between two steps may change
parts: count epochs without progress, or average losses. When it is done, each rank leaves what it
has changed in the node's shared memory, so that its replacement can begin with the next step.

Under a framework nearly every turn changes something, so two files are kept open and overwritten in
turns: creating one takes ten times as long.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
from pathlib import Path
from typing import Any

from taskd.torch.state.sealed import BadState, seal, unseal

log = logging.getLogger(__name__)

PLACE = "parts after a step"
MAX_BYTES = 64 << 20
"""Larger changes are not kept here: a peer has them, unless they belong to this rank alone."""
_LENGTH = struct.Struct("<Q")
"""The first word of a file: how much follows. 0: not valid; written last."""

Changed = dict[str, Any]


class TurnParts:
    """The changes of one rank before the last turns that it has begun."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder` is in the node's shared memory; None: nothing is kept."""
        paths = [] if folder is None else [folder / f"parts-{rank}.{last}" for last in (0, 1)]
        found = [kept for path in paths if (kept := _read(path)) is not None]
        self.predecessor: dict[int, Changed] = dict(found)
        """By turn."""
        self._files = [_open(path) for path in paths]
        self._is_there = bool(found)
        self._has_warned = False

    def forget_predecessor(self) -> None:
        """All ranks start together."""
        self.predecessor = {}
        self._remove()

    def save(self, turn: int, changed: Changed) -> None:
        """The code before this turn is done on this rank."""
        if not self._files or not changed:
            return self._remove()
        data = seal((turn, changed), PLACE)
        if len(data) > MAX_BYTES:
            self._remove()
            return self._warn(len(data))
        file = self._files[turn % 2]
        os.pwrite(file, _LENGTH.pack(0), 0)
        _write(file, data, _LENGTH.size)
        os.pwrite(file, _LENGTH.pack(len(data)), 0)
        self._is_there = True

    def of_predecessor(self, turn: int) -> Changed:
        """What it had changed before this turn, if it had begun it."""
        return self.predecessor.get(turn, {})

    def _remove(self) -> None:
        if self._is_there:
            for file in self._files:
                os.ftruncate(file, 0)
            self._is_there = False

    def _warn(self, size: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "protected parts are changed between steps and have bytes=%d: they are not kept "
                "for a replacement. Change them in an attempt",
                size,
            )


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write(file: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(file, rest, at)
        rest, at = rest[done:], at + done


def _read(path: Path) -> tuple[int, Changed] | None:
    try:
        data = path.read_bytes()
        length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
        if not length:
            return None
        turn, changed = unseal(data[_LENGTH.size : _LENGTH.size + length], PLACE)
    except FileNotFoundError:
        return None
    except (OSError, BadState, pickle.PickleError, ValueError) as error:
        log.warning("cannot read what the predecessor has changed between steps: %s", error)
        return None
    return turn, changed
