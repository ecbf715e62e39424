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

from taskd.torch.copies.snapshots import LocalState
from taskd.torch.state import emergency_checkpoint, sealed
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
        note["metadata"] = emergency_checkpoint._metadata_digest(written)
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


def test_checkpoint_is_not_written_into_a_folder_that_another_user_has_prepared(
    written: Path,
) -> None:
    shutil.rmtree(written)
    written.mkdir()
    written.chmod(0o777)
    state = LocalState(0, "", 10, protected(1), None)
    with pytest.raises(CheckpointFailed, match="only you can write"):
        emergency_checkpoint.save(state, 10, 1, str(written.parent))


def test_key_of_a_job_without_token_is_empty() -> None:
    sealed.checkpoint_key.cache_clear()
    assert sealed.checkpoint_key() == b""
