"""The dying gasp: the survivors write one complete checkpoint; the next start goes on from it.

Written with `torch.distributed.checkpoint`, so other tools can read it too and another number of
ranks can load it. What a lost rank held alone is written from a copy of it (`orphans.py`,
`planner.py`). Beside it lies a note of ours that says which step it is and of what model; it is
written last, and a checkpoint without it does not count.
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

from taskd.torch.apply_plan import Holding
from taskd.torch.state import orphaned_shards as orphans
from taskd.torch.state import transfer as state
from taskd.torch.state.orphaned_shards import CannotDump
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState

log = logging.getLogger(__name__)

NOTE, USED = "taskd.json", "taskd.used.json"


@dataclass(frozen=True, slots=True)
class Note:
    step: int
    incident: int
    model: str
    """A fingerprint: names and shapes of all parameters."""


def save(mine: Holding, step: int, incident: int, directory: str) -> Path:
    """Write this rank's part. All ranks of the default group do it together."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    path = Path(directory) / f"step-{step}"
    try:
        stands = mine.step == step or _went_back(mine, step, incident)
        adopted = orphans.adopt(mine, stands, step, incident)
        content = _content(mine.kept)
        planner = None
        if adopted or not stands:
            from taskd.torch.state.checkpoint_planner import Planner

            planner = Planner(mine.kept, stands, adopted)
        state_dict_saver.save(content, checkpoint_id=path, planner=planner)
        if dist.get_rank() == 0:
            draft = path / f"{NOTE}.new"
            draft.write_text(json.dumps(asdict(Note(step, incident, fingerprint(mine.kept)))))
            draft.rename(path / NOTE)
        dist.barrier()
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CannotDump(f"{type(error).__name__}: {error}") from error
    return path


def find(kept: Protected, directory: str, beyond: int = 0) -> tuple[Path, Note] | None:
    """The furthest complete checkpoint of this very model, if it is further than that step."""
    found: list[tuple[int, Path, Note]] = []
    for path in Path(directory).glob(f"step-*/{NOTE}"):
        try:
            note = Note(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as problem:
            log.warning("%s is not used: %s", path, problem)
            continue
        if note.model != fingerprint(kept):
            log.warning("%s is of another model and is not used", path.parent)
            continue
        if note.step <= beyond:
            log.info("%s is not used: the script begins at step %d", path.parent, beyond)
            continue
        found.append((note.step, path.parent, note))
    if not found:
        return None
    _, path, note = max(found, key=lambda one: one[0])
    return path, note


def load(kept: Protected, path: Path) -> None:
    """Read this rank's part. All ranks do it together."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    content = _content(kept)
    try:
        state_dict_loader.load(content, checkpoint_id=path)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CannotDump(f"{path} cannot be read: {error}") from error
    for model, of_model, of_optimizer in zip(
        kept.models, content["models"], content["optimizers"], strict=True
    ):
        set_state_dict(
            model,
            kept.optimizers if model is kept.models[0] else (),
            model_state_dict=of_model,
            optim_state_dict=of_optimizer,
        )
    state.adopt_plain(kept, pickle.loads(content["plain"]))


def use_up(path: Path) -> None:
    """The job that went on from it has ended well: it must not be gone on from again."""
    note = path / NOTE
    if note.exists():
        note.rename(path / USED)


def _went_back(mine: Holding, step: int, incident: int) -> bool:
    """Whether there was a copy of our own of that step: some are a step ahead of the lost one."""
    kept = mine.snapshots
    found = kept.find(mine.shard, step) if kept is not None else None
    if kept is None or found is None:
        return False
    aside = mine.step is not None
    take = partial(state.take, mine.kept, step, incident, mine.shard, aside=aside)
    try:
        kept.read(found, take)
    except BadState:
        return False
    return True


def _content(kept: Protected) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    models, optimizers = [], []
    for model in kept.models:
        # All optimizers may refer to all models; they go with the first.
        mine = kept.optimizers if model is kept.models[0] else ()
        of_model, of_optimizer = get_state_dict(model, mine)
        models.append(of_model)
        optimizers.append(of_optimizer)
    plain = pickle.dumps(state.plain_state(kept))
    return {"models": models, "optimizers": optimizers, "plain": plain}


def fingerprint(kept: Protected) -> str:
    names = [
        (name, tuple(parameter.shape), str(parameter.dtype))
        for model in kept.models
        for name, parameter in model.named_parameters()
    ]
    return blake2b(repr(names).encode(), digest_size=8).hexdigest()
