"""An emergency checkpoint that another user could have written is not used, and runs no code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from taskd.torch.checkpoints import emergency_checkpoint
from taskd.torch.copies.snapshots import LocalState
from taskd.torch.state import sealed
from taskd.torch.state.orphaned_shards import CheckpointFailed
from taskd.torch.state.protected import Protected


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


class Counted:
    """A class of the script, in its state."""

    def __init__(self) -> None:
        self.seen = [1, 2]


class Part:
    def __init__(self) -> None:
        self.value: Any = Counted()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Odd(nn.Linear):
    """A model whose state dict holds an object that is not a tensor."""

    def get_extra_state(self) -> Any:
        return getattr(self, "extra", None)

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def protected(seed: int) -> Protected:
    torch.manual_seed(seed)
    model = Odd(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Protected(model, optimizer, None, {"part": Part()})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    state = protected(1)
    state.models[0].extra = Counted()  # type: ignore[assignment]
    state.parts["part"].value.seen = [7]  # type: ignore[attr-defined]
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    return emergency_checkpoint.save(LocalState(0, "", 10, state, None), 10, 1, str(folder))


def find(path: Path) -> Path | None:
    found = emergency_checkpoint.find(protected(2), str(path.parent))
    return found[0] if found else None


def test_own_checkpoint_is_loaded_with_objects_of_the_script(written: Path) -> None:
    assert find(written) == written
    state = protected(2)
    emergency_checkpoint.load(state, written)
    right = protected(1)
    for one, other in zip(state.parameters, right.parameters, strict=True):
        assert torch.equal(one, other)
        mine, theirs = state.optimizers[0].state[one], right.optimizers[0].state[other]
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)
    assert state.parts["part"].value.seen == [7]  # type: ignore[attr-defined]
    assert state.models[0].extra.seen == [1, 2]  # type: ignore[union-attr]
    assert written.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", [".metadata", "taskd.plain", "__0_0.distcp"])
def test_replaced_file_runs_no_code(
    written: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the note beside it was made to match, without the key."""
    with_key(monkeypatch, "ours")
    note = json.loads((written / "taskd.json").read_text())
    (written / name).write_bytes(pickle.dumps(Trap(tmp_path / "opened")))
    if name == ".metadata":
        note["metadata"] = emergency_checkpoint.metadata_digest(written)
    (written / "taskd.json").write_text(json.dumps(note))
    if find(written) is not None:
        with pytest.raises(CheckpointFailed):
            emergency_checkpoint.load(protected(2), written)
    assert not (tmp_path / "opened").exists()


def with_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(emergency_checkpoint, "checkpoint_key", lambda: key.encode())


def test_checkpoint_of_another_token_is_not_used(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_key(monkeypatch, "another")
    assert find(written) is None
    assert "its signature does not match: it was written with another TASKD_TOKEN" in caplog.text


def writable(path: Path) -> None:
    path.chmod(0o777)


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def linked_file(path: Path) -> None:
    (path / "taskd.json").rename(path.parent / "note")
    (path / "taskd.json").symlink_to(path.parent / "note")


def foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


def foreign_file(path: Path) -> None:
    os.chown(path / "taskd.json", 12345, 12345)


def writable_file(path: Path) -> None:
    path.chmod(0o755)
    (path / ".metadata").chmod(0o666)


AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    "change",
    [
        writable,
        writable_file,
        linked,
        linked_file,
        pytest.param(foreign, marks=AS_ROOT),
        pytest.param(foreign_file, marks=AS_ROOT),
    ],
)
def test_checkpoint_that_another_user_could_have_written_is_not_used(
    written: Path, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change(written)
    assert find(written) is None
    assert "another user could have written" in caplog.text


def test_key_of_a_job_without_token_is_empty() -> None:
    sealed.checkpoint_key.cache_clear()
    assert sealed.checkpoint_key() == b""


class Exchanging(Odd):
    """While its state is read, another user exchanges the folder of the checkpoint."""

    exchange = staticmethod(lambda: None)

    def get_extra_state(self) -> Any:
        self.exchange()
        return super().get_extra_state()


def exchanging(path: Path, other: Path) -> Protected:
    """A state that puts `other` in the place of `path`, once, when it is asked for."""
    state = protected(2)
    state.models[0].__class__ = Exchanging

    def exchange() -> None:
        if other.exists():
            path.rename(path.parent / "away")
            other.rename(path)

    state.models[0].exchange = exchange  # type: ignore[assignment]
    return state


def test_folder_that_is_exchanged_after_the_check_is_not_read(
    written: Path, tmp_path: Path
) -> None:
    """A user who may write to its parent can do that at any time."""
    planted, opened = tmp_path / "planted", tmp_path / "opened"
    shutil.copytree(written, planted)
    (planted / ".metadata").write_bytes(pickle.dumps(Trap(opened)))
    emergency_checkpoint.load(exchanging(written, planted), written)
    assert not opened.exists(), "code of the planted folder has run"
    assert not planted.exists(), "nothing was exchanged"


def test_folder_that_is_exchanged_while_it_is_written_gets_nothing(tmp_path: Path) -> None:
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    shared.mkdir(mode=0o777)
    theirs.mkdir()
    state = exchanging(shared / "step-10", theirs)
    emergency_checkpoint.save(LocalState(0, "", 10, state, None), 10, 1, str(shared))
    assert not list((shared / "step-10").iterdir()), "the weights are in a folder of another user"
    assert (shared / "away" / ".metadata").exists()


@pytest.mark.parametrize("planted", ["file", "link", "open"])
def test_planted_folder_does_not_keep_the_checkpoint_from_being_written(
    tmp_path: Path, planted: str
) -> None:
    """The names of emergency checkpoints are known: another user can take them before."""
    place = tmp_path / "step-10"
    if planted == "file":
        place.touch()
    elif planted == "link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir()
        place.chmod(0o777)
    state = protected(1)
    path = emergency_checkpoint.save(LocalState(0, "", 10, state, None), 10, 1, str(tmp_path))
    assert path != place
    found = emergency_checkpoint.find(protected(2), str(tmp_path))
    assert found is not None
    assert (found[0], found[1].step) == (path, 10)
