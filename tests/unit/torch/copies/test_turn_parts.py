"""What the code between two steps has changed is found by a replacement, if it still counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.torch.copies.turn_parts import TurnParts


@pytest.fixture(autouse=True)
def _insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskd.torch.state.sealed._key", lambda: b"key")


def test_replacement_finds_what_its_predecessor_has_changed(tmp_path: Path) -> None:
    TurnParts(tmp_path, 1).save(7, {"patience": {"worse": 2}})
    found = TurnParts(tmp_path, 1)
    assert found.of_predecessor(7) == {"patience": {"worse": 2}}
    assert found.of_predecessor(8) == {}, "it had not begun that turn"
    assert TurnParts(tmp_path, 0).of_predecessor(7) == {}, "another rank"


def test_last_two_turns_are_kept(tmp_path: Path) -> None:
    """The job may resume at the turn before the one that the predecessor has begun."""
    parts = TurnParts(tmp_path, 1)
    for turn in range(5, 8):
        parts.save(turn, {"patience": {"worse": "more" * (9 - turn)}})
    found = TurnParts(tmp_path, 1)
    assert found.of_predecessor(7) == {"patience": {"worse": "more" * 2}}
    assert found.of_predecessor(6) == {"patience": {"worse": "more" * 3}}
    assert found.of_predecessor(5) == {}


def test_turn_without_changes_leaves_nothing(tmp_path: Path) -> None:
    parts = TurnParts(tmp_path, 1)
    parts.save(7, {"patience": {"worse": 2}})
    parts.save(8, {})
    assert TurnParts(tmp_path, 1).predecessor == {}


def test_file_that_was_not_written_to_its_end_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TurnParts(tmp_path, 1).save(7, {"patience": {"worse": 2}})
    path = tmp_path / "parts-1.1"
    path.write_bytes(bytes(8) + path.read_bytes()[8:])
    assert TurnParts(tmp_path, 1).predecessor == {}
    assert not caplog.text


def test_damaged_file_is_not_used(tmp_path: Path) -> None:
    TurnParts(tmp_path, 1).save(7, {"patience": {"worse": 2}})
    path = tmp_path / "parts-1.1"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert TurnParts(tmp_path, 1).of_predecessor(7) == {}


def test_start_of_all_ranks_forgets_an_earlier_run(tmp_path: Path) -> None:
    TurnParts(tmp_path, 1).save(7, {"patience": {"worse": 2}})
    TurnParts(tmp_path, 1).forget_predecessor()
    assert TurnParts(tmp_path, 1).of_predecessor(7) == {}
