"""A virtual environment per peer under .venvs/, made when it is first needed.

All have the torch version that the project is developed with (constraints.txt), so that the peers
are compared on one torch. The benchmark makes them before it measures;
`python -m tests.bench.peers.venvs` only makes them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.bench.peers.trial import TrialError

SETUP_LIMIT_S = 600.0
OUTPUT_CHARS = 1000
_problems: dict[str, TrialError] = {}
"""The peers that could not be installed; the installation is not tried again."""
PACKAGES = {
    "torchft": ("torchft-nightly==2026.10.26",),
    "nvrx": ("nvidia-resiliency-ext==0.4.1",),
    "dlrover": ("dlrover[torch,k8s]==0.6.1", "protobuf"),
}


def peer_bin(name: str) -> Path:
    """Return the folder with the python and commands of the peer; install it if necessary."""
    if name in _problems:
        raise _problems[name]
    home = ROOT / ".venvs" / f"peer-{name}"
    ready = home / ".ready"
    packages = "\n".join(PACKAGES[name])
    if not ready.exists() or ready.read_text() != packages:
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin/pip"), "--disable-pip-version-check", "--quiet", "install"]
        _run([*pip, _own_torch(), "numpy", *PACKAGES[name]])
        ready.write_text(packages)
    return home / "bin"


def _own_torch() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def prepare() -> None:
    """Install all peers. The trial of a peer that cannot be installed fails with the reason."""
    for name in PACKAGES:
        try:
            peer_bin(name)
        except TrialError as error:
            print(f"{name} {error}", flush=True)
            _problems[name] = error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SETUP_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise TrialError(f"cannot be installed; {error.stderr[-OUTPUT_CHARS:]}") from error
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"not installed within {SETUP_LIMIT_S:.0f} s") from error


if __name__ == "__main__":
    for each in PACKAGES:
        print(peer_bin(each))
