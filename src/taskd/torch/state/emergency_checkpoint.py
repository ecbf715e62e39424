"""The emergency checkpoint: the survivors write one complete checkpoint, the next start resumes.

Written with `torch.distributed.checkpoint`, so other tools can read it too and another number of
ranks can load it. What only a lost rank held is written from a copy of it (`orphaned_shards.py`,
`checkpoint_planner.py`). A small file of ours beside it says which step it is and of which model;
it is written last, and a checkpoint without it is not used.
"""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from taskd.torch.copies.snapshots import LocalState
from taskd.torch.state import pieces, transfer
from taskd.torch.state.orphaned_shards import CheckpointFailed, read_orphans
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState

log = logging.getLogger(__name__)

INFO_FILE, USED_FILE = "taskd.json", "taskd.used.json"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The content of the file beside the checkpoint."""

    step: int
    incident: int
    model: str
    """A fingerprint of the names and shapes of all parameters."""


def save(mine: LocalState, step: int, incident: int, directory: str) -> Path:
    """Write this rank's part. All ranks of the default group call it together."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    path = Path(directory) / f"step-{step}"
    try:
        has_step = mine.step == step or _load_own_copy(mine, step, incident)
        orphans = read_orphans(mine, has_step, step, incident)
        content = _content(mine.protected)
        planner = None
        if orphans or not has_step:
            from taskd.torch.state.checkpoint_planner import SurvivorPlanner

            planner = SurvivorPlanner(mine.protected, has_step, orphans)
        state_dict_saver.save(content, checkpoint_id=path, planner=planner)
        if dist.get_rank() == 0:
            draft = path / f"{INFO_FILE}.new"
            info = CheckpointInfo(step, incident, model_fingerprint(mine.protected))
            draft.write_text(json.dumps(asdict(info)))
            draft.rename(path / INFO_FILE)
        dist.barrier()
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointFailed(f"{type(error).__name__}: {error}") from error
    return path


def find(
    protected: Protected, directory: str, beyond: int = 0
) -> tuple[Path, CheckpointInfo] | None:
    """The newest complete checkpoint of this model, if it is of a later step than `beyond`."""
    found: list[tuple[int, Path, CheckpointInfo]] = []
    for path in Path(directory).glob(f"step-*/{INFO_FILE}"):
        try:
            info = CheckpointInfo(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as problem:
            log.warning("%s is not used: %s", path, problem)
            continue
        if info.model != model_fingerprint(protected):
            log.warning("%s is not used: it belongs to another model", path.parent)
            continue
        if info.step <= beyond:
            log.info("%s is not used: the script starts at step %d", path.parent, beyond)
            continue
        found.append((info.step, path.parent, info))
    if not found:
        return None
    _, path, info = max(found, key=lambda one: one[0])
    return path, info


def load(protected: Protected, path: Path) -> None:
    """Read this rank's part. All ranks call it together."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    content = _content(protected)
    try:
        state_dict_loader.load(content, checkpoint_id=path)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CheckpointFailed(f"cannot read {path}: {error}") from error
    for model, of_model, of_optimizer in zip(
        protected.models, content["models"], content["optimizers"], strict=True
    ):
        set_state_dict(
            model,
            protected.optimizers if model is protected.models[0] else (),
            model_state_dict=of_model,
            optim_state_dict=of_optimizer,
        )
    pieces.load_plain_state(protected, pickle.loads(content["plain"]))


def mark_used(path: Path) -> None:
    """The job that resumed from it has finished: it must not be resumed from again."""
    info = path / INFO_FILE
    if info.exists():
        info.rename(path / USED_FILE)


def _load_own_copy(mine: LocalState, step: int, incident: int) -> bool:
    """Go back to our own copy of that step, if any: some ranks are a step ahead of the lost one."""
    snapshots = mine.snapshots
    found = snapshots.find(mine.shard, step) if snapshots is not None else None
    if snapshots is None or found is None:
        return False
    keep_own = mine.step is not None
    receive = partial(
        transfer.receive_state, mine.protected, step, incident, mine.shard, keep_own=keep_own
    )
    try:
        snapshots.read(found, receive)
    except BadState:
        return False
    return True


def _content(protected: Protected) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    models, optimizers = [], []
    for model in protected.models:
        # Every optimizer may refer to every model; they are saved with the first.
        mine = protected.optimizers if model is protected.models[0] else ()
        of_model, of_optimizer = get_state_dict(model, mine)
        models.append(of_model)
        optimizers.append(of_optimizer)
    plain = pickle.dumps(pieces.plain_state(protected))
    return {"models": models, "optimizers": optimizers, "plain": plain}


def model_fingerprint(protected: Protected) -> str:
    names = [
        (name, tuple(parameter.shape), str(parameter.dtype))
        for model in protected.models
        for name, parameter in model.named_parameters()
    ]
    return blake2b(repr(names).encode(), digest_size=8).hexdigest()
