"""A temporary virtual environment with TaskD from its wheel and a torch that may be edited.

Torch's files are hard links to the installed ones, so nothing is downloaded; `sed -i` replaces the
link of the one file that it edits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import torch

from tests import ROOT

SITE = Path(torch.__file__).parents[1]


def make(folder: Path) -> Path:
    """Create the environment; returns its bin directory."""
    home = folder / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    for source in (SITE / "torch", *SITE.glob("torch-*.dist-info")):
        shutil.copytree(source, site / source.name, copy_function=os.link, symlinks=True)
    for old in ("setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"):
        found = site / old  # The bundled versions are too old to build TaskD.
        shutil.rmtree(found) if found.is_dir() else found.unlink(missing_ok=True)
    # Other packages come from the current environment, except its editable installations.
    (site / "others.pth").write_text(f"{SITE}\n")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    pip = [str(home / "bin/pip"), "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--no-build-isolation", str(source)], check=True)
    torchrun = home / "bin/torchrun"
    torchrun.write_text(f"#!{home}/bin/python\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    return home / "bin"


def alone(command: list[str]) -> list[str]:
    """The command in its own network, if permitted, so that the documented ports are free."""
    inside = ["unshare", "--map-root-user", "--net"]
    possible = subprocess.run([*inside, "true"], capture_output=True, check=False)
    if possible.returncode != 0:
        return command
    return [*inside, sys.executable, "-c", _LOOPBACK_UP, *command]


_LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14s", b"lo", 0x41, b""))
os.execvp(sys.argv[1], sys.argv[1:])
"""
