"""torch.compile: a replacement takes the compiled code of the others, and the weights are the same.

One cold compilation, in a cache of this test's own; everything after it reads from there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.run.run_job import Ended, Job

SCRIPT = Path(__file__).with_name("compiled_script.py")
KILLS = "1.0.5,0.0.8"
DEADLINE_S = 300.0
"""A cold compilation takes a quarter of a minute of two idle cores."""


def compiled(folder: Path, kills: str) -> Ended:
    cache = str(folder / "cache")
    words = ["--nproc-per-node=2", str(SCRIPT)]
    ended = Job(folder, *words, KILLS=kills, TORCHINDUCTOR_CACHE_DIR=cache).end(DEADLINE_S)
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.timeout(700)
def test_replacement_compiles_nothing(tmp_path: Path) -> None:
    killed = compiled(tmp_path, KILLS)
    assert "2 faults" in killed.err, killed.err
    first = re.findall(r"first (\d) (\d) hits (\d+) misses (\d+)", killed.out)
    replacements = [(int(hits), int(misses)) for _, at, hits, misses in first if at != "0"]
    assert replacements == [(2, 0)] * 2, killed.out
    half = max((tmp_path / "cache").glob("??/*.so"), key=lambda path: path.stat().st_mtime)
    half.write_bytes(half.read_bytes()[:100])  # as a killed compiler leaves it
    undisturbed = compiled(tmp_path, "")
    assert "removed=1" in undisturbed.err, undisturbed.err
    ends = set(re.findall(r"end (\w+)", killed.out + undisturbed.out))
    assert len(ends) == 1, "equal weights"
