"""runtime/files/private_files.py: files that only their user can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taskd.runtime.files import private_files
from taskd.runtime.files.private_files import user_folder, why_not_private, write_private


def test_private_file_is_readable_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.touch(mode=0o666)
    write_private(path, "{}")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "{}"


def test_private_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        write_private(tmp_path / "link", "{}")
    assert not (tmp_path / "target").exists()


def test_name_taken_by_another_user_does_not_stop_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name in /tmp is known: any user of the machine can create it first."""
    monkeypatch.setattr(private_files, "SHARED", tmp_path)
    usual = tmp_path / f"taskd-{os.getuid()}"
    assert user_folder() == usual
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    usual.symlink_to(tmp_path / "elsewhere")
    decoy = tmp_path / f"taskd-{os.getuid()}.0"
    decoy.mkdir()
    decoy.chmod(0o777)
    found = user_folder()
    assert found not in (usual, decoy)
    assert why_not_private(found) == ""
    assert user_folder() == found, "all processes must find the same one"
