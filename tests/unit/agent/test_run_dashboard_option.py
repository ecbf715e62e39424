from __future__ import annotations

import pytest

from taskd.agent.run import plan
from taskd.agent.run.arguments import normalized

DEFAULT = "--dashboard=127.0.0.1:0"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--dashboard train.py", f"{DEFAULT} train.py"),
        ("--dashboard --nproc-per-node 4 train.py", f"{DEFAULT} --nproc-per-node 4 train.py"),
        (
            "--nproc-per-node 4 --dashboard train.py --x 1",
            f"--nproc-per-node 4 {DEFAULT} train.py --x 1",
        ),
        ("--standalone --dashboard train.py", f"--standalone {DEFAULT} train.py"),
        ("--dashboard -m train", f"{DEFAULT} -m train"),
        ("--dashboard 0.0.0.0:80 train.py", "--dashboard 0.0.0.0:80 train.py"),
        ("--dashboard=0.0.0.0:80 train.py", "--dashboard=0.0.0.0:80 train.py"),
        ("train.py --dashboard", "train.py --dashboard"),
        ("--nproc-per-node=2 train.py --dashboard x", "--nproc-per-node=2 train.py --dashboard x"),
        ("-- train.py --dashboard", "-- train.py --dashboard"),
    ],
)
def test_address_of_the_dashboard_is_optional(given: str, meant: str) -> None:
    assert normalized(given.split()) == meant.split()


@pytest.mark.parametrize(
    ("listen", "problem"),
    [
        ("0.0.0.0:80", "taskd dashboard JOB --listen HOST:PORT --tls-cert"),
        ("80", "must be HOST:PORT"),
        ("localhost:x", "must be HOST:PORT"),
    ],
)
def test_address_that_cannot_be_served_is_refused_before_the_start(
    listen: str, problem: str
) -> None:
    problems: list[str] = []
    plan._dashboard(listen, problems)
    assert problem in problems[0]
    assert plan._dashboard("localhost:8790", []) == "localhost:8790"
