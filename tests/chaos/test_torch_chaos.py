"""200 steps, at least 20 faults of every same-world kind at random moments; not a bit is different.

TASKD_CHAOS_SEED repeats a run; the seed is printed.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.integration import torch_scripts as scripts
from tests.integration.torch_runs import assert_same, ends, run
from tests.integration.torch_world import Script

STEPS, RANKS, FAULTS = 200, 4, 24
MOMENTS = (
    "between steps",
    "in forward",
    "in backward",
    "after backward",
    "in the optimizer",
    "after the optimizer",
)
Fault = tuple[int, int, int, str]


def faults(seed: int, groups: tuple[tuple[int, ...], ...]) -> tuple[list[Fault], list[Fault]]:
    """Kills and cuts. Of each group of ranks that hold the same, one is always left alive."""
    dice = random.Random(seed)
    kills, cuts, lives = list[Fault](), list[Fault](), [0] * RANKS
    # Not closer than that: two losses in a row could take both holders of a shard.
    for step in sorted(dice.sample(range(1, STEPS - 1, 4), FAULTS)):
        kind = dice.choice(["kill", "kill", "cut", "two"])
        if kind == "cut":
            rank = dice.randrange(RANKS)
            cuts.append((rank, lives[rank], step, dice.choice(MOMENTS[1:4])))
            continue
        spared = {dice.choice(group) for group in groups}
        victims = [rank for rank in range(RANKS) if rank not in spared]
        for rank in dice.sample(victims, min(len(victims), 2 if kind == "two" else 1)):
            kills.append((rank, lives[rank], step, dice.choice(MOMENTS)))
            lives[rank] += 1
    return kills, cuts


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "groups"),
    [
        pytest.param(scripts.ddp, ((0, 1, 2, 3),), id="DDP"),
        pytest.param(scripts.hsdp, ((0, 2), (1, 3)), id="HSDP"),
        pytest.param(scripts.fsdp, ((0, 1, 2, 3),), id="FSDP2"),
    ],
)
def test_not_a_bit_is_different(
    script: Script, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    seed = int(os.environ.get("TASKD_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"TASKD_CHAOS_SEED={seed}\n")
    kills, cuts = faults(seed, groups)
    calm = ends(run(tmp_path / "calm", script, run_s=500.0, steps=STEPS))
    world = run(tmp_path / "chaos", script, run_s=500.0, steps=STEPS, kills=kills, cuts=cuts)
    sys.stdout.write(f"{len(kills)} deaths, {len(cuts)} cuts, {world.incident} incidents\n")
    for rank, end in enumerate(ends(world)):
        assert end["done"] == list(range(STEPS)), f"rank {rank} has lost a step, or done one twice"
    assert_same(calm, world)
