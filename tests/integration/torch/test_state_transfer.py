"""Transfer of state and snapshots, and what is refused: in one process, without any peer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from taskd.errors import SettingsError
from taskd.torch.copies import snapshot_file
from taskd.torch.copies.snapshot_file import HEAD, SnapshotReader
from taskd.torch.copies.snapshots import Snapshots
from taskd.torch.state import sealed, transfer
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState
from taskd.torch.state.transfer import StateImage


def trained(seed: int, steps: int = 2) -> Protected:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        torch.autograd.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return Protected(model, optimizer, None, {"scheduler": scheduler})


def to_bytes(image: StateImage) -> bytearray:
    out = bytearray()
    image.send(lambda piece: out.extend(piece.cast("B")))
    return out


class ByteSource:
    def __init__(self, content: bytes | bytearray) -> None:
        self._content, self._at = content, 0

    def __call__(self, place: memoryview) -> None:
        flat = place.cast("B")
        part = self._content[self._at : self._at + flat.nbytes]
        if len(part) < flat.nbytes:
            raise BadState("end of data")
        flat[:] = part
        self._at += flat.nbytes


def same(one: Protected, other: Protected) -> bool:
    def content(protected: Protected) -> bytearray:
        return to_bytes(StateImage(protected, 0, 0, ""))

    return content(one) == content(other)


def test_receiver_has_every_bit_of_the_sender() -> None:
    sender, receiver = trained(1), trained(2, steps=0)
    assert not same(sender, receiver)
    content = to_bytes(StateImage(sender, 2, 5, ""))
    transfer.receive_state(receiver, 2, 5, "", ByteSource(content), keep_own=False)
    assert same(sender, receiver)
    assert receiver.parts["scheduler"].state_dict() == sender.parts["scheduler"].state_dict()


def bare_bytes(image: StateImage) -> bytearray:
    out = bytearray()
    image.send(lambda piece: out.extend(piece.cast("B")), bare=True)
    return out


def test_image_without_digests_is_refused_unless_it_comes_locally() -> None:
    sender, receiver = trained(1), trained(2, steps=0)
    before = to_bytes(StateImage(receiver, 0, 0, ""))
    content = bare_bytes(StateImage(sender, 2, 5, ""))
    for read in (
        lambda: transfer.receive_state(receiver, 2, 5, "", ByteSource(content), keep_own=False),
        lambda: transfer.unpack(ByteSource(content)),
        lambda: transfer.verify(ByteSource(content)),
    ):
        with pytest.raises(BadState, match="not received over a local connection"):
            read()
    assert to_bytes(StateImage(receiver, 0, 0, "")) == before
    source = ByteSource(content)
    transfer.receive_state(receiver, 2, 5, "", source, keep_own=False, may_be_bare=True)
    assert same(sender, receiver)


def test_digests_are_verified_also_if_there_need_be_none() -> None:
    """A copy in shared memory has them: its bits may have flipped there."""
    sender, receiver = trained(1), trained(2, steps=0)
    content = to_bytes(StateImage(sender, 2, 5, ""))
    content[-1] ^= 1
    source = ByteSource(content)
    with pytest.raises(BadState, match="does not match"):
        transfer.receive_state(receiver, 2, 5, "", source, keep_own=True, may_be_bare=True)


def test_length_is_the_number_of_bytes_sent() -> None:
    image = StateImage(trained(1), 2, 5, "")
    image.seal()
    assert len(to_bytes(image)) == image.length


@pytest.mark.parametrize(
    ("step", "incident", "shard"),
    [(3, 5, ""), (2, 4, ""), (2, 5, "another")],
    ids=["another step", "a later incident", "another shard"],
)
def test_state_that_was_not_requested_is_refused(step: int, incident: int, shard: str) -> None:
    content = to_bytes(StateImage(trained(1), 2, 5, ""))
    with pytest.raises(BadState, match="expected step"):
        transfer.receive_state(
            trained(2), step, incident, shard, ByteSource(content), keep_own=True
        )


@pytest.mark.parametrize("where", [0.3, 0.6, 0.99])
def test_flipped_bit_is_refused_and_the_receiver_is_unchanged(where: float) -> None:
    content = to_bytes(StateImage(trained(1), 2, 5, ""))
    content[int(len(content) * where)] ^= 1
    receiver, before = trained(2), trained(2)
    with pytest.raises(BadState):
        transfer.receive_state(receiver, 2, 5, "", ByteSource(content), keep_own=True)
    assert same(receiver, before)


@pytest.mark.parametrize("change", ["swapped", "compensating"])
def test_changes_that_keep_the_sum_of_all_words_are_refused(change: str) -> None:
    content = to_bytes(StateImage(trained(1), 2, 5, ""))
    words = memoryview(content)[len(content) % 8 :].cast("Q")
    assert words[-1] != words[-2]
    if change == "swapped":
        words[-1], words[-2] = words[-2], words[-1]
    else:
        words[-1], words[-2] = words[-1] ^ 1 << 63, words[-2] ^ 1 << 63
    words.release()
    with pytest.raises(BadState, match="digest"):
        transfer.receive_state(trained(2), 2, 5, "", ByteSource(content), keep_own=True)


def test_all_zero_weights_with_a_valid_step_are_refused() -> None:
    sender = trained(1)
    content = to_bytes(StateImage(sender, 2, 5, ""))
    size = sum(p.numel() * p.element_size() for p in sender.parameters)
    content[-size:] = bytes(size)
    with pytest.raises(BadState, match="digest"):
        transfer.receive_state(trained(2), 2, 5, "", ByteSource(content), keep_own=True)


def test_state_sealed_by_another_job_is_not_unpickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any process can write to torch's store; unpickling would run its code."""
    opened: list[str] = []

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return opened.append, ("code that runs when it is unpickled",)

    def offered(seal: str) -> bytearray:
        monkeypatch.setenv("TASKD_SEAL", seal)
        sealed._key.cache_clear()
        data = sealed.seal(Trap(), transfer.PLACE)
        return bytearray(len(data).to_bytes(8, "little") + data)

    foreign, ours = offered("another key"), offered("ours")
    try:
        with pytest.raises(BadState, match="comes from another job"):
            transfer.verify(ByteSource(foreign))
        assert not opened
        with pytest.raises(AttributeError):
            transfer.verify(ByteSource(ours))
        with pytest.raises(BadState, match="invalid manifest"):
            transfer.verify(ByteSource(b"\xff" * 64))
    finally:
        monkeypatch.undo()
        sealed._key.cache_clear()


def test_nothing_is_unpickled_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKD_SEAL")
    sealed._key.cache_clear()
    try:
        with pytest.raises(SettingsError, match="set TASKD_TOKEN"):
            sealed.unseal(bytes(64), "place")
        monkeypatch.setenv("TASKD_INSECURE", "1")
        assert sealed.unseal(sealed.seal("x", "place"), "place") == "x"
        with pytest.raises(BadState):
            sealed.unseal(sealed.seal("x", "place"), "another place")
    finally:
        monkeypatch.undo()
        sealed._key.cache_clear()


def test_cut_connection_leaves_the_receiver_unchanged() -> None:
    content = to_bytes(StateImage(trained(1), 2, 5, ""))
    receiver, before = trained(2), trained(2)
    with pytest.raises(BadState):
        transfer.receive_state(
            receiver, 2, 5, "", ByteSource(content[: len(content) // 2]), keep_own=True
        )
    assert same(receiver, before)


def test_state_of_another_model_is_refused() -> None:
    other = nn.Linear(4, 4)
    receiver = Protected(other, torch.optim.SGD(other.parameters(), 0.1), None, {})
    with pytest.raises(BadState, match="the models differ"):
        transfer.receive_state(
            receiver,
            2,
            5,
            "",
            ByteSource(to_bytes(StateImage(trained(1), 2, 5, ""))),
            keep_own=True,
        )


def test_two_snapshots_are_kept_and_the_older_is_overwritten(tmp_path: Path) -> None:
    protected = trained(1)
    mine = Snapshots(tmp_path, 0, "a", protected)
    for step in (1, 2, 3):
        mine.start(step, 0)
    mine.wait()
    assert {copy.step for copy in mine.copies()} == {2, 3}
    assert len(list(tmp_path.iterdir())) == 2
    mine.forget_after(2)
    assert {copy.step for copy in mine.copies()} == {2}


def test_incomplete_snapshot_is_not_listed(tmp_path: Path) -> None:
    mine = Snapshots(tmp_path, 0, "a", trained(1))
    mine.start(1, 0)
    mine.wait()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-8])
    assert mine.copies() == ()
    content[:8] = bytes(8)
    path.write_bytes(content)
    assert mine.copies() == ()


def test_damaged_snapshot_is_detected_and_not_offered_again(tmp_path: Path) -> None:
    protected = trained(1)
    mine = Snapshots(tmp_path, 0, "a", protected)
    mine.start(1, 0)
    mine.wait()
    found = mine.find("a", 1)
    assert found is not None
    assert snapshot_file.is_intact(found)
    content = bytearray(found.path.read_bytes())
    content[HEAD + found.length // 2] ^= 4
    found.path.write_bytes(content)
    assert not snapshot_file.is_intact(found)
    reader = SnapshotReader(found)
    with pytest.raises(BadState):
        transfer.receive_state(trained(2), 1, 0, "a", reader.receive, keep_own=True)
    reader.close()
    mine.reject(found)
    assert mine.copies() == ()


def test_full_shared_memory_skips_only_the_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    protected = trained(1)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system on this machine")
    try:
        mine = Snapshots(tmp_path, 0, "a", protected)
        mine.start(1, 0)
        mine.wait()
        assert mine.copies() == ()
        assert "No space left" in caplog.text
        subprocess.run(["mount", "-o", "remount,size=4m", tmp_path], check=True)
        mine.start(2, 0)
        mine.wait()
        assert {copy.step for copy in mine.copies()} == {2}
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_state_that_grows_gets_a_larger_file(tmp_path: Path) -> None:
    protected = trained(1)
    mine = Snapshots(tmp_path, 0, "a", protected)
    for step in range(1, 4):
        protected.optimizers[0].param_groups[0]["note"] = "x" * 5000 * step
        mine.start(step, 0)
    mine.wait()
    found = mine.find("a", 3)
    assert found is not None
    assert snapshot_file.is_intact(found)
