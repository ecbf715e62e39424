"""The dying gasp: the survivors write one complete checkpoint; the next start goes on from it.

Written with `torch.distributed.checkpoint`, so other tools can read it too and another number of
ranks can load it. Beside it lies a note of ours that says which step it is and of what model; it is
written last, and a checkpoint without it does not count.
"""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed as dist

from taskd.errors import Transient
from taskd.torch import state
from taskd.torch.protected import Protected

log = logging.getLogger(__name__)

NOTE, USED = "taskd.json", "taskd.used.json"


class CannotDump(Transient):
    """The checkpoint could not be written, or not be read."""


@dataclass(frozen=True, slots=True)
class Note:
    step: int
    incident: int
    model: str
    """A fingerprint: names and shapes of all parameters."""


def save(kept: Protected, step: int, incident: int, directory: str) -> Path:
    """Write this rank's part. All ranks of the default group do it together."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    path = Path(directory) / f"step-{step}"
    try:
        state_dict_saver.save(_content(kept), checkpoint_id=path)
        if dist.get_rank() == 0:
            draft = path / f"{NOTE}.new"
            draft.write_text(json.dumps(asdict(Note(step, incident, fingerprint(kept)))))
            draft.rename(path / NOTE)
        dist.barrier()
    except (OSError, RuntimeError, CheckpointException) as error:
        raise CannotDump(f"{type(error).__name__}: {error}") from error
    return path


def find(kept: Protected, directory: str) -> tuple[Path, Note] | None:
    """The newest complete checkpoint of this very model."""
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
