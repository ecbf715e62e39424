"""Frozen weights are copied once; a copy is complete all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from taskd.torch.copies.snapshot_file import (
    SnapshotReader,
    SnapshotWriter,
    inspect,
    is_intact,
)
from taskd.torch.state import transfer
from taskd.torch.state.protected import Protected
from taskd.torch.state.transfer import StateImage


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskd.torch.state.sealed._key", lambda: b"key of the test")


def adapted() -> Protected:
    """A frozen layer with a small trained one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1, momentum=0.9)
    return Protected(net, optimizer, None, {})


def train(protected: Protected) -> None:
    protected.models[0](torch.randn(4, 64)).sum().backward()
    protected.optimizers[0].step()


class Copies:
    """Writes copies into one file, and notes what is written."""

    def __init__(self, path: Path, protected: Protected) -> None:
        self.path, self.protected, self.step = path, protected, 0
        self.writer = SnapshotWriter(path)

    def write(self) -> None:
        self.step += 1
        self.writer.write("", self.step, StateImage(self.protected, self.step, 0, ""))

    def erase(self, tensor: torch.Tensor) -> None:
        """Overwrite it in the file: if it is not written again, the copy is damaged."""
        data = self.path.read_bytes()
        at = data.find(tensor.detach().numpy().tobytes())
        assert at > 0
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(b"\0" * tensor.nbytes)

    def is_intact(self) -> bool:
        info = inspect(self.path)
        assert info is not None
        return is_intact(info)

    def load(self, into: Protected) -> None:
        info = inspect(self.path)
        assert info is not None
        reader = SnapshotReader(info)
        transfer.receive_state(into, self.step, 0, "", reader.receive, keep_own=False)
        reader.close()


def test_frozen_weights_are_not_written_again(tmp_path: Path) -> None:
    protected = adapted()
    train(protected)
    copies = Copies(tmp_path / "snapshot-0.0", protected)
    copies.write()
    copies.erase(protected.parameters[0])
    train(protected)
    copies.write()
    assert not copies.is_intact(), "the frozen weight was written again"
    copies = Copies(tmp_path / "snapshot-0.1", protected)
    copies.write()
    trained = protected.parameters[2].detach().clone()
    train(protected)
    copies.write()
    assert copies.is_intact()
    other = adapted()
    copies.load(other)
    assert not torch.equal(other.parameters[2], trained)
    for one, mine in zip(other.parameters, protected.parameters, strict=True):
        assert torch.equal(one, mine)


@pytest.mark.parametrize("how", ["in place", "behind the back of autograd", "another tensor"])
def test_frozen_weights_that_change_all_the_same_are_written(how: str, tmp_path: Path) -> None:
    protected = adapted()
    train(protected)
    copies = Copies(tmp_path / "snapshot-0.0", protected)
    copies.write()
    weight = protected.parameters[0]
    with torch.no_grad():
        if how == "in place":
            weight.add_(1.0)
        elif how == "behind the back of autograd":
            weight.data.mul_(2.0)
        else:
            weight.data = torch.randn(64, 64)
    copies.write()
    assert copies.is_intact()
    other = adapted()
    copies.load(other)
    assert torch.equal(other.parameters[0], weight)


def test_weights_in_an_optimizer_are_not_frozen(tmp_path: Path) -> None:
    """They may be trained again at any time."""
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.requires_grad_(False)
    copies = Copies(tmp_path / "snapshot-0.0", Protected(net, optimizer, None, {}))
    copies.write()
    copies.erase(net.weight)
    copies.write()
    assert copies.is_intact()


def test_state_of_another_size_is_written_completely(tmp_path: Path) -> None:
    """After its first update the optimizer has state, and everything has another place."""
    protected = adapted()
    copies = Copies(tmp_path / "snapshot-0.0", protected)
    copies.write()
    train(protected)
    copies.write()
    assert copies.is_intact()
