"""runtime/files/private_files.py: files that only their user can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskd.runtime.files.private_files import write_private


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
