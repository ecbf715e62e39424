"""What the ranks know about each other's state, kept for replacements.

A replacement learns it from the ranks that are left. If all ranks are replaced at once, no process
knows it any more, and without it no copies would be made. So each rank leaves it in the node's
shared memory.
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

from taskd.core.worker.state_classes import Agreement
from taskd.torch.state.sealed import BadState, seal, unseal

log = logging.getLogger(__name__)

PLACE = "agreement of the ranks"


class KeptAgreement:
    """The newest one that this rank has acted on."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """`folder` is in the node's shared memory; None: nothing is kept."""
        self._path = None if folder is None else folder / f"agreement-{rank}"
        self.predecessor = None if self._path is None else _read(self._path)

    def forget_predecessor(self) -> None:
        """All ranks start together."""
        self.predecessor = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def save(self, agreement: Agreement) -> None:
        if self._path is not None:
            draft = self._path.with_suffix(".new")
            draft.write_bytes(seal(agreement, PLACE))
            os.replace(draft, self._path)


def _read(path: Path) -> Agreement | None:
    try:
        agreement: Agreement = unseal(path.read_bytes(), PLACE)
    except FileNotFoundError:
        return None
    except (OSError, BadState, pickle.PickleError, ValueError) as error:
        log.warning("cannot read what the predecessor knew about the other ranks: %s", error)
        return None
    return agreement
