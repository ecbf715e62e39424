"""Installs what `make dist` has built into a clean environment, and runs a small job with it.

    python tools/check_dist.py FOLDER

The wheel of this machine and the sdist are installed one after the other into an environment that
has only the dependencies of `taskd[torch]`. Each must find `libtaskd.so` where the documented
LD_PRELOAD line looks for it, pass `taskd doctor`, and bring a job of two ranks, one of which is
killed, to its last step.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
JOB = """
import os, signal, torch
import taskd.torch as taskd
from torch.nn.parallel import DistributedDataParallel as DDP

job = taskd.init("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
for step in job.steps(20):
    if (job.rank, step, os.environ["TASKD_INCARNATION"]) == (1, 10, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    with step:
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("rank", job.rank, "finished")
"""
PRELOAD = """
location=$(pip show taskd | awk '/^Location: / {print $2}')
LD_PRELOAD=$location/taskd/python/cython_api/libs/libtaskd.so python -c "import taskd.api"
"""


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="taskd-dist-") as name:
        place = Path(name)
        _run([sys.executable, "-m", "venv", place / "venv"], place)
        for package in (
            _only(folder, f"*-manylinux2014_{platform.machine()}.whl"),
            _only(folder, "*.tar.gz"),
        ):
            _install(package, place)
            _try(package, place)
    return 0


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(
            f"{folder} holds {len(found)} files {pattern}, expected one: run make dist"
        )
    return found[0]


def _install(package: Path, place: Path) -> None:
    pip = [place / "venv/bin/pip", "--disable-pip-version-check", "--quiet"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    _run([*pip, "install", *constraints, f"{package}[torch]", "setuptools"], place)
    # pip takes a package of the same version for installed. This one replaces it, and only it.
    options = ["--force-reinstall", "--no-deps", "--no-build-isolation"]
    _run([*pip, "install", *options, package], place)


def _try(package: Path, place: Path) -> None:
    script = place / "job.py"
    script.write_text(JOB)
    taskd = place / "venv/bin/taskd"
    preloaded = _run(["bash", "-c", PRELOAD], place)
    if preloaded:
        raise SystemExit(f"{package.name}: the LD_PRELOAD line prints {preloaded!r}")
    _run([taskd, "doctor"], place)
    output = _run([taskd, "run", "--nproc-per-node", "2", script], place)
    expected = ("rank 0 finished", "rank 1 finished", "recover-in-place: recovered")
    missing = [text for text in expected if text not in output]
    if missing:
        raise SystemExit(f"{package.name}: the job did not print {missing}:\n{output}")
    print(f"{package.name}: installed; a job of two ranks has survived the loss of one")


def _run(command: list[str | Path], place: Path) -> str:
    """Run in the environment and return what was printed. The sources must not be importable."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["PATH"] = f"{place / 'venv/bin'}:{env['PATH']}"
    env["TASKD_LOG_PATH"] = str(place / "log")
    done = subprocess.run(
        [str(word) for word in command],
        cwd=place,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise SystemExit(f"exit code {done.returncode} from {words}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
