"""200 steps, at least 20 faults of every same-world kind at random moments; not a bit is different.

Ranks are killed, alone and in pairs; links are cut; an exception that the script has listed is
raised; a rank says that its state is wrong; a bit is flipped, and the guard has to find it (not
under plain FSDP2, where no shard has a second holder to be compared with). A hang is not among
them: only the manager can tell one, and here the test is the manager (see test_run_hang.py).

TASKD_CHAOS_SEED repeats a run; the seed is printed.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from taskd.model.messages import WorkerFailed
from tests.chaos import commits
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.world import Script, World

STEPS, RANKS, FAULTS = 200, 4, 24
MOMENTS = (
    "between steps",
    "in forward",
    "in backward",
    "after backward",
    "in the optimizer",
    "after the optimizer",
)
KINDS = ("kills", "kills", "kills", "two", "cuts", "raises", "declares", "flips")
WHERE = {"cuts": MOMENTS[1:4], "raises": ("in forward", "after backward"), "flips": ("a weight",)}
Faults = dict[str, Any]
"""For each kind of fault: rank, life, step, and where in the step."""


def faults(seed: int, groups: tuple[tuple[int, ...], ...], kinds: tuple[str, ...]) -> Faults:
    """What strikes whom, when. Of each group of ranks that hold the same, one is always left."""
    dice = random.Random(seed)
    drawn: Faults = {"kills": [], "cuts": [], "raises": [], "declares": [], "flips": []}
    lives = [0] * RANKS
    # Not closer than that: two losses in a row could take both holders of a shard.
    steps = sorted(dice.sample(range(1, STEPS - 1, 4), FAULTS))
    deck = [kinds[at % len(kinds)] for at in range(FAULTS)]
    dice.shuffle(deck)
    for step, kind in zip(steps, deck, strict=True):
        if kind not in ("kills", "two"):
            rank = dice.randrange(RANKS)
            where = [dice.choice(WHERE[kind])] if kind in WHERE else []
            drawn[kind].append((rank, lives[rank], step, *where))
            continue
        spared = {dice.choice(group) for group in groups}
        victims = [rank for rank in range(RANKS) if rank not in spared]
        # Two strike before the update: at it, a peer that has committed the step may carry the
        # second one past its moment.
        count, moments = (1, MOMENTS) if kind == "kills" else (2, MOMENTS[:4])
        for rank in dice.sample(victims, count):
            drawn["kills"].append((rank, lives[rank], step, dice.choice(moments)))
            lives[rank] += 1
    return drawn


def assert_all_struck(world: World, wanted: Faults) -> None:
    """Every fault that was drawn came true, and was noticed for what it was."""
    lines = (world.folder / "faults").read_text().splitlines()
    struck = sorted(json.loads(line) for line in lines)
    assert struck == sorted([kind, *place] for kind in wanted for place in wanted[kind])
    assert sum(world.lives.values()) == len(wanted["kills"])
    assert world.incident >= FAULTS
    told = [body for body in world.heard if isinstance(body, WorkerFailed)]
    raised = {(one.rank, one.evidence) for one in told if one.kind == "exception"}
    assert raised == {(rank, f"SmallHiccup: in step {at}") for rank, _, at, _ in wanted["raises"]}
    # Of two holders that differ, the one that says so first may keep the other from saying it, too.
    corrupt = {one.incident for one in told if one.kind == "corrupt"}
    assert len(corrupt) == len(wanted["declares"]) + len(wanted["flips"])


COPIES = {"snapshot_every": 1}
GUARD = {"guard_every": 1}
"""Two holders that differ have no majority: under HSDP they need copies to go back to."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "groups", "protect", "taken_back"),
    [
        pytest.param(scripts.ddp, ((0, 1, 2, 3),), GUARD, 0, id="DDP"),
        pytest.param(scripts.hsdp, ((0, 2), (1, 3)), GUARD | COPIES, 1, id="HSDP"),
        pytest.param(scripts.fsdp, ((0, 1, 2, 3),), COPIES, 1, id="FSDP2"),
    ],
)
def test_not_a_bit_is_different(
    script: Script,
    groups: tuple[tuple[int, ...], ...],
    protect: dict[str, int],
    taken_back: int,
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("TASKD_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    sys.stdout.write(f"TASKD_CHAOS_SEED={seed}\n")
    drawn = faults(seed, groups, KINDS if "guard_every" in protect else KINDS[:-1])
    calm = ends(run(tmp_path / "calm", script, run_s=500.0, steps=STEPS))
    told = {**protect, "retry_on": (scripts.Hiccup,)}
    world = run(tmp_path / "chaos", script, run_s=500.0, steps=STEPS, protect=told, **drawn)
    counted = ", ".join(f"{len(places)} {kind}" for kind, places in drawn.items())
    sys.stdout.write(f"{counted}: {world.incident} incidents\n")
    assert_all_struck(world, drawn)
    commits.check(world, STEPS, taken_back)
    for rank, end in enumerate(ends(world)):
        assert end["done"] == list(range(STEPS)), f"rank {rank} has lost a step, or done one twice"
    assert_same(calm, world)
