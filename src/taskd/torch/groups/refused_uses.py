"""Uses of a device that a repair could not renew, refused with the reason when they begin.

A CUDA graph replays what it has recorded without any Python: a collective in it would use the
communicator of an earlier incident, and an update in it would pass no gate. Symmetric memory maps
the memory of peers into this process: after a repair that would be the memory of a dead process.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from taskd.errors import SettingsError
from taskd.torch import compat

SYMMETRIC_MEMORY = (
    "symmetric memory (and asynchronous tensor parallelism, which uses it) cannot be protected: it "
    "maps the memory of other ranks, and a repair replaces these. Use the ordinary collectives, or "
    "start the script without taskd.torch"
)


def refuse_symmetric_memory() -> None:
    """From now on in this process."""
    compat.replace_symmetric_memory(_refuse)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise SettingsError([SYMMETRIC_MEMORY])


def refuse_capture(what: str) -> None:
    """Called where `what` (such as "all_reduce") begins, on a device."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and torch.cuda.is_current_stream_capturing():
        raise SettingsError(
            [
                f"{what} in a CUDA graph cannot be protected: the graph would run it again "
                "without TaskD, also after a repair. Capture only forward and backward passes "
                "that do not communicate, and leave the gradient exchange and the update outside"
            ]
        )
