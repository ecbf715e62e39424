"""The emergency checkpoint: the survivors write one complete checkpoint, the next start resumes.

Written with `torch.distributed.checkpoint`, so other tools can read it too and another number of
ranks can load it. What only a lost rank held is written from a copy of it (`orphaned_shards.py`,
`checkpoint_planner.py`). A small file of ours beside it says which step it is and of which model;
it is written last, and a checkpoint without it is not used.

A checkpoint can hold code: torch unpickles its metadata, and we unpickle what is not a tensor. So
a checkpoint is used only if no other user could have written it; with `TASKD_TOKEN` the files that
are unpickled must also carry a signature of this job's token. Everything else is loaded as weights.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from taskd.errors import SettingsError
from taskd.model.messages import own_name
from taskd.runtime.files.checkpoint_folders import INFO_FILE, USED_FILE
from taskd.runtime.files.private_files import (
    make_private,
    pinned,
    private_folder,
    read_small,
    why_not_private_with_files,
)
from taskd.torch.copies.snapshots import LocalState
from taskd.torch.groups import sealed_objects
from taskd.torch.state import pieces, rank_files, sharded, transfer
from taskd.torch.state.orphaned_shards import CheckpointFailed, read_orphans
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState, checkpoint_key, seal, sign, unseal
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

PLAIN_FILE, METADATA_FILE = "taskd.plain", ".metadata"
OBJECTS = "objects"
"""What is in a model's state dict and is not a tensor; in the plain file."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The content of the file beside the checkpoint."""

    step: int
    incident: int
    model: str
    """A fingerprint of the names and shapes of all parameters."""
    metadata: str
    """The digest of DCP's own metadata."""
    size: int = 0
    """The number of ranks of the job, if files of `rank_files.py` belong to it; only as many ranks
    can load them. 0: there are none."""
    shards: dict[str, str] = field(default_factory=dict)
    """The shard of each rank, if these are in such files. Empty: they are in DCP's."""
    models: dict[str, str] = field(default_factory=dict)
    """As `model`, for each rank that has written its own shard."""
    own: bool = False
    """What only one rank had is in such files."""
    parts_of: list[str] = field(default_factory=list)
    """The shards of distributed tensors whose parts are in such files."""

    @property
    def place(self) -> str:
        return f"emergency checkpoint of step {self.step} of incident {self.incident}"

    def signature(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return sign(text.encode(), self.place, checkpoint_key()).hex()


def save(mine: LocalState, step: int, incident: int, directory: str) -> Path:
    """Write this rank's part. All ranks of the default group call it together."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        has_step = mine.step == step or _load_own_copy(mine, step, incident)
        agreement, fingerprint = mine.protected.agreement, model_fingerprint(mine.protected)
        shards = rank_files.divided_shards(agreement)
        orphans = [] if shards else read_orphans(mine, has_step, step, incident)
        path, holders = _choose_folder(Path(directory), step, incident, has_step)
        with private_folder(path) as folder:
            content, objects, models = dict[str, Any](), list[dict[str, Any]](), dict[str, str]()
            if shards:
                content["step"] = torch.tensor(step)
                models |= sealed_objects.all_gather((str(mine.rank), fingerprint))
            else:
                content, objects = content_of(mine.protected)
            planner = None
            if not shards and (orphans or not has_step):
                from taskd.torch.checkpoints.checkpoint_planner import SurvivorPlanner

                planner = SurvivorPlanner(mine.protected, has_step, orphans)
            state_dict_saver.save(content, checkpoint_id=folder, planner=planner)
            rank_files.write(mine, has_step, step, incident, folder)
            rank_files.write_parts(mine, has_step, step, incident, folder)
            if not shards and dist.get_rank() == holders[0]:
                parts = mine.protected.parts_to_resume(step)
                plain = {**pieces.plain_state(mine.protected, parts), OBJECTS: objects}
                write_file(folder / PLAIN_FILE, seal(plain, plain_place(step), checkpoint_key()))
            dist.barrier()
            if dist.get_rank() == 0:
                info = CheckpointInfo(
                    step,
                    incident,
                    fingerprint,
                    metadata_digest(folder),
                    size=len(agreement.shards)
                    if agreement and rank_files.names(agreement, step)
                    else 0,
                    shards={str(rank): name for rank, name in shards.items()},
                    models=models,
                    own=agreement is not None and 0 <= agreement.own_since <= step,
                    parts_of=rank_files.sharded_names(agreement),
                )
                write_info(folder, info)
            dist.barrier()
    except (OSError, RuntimeError, CheckpointException, BadState, SettingsError) as error:
        raise CheckpointFailed(f"{type(error).__name__}: {error}") from error
    return path


def _choose_folder(
    directory: Path, step: int, incident: int, has_step: bool
) -> tuple[Path, list[int]]:
    """The same for all ranks; and which of them have the state of this step.

    The usual name is known, so another user of the directory may have taken it. The other one
    depends on the job's key.
    """
    path = directory / f"step-{step}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        make_private(path)
        is_usable = True
    except (OSError, SettingsError) as error:
        log.warning("the emergency checkpoint gets another name: %s", error)
        is_usable = False
    ranks = sealed_objects.gather_numbers([has_step, is_usable])
    if not all(usable for _, usable in ranks):
        name = sign(f"{step} {incident}".encode(), "folder of an emergency checkpoint")
        path = directory / f"step-{step}-{name.hex()}"
    return path, [rank for rank, (has, _) in enumerate(ranks) if has]


def find(
    protected: Protected, directory: str, beyond: int = 0
) -> tuple[Path, CheckpointInfo] | None:
    """The newest complete checkpoint of this model, if it is of a later step than `beyond`."""
    found: list[tuple[int, Path, CheckpointInfo]] = []
    for path in Path(directory).glob(f"step-*/{INFO_FILE}"):
        try:
            info = _read_info(path)
        except (OSError, ValueError, TypeError, BadState) as problem:
            log.warning("%s is not used: %s", path, problem)
            continue
        if info.size and info.size != dist.get_world_size():
            log.warning(
                "%s is not used: it has state that belongs to single ranks of %d, and this job "
                "has %d",
                path.parent,
                info.size,
                dist.get_world_size(),
            )
            continue
        model = info.models.get(str(dist.get_rank())) if info.shards else info.model
        if model not in (None, model_fingerprint(protected)):
            log.warning("%s is not used: it belongs to another model", path.parent)
            continue
        if info.step <= beyond:
            log.info("%s is not used: the script starts at step %d", path.parent, beyond)
            continue
        found.append((info.step, path.parent, info))
    if not found:
        return None
    # Of two for the same step, all ranks take the same one.
    _, path, info = max(found, key=lambda one: (one[0], one[1].name))
    return path, info


def load(protected: Protected, path: Path) -> None:
    """Read this rank's part. All ranks call it together."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with pinned(path) as folder:
            _load(protected, folder)
    except (OSError, RuntimeError, CheckpointException, BadState) as error:
        raise CheckpointFailed(f"cannot read {path}: {error}") from error


def _load(protected: Protected, folder: Path) -> None:
    """`folder` must be pinned: torch reads its files again after we have checked them."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from taskd.torch.checkpoints.checkpoint_planner import WeightsPlanner

    info = _read_info(folder / INFO_FILE)
    step, rank = info.step, dist.get_rank()
    if info.shards:
        rank_files.read(protected, folder, info.shards[str(rank)], step)
        if info.own:
            rank_files.read(protected, folder, own_name(rank), step)
        return
    content, _ = content_of(protected)
    plain = unseal((folder / PLAIN_FILE).read_bytes(), plain_place(step), checkpoint_key())
    if (shard := sharded.describe(protected)[0]) in info.parts_of:
        plain["parts"] |= rank_files.read_parts(folder, shard, step)
    if info.own:  # those of the rank that has written the file may not even fit
        own = rank_files.part_names(folder, own_name(rank), step)
        plain["parts"] = {name: one for name, one in plain["parts"].items() if name not in own}
    state_dict_loader.load(content, checkpoint_id=folder, planner=WeightsPlanner())
    for number, (model, of_model, of_optimizer) in enumerate(
        zip(protected.models, content["models"], content["optimizers"], strict=True)
    ):
        set_state_dict(
            model,
            protected.optimizers if number == 0 else (),
            model_state_dict=of_model | plain[OBJECTS][number],
            optim_state_dict=of_optimizer,
        )
    for index, (optimizer, parameter) in enumerate(pieces.optimized(protected)):
        if index in plain["optimizer"]:
            optimizer.state[parameter].update(plain["optimizer"][index])
        else:
            optimizer.state.pop(parameter, None)  # it had none: only `content_of` has created it
    pieces.load_plain_state(protected, plain)
    protected.record_parts()
    if info.own:
        rank_files.read(protected, folder, own_name(rank), step)


def _read_info(path: Path) -> CheckpointInfo:
    """Raises OSError, ValueError, TypeError or BadState if the checkpoint must not be used."""
    if why := why_not_private_with_files(path.parent):
        raise BadState(
            f"another user could have written {path.parent}: {why}. If it is yours, run chown and "
            "chmod 700 on it"
        )
    content = loads(read_small(str(path)))
    signature = str(content.pop("signature", ""))
    info = CheckpointInfo(**content)
    if not compare_digest(signature, info.signature()):
        raise BadState("its signature does not match: it was written with another TASKD_TOKEN")
    if not compare_digest(info.metadata, metadata_digest(path.parent)):
        raise BadState(f"{METADATA_FILE} is not the one that was written with it")
    return info


def metadata_digest(path: Path) -> str:
    return sign((path / METADATA_FILE).read_bytes(), METADATA_FILE, checkpoint_key()).hex()


def plain_place(step: int) -> str:
    return f"plain state of step {step}"


def write_info(path: Path, info: CheckpointInfo) -> None:
    """The last file: with it, the checkpoint is complete."""
    content = {**asdict(info), "signature": info.signature()}
    write_file(path / INFO_FILE, json.dumps(content).encode())


def write_file(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def mark_used(path: Path) -> None:
    """The job that resumed from it has finished: it must not be resumed from again."""
    with suppress(FileNotFoundError), pinned(path) as folder:
        (folder / INFO_FILE).rename(folder / USED_FILE)


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


def content_of(protected: Protected) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tensors, which DCP writes; and for each model what is not a tensor (extra state)."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    models, optimizers, objects = [], [], []
    for model in protected.models:
        # Every optimizer may refer to every model; they are saved with the first.
        mine = protected.optimizers if model is protected.models[0] else ()
        of_model, of_optimizer = get_state_dict(model, mine)
        names = [name for name, value in of_model.items() if not isinstance(value, torch.Tensor)]
        objects.append({name: of_model.pop(name) for name in names})
        models.append(of_model)
        optimizers.append(of_optimizer)
    return {"models": models, "optimizers": optimizers}, objects


def model_fingerprint(protected: Protected) -> str:
    names = [
        (name, tuple(parameter.shape), str(parameter.dtype))
        for model in protected.models
        for name, parameter in model.named_parameters()
    ]
    return blake2b(repr(names).encode(), digest_size=8).hexdigest()
