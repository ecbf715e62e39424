"""The folders of continuous checkpoints: their names, which are complete, and which may go.

One folder per checkpoint, beside the emergency checkpoints: `step-STEP.MODEL-RUN.INCIDENT`. The
model is a fingerprint of its names and shapes, the run a random name of one start of the ranks: two
starts, or two attempts at the same step, never write into the same folder. A folder is complete
when it has the file that is written last; one that is removed loses that file first.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from taskd.runtime.files.private_files import pinned, why_not_private

INFO_FILE, USED_FILE = "taskd.json", "taskd.used.json"
"""What says which step it is; and its name when the job that resumed from it has finished."""
MODEL_FILE = "checkpoint-model"
"""In the node's shared memory: the model of which the ranks write checkpoints."""
WAKE = "checkpoint-writer"
"""In the node's shared memory: the socket that wakes the process that writes them."""
_NAME = re.compile(r"step-(\d+)\.([0-9a-f]+)-([0-9a-f]+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    path: Path
    step: int
    model: str
    run: str
    incident: int

    @property
    def is_complete(self) -> bool:
        return (self.path / INFO_FILE).exists()


def folder_name(step: int, model: str, run: str, incident: int) -> str:
    return f"step-{step}.{model}-{run}.{incident}"


def is_continuous(path: Path) -> bool:
    """Whether it is not an emergency checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def folders(directory: Path, model: str) -> list[CheckpointFolder]:
    """All of this model that only this user can have written, the newest first."""
    return sorted(_of_model(directory, model), key=lambda one: (-one.step, -one.incident))


def _of_model(directory: Path, model: str) -> Iterator[CheckpointFolder]:
    for path in directory.glob("step-*"):
        found = _NAME.fullmatch(path.name)
        if found is not None and found[2] == model and not why_not_private(path):
            yield CheckpointFolder(path, int(found[1]), found[2], found[3], int(found[4]))


def superfluous(
    known: list[CheckpointFolder], complete: CheckpointFolder, keep: int
) -> list[CheckpointFolder]:
    """What may go when a checkpoint is complete: those before it, except the newest complete ones.

    A later one belongs to a run that came further: the present one has not resumed from it.
    """
    before = [one for one in known if (one.step, one.incident) < (complete.step, complete.incident)]
    kept = [one for one in before if one.is_complete][: keep - 1]
    return [one for one in before if one not in kept]


def remove(path: Path) -> None:
    """What is left of it when this is interrupted is not complete."""
    for name in (INFO_FILE, USED_FILE):
        with suppress(OSError), pinned(path) as folder:
            (folder / name).unlink()
    shutil.rmtree(path, ignore_errors=True)


def retire(directory: Path, model: str) -> None:
    """The job has finished: no start resumes from its checkpoints any more. The newest one stays,
    for other tools."""
    known = folders(directory, model)
    newest = next((one for one in known if one.is_complete), None)
    for one in known:
        if one is not newest:
            remove(one.path)
        else:
            with suppress(OSError), pinned(one.path) as folder:
                os.replace(folder / INFO_FILE, folder / USED_FILE)
