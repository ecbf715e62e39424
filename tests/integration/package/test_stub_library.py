from __future__ import annotations

import ctypes
import mmap
import os
import platform
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

INSIDE = "taskd/python/cython_api/libs/libtaskd.so"
STUB = runpy.run_path(str(ROOT / "tools" / "stub_library.py"))

needs_machine = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in STUB["MACHINES"],
    reason="the library exists for Linux on x86_64 and aarch64 only",
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libtaskd.so"
    STUB["write"](path, platform.machine())
    return path


@needs_machine
@pytest.mark.parametrize("bind_now", ["", "1"])
def test_preloading_the_library_changes_nothing(library: Path, bind_now: str) -> None:
    code = (
        "import ctypes, hashlib, ssl\n"
        "print(open('/proc/self/maps').read().count('libtaskd.so') > 0)\n"
        "print([line for line in open('/proc/self/maps') if '[stack]' in line][0].split()[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library), "LD_BIND_NOW": bind_now},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True", "rw-p"]


@needs_machine
def test_library_loads_and_exports_no_symbol(library: Path) -> None:
    loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    assert not hasattr(loaded, "InitWorker")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "Advanced Micro Devices X86-64"), ("aarch64", "AArch64")]
)
def test_library_is_well_formed_for_both_machines(tmp_path: Path, machine: str, name: str) -> None:
    path = tmp_path / "libtaskd.so"
    command = [sys.executable, str(ROOT / "tools" / "stub_library.py"), str(path), machine]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run(
        ["readelf", "--all", "--wide", path],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert name in done.stdout
    assert "Library soname: [libtaskd.so]" in done.stdout


def test_unknown_machine_is_rejected_by_name(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "stub_library.py"),
        str(tmp_path / "x"),
        "riscv64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "riscv64" in done.stderr
    assert not (tmp_path / "x").exists()


@needs_machine
def test_a_second_install_leaves_mapped_pages_alone(library: Path) -> None:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = bytes(mapped)
        STUB["write"](library, "aarch64" if platform.machine() == "x86_64" else "x86_64")
        assert bytes(mapped) == before
        assert library.read_bytes() != before
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy to build in: the build writes next to the sources."""
    copy = tmp_path / "sources"
    copy.mkdir()
    ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    (copy / "tools").mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "tools/stub_library.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@needs_machine
def test_local_wheel_has_the_tag_and_library_of_this_machine(sources: Path, tmp_path: Path) -> None:
    pip(["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(sources)])
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(INSIDE) == STUB["library"](platform.machine())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_published_wheel_has_the_tag_and_library_of_the_named_machine(
    machine: str, sources: Path, tmp_path: Path
) -> None:
    tag = f"manylinux2014_{machine}"
    option = f"--config-setting=--build-option=--plat-name={tag}"
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", option]
    subprocess.run([*command, "--outdir", str(tmp_path), str(sources)], check=True, timeout=150)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(INSIDE) == STUB["library"](machine)


@needs_machine
def test_editable_install_has_the_library_in_src_and_in_site_packages(
    sources: Path, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    options = ["--no-deps", "--no-build-isolation", "--target", str(target)]
    pip(["install", *options, "--editable", str(sources)])
    for folder in (sources / "src", target):
        assert (folder / INSIDE).read_bytes() == STUB["library"](platform.machine())
    code = "import sys, site; site.addsitedir(sys.argv[1]); import taskd; print(taskd.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(sources / "src/taskd/__init__.py")


def pip(arguments: list[str]) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]],
        check=True,
        timeout=150,
    )
