"""What the code after a step has changed in the protected parts, kept for a replacement.

The state of a step is recorded when the step is committed. The code between two steps may change
parts: count epochs without progress, or average losses. When it is done, each rank leaves what it
has changed in the node's shared memory, so that its replacement can begin with the next step.
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

from taskd.torch.state.sealed import BadState, seal, unseal

log = logging.getLogger(__name__)

PLACE = "parts after a step"
MAX_BYTES = 64 << 20
"""Larger changes are not kept here: a peer has them, unless they belong to this rank alone."""

Changed = dict[str, Any]


class TurnParts:
    """The changes of one rank before the last turn that it has begun."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder` is in the node's shared memory; None: nothing is kept."""
        self._path = None if folder is None else folder / f"parts-{rank}"
        self.predecessor = None if self._path is None else _read(self._path)
        self._is_there = self.predecessor is not None
        self._has_warned = False

    def forget_predecessor(self) -> None:
        """All ranks start together."""
        self.predecessor = None
        self._remove()

    def save(self, turn: int, changed: Changed) -> None:
        """The code before this turn is done on this rank."""
        if self._path is None or not changed:
            return self._remove()
        data = seal((turn, changed), PLACE)
        if len(data) > MAX_BYTES:
            self._remove()
            return self._warn(len(data))
        draft = self._path.with_suffix(".new")
        draft.write_bytes(data)
        os.replace(draft, self._path)
        self._is_there = True

    def of_predecessor(self, turn: int) -> Changed:
        """What it had changed before this turn, if it had begun it."""
        known, changed = self.predecessor or (-1, {})
        return changed if known == turn else {}

    def _remove(self) -> None:
        if self._path is not None and self._is_there:
            self._path.unlink(missing_ok=True)
            self._is_there = False

    def _warn(self, size: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "protected parts are changed between steps and have bytes=%d: they are not kept "
                "for a replacement. Change them in an attempt",
                size,
            )


def _read(path: Path) -> tuple[int, Changed] | None:
    try:
        turn, changed = unseal(path.read_bytes(), PLACE)
    except FileNotFoundError:
        return None
    except (OSError, BadState, pickle.PickleError, ValueError) as error:
        log.warning("cannot read what the predecessor has changed between steps: %s", error)
        return None
    return turn, changed
