"""What state looks like on its way, and what is refused: in one process, without any peer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from taskd.torch.copies import snapshot_file as page
from taskd.torch.copies.snapshot_file import HEAD, Reader
from taskd.torch.copies.snapshots import Snapshots
from taskd.torch.state import sealed
from taskd.torch.state import transfer as state
from taskd.torch.state.protected import Protected
from taskd.torch.state.sealed import BadState
from taskd.torch.state.transfer import Parcel


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


def pour(parcel: Parcel) -> bytearray:
    out = bytearray()
    parcel.give(lambda piece: out.extend(piece.cast("B")))
    return out


class Tap:
    def __init__(self, content: bytes | bytearray) -> None:
        self._content, self._at = content, 0

    def __call__(self, place: memoryview) -> None:
        flat = place.cast("B")
        part = self._content[self._at : self._at + flat.nbytes]
        if len(part) < flat.nbytes:
            raise BadState("the end")
        flat[:] = part
        self._at += flat.nbytes


def same(one: Protected, other: Protected) -> bool:
    def pieces(kept: Protected) -> bytearray:
        return pour(Parcel(kept, 0, 0, ""))

    return pieces(one) == pieces(other)


def test_the_taker_becomes_the_giver_in_every_bit() -> None:
    giver, taker = trained(1), trained(2, steps=0)
    assert not same(giver, taker)
    content = pour(Parcel(giver, 2, 5, ""))
    state.take(taker, 2, 5, "", Tap(content), aside=False)
    assert same(giver, taker)
    assert taker.parts["scheduler"].state_dict() == giver.parts["scheduler"].state_dict()


def test_the_length_is_what_is_sent() -> None:
    parcel = Parcel(trained(1), 2, 5, "")
    parcel.seal()
    assert len(pour(parcel)) == parcel.length


@pytest.mark.parametrize(
    ("step", "incident", "shard"),
    [(3, 5, ""), (2, 4, ""), (2, 5, "another")],
    ids=["another step", "a later incident", "another shard"],
)
def test_what_was_not_asked_for_is_refused(step: int, incident: int, shard: str) -> None:
    content = pour(Parcel(trained(1), 2, 5, ""))
    with pytest.raises(BadState, match="asked for"):
        state.take(trained(2), step, incident, shard, Tap(content), aside=True)


@pytest.mark.parametrize("where", [0.3, 0.6, 0.99])
def test_a_flipped_bit_is_found_and_the_taker_stays_as_it_was(where: float) -> None:
    content = pour(Parcel(trained(1), 2, 5, ""))
    content[int(len(content) * where)] ^= 1
    taker, before = trained(2), trained(2)
    with pytest.raises(BadState):
        state.take(taker, 2, 5, "", Tap(content), aside=True)
    assert same(taker, before)


def test_all_zero_weights_with_a_valid_step_are_refused() -> None:
    giver = trained(1)
    content = pour(Parcel(giver, 2, 5, ""))
    size = sum(p.numel() * p.element_size() for p in giver.parameters)
    content[-size:] = bytes(size)
    with pytest.raises(BadState, match="checksum"):
        state.take(trained(2), 2, 5, "", Tap(content), aside=True)


def test_a_state_that_another_job_has_sealed_is_not_even_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reaches torch's store could offer one; opening it would run what is in it."""
    opened: list[str] = []

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return opened.append, ("run by whoever opens it",)

    def offered(seal: str) -> bytearray:
        monkeypatch.setenv("TASKD_SEAL", seal)
        sealed._key.cache_clear()
        letter = sealed.seal(Trap())
        return bytearray(len(letter).to_bytes(8, "little") + letter)

    stranger, ours = offered("a stranger's key"), offered("ours")
    try:
        with pytest.raises(BadState, match="not of this job"):
            state.check(Tap(stranger))
        assert not opened
        with pytest.raises(AttributeError):
            state.check(Tap(ours))
        with pytest.raises(BadState, match="is none"):
            state.check(Tap(b"\xff" * 64))
    finally:
        monkeypatch.undo()
        sealed._key.cache_clear()


def test_a_cut_connection_leaves_the_taker_as_it_was() -> None:
    content = pour(Parcel(trained(1), 2, 5, ""))
    taker, before = trained(2), trained(2)
    with pytest.raises(BadState):
        state.take(taker, 2, 5, "", Tap(content[: len(content) // 2]), aside=True)
    assert same(taker, before)


def test_another_model_is_refused() -> None:
    other = nn.Linear(4, 4)
    taker = Protected(other, torch.optim.SGD(other.parameters(), 0.1), None, {})
    with pytest.raises(BadState, match="models are not the same"):
        state.take(taker, 2, 5, "", Tap(pour(Parcel(trained(1), 2, 5, ""))), aside=True)


def test_two_snapshots_are_kept_and_the_older_makes_room(tmp_path: Path) -> None:
    kept = trained(1)
    mine = Snapshots(tmp_path, 0, "a", kept)
    for step in (1, 2, 3):
        mine.begin(step, 0)
    mine.wait()
    assert {copy.step for copy in mine.copies()} == {2, 3}
    assert len(list(tmp_path.iterdir())) == 2
    mine.forget_after(2)
    assert {copy.step for copy in mine.copies()} == {2}


def test_a_torn_snapshot_does_not_exist(tmp_path: Path) -> None:
    mine = Snapshots(tmp_path, 0, "a", trained(1))
    mine.begin(1, 0)
    mine.wait()
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-8])
    assert mine.copies() == ()
    content[:8] = bytes(8)
    path.write_bytes(content)
    assert mine.copies() == ()


def test_a_damaged_snapshot_is_found_out_and_never_offered_again(tmp_path: Path) -> None:
    kept = trained(1)
    mine = Snapshots(tmp_path, 0, "a", kept)
    mine.begin(1, 0)
    mine.wait()
    found = mine.find("a", 1)
    assert found is not None
    assert page.is_sound(found)
    content = bytearray(found.path.read_bytes())
    content[HEAD + found.length // 2] ^= 4
    found.path.write_bytes(content)
    assert not page.is_sound(found)
    reader = Reader(found)
    with pytest.raises(BadState):
        state.take(trained(2), 1, 0, "a", reader.receive, aside=True)
    reader.close()
    mine.refuse(found)
    assert mine.copies() == ()


def test_a_full_shared_memory_costs_the_snapshot_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = trained(1)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        mine = Snapshots(tmp_path, 0, "a", kept)
        mine.begin(1, 0)
        mine.wait()
        assert mine.copies() == ()
        assert "No space left" in caplog.text
        subprocess.run(["mount", "-o", "remount,size=4m", tmp_path], check=True)
        mine.begin(2, 0)
        mine.wait()
        assert {copy.step for copy in mine.copies()} == {2}
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_state_that_grows_gets_a_larger_file(tmp_path: Path) -> None:
    kept = trained(1)
    mine = Snapshots(tmp_path, 0, "a", kept)
    for step in range(1, 4):
        kept.optimizers[0].param_groups[0]["note"] = "x" * 5000 * step
        mine.begin(step, 0)
    mine.wait()
    found = mine.find("a", 3)
    assert found is not None
    assert page.is_sound(found)
