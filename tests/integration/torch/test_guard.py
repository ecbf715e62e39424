"""Silent corruption: a flipped bit is found before it reaches anybody, and leaves no trace."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from taskd.core.worker.state_vote import Verdict
from taskd.torch.guard import Guard
from tests.integration.run.run_job import Ended, script
from tests.integration.run.run_job import run as job_run
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import ddp, hsdp
from tests.integration.torch.world import World

STEPS = 8
GUARDED = {"guard_every": 1}
HEARS_AFTER_S = 2.0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", ddp, steps=STEPS))


def nobody_died(world: World) -> bool:
    return set(world.lives.values()) == {0}


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
def test_a_flipped_bit_is_repaired_from_a_peer(
    flip: tuple[int, int, int, str], calm: list[Any], tmp_path: Path
) -> None:
    world = run(tmp_path / "run", ddp, steps=STEPS, protect=GUARDED, flips=[flip])
    assert_same(calm, world)
    assert nobody_died(world)
    named = [line for line in world.story if "kind='corrupt'" in line]
    assert len(named) == 1
    assert f"the state of rank {flip[0]} differs" in named[0]


def test_without_the_guard_it_spreads(calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", ddp, steps=STEPS, flips=[(2, 0, 3, "a weight")])
    with pytest.raises(AssertionError, match="of rank"):
        assert_same(calm, world)


def test_a_guard_that_looks_rarely_still_makes_all_the_same(tmp_path: Path) -> None:
    flips = [(2, 0, 2, "a weight")]
    world = run(tmp_path / "run", ddp, steps=STEPS, protect={"guard_every": 4}, flips=flips)
    first, *others = ends(world)
    for other in others:
        assert_models_equal(first, other)
    assert any("at step 4 the state of rank 2 differs" in line for line in world.story)


def assert_models_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["model"].items():
        assert value.equal(other["model"][name]), name


def test_a_rank_that_says_so_itself_is_repaired(calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", ddp, steps=STEPS, declares=[(1, 0, 4)])
    assert_same(calm, world)
    assert nobody_died(world)
    assert any("the memory controller says so" in line for line in world.story)


def test_a_fault_in_the_same_step(calm: list[Any], tmp_path: Path) -> None:
    flips, kills = [(2, 0, 3, "a weight")], [(0, 0, 3, "after backward")]
    world = run(tmp_path / "run", ddp, steps=STEPS, protect=GUARDED, flips=flips, kills=kills)
    assert_same(calm, world)


def test_two_replicas_go_back_to_where_they_agreed(tmp_path: Path) -> None:
    """Nobody knows which of the two is right; the copies of the last comparison are."""
    calm = ends(run(tmp_path / "calm", hsdp, steps=STEPS))
    told = {"guard_every": 1, "snapshot_every": 1}
    world = run(tmp_path / "run", hsdp, steps=STEPS, protect=told, flips=[(0, 0, 3, "a weight")])
    assert_same(calm, world)
    assert nobody_died(world)
    named = [line for line in world.story if "kind='corrupt'" in line]
    assert "the states of ranks 0, 2 differ, and none has a majority" in named[0]
    assert any("resume=2" in line for line in world.story)


def slow_of_hearing(told: dict[str, Any]) -> None:
    """Rank 0 hears of a difference after the others; if they end the step first, not at all. Rank 1
    may die of it."""
    hears = Guard.compare

    def hears_late(self: Guard, step: int) -> Verdict | None:
        verdict = hears(self, step)
        if verdict is None or not verdict.named:
            return verdict
        deadline = monotonic() + HEARS_AFTER_S
        while monotonic() < deadline and not self._groups.trouble():
            os.sched_yield()
        return None if self._groups.trouble() else verdict

    def hears_and_dies(self: Guard, step: int) -> Verdict | None:
        verdict = hears(self, step)
        if verdict is not None and verdict.named:
            os.kill(os.getpid(), signal.SIGKILL)
        return verdict

    if told["rank"] == 0:
        setattr(Guard, "compare", hears_late)  # noqa: B010
    if told["rank"] == 1 and told["life"] == 0 and told.get("dies"):
        setattr(Guard, "compare", hears_and_dies)  # noqa: B010
    hsdp(told)


@pytest.mark.parametrize("dies", [False, True], ids=["", "a third one dies"])
def test_of_two_that_differ_none_is_believed_because_it_has_heard_nothing(
    dies: bool, tmp_path: Path
) -> None:
    calm = ends(run(tmp_path / "calm", hsdp, steps=STEPS))
    told: dict[str, Any] = {
        "protect": GUARDED | {"snapshot_every": 1},
        "flips": [(0, 0, 3, "a weight")],
    }
    world = run(tmp_path / "run", slow_of_hearing, steps=STEPS, dies=dies, **told)
    assert_same(calm, world)
    assert any("resume=2" in line for line in world.story)


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


def test_a_flipped_bit_under_taskd_run(tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    undisturbed = weights(job_run(tmp_path, "--nproc-per-node=4", path))
    ended = job_run(tmp_path, "--nproc-per-node=4", path, FLIP="2.0.5")
    assert len(undisturbed) == 4
    assert weights(ended) == undisturbed
    assert "incident 1: rank 2 (corrupt) -> retry" in ended.err


def test_two_that_differ_and_have_no_copies_begin_again(tmp_path: Path) -> None:
    """Writing a checkpoint of either, or going on with it, could be wrong: the job is restarted."""
    path = script(tmp_path, TRAIN)
    undisturbed = weights(job_run(tmp_path, "--nproc-per-node=2", path))
    ended = job_run(tmp_path, "--nproc-per-node=2", path, FLIP="1.0.5")
    assert weights(ended) == undisturbed
    assert " (corrupt)" in ended.err
