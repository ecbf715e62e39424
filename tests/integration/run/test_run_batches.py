"""`Job.batches` with loader workers: killed ranks change no batch, in no epoch."""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.run.run_job import run

SCRIPT = Path(__file__).with_name("batches_script.py")
ROOT = Path(__file__).parents[3]
RANKS, KILLS = 2, 3


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: loader workers put a socket below it, whose path may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        yield Path(folder)


def weights(folder: Path, loader: str, kills: str = "") -> tuple[int, str]:
    """How many steps there were, and the weights after them."""
    path = f"{ROOT / 'src'}:{ROOT}"
    words = [f"--nproc-per-node={RANKS}", str(SCRIPT), loader]
    ended = run(folder, *words, KILLS=kills, PYTHONPATH=path)
    assert ended.code == 0, ended.err
    faults = len(kills.split(",")) if kills else 0
    assert f"{faults} fault" in ended.err, ended.err
    ends = {match.groups() for match in re.finditer(r"end \d (\d+) (\w+)", ended.out)}
    assert len(ends) == 1, ended.out
    ((steps, digest),) = ends
    return int(steps), digest


def seeded_kills(seed: str, steps: int) -> str:
    chosen = random.Random(seed)
    lost: Counter[int] = Counter()
    kills = []
    for step in sorted(chosen.sample(range(1, steps), KILLS)):
        rank, moment = chosen.randrange(RANKS), chosen.choice(["before", "forward", "backward"])
        kills.append(f"{rank}.{lost[rank]}.{step}.{moment}")
        lost[rank] += 1
    return ",".join(kills)


@pytest.mark.parametrize("loader", ["distributed", "stateful stream"])
def test_killed_ranks_change_no_batch(tmp_path: Path, loader: str) -> None:
    steps, undisturbed = weights(tmp_path, loader)
    assert weights(tmp_path, loader, seeded_kills(loader, steps)) == (steps, undisturbed)
