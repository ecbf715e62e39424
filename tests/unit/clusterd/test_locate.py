"""A command that finds no job names the running jobs and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.clusterd.locate import announce, find, withdraw
from taskd.errors import SettingsError


@pytest.fixture(autouse=True)
def _a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TASKD_CLUSTERD", raising=False)


def test_announced_job_is_found_with_and_without_its_name() -> None:
    announce("one", "127.0.0.1:1")
    announce("two", "127.0.0.1:2", "token")
    assert find("one").address == "127.0.0.1:1"
    assert find().job == "two", "the newest"
    assert find(server="127.0.0.1:2").token == "token"
    withdraw("two")
    assert find().job == "one"


def test_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="none of your jobs is running"):
        find()
    announce("one", "127.0.0.1:1")
    with pytest.raises(SettingsError, match=r"running here: one.*--server.*taskd replay other"):
        find("other")


def test_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taskd").mkdir(mode=0o777)
    (tmp_path / "taskd").chmod(0o777)
    with pytest.raises(SettingsError, match="only you can write"):
        find("one")
    (tmp_path / "taskd").rmdir()
    (tmp_path / "taskd").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(SettingsError, match="only you can write"):
        find("one")
