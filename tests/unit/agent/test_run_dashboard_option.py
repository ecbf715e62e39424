from __future__ import annotations

import pytest

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
