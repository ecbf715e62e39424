"""The profiling files: layout, rotation, the node's limit, and directories that cannot be used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from taskd.runtime import private_folder as own_folder
from taskd.worker.profiling import record_files as disk
from taskd.worker.profiling.record_files import CannotKeep, Shelf, base_dir

MB = 1024 * 1024
LINE = "x" * 1023 + "\n"


def total(base: Path) -> int:
    return sum(path.stat().st_size for path in base.rglob("*") if path.is_file())


def shelf(base: Path, rank: int = 0, limit_mb: int = 100, now: float = 1_700_000_000.0) -> Shelf:
    return Shelf(base, "job", rank, limit_mb, lambda: now)


def test_the_layout(tmp_path: Path) -> None:
    base = tmp_path / "a" / "profiling"
    assert shelf(base, rank=3).keep(["{}\n", "{}\n"]) == 0
    file = base / "job" / "3" / "1700000000"
    assert file.read_text() == "{}\n{}\n"
    assert file.stat().st_mode & 0o777 == 0o644
    assert file.parent.stat().st_mode & 0o777 == 0o755


def test_a_later_life_appends_to_the_newest_file(tmp_path: Path) -> None:
    shelf(tmp_path).keep(["a\n"])
    shelf(tmp_path, now=1_800_000_000.0).keep(["b\n"])
    assert (tmp_path / "job/0/1700000000").read_text() == "a\nb\n"


def test_a_file_is_closed_at_ten_mebibytes(tmp_path: Path) -> None:
    kept = shelf(tmp_path)
    for _ in range(3):
        kept.keep([LINE] * 7_000)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "job/0").iterdir())
    assert len(sizes) == 3
    assert sizes[1:] == [10 * MB, 10 * MB]
    assert sum(sizes) == 21_000 * 1024


@pytest.mark.parametrize("limit_mb", [1, 3, 9, 25])
def test_the_limit_holds_for_all_ranks_together(tmp_path: Path, limit_mb: int) -> None:
    ranks = [shelf(tmp_path, rank, limit_mb) for rank in range(4)]
    for turn in range(12):
        for rank, kept in enumerate(ranks):
            kept.keep([f"{turn} {rank} {LINE}"] * (limit_mb * 60))
            assert total(tmp_path) <= limit_mb * MB
    assert total(tmp_path) > limit_mb * MB * 0.6, "making room must not empty the shelf"
    newest = max((tmp_path / "job/3").iterdir(), key=lambda path: int(path.name))
    assert newest.read_text().splitlines()[-1].startswith("11 3 ")


def test_more_at_once_than_the_limit_leaves_the_oldest_lines_out(tmp_path: Path) -> None:
    left_out = shelf(tmp_path, limit_mb=1).keep([f"{n:06d}{LINE}" for n in range(2_000)])
    assert left_out > 0
    assert total(tmp_path) <= MB
    lines = "".join(
        path.read_text() for path in sorted((tmp_path / "job/0").iterdir(), key=lambda p: p.name)
    ).splitlines()
    assert lines[-1].startswith("001999")
    assert len(lines) == 2_000 - left_out


def test_the_groups_of_the_job_are_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "0"
    folder.mkdir(parents=True)
    (folder / disk.KEPT).write_text("{}")
    os.utime(folder / disk.KEPT, (0, 0))
    kept = shelf(tmp_path, limit_mb=1)
    for _ in range(4):
        kept.keep([LINE] * 800)
    assert (folder / disk.KEPT).read_text() == "{}"


def test_old_jobs_make_room_for_new_ones(tmp_path: Path) -> None:
    Shelf(tmp_path, "old", 0, 2, lambda: 1.0).keep([LINE] * 1_500)
    Shelf(tmp_path, "new", 0, 2, lambda: 2.0).keep([LINE] * 1_500)
    assert total(tmp_path / "new") == 1_500 * 1024
    assert total(tmp_path) <= 2 * MB


@pytest.mark.parametrize("where", ["", "job", "job/0", "job/0/1700000000"])
def test_links_are_refused(tmp_path: Path, where: str) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    target = base / where
    target.parent.mkdir(parents=True, exist_ok=True)
    if where.endswith("1700000000"):
        elsewhere.write_text("precious")
    else:
        elsewhere.mkdir()
    target.symlink_to(elsewhere)
    with pytest.raises(CannotKeep, match="symbolic link"):
        shelf(base).keep(["{}\n"])
    if elsewhere.is_dir():
        assert not list(elsewhere.iterdir())
    else:
        assert elsewhere.read_text() == "precious"


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("")
    with pytest.raises(CannotKeep, match=r"job.*directory"):
        shelf(tmp_path).keep(["{}\n"])


def test_a_limit_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotKeep, match="0 MB"):
        shelf(tmp_path, limit_mb=0).keep(["{}\n"])


def test_a_path_too_long(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 200] * 6)
    with pytest.raises(CannotKeep, match="1024"):
        shelf(deep).keep(["{}\n"])


def test_a_full_disk_keeps_whole_lines_and_says_so(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs a file system of its own")
    try:
        kept = shelf(tmp_path / "base")
        written = 0
        while written < 63:  # the next seven do not fit any more
            kept.keep([LINE] * 7)
            written += 7
        with pytest.raises(CannotKeep, match="No space left"):
            kept.keep([LINE] * 7)
        text = (tmp_path / "base/job/0/1700000000").read_text()
        assert text == LINE * written
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_where_records_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert base_dir("/some/where") == Path("/some/where")
    monkeypatch.setattr(disk, "ASCEND_DIR", tmp_path / "cluster-info" / "profiling")
    assert base_dir("").name == "profiling"
    assert str(os.getuid()) in str(base_dir(""))
    (tmp_path / "cluster-info").mkdir()
    assert base_dir("") == tmp_path / "cluster-info" / "profiling"


@pytest.mark.parametrize("spoil", ["mode", "owner", "link"])
def test_a_folder_in_tmp_that_others_can_write_is_refused(
    spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "ASCEND_DIR", tmp_path / "nowhere" / "profiling")
    monkeypatch.setattr(own_folder, "SHARED", tmp_path)
    base = base_dir("")
    assert shelf(base).keep(["{}\n"]) == 0
    assert base.parent.stat().st_mode & 0o777 == 0o700
    if spoil == "mode":
        base.parent.chmod(0o777)
    elif spoil == "link":
        base.parent.rename(tmp_path / "elsewhere")
        base.parent.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid():
        pytest.skip("needs root")
    else:
        os.chown(base.parent, 65534, 65534)
    with pytest.raises(CannotKeep, match="only you can write"):
        shelf(base).keep(["{}\n"])
