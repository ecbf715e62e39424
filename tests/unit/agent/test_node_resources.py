"""Shared memory of jobs that were killed completely is freed; that of other jobs is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from taskd.agent.node_resources import YOUNG_S, make_shared_folder

HOLD = """
import sys
from taskd.agent.node_resources import make_shared_folder
print(make_shared_folder(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_folder_of_dead_launcher_is_removed_and_of_living_launcher_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        (other / "snapshot-0.0").write_bytes(bytes(100))
        young = tmp_path / "taskd-node-young"
        young.mkdir()
        _age(other)
        make_shared_folder(str(tmp_path))
        assert other.exists(), "its launcher is alive"
        process.kill()
    make_shared_folder(str(tmp_path))
    assert not other.exists()
    assert young.exists(), "its launcher may be about to lock it"


def test_symlinks_and_foreign_folders_are_kept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    where = tmp_path / "shm"
    where.mkdir()
    (where / "taskd-node-link").symlink_to(elsewhere)
    (where / "taskd-other").mkdir()
    for path in where.iterdir():
        _age(path)
    made = Path(make_shared_folder(str(where)))
    assert made.stat().st_mode & 0o077 == 0
    assert (elsewhere / "precious").exists()
    assert (where / "taskd-other").exists()


def _age(path: Path) -> None:
    then = path.lstat().st_mtime - 2 * YOUNG_S
    os.utime(path, (then, then), follow_symlinks=False)
