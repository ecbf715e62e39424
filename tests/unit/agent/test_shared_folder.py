"""Shared memory of jobs that were killed as a whole is given back; that of others is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from taskd.agent.shared_folder import YOUNG_S, make_folder

HOLD = """
import sys
from taskd.agent.shared_folder import make_folder
print(make_folder(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_what_the_dead_left_is_removed_and_what_the_living_hold_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "snapshot-0.0").write_bytes(bytes(100))
        young = tmp_path / "taskd-node-young"
        young.mkdir()
        _age(theirs)
        make_folder(str(tmp_path))
        assert theirs.exists(), "its maker lives"
        process.kill()
    make_folder(str(tmp_path))
    assert not theirs.exists()
    assert young.exists(), "its maker may be about to lock it"


def test_links_and_strangers_are_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    where = tmp_path / "shm"
    where.mkdir()
    (where / "taskd-node-link").symlink_to(elsewhere)
    (where / "taskd-other").mkdir()
    for path in where.iterdir():
        _age(path)
    made = Path(make_folder(str(where)))
    assert made.stat().st_mode & 0o077 == 0
    assert (elsewhere / "precious").exists()
    assert (where / "taskd-other").exists()


def _age(path: Path) -> None:
    then = path.lstat().st_mtime - 2 * YOUNG_S
    os.utime(path, (then, then), follow_symlinks=False)
