"""A throw-away virtual environment with a torch that may be edited and TaskD from its own wheel.

Torch's files are hard links to the ones in use here, so nothing is downloaded; `sed -i` replaces
the link of the one file that it edits.
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
    """The environment's bin directory."""
    home = folder / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    for source in (SITE / "torch", *SITE.glob("torch-*.dist-info")):
        shutil.copytree(source, site / source.name, copy_function=os.link, symlinks=True)
    for old in ("setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"):
        found = site / old  # what comes with the environment is too old to build us
        shutil.rmtree(found) if found.is_dir() else found.unlink(missing_ok=True)
    # The rest is used from where it is; editable installations there are not seen from here.
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
    """In a network of its own, so that the documented ports are free; needs to be allowed to."""
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
