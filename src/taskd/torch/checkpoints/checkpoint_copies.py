"""Copies of the state for continuous checkpoints, which another process writes to the disk.

At every so many steps the ranks that were chosen (`core/worker/checkpoint_choice.py`) copy their
state into a file in the node's shared memory, beside the next step, and leave an order for the
process that writes it (`checkpoint_writer.py`). The order is removed when it is carried out.
As long as it is there, the next copy is left out: a slow disk makes checkpoints rarer, and never
holds up training. Where several ranks write parts, all of them agree at the end of the step before
that each is ready.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskd.core.worker import checkpoint_choice
from taskd.core.worker.checkpoint_choice import Parts
from taskd.core.worker.state_classes import Agreement
from taskd.model.ids import Rank
from taskd.model.messages import own_name
from taskd.runtime.files import checkpoint_folders
from taskd.runtime.files.checkpoint_folders import MODEL_FILE, WAKE
from taskd.torch.copies.snapshot_file import SnapshotWriter
from taskd.torch.state import pieces
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import seal
from taskd.torch.state.transfer import StateImage

if TYPE_CHECKING:
    from taskd.torch.checkpoints.checkpoint_layout import Layout

log = logging.getLogger(__name__)

PLACE = "order to write a checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """What the writer has to do with the copies of one rank."""

    rank: int
    step: int
    incident: int
    model: str
    run: str
    parts: Parts
    fingerprint: str
    """Of this rank's own model."""
    layout: Layout | None
    """None: the shard goes into a file of its own, or another rank writes it."""
    shard: str
    shards: dict[str, str] = field(default_factory=dict)
    """The shard of each rank, if these are in files of their own."""
    size: int = 0
    parts_of: list[str] = field(default_factory=list)
    """As in `CheckpointInfo`."""

    @property
    def writes_shard(self) -> bool:
        return self.rank in self.parts.shards


class CheckpointCopies:
    """One rank's copies for checkpoints."""

    def __init__(self, folder: Path | None, directory: Path, rank: int, every: int) -> None:
        """`folder` is in the node's shared memory, `directory` is where checkpoints are written.
        `every`: in steps; 0: there are none."""
        self._folder, self._directory, self._rank = folder, directory, rank
        self.every = every if folder is not None else 0
        self._protected: Protected | None = None
        self._layout: Layout | None = None
        self._signature: tuple[pieces.Key, ...] = ()
        self._agreed = -1
        self._updated: set[int] = set()
        """The optimizers that have made an update in this process."""
        self._thread: threading.Thread | None = None
        self._problem, self._last_problem = "", ""
        if folder is not None:
            self._shard = SnapshotWriter(shard_file(folder, rank))
            self._own = SnapshotWriter(own_file(folder, rank))

    def attach(self, protected: Protected) -> None:
        self._protected = protected
        if self.every:
            for optimizer in protected.optimizers:
                optimizer.register_step_post_hook(self._after_update)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        self._updated.add(id(optimizer))

    def is_due(self, step: int) -> bool:
        """Whether the state of this step is to be written, if possible. The same on all ranks."""
        agreement = self._agreement
        return agreement is not None and checkpoint_choice.is_due(agreement, step, self.every)

    def is_ready(self) -> bool:
        """Whether the last copy of this rank has been written."""
        is_copying = self._thread is not None and self._thread.is_alive()
        return (
            self._folder is not None
            and not is_copying
            and not order_file(self._folder, self._rank).exists()
        )

    def agreed(self, step: int) -> None:
        """All ranks are ready to copy the state of this step."""
        self._agreed = step

    def begin_turn(self, step: int, incident: int, members: tuple[int, ...], votes: bool) -> None:
        """The state of this step is complete, with what the code after the step has changed."""
        agreement, protected = self._agreement, self._protected
        if agreement is None or protected is None or not self.is_due(step):
            return
        chosen = checkpoint_choice.parts(agreement, step, members)
        if chosen is None or self._rank not in chosen.writers:
            return
        if not all(one.state or id(one) in self._updated for one in protected.optimizers):
            return  # its state does not exist yet, and looking for it would create one
        if (votes and self._agreed != step) or not self.is_ready():
            return  # the same step again, after a repair: its order may be there already
        self.wait()
        self._start(protected, agreement, chosen, step, incident)
        trained = {parameter for _, parameter in pieces.optimized(protected)}
        if not trained.issuperset(protected.parameters):
            self.wait()  # a forward pass may change weights that have no optimizer

    def wait(self) -> None:
        """Until the state may change."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem and self._problem != self._last_problem:
            log.warning("checkpoint is not written: %s. Training continues", self._problem)
        if self._problem:
            self._last_problem, self._problem = self._problem, ""

    def distrust(self, after: int) -> None:
        """The state of some rank may be wrong since that step."""
        self.wait()
        agreement = self._agreement
        if self._folder is None or agreement is None or not self.every:
            return
        order_file(self._folder, self._rank).unlink(missing_ok=True)  # it is not completed
        for one in checkpoint_folders.folders(self._directory, agreement.model):
            if one.step > after and one.run == agreement.run:
                checkpoint_folders.remove(one.path)

    @property
    def _agreement(self) -> Agreement | None:
        return self._protected.agreement if self._protected is not None else None

    def _start(
        self, protected: Protected, agreement: Agreement, chosen: Parts, step: int, incident: int
    ) -> None:
        from taskd.torch.checkpoints import emergency_checkpoint
        from taskd.torch.state import rank_files

        shard = agreement.shards[Rank(self._rank)]
        divided = rank_files.divided_shards(agreement)
        images: list[tuple[SnapshotWriter, str, StateImage]] = []
        layout = None
        if self._rank in chosen.shards:
            if divided:
                image = StateImage(protected, step, incident, shard)
            else:
                layout = self._described(protected)
                if self._rank != chosen.first:
                    layout = layout.only_shards()
                with protected.undivided():
                    image = StateImage(protected, step, incident, shard)
            images.append((self._shard, shard, image))
        if chosen.own:
            name, gradients = own_name(self._rank), protected.has_left_gradients
            image = StateImage(protected, step, incident, name, own=True, gradients=gradients)
            images.append((self._own, name, image))
        order = CheckpointOrder(
            self._rank,
            step,
            incident,
            agreement.model,
            agreement.run,
            chosen,
            emergency_checkpoint.model_fingerprint(protected),
            layout,
            shard,
            {str(rank): name for rank, name in divided.items()},
            len(agreement.shards) if rank_files.names(agreement, step) else 0,
            rank_files.sharded_names(agreement),
        )
        self._thread = threading.Thread(
            target=self._copy, args=(order, images), name="taskd-checkpoint", daemon=True
        )
        self._thread.start()

    def _described(self, protected: Protected) -> Layout:
        from taskd.torch.checkpoints import checkpoint_layout

        signature = checkpoint_layout.signature(protected)
        if self._layout is None or not self._layout.is_stable or signature != self._signature:
            self._layout = checkpoint_layout.describe(protected)
            self._signature = signature
        return self._layout

    def _copy(
        self, order: CheckpointOrder, images: list[tuple[SnapshotWriter, str, StateImage]]
    ) -> None:
        assert self._folder is not None
        try:
            for writer, name, image in images:
                writer.write(name, order.step, image)
            (self._folder / MODEL_FILE).write_text(order.model)
            path = order_file(self._folder, self._rank)
            draft = path.with_suffix(".new")
            draft.write_bytes(seal(order, PLACE))
            draft.rename(path)
        except (OSError, ValueError) as error:
            self._problem = f"the state cannot be copied to {self._folder}: {error}"
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.setblocking(False)
            waker.sendto(b"", str(self._folder / WAKE))


def shard_file(folder: Path, rank: int) -> Path:
    return folder / f"checkpoint-{rank}"


def own_file(folder: Path, rank: int) -> Path:
    return folder / f"checkpoint-{rank}.own"


def order_file(folder: Path, rank: int) -> Path:
    return folder / f"checkpoint-{rank}.order"
