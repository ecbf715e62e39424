"""Libraries that a killed compiler has left behind."""

from __future__ import annotations

import _ctypes
import getpass
import os
import shutil
import tempfile
from pathlib import Path

import pytest

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
