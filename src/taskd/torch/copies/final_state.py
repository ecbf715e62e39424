"""The state after the last step, kept in the node's shared memory until the job ends.

A rank that dies in the code after the loop cannot be repaired: its peers run that code, too, or
have ended. So all ranks restart. Each finds its own copy here, has no step left to do, and runs
only the code after the loop again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from taskd import config
from taskd.torch.context import JobContext
from taskd.torch.copies.snapshot_file import (
    SnapshotInfo,
    SnapshotReader,
    SnapshotWriter,
    inspect,
    invalidate,
)
from taskd.torch.state import transfer
from taskd.torch.state.sealed import BadState
from taskd.torch.state.transfer import StateImage

log = logging.getLogger(__name__)

SHARE = 0.5
"""The copies of all ranks of a node may take this share of the free shared memory."""


def keep(context: JobContext) -> None:
    """All ranks have committed the last step: copy its state."""
    path = _path(context)
    if path is None or context.held_step != context.step or not context.step:
        return
    with context.protected.undivided():
        image = StateImage(context.protected, context.step, context.incident, context.shard)
    image.seal()
    ranks = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        memory = os.statvfs(path.parent)
        if image.length * ranks > SHARE * memory.f_bavail * memory.f_frsize:
            if context.rank == 0:
                log.warning(
                    "final state is not kept: it takes %.1f GB on each node, too much for the "
                    "free shared memory. If a rank dies in the code after the loop, training "
                    "continues from the script's own checkpoint.",
                    image.length * ranks / 1e9,
                )
            return
        SnapshotWriter(path).write(context.shard, context.step, image)
    except OSError as error:
        log.warning("final state is not kept: %s: %s", path, error)


def find(context: JobContext, beyond: int) -> SnapshotInfo | None:
    """This rank's copy, if it is intact and of a later step than `beyond`."""
    path = _path(context)
    info = inspect(path) if path is not None else None
    if info is None or info.step <= beyond:
        return None
    reader = SnapshotReader(info)
    try:
        transfer.verify(reader.receive)
    except BadState as error:
        log.warning("final state %s is damaged and is not used: %s", info.path, error)
        invalidate(info.path)
        return None
    finally:
        reader.close()
    return info


def load(context: JobContext, info: SnapshotInfo) -> None:
    reader = SnapshotReader(info)
    try:
        transfer.receive_state(
            context.protected,
            info.step,
            context.incident,
            info.shard,
            reader.receive,
            keep_own=False,
        )
    except BadState:
        invalidate(info.path)
        raise
    finally:
        reader.close()


def _path(context: JobContext) -> Path | None:
    beacon = context.settings.beacon
    return Path(beacon).parent / f"final-{context.rank}" if beacon else None
