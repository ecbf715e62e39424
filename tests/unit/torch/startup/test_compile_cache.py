"""Libraries that a killed compiler has left behind."""

from __future__ import annotations

import _ctypes
import getpass
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from taskd.runtime.files import private_files as files
from taskd.torch.startup import compile_cache


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "6e"
    folder.mkdir()
    return Path(shutil.copy(_ctypes.__file__, folder / "code.main.so"))


@pytest.mark.parametrize("left", [0, 40, 100, 5000])
def test_half_written_library_is_removed(tmp_path: Path, library: Path, left: int) -> None:
    half = library.with_name("half.main.so")
    half.write_bytes(library.read_bytes()[:left])
    assert compile_cache.remove_incomplete(tmp_path, since=0.0) == [half]
    assert library.exists()
    assert not half.exists()


def test_library_that_is_being_written_is_left_alone(tmp_path: Path, library: Path) -> None:
    half = library.with_name("half.main.so")
    with half.open("wb") as file:
        file.write(b"\x7fELF")
        file.flush()
        assert compile_cache.remove_incomplete(tmp_path, since=0.0) == []
    assert compile_cache.remove_incomplete(tmp_path, since=0.0) == [half]


def test_old_libraries_are_not_read(tmp_path: Path, library: Path) -> None:
    library.write_bytes(b"")
    assert compile_cache.remove_incomplete(tmp_path, since=library.stat().st_mtime + 1) == []


def test_user_without_a_name_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    directory = tmp_path / f"torchinductor_uid_{os.getuid()}" / "6e"
    directory.mkdir(parents=True)
    (directory / "half.main.so").touch()
    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compile_cache.prepare(is_replacement=False)
    assert not list(directory.iterdir())


def test_links_in_the_cache_are_not_followed(tmp_path: Path) -> None:
    """Another user could have put them there: files elsewhere would be removed."""
    elsewhere, cache = tmp_path / "elsewhere", tmp_path / "cache"
    for folder in (elsewhere, cache):
        folder.mkdir()
    (elsewhere / "libc.so").write_text("GROUP ( libc.so.6 )")
    (cache / "6e").symlink_to(elsewhere)
    assert compile_cache.remove_incomplete(cache, since=0.0) == []
    assert (elsewhere / "libc.so").exists()


@pytest.mark.parametrize("kind", ["link", "open to all", "of another user"])
def test_cache_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(files, "SHARED", tmp_path)
    monkeypatch.delenv(compile_cache.DIRECTORY, raising=False)
    usual = tmp_path / f"torchinductor_{getpass.getuser()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        usual.symlink_to(tmp_path / "elsewhere")
    else:
        usual.mkdir()
        usual.chmod(0o777 if kind == "open to all" else 0o755)
    if kind == "of another user":
        if os.getuid():
            pytest.skip("only root can give files away")
        os.chown(usual, 12345, 12345)
    compile_cache.prepare(is_replacement=False)
    private = tmp_path / f"taskd-{os.getuid()}"
    assert os.environ[compile_cache.DIRECTORY] == str(private / "torchinductor")
    assert private.stat().st_mode & 0o077 == 0
    assert "could run in this job" in caplog.text
    monkeypatch.delenv(compile_cache.DIRECTORY)


def test_own_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv(compile_cache.DIRECTORY, raising=False)
    compile_cache.prepare(is_replacement=False)
    (tmp_path / f"torchinductor_{getpass.getuser()}").mkdir()
    compile_cache.prepare(is_replacement=False)
    assert compile_cache.DIRECTORY not in os.environ
