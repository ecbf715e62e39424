"""200 steps with 24 faults of every kind at random moments: the result is identical in every bit.

Ranks are killed, alone and in pairs; links are cut; an exception from `retry_on` is raised; a rank
reports that its state is wrong; a bit is flipped, and the guard has to find it (not under plain
FSDP2, where no shard has a second holder to compare it with). A hang is not included: only the
manager can detect one, and here the test is the manager (see tests/integration/run/test_hang.py).

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

from taskd.model.faults import FaultCause
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
"""For each kind of fault: rank, incarnation, step, and moment in the step."""


def faults(seed: int, groups: tuple[tuple[int, ...], ...], kinds: tuple[str, ...]) -> Faults:
    """Draw the faults. Of each group of ranks that hold the same state, one always survives."""
    dice = random.Random(seed)
    drawn: Faults = {"kills": [], "cuts": [], "raises": [], "declares": [], "flips": []}
    incarnations = [0] * RANKS
    # Not closer: two losses in a row could hit both holders of a shard.
    steps = sorted(dice.sample(range(1, STEPS - 1, 4), FAULTS))
    deck = [kinds[at % len(kinds)] for at in range(FAULTS)]
    dice.shuffle(deck)
    for step, kind in zip(steps, deck, strict=True):
        if kind not in ("kills", "two"):
            rank = dice.randrange(RANKS)
            where = [dice.choice(WHERE[kind])] if kind in WHERE else []
            drawn[kind].append((rank, incarnations[rank], step, *where))
            continue
        spared = {dice.choice(group) for group in groups}
        victims = [rank for rank in range(RANKS) if rank not in spared]
        # Two kills happen before the update: during it, a peer that has committed the step may
        # carry the second rank past its moment.
        count, moments = (1, MOMENTS) if kind == "kills" else (2, MOMENTS[:4])
        for rank in dice.sample(victims, count):
            drawn["kills"].append((rank, incarnations[rank], step, dice.choice(moments)))
            incarnations[rank] += 1
    return drawn


def assert_all_injected(world: World, wanted: Faults) -> None:
    """Every drawn fault was injected, and reported with its kind."""
    lines = (world.folder / "faults").read_text().splitlines()
    injected = sorted(json.loads(line) for line in lines)
    assert injected == sorted([kind, *place] for kind in wanted for place in wanted[kind])
    assert sum(world.incarnations.values()) == len(wanted["kills"])
    assert world.incident >= FAULTS
    reports = [body for body in world.received if isinstance(body, WorkerFailed)]
    raised = {(one.rank, one.evidence) for one in reports if one.kind is FaultCause.EXCEPTION}
    assert raised == {(rank, f"SmallHiccup: in step {at}") for rank, _, at, _ in wanted["raises"]}
    # Of two holders that differ, the first report may keep the other from reporting.
    corrupt = {one.incident for one in reports if one.kind is FaultCause.CORRUPT}
    assert len(corrupt) == len(wanted["declares"]) + len(wanted["flips"])


COPIES = {"snapshot_every": 1}
GUARD = {"guard_every": 1}
"""Two holders that differ have no majority: under HSDP they need copies to return to."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "groups", "protect", "taken_back"),
    [
        pytest.param(scripts.ddp, ((0, 1, 2, 3),), GUARD, 0, id="DDP"),
        pytest.param(scripts.hsdp, ((0, 2), (1, 3)), GUARD | COPIES, 1, id="HSDP"),
        pytest.param(scripts.fsdp, ((0, 1, 2, 3),), COPIES, 1, id="FSDP2"),
    ],
)
def test_result_is_identical_in_every_bit(
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
    options = {**protect, "retry_on": (scripts.Hiccup,)}
    world = run(tmp_path / "chaos", script, run_s=500.0, steps=STEPS, protect=options, **drawn)
    counted = ", ".join(f"{len(places)} {kind}" for kind, places in drawn.items())
    sys.stdout.write(f"{counted}: {world.incident} incidents\n")
    assert_all_injected(world, drawn)
    commits.check(world, STEPS, taken_back)
    for rank, end in enumerate(ends(world)):
        assert end["done"] == list(range(STEPS)), f"rank {rank} has lost a step or done one twice"
    assert_same(calm, world)
