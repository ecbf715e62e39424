"""The process that writes continuous checkpoints: one per node, started by the agent.

    python -m taskd.torch.checkpoints.checkpoint_writer SHARED_FOLDER DIRECTORY

It takes the copies that ranks have left in the node's shared memory
(`checkpoints/checkpoint_copies.py`) and writes them in the format of the emergency checkpoint, so
that they are found, checked and loaded in the same way. Each rank's part ends with a file of its
own; the writer that adds the last part completes the checkpoint, on any node, and removes older
ones. What cannot be written is left out and reported; this process never ends because of it, and
training does not notice.
"""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from taskd.config import environ
from taskd.errors import SettingsError
from taskd.model.ids import Rank
from taskd.model.messages import own_name
from taskd.runtime.clock import monotonic
from taskd.runtime.files import checkpoint_folders
from taskd.runtime.files.checkpoint_folders import WAKE, CheckpointFolder
from taskd.runtime.files.private_files import private_folder, why_not_private_with_files
from taskd.torch.checkpoints import checkpoint_copies, emergency_checkpoint
from taskd.torch.checkpoints.checkpoint_copies import CheckpointOrder
from taskd.torch.checkpoints.checkpoint_layout import CopiedState
from taskd.torch.checkpoints.emergency_checkpoint import OBJECTS, PLAIN_FILE, CheckpointInfo
from taskd.torch.copies.snapshot_file import SnapshotReader, inspect
from taskd.torch.state import rank_files, transfer
from taskd.torch.state.sealed import BadState, checkpoint_key, seal, unseal
from taskd.torch.state.transfer import Manifest

log = logging.getLogger(__name__)

KEPT = 2
"""How many complete checkpoints are kept."""
REST, MOST_REST_S = 1.0, 60.0
"""After a part was written, the disk is left alone for so many times as long."""
COMPLETING = "taskd.completing"
"""The file that says that a writer completes the checkpoint."""
FAILURES = (OSError, RuntimeError, ValueError, CheckpointException, BadState, SettingsError)

Part = tuple[SavePlan | None, list[WriteResult], str]
"""DCP's plan of one rank, what was written for it, and the fingerprint of the rank's model."""


class CheckpointWriter:
    """Writes what the ranks of one node leave in a folder of shared memory."""

    def __init__(self, shared: Path, directory: Path) -> None:
        self._shared, self._directory = shared, directory
        self._last_problem = ""

    def run(self) -> None:
        """Until the process is ended. Ranks wake it when they leave an order."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            address = self._shared / WAKE
            address.unlink(missing_ok=True)  # of a writer that has died
            waker.bind(str(address))
            while True:
                self.write_all()
                waker.recv(1)

    def write_all(self) -> None:
        """Carry out the orders that are there: also those of a writer that died in the middle."""
        pause = threading.Event()
        for path in sorted(self._shared.glob("checkpoint-*.order")):
            began = monotonic()
            try:
                order: CheckpointOrder = unseal(path.read_bytes(), checkpoint_copies.PLACE)
            except (OSError, BadState, pickle.PickleError) as error:
                log.warning("order %s is not used: %s", path, error)
                path.unlink(missing_ok=True)
                continue
            self._carry_out(order)
            pause.wait(min(MOST_REST_S, REST * (monotonic() - began)))
            path.unlink(missing_ok=True)

    def _carry_out(self, order: CheckpointOrder) -> None:
        name = checkpoint_folders.folder_name(order.step, order.model, order.run, order.incident)
        path = self._directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with private_folder(path) as folder:
                part = self._write_part(order, folder)
                emergency_checkpoint.write_file(
                    folder / part_file(order.rank), seal(part, _place(order, order.rank), _key())
                )
                is_complete = self._complete(order, folder)
        except FAILURES as error:
            checkpoint_folders.remove(path)
            self._make_room(order)
            self._report(f"{type(error).__name__}: {error}", order.step)
            return
        if is_complete:
            log.info("checkpoint is complete: step=%d path=%s", order.step, path)
            if self._last_problem:
                log.warning("checkpoints are written again: step=%d", order.step)
            self._last_problem = ""

    def _report(self, problem: str, step: int) -> None:
        """Once, until a checkpoint is complete again."""
        if not self._last_problem:
            log.warning(
                "checkpoint of step %d is not written: %s. Training continues, and the next "
                "checkpoint is tried",
                step,
                problem,
            )
        self._last_problem = problem

    def _write_part(self, order: CheckpointOrder, path: Path) -> Part:
        plan, results = None, list[WriteResult]()
        if order.writes_shard:
            manifest, tensors = self._read(
                checkpoint_copies.shard_file(self._shared, order.rank), order.step
            )
            if order.layout is None:
                _write_state(path, order.shard, order.step, manifest, tensors)
            else:
                parts = manifest.plain["parts"] | manifest.plain["turn"]
                keyed = {
                    piece.key: tensor
                    for piece, tensor in zip(manifest.pieces, tensors, strict=True)
                }
                state = CopiedState(order.layout, keyed, parts)
                plan, results = _write_tensors(order, path, state)
                if order.shard in order.parts_of:
                    content = rank_files.sealed_parts(order.shard, order.step, parts)
                    name = rank_files.file_name(rank_files.parts_of(order.shard))
                    emergency_checkpoint.write_file(path / name, content)
                if order.rank == order.parts.first:
                    plain = {name: manifest.plain[name] for name in ("optimizer", "scalers")}
                    plain |= {"parts": parts, OBJECTS: order.layout.objects}
                    place = emergency_checkpoint.plain_place(order.step)
                    emergency_checkpoint.write_file(path / PLAIN_FILE, seal(plain, place, _key()))
        if order.parts.own:
            copied = self._read(checkpoint_copies.own_file(self._shared, order.rank), order.step)
            _write_state(path, own_name(Rank(order.rank)), order.step, *copied)
        return plan, results, order.fingerprint

    def _read(self, copy: Path, step: int) -> tuple[Manifest, list[torch.Tensor]]:
        info = inspect(copy)
        if info is None or info.step != step:
            raise BadState(f"{copy} is not a complete copy of step {step}")
        reader = SnapshotReader(info)
        try:
            manifest, pieces = transfer.unpack(reader.receive)
            return manifest, [tensor for _, tensor in pieces]
        finally:
            reader.close()

    def _complete(self, order: CheckpointOrder, path: Path) -> bool:
        """Complete the checkpoint, if all parts are there. The last writer does it."""
        if not checkpoint_copies.order_file(self._shared, order.rank).exists():
            return False  # the rank has withdrawn it
        if not all((path / part_file(rank)).exists() for rank in order.parts.writers):
            return False
        if why := why_not_private_with_files(path):
            raise BadState(f"another user could have written it: {why}")
        try:
            (path / COMPLETING).touch(0o600, exist_ok=False)
        except FileExistsError:
            return False  # another writer does it
        read = partial(_read_part, order, path)
        parts: dict[int, Part] = {int(rank): read(rank) for rank in order.parts.writers}
        if order.shards:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this process has no groups
                content = {"step": torch.tensor(order.step)}
                state_dict_saver.save(content, checkpoint_id=path, no_dist=True)
        else:
            plans = [plan for plan, _, _ in parts.values() if plan is not None]
            _, metadata = DefaultSavePlanner().create_global_plan(plans)
            FileSystemWriter(path).finish(metadata, [results for _, results, _ in parts.values()])
        info = CheckpointInfo(
            order.step,
            order.incident,
            parts[order.parts.first][2],
            emergency_checkpoint.metadata_digest(path),
            size=order.size,
            shards=order.shards,
            models={str(rank): part[2] for rank, part in parts.items()} if order.shards else {},
            own=order.parts.own,
            parts_of=order.parts_of,
        )
        emergency_checkpoint.write_info(path, info)
        for name in (*map(part_file, order.parts.writers), COMPLETING):
            with suppress(OSError):
                (path / name).unlink()
        self._prune(order, KEPT)
        return True

    def _prune(self, order: CheckpointOrder, keep: int) -> None:
        known = checkpoint_folders.folders(self._directory, order.model)
        here = CheckpointFolder(Path(), order.step, order.model, order.run, order.incident)
        for one in checkpoint_folders.superfluous(known, here, keep):
            checkpoint_folders.remove(one.path)

    def _make_room(self, order: CheckpointOrder) -> None:
        """If the disk is full, one complete checkpoint and a new one may fit."""
        with suppress(OSError):
            self._prune(order, KEPT)


def part_file(rank: int) -> str:
    return f"taskd-part-{rank}"


def _write_tensors(
    order: CheckpointOrder, path: Path, state: CopiedState
) -> tuple[SavePlan, list[WriteResult]]:
    assert order.layout is not None
    writer = FileSystemWriter(path)
    # DCP names the files of a plan after its place in the list.
    empty = [SavePlan([]) for _ in range(order.rank)]
    plan = writer.prepare_global_plan([*empty, order.layout.plan])[-1]
    results = writer.write_data(plan, state).wait()
    return plan, list(results)


def _write_state(
    path: Path, name: str, step: int, manifest: Manifest, tensors: list[torch.Tensor]
) -> None:
    content = seal((manifest, tensors), rank_files.place(name, step), _key())
    emergency_checkpoint.write_file(path / rank_files.file_name(name), content)


def _read_part(order: CheckpointOrder, path: Path, rank: int) -> Part:
    part: Part = unseal((path / part_file(rank)).read_bytes(), _place(order, rank), _key())
    return part


def _place(order: CheckpointOrder, rank: int) -> str:
    return f"part {rank} of step {order.step} of run {order.run} in incident {order.incident}"


def _key() -> bytes:
    return checkpoint_key()


def main(arguments: list[str] | None = None) -> None:
    shared, directory = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(
        level=environ.get("TASKD_LOG_LEVEL", "WARNING"), format="taskd: %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent ends us
    torch.set_num_threads(1)
    CheckpointWriter(Path(shared), Path(directory)).run()


if __name__ == "__main__":
    main()
