"""A script with its own checkpoints says where it starts; the job resumes from the latest step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.errors import SettingsError
from tests.integration.torch.runs import assert_same, ends, lose_and_checkpoint, run, run_scenario
from tests.integration.torch.scripts import WIDTH, batch, digest, inject_fault, seed
from tests.integration.torch.world import World

STEPS = 8


def with_checkpoints(args: dict[str, Any]) -> None:
    """Loads its own checkpoint, if there is one, and saves one after step `save_at`."""
    rank, folder = args["rank"], Path(args["folder"])
    own = folder.parent / "own.pt"
    seed(7)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 8))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if own.exists():
        saved = torch.load(own)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved.get("random", torch.get_rng_state()))
        done = saved["step"]
    job.protect(model=model, optimizer=optimizer)
    first = folder / f"first-{rank}"
    first.unlink(missing_ok=True)  # of the predecessor
    for step in job.steps(args["steps"], start=args.get("starts", {}).get(rank, done)):
        if not first.exists():
            first.write_text(str(int(step)))
        inject_fault(args, step, "between steps")
        with step:
            optimizer.zero_grad()
            data, target = batch(rank, step)
            inject_fault(args, step, "in forward")
            torch.autograd.backward(nn.functional.cross_entropy(model(data), target))
            optimizer.step()
        if rank == 0 and job.step == args.get("save_at"):
            state: dict[str, Any] = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            if "with_random" in args:
                state["random"] = torch.get_rng_state()
            torch.save({**state, "step": job.step}, own)
    torch.save(digest(net, optimizer), folder / f"end-{rank}.pt")


def first_steps(world: World) -> list[int]:
    return [int((world.folder / f"first-{rank}").read_text()) for rank in range(world.size)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("calm") / "run"
    return ends(run(folder, with_checkpoints, steps=STEPS))


def test_rank_lost_in_the_first_step_resumes_there(calm: list[Any], tmp_path: Path) -> None:
    run(tmp_path / "before", with_checkpoints, steps=4, save_at=4)
    kills = [(1, 0, 4, "in forward"), (0, 0, 6, "between steps")]
    world = run(tmp_path / "after", with_checkpoints, steps=STEPS, kills=kills)
    assert_same(calm, world)
    assert world.incarnations == {0: 1, 1: 1, 2: 0, 3: 0}
    assert first_steps(world) == [6, 4, 4, 4]


def test_checkpoint_with_random_state_that_only_a_replacement_loads(
    calm: list[Any], tmp_path: Path
) -> None:
    args = {"steps": STEPS, "save_at": 3, "with_random": True}
    kills = [(1, 0, 5, "in forward"), (0, 0, 6, "between steps")]
    world = run(tmp_path / "killed", with_checkpoints, kills=kills, **args)
    assert_same(calm, world)


def test_older_emergency_checkpoint_is_not_used(calm: list[Any], tmp_path: Path) -> None:
    lose_and_checkpoint(tmp_path / "dumped", with_checkpoints, (1, 0, 2, "in forward"), steps=STEPS)
    old = tmp_path / "dump"
    old.rename(tmp_path / "aside")
    run(tmp_path / "before", with_checkpoints, steps=4, save_at=4)
    (tmp_path / "aside").rename(old)
    world = run(tmp_path / "after", with_checkpoints, steps=STEPS)
    assert first_steps(world) == [4] * 4
    assert_same(calm, world)
    assert list(old.glob("step-2/taskd.json")), "it was not used, so it is not marked as used"


def test_later_emergency_checkpoint_is_used(calm: list[Any], tmp_path: Path) -> None:
    run(tmp_path / "before", with_checkpoints, steps=2, save_at=2)
    lose_and_checkpoint(tmp_path / "dumped", with_checkpoints, (1, 0, 5, "in forward"), steps=STEPS)
    world = run(tmp_path / "after", with_checkpoints, steps=STEPS)
    assert first_steps(world) == [5] * 4
    assert_same(calm, world)


def recording_refusals(args: dict[str, Any]) -> None:
    try:
        with_checkpoints(args)
    except SettingsError as error:
        (Path(args["folder"]) / f"refused-{args['rank']}").write_text(str(error))
        raise


def test_different_start_steps_are_refused(tmp_path: Path) -> None:
    world = World(recording_refusals, tmp_path, args={"steps": STEPS, "starts": {2: 3}})

    async def scenario() -> None:
        await world.start()
        await world.until(
            lambda: len(world.dead) == world.size, "the end of all ranks", world.run_s
        )

    run_scenario(world, scenario)
    for rank in range(world.size):
        refusal = (tmp_path / f"refused-{rank}").read_text()
        assert refusal == "steps(start=…) must be the same on all ranks, got (0, 0, 3, 0)"
