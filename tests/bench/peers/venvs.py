"""A virtual environment for each peer under .venvs/, made when it is first needed.

All of them get the torch that the project itself is developed with (constraints.txt): the peers are
compared on one torch, and no peer's requirements can pull another one. The bench makes them before
it measures; `python -m tests.bench.peers.venvs` does nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.peers.trial import ROOT, TrialError

SETUP_LIMIT_S = 600.0
SAID_CHARS = 1000
_problems: dict[str, TrialError] = {}
"""Who could not be installed; it is not tried again."""
WANTED = {
    "torchft": ("torchft-nightly==2026.10.26",),
    "nvrx": ("nvidia-resiliency-ext==0.4.1",),
    "dlrover": ("dlrover[torch,k8s]==0.6.1", "protobuf"),
}


def peer_bin(name: str) -> Path:
    """The folder with the peer's python and commands; installs the peer if it is not there."""
    if name in _problems:
        raise _problems[name]
    home = ROOT / ".venvs" / f"peer-{name}"
    ready = home / ".ready"
    wanted = "\n".join(WANTED[name])
    if not ready.exists() or ready.read_text() != wanted:
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin/pip"), "--disable-pip-version-check", "--quiet", "install"]
        _run([*pip, _own_torch(), "numpy", *WANTED[name]])
        ready.write_text(wanted)
    return home / "bin"


def _own_torch() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def prepare() -> None:
    """All of them, as far as they can be installed here. Who cannot says so in its trial."""
    for name in WANTED:
        try:
            peer_bin(name)
        except TrialError as error:
            print(f"{name} {error}", flush=True)
            _problems[name] = error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SETUP_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise TrialError(f"cannot be installed here; {error.stderr[-SAID_CHARS:]}") from error
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"not installed within {SETUP_LIMIT_S:.0f} s") from error


if __name__ == "__main__":
    for each in WANTED:
        print(peer_bin(each))
