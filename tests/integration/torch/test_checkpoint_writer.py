"""Continuous checkpoints of one rank: what the writer leaves on the disk, also if that fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

from taskd.core.worker.state_classes import Agreement
from taskd.model.ids import Rank
from taskd.runtime.files import checkpoint_folders
from taskd.torch.checkpoints import emergency_checkpoint
from taskd.torch.checkpoints.checkpoint_copies import CheckpointCopies, order_file
from taskd.torch.checkpoints.checkpoint_writer import KEPT, CheckpointWriter
from taskd.torch.state.protected import Protected

DEADLINE_S = 60.0
MODEL = "0123456789abcdef"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir(mode=0o700)
    return tmp_path / "shared"


class Counter:
    """An object of the script that the code between two steps changes."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Model(nn.Module):
    """Its second layer is not used before step 7."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.uses_second = nn.BatchNorm1d(width), False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.first(batch))
        return self.second(found) if self.uses_second else found


class Rank0:
    """The training process of a job with one rank."""

    def __init__(
        self,
        shared: Path,
        directory: Path,
        own: bool = False,
        width: int = 8,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        torch.manual_seed(1)
        self.model = Model(width)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.counter, self.step = Counter(), 0
        self.protected = Protected(self.model, self.optimizer, None, {"counter": self.counter})
        self.protected.agreement = Agreement(
            {Rank(0): ""}, own_parts={"counter": 0} if own else {}, model=MODEL, run="abcd"
        )
        self.copies = CheckpointCopies(shared, directory, 0, every=2)
        self.copies.attach(self.protected)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            batch = torch.randn(4, self.model.first.in_features, generator=generator)
            self.model.uses_second = self.step >= 7
            self.model(batch).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.protected.record_parts()
            self.counter.count += 1
            self.protected.record_turn(self.step)
            self.optimizer.param_groups[0]["lr"] *= 0.9
            self.protected.record_parts()
            self.copies.begin_turn(self.step, 0, (0,), votes=False)
            self.copies.wait()


def find(protected: Protected, directory: Path) -> tuple[Path, int] | None:
    found = emergency_checkpoint.find(protected, str(directory))
    return (found[0], found[1].step) if found else None


def weights(one: Rank0) -> list[torch.Tensor]:
    state = one.optimizer.state
    own = [state[p] for p in one.model.parameters() if p in state]
    return [*one.model.state_dict().values(), *(value for each in own for value in each.values())]


def until(happened: Callable[[], bool], expected: str) -> None:
    """Poll the result of another process, which sends no event."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if happened():
            return
        pause.wait(0.02)
    raise AssertionError(f"not in time: {expected}")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_start_resumes_from_what_the_writer_left(
    shared: Path, tmp_path: Path, own: bool, optimizer: type[torch.optim.Optimizer]
) -> None:
    """Also if some weights have not been used yet, and if the optimizer has no state."""
    directory = tmp_path / "out"
    rank = Rank0(shared, directory, own, optimizer=optimizer)
    writer = CheckpointWriter(shared, directory)
    rank.train(4)
    assert not rank.copies.is_ready(), "step 2 is not written, so step 4 is left out"
    writer.write_all()
    assert rank.copies.is_ready()
    rank.train(2)
    writer.write_all()
    again = Rank0(shared, directory, own, optimizer=optimizer)
    path, step = find(again.protected, directory) or (Path(), 0)
    assert step == 6
    emergency_checkpoint.load(again.protected, path)
    again.protected.enter_turn()
    again.step = 6
    assert again.counter.count == 6
    for one in (rank, again):
        one.copies.every = 0
        one.train(3)
    mine, theirs = weights(rank), weights(again)
    assert len(mine) == len(theirs)
    assert all(map(torch.equal, mine, theirs))
    assert rank.optimizer.param_groups[0]["lr"] == again.optimizer.param_groups[0]["lr"]


def test_optimizer_without_an_update_is_left_alone(shared: Path, tmp_path: Path) -> None:
    """torch would create its state to look at it, and count an update that was never made."""
    rank = Rank0(shared, tmp_path / "out")
    rank.copies.begin_turn(2, 0, (0,), votes=False)
    rank.copies.wait()
    assert not rank.optimizer.state
    assert rank.copies.is_ready()


def test_other_tools_can_read_it(shared: Path, tmp_path: Path) -> None:
    rank, directory = Rank0(shared, tmp_path / "out"), tmp_path / "out"
    writer = CheckpointWriter(shared, directory)
    rank.train(2)
    writer.write_all()
    rank.train(2)
    writer.write_all()
    path, _ = find(rank.protected, directory) or (Path(), 0)
    empty = {
        "models": [{"first.weight": torch.zeros(8, 8)}],
        "optimizers": [{"param_groups": [{}]}],
    }
    state_dict_loader.load(empty, checkpoint_id=path)
    assert torch.equal(empty["models"][0]["first.weight"], rank.model.first.weight)  # type: ignore[index]
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    assert any(name.endswith("exp_avg") for name in names)
    assert {one.name for one in path.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "taskd.json",
        "taskd.plain",
    }


def test_old_ones_are_removed(shared: Path, tmp_path: Path) -> None:
    rank, directory = Rank0(shared, tmp_path / "out"), tmp_path / "out"
    other = directory / checkpoint_folders.folder_name(3, "ff", "12", 0)
    other.mkdir(parents=True, mode=0o700)
    unfinished = directory / checkpoint_folders.folder_name(1, MODEL, "12", 0)
    unfinished.mkdir(mode=0o700)
    writer = CheckpointWriter(shared, directory)
    for _ in range(4):
        rank.train(2)
        writer.write_all()
    known = checkpoint_folders.folders(directory, MODEL)
    assert [one.step for one in known] == [8, 6]
    assert len(known) == KEPT
    assert not unfinished.exists()
    assert other.exists(), "it belongs to another model"
    checkpoint_folders.retire(directory, MODEL)
    assert find(rank.protected, directory) is None, "the job has finished"
    assert [one.step for one in checkpoint_folders.folders(directory, MODEL)] == [8]


def test_full_disk_stops_neither_training_nor_the_writer(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1800k", "tmpfs", str(directory)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        rank = Rank0(shared, directory, width=150)
        writer = CheckpointWriter(shared, directory)
        rank.train(2)
        writer.write_all()
        assert (find(rank.protected, directory) or ("", 0))[1] == 2
        ballast = directory / "ballast"
        free = os.statvfs(directory)
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))
        for _ in range(2):
            rank.train(2)
            writer.write_all()
        assert (find(rank.protected, directory) or ("", 0))[1] == 2, "the last complete one stays"
        assert [text for text in caplog.messages if "is not written" in text] == [
            text for text in caplog.messages if "Training continues" in text
        ]
        assert len([text for text in caplog.messages if "is not written" in text]) == 1
        ballast.unlink()
        rank.train(2)
        writer.write_all()
        assert (find(rank.protected, directory) or ("", 0))[1] == 8
        assert "written again" in caplog.text
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_folder_that_disappears_is_created_again(shared: Path, tmp_path: Path) -> None:
    rank, directory = Rank0(shared, tmp_path / "out"), tmp_path / "out"
    writer = CheckpointWriter(shared, directory)
    rank.train(2)
    writer.write_all()
    shutil.rmtree(directory)
    directory.write_text("in the way")
    rank.train(2)
    writer.write_all()
    directory.unlink()
    rank.train(2)
    writer.write_all()
    assert (find(rank.protected, directory) or ("", 0))[1] == 6


def test_killed_writer_leaves_nothing_that_looks_complete(shared: Path, tmp_path: Path) -> None:
    """The next one carries out the order."""
    directory = tmp_path / "out"
    rank = Rank0(shared, directory, width=3000)
    rank.train(2)
    command = [sys.executable, "-m", "taskd.torch.checkpoints.checkpoint_writer"]
    with subprocess.Popen([*command, str(shared), str(directory)]) as writer:
        until(lambda: any(directory.glob("step-*/*.distcp")), "the first bytes")
        os.kill(writer.pid, signal.SIGKILL)
    assert order_file(shared, 0).exists()
    assert find(rank.protected, directory) is None
    CheckpointWriter(shared, directory).write_all()
    assert (find(rank.protected, directory) or ("", 0))[1] == 2


def test_folder_of_another_user_is_not_resumed_from(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.getuid():
        pytest.skip("only root can give a folder away")
    rank, directory = Rank0(shared, tmp_path / "out"), tmp_path / "out"
    rank.train(2)
    CheckpointWriter(shared, directory).write_all()
    path, _ = find(rank.protected, directory) or (Path(), 0)
    planted = path.with_name(checkpoint_folders.folder_name(90, MODEL, "99", 0))
    shutil.copytree(path, planted)
    for one in (planted, *planted.iterdir()):
        os.chown(one, 65534, 65534)
    assert (find(rank.protected, directory) or ("", 0))[0] == path
    assert "belongs to user 65534" in caplog.text
    checkpoint_folders.retire(directory, MODEL)
    assert (planted / checkpoint_folders.INFO_FILE).exists(), "files of others are left alone"


def test_damaged_copy_is_not_written(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank, directory = Rank0(shared, tmp_path / "out"), tmp_path / "out"
    rank.train(2)
    copy = shared / "checkpoint-0"
    damaged = bytearray(copy.read_bytes())
    damaged[-40] ^= 1
    copy.write_bytes(damaged)
    CheckpointWriter(shared, directory).write_all()
    assert find(rank.protected, directory) is None
    assert "digest" in caplog.text
    assert rank.copies.is_ready()


def test_state_that_was_wrong_is_withdrawn(shared: Path, tmp_path: Path) -> None:
    rank, directory = Rank0(shared, tmp_path / "out"), tmp_path / "out"
    writer = CheckpointWriter(shared, directory)
    for _ in range(2):
        rank.train(2)
        writer.write_all()
    rank.train(2)
    rank.copies.distrust(after=2)
    writer.write_all()
    assert (find(rank.protected, directory) or ("", 0))[1] == 2
