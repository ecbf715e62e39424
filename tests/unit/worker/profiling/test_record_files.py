"""The profiling files: layout, rotation, the node's limit, and unusable directories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from taskd.runtime.files import private_files as runtime_files
from taskd.worker.profiling import record_files
from taskd.worker.profiling.record_files import CannotWrite, RecordFiles, base_dir

MB = 1024 * 1024
LINE = "x" * 1023 + "\n"


def total(base: Path) -> int:
    return sum(path.stat().st_size for path in base.rglob("*") if path.is_file())


def files(
    base: Path, rank: int = 0, limit_mb: int = 100, now: float = 1_700_000_000.0
) -> RecordFiles:
    return RecordFiles(base, "job", rank, limit_mb, lambda: now)


def test_layout_and_modes(tmp_path: Path) -> None:
    base = tmp_path / "a" / "profiling"
    assert files(base, rank=3).append(["{}\n", "{}\n"]) == 0
    file = base / "job" / "3" / "1700000000"
    assert file.read_text() == "{}\n{}\n"
    assert file.stat().st_mode & 0o777 == 0o644
    assert file.parent.stat().st_mode & 0o777 == 0o755


def test_later_incarnation_appends_to_the_newest_file(tmp_path: Path) -> None:
    files(tmp_path).append(["a\n"])
    files(tmp_path, now=1_800_000_000.0).append(["b\n"])
    assert (tmp_path / "job/0/1700000000").read_text() == "a\nb\n"


def test_file_is_closed_at_ten_mebibytes(tmp_path: Path) -> None:
    writer = files(tmp_path)
    for _ in range(3):
        writer.append([LINE] * 7_000)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "job/0").iterdir())
    assert len(sizes) == 3
    assert sizes[1:] == [10 * MB, 10 * MB]
    assert sum(sizes) == 21_000 * 1024


@pytest.mark.parametrize("limit_mb", [1, 3, 9, 25])
def test_limit_holds_for_all_ranks_together(tmp_path: Path, limit_mb: int) -> None:
    ranks = [files(tmp_path, rank, limit_mb) for rank in range(4)]
    for round_ in range(12):
        for rank, writer in enumerate(ranks):
            writer.append([f"{round_} {rank} {LINE}"] * (limit_mb * 60))
            assert total(tmp_path) <= limit_mb * MB
    assert total(tmp_path) > limit_mb * MB * 0.6, "making room must not remove most files"
    newest = max((tmp_path / "job/3").iterdir(), key=lambda path: int(path.name))
    assert newest.read_text().splitlines()[-1].startswith("11 3 ")


def test_oldest_lines_are_left_out_when_one_batch_exceeds_the_limit(tmp_path: Path) -> None:
    left_out = files(tmp_path, limit_mb=1).append([f"{n:06d}{LINE}" for n in range(2_000)])
    assert left_out > 0
    assert total(tmp_path) <= MB
    lines = "".join(
        path.read_text() for path in sorted((tmp_path / "job/0").iterdir(), key=lambda p: p.name)
    ).splitlines()
    assert lines[-1].startswith("001999")
    assert len(lines) == 2_000 - left_out


def test_process_group_file_is_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "0"
    folder.mkdir(parents=True)
    (folder / record_files.NEVER_REMOVED).write_text("{}")
    os.utime(folder / record_files.NEVER_REMOVED, (0, 0))
    writer = files(tmp_path, limit_mb=1)
    for _ in range(4):
        writer.append([LINE] * 800)
    assert (folder / record_files.NEVER_REMOVED).read_text() == "{}"


def test_old_jobs_make_room_for_new_ones(tmp_path: Path) -> None:
    RecordFiles(tmp_path, "old", 0, 2, lambda: 1.0).append([LINE] * 1_500)
    RecordFiles(tmp_path, "new", 0, 2, lambda: 2.0).append([LINE] * 1_500)
    assert total(tmp_path / "new") == 1_500 * 1024
    assert total(tmp_path) <= 2 * MB


@pytest.mark.parametrize("where", ["", "job", "job/0", "job/0/1700000000"])
def test_symbolic_links_are_refused(tmp_path: Path, where: str) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    target = base / where
    target.parent.mkdir(parents=True, exist_ok=True)
    if where.endswith("1700000000"):
        elsewhere.write_text("precious")
    else:
        elsewhere.mkdir()
    target.symlink_to(elsewhere)
    with pytest.raises(CannotWrite, match="symbolic link"):
        files(base).append(["{}\n"])
    if elsewhere.is_dir():
        assert not list(elsewhere.iterdir())
    else:
        assert elsewhere.read_text() == "precious"


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("")
    with pytest.raises(CannotWrite, match=r"job.*directory"):
        files(tmp_path).append(["{}\n"])


def test_limit_of_zero_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="0 MB"):
        files(tmp_path, limit_mb=0).append(["{}\n"])


def test_too_long_path_is_refused(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 200] * 6)
    with pytest.raises(CannotWrite, match="1024"):
        files(deep).append(["{}\n"])


def test_full_disk_leaves_whole_lines_and_is_reported(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root to mount a file system")
    try:
        writer = files(tmp_path / "base")
        written = 0
        while written < 63:  # the next seven do not fit
            writer.append([LINE] * 7)
            written += 7
        with pytest.raises(CannotWrite, match="No space left"):
            writer.append([LINE] * 7)
        text = (tmp_path / "base/job/0/1700000000").read_text()
        assert text == LINE * written
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_base_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert base_dir("/some/where") == Path("/some/where")
    monkeypatch.setattr(record_files, "ASCEND_DIR", tmp_path / "cluster-info" / "profiling")
    assert base_dir("").name == "profiling"
    assert str(os.getuid()) in str(base_dir(""))
    (tmp_path / "cluster-info").mkdir()
    assert base_dir("") == tmp_path / "cluster-info" / "profiling"


@pytest.mark.parametrize("defect", ["mode", "owner", "link"])
def test_folder_in_tmp_that_others_can_write_is_refused(
    defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "ASCEND_DIR", tmp_path / "nowhere" / "profiling")
    monkeypatch.setattr(runtime_files, "SHARED", tmp_path)
    base = base_dir("")
    assert files(base).append(["{}\n"]) == 0
    assert base.parent.stat().st_mode & 0o777 == 0o700
    if defect == "mode":
        base.parent.chmod(0o777)
    elif defect == "link":
        base.parent.rename(tmp_path / "elsewhere")
        base.parent.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid():
        pytest.skip("needs root")
    else:
        os.chown(base.parent, 65534, 65534)
    with pytest.raises(CannotWrite, match="only you can write"):
        files(base).append(["{}\n"])
