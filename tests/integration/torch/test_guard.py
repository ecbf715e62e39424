"""Silent data corruption: a flipped bit is found before it reaches other ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from taskd.core.worker.state_vote import Verdict
from taskd.torch.replicas.guard import Guard
from tests.integration.run.run_job import Ended, script
from tests.integration.run.run_job import run as job_run
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import ddp, hsdp
from tests.integration.torch.world import World

STEPS = 8
GUARDED = {"guard_every": 1}
VERDICT_DELAY_S = 2.0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", ddp, steps=STEPS))


def no_rank_died(world: World) -> bool:
    return set(world.incarnations.values()) == {0}


@pytest.mark.parametrize(
    "flip",
    [
        (2, 0, 3, "a weight"),
        (0, 0, 3, "momentum"),
        (1, 0, 3, "a weight, updated"),
        (3, 0, STEPS - 1, "a weight, updated"),  # after the last gate
    ],
    ids=str,
)
def test_flipped_bit_is_repaired_from_a_peer(
    flip: tuple[int, int, int, str], calm: list[Any], tmp_path: Path
) -> None:
    world = run(tmp_path / "run", ddp, steps=STEPS, protect=GUARDED, flips=[flip])
    assert_same(calm, world)
    assert no_rank_died(world)
    named = [line for line in world.history if "FaultCause.CORRUPT" in line]
    assert len(named) == 1
    assert f"the state of rank {flip[0]} differs" in named[0]


def test_flipped_bit_spreads_without_the_guard(calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", ddp, steps=STEPS, flips=[(2, 0, 3, "a weight")])
    with pytest.raises(AssertionError, match="of rank"):
        assert_same(calm, world)


def test_rare_comparison_still_makes_all_ranks_equal(tmp_path: Path) -> None:
    flips = [(2, 0, 2, "a weight")]
    world = run(tmp_path / "run", ddp, steps=STEPS, protect={"guard_every": 4}, flips=flips)
    first, *others = ends(world)
    for other in others:
        assert_models_equal(first, other)
    assert any("at step 4 the state of rank 2 differs" in line for line in world.history)


def assert_models_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["model"].items():
        assert value.equal(other["model"][name]), name


def test_rank_that_raises_corrupt_is_repaired(calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", ddp, steps=STEPS, declares=[(1, 0, 4)])
    assert_same(calm, world)
    assert no_rank_died(world)
    assert any("the memory controller says so" in line for line in world.history)


def test_flipped_bit_and_lost_rank_in_the_same_step(calm: list[Any], tmp_path: Path) -> None:
    flips, kills = [(2, 0, 3, "a weight")], [(0, 0, 3, "after backward")]
    world = run(tmp_path / "run", ddp, steps=STEPS, protect=GUARDED, flips=flips, kills=kills)
    assert_same(calm, world)


def test_two_replicas_without_majority_return_to_the_last_agreed_step(tmp_path: Path) -> None:
    """It is not known which of the two is right; the copies of the last comparison are."""
    calm = ends(run(tmp_path / "calm", hsdp, steps=STEPS))
    options = {"guard_every": 1, "snapshot_every": 1}
    world = run(tmp_path / "run", hsdp, steps=STEPS, protect=options, flips=[(0, 0, 3, "a weight")])
    assert_same(calm, world)
    assert no_rank_died(world)
    named = [line for line in world.history if "FaultCause.CORRUPT" in line]
    assert "the states of ranks 0, 2 differ, and none has a majority" in named[0]
    assert any("resume=2" in line for line in world.history)


def late_verdict(args: dict[str, Any]) -> None:
    """Rank 0 gets the verdict after the others, or not at all if they end the step first. Rank 1
    dies when it gets it, if the test wants it."""
    compare = Guard.compare

    def compare_late(self: Guard, step: int) -> Verdict | None:
        verdict = compare(self, step)
        if verdict is None or not verdict.named:
            return verdict
        deadline = monotonic() + VERDICT_DELAY_S
        while monotonic() < deadline and not self._groups.is_broken():
            os.sched_yield()
        return None if self._groups.is_broken() else verdict

    def compare_and_die(self: Guard, step: int) -> Verdict | None:
        verdict = compare(self, step)
        if verdict is not None and verdict.named:
            os.kill(os.getpid(), signal.SIGKILL)
        return verdict

    if args["rank"] == 0:
        setattr(Guard, "compare", compare_late)  # noqa: B010
    if args["rank"] == 1 and args["incarnation"] == 0 and args.get("dies"):
        setattr(Guard, "compare", compare_and_die)  # noqa: B010
    hsdp(args)


@pytest.mark.parametrize("dies", [False, True], ids=["", "a third rank dies"])
def test_rank_without_the_verdict_is_not_trusted_either(dies: bool, tmp_path: Path) -> None:
    calm = ends(run(tmp_path / "calm", hsdp, steps=STEPS))
    args: dict[str, Any] = {
        "protect": GUARDED | {"snapshot_every": 1},
        "flips": [(0, 0, 3, "a weight")],
    }
    world = run(tmp_path / "run", late_verdict, steps=STEPS, dies=dies, **args)
    assert_same(calm, world)
    assert any("resume=2" in line for line in world.history)


TRAIN = """
    import hashlib, os
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer, guard_every=1)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    flips = {os.environ.get("FLIP")}
    for step in job.steps(12):
        if f"{job.rank}.{attempt}.{step}" in flips:
            flips.clear()
            net[0].weight.data.view(torch.int32)[3, 3] ^= 1 << 20
        with step:
            optimizer.zero_grad()
            model(torch.randn(8, 16) + job.rank).square().mean().backward()
            optimizer.step()
    state = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print("weights", hashlib.sha256(state).hexdigest(), flush=True)
"""


def weights(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.err
    return [line.split("weights ")[1] for line in ended.out.splitlines() if "weights" in line]


def test_flipped_bit_under_taskd_run(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    undisturbed = weights(job_run(tmp_path, "--nproc-per-node=4", path))
    ended = job_run(tmp_path, "--nproc-per-node=4", path, FLIP="2.0.5")
    assert len(undisturbed) == 4
    assert weights(ended) == undisturbed
    assert "incident 1: rank 2 (corrupt) -> retry" in ended.err


def test_two_replicas_that_differ_without_copies_restart(tmp_path: Path) -> None:
    """A checkpoint of either, or continuing with it, could be wrong: the job restarts."""
    path = script(tmp_path, TRAIN)
    undisturbed = weights(job_run(tmp_path, "--nproc-per-node=2", path))
    ended = job_run(tmp_path, "--nproc-per-node=2", path, FLIP="1.0.5")
    assert weights(ended) == undisturbed
    assert " (corrupt)" in ended.err
