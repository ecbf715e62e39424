"""`torch.distributed.checkpoint` in a protected job: set-up, between steps, and in replacements."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.errors import SettingsError
from taskd.torch.state.sharded import local
from tests.integration.torch.runs import assert_same, ends, run, same
from tests.integration.torch.scripts import (
    CLASSES,
    WIDTH,
    batch,
    generators,
    inject_fault,
    is_due,
    seed,
)
from tests.integration.torch.world import World

STEPS = 8
dcp: Any = torch.distributed.checkpoint  # mypy does not see what it exports


class TrainingState:
    """Model, optimizer and step number, as in PyTorch's own tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = int(state["step"])


def with_dcp(args: dict[str, Any]) -> None:
    """Resumes from the newest checkpoint, if there is one, and saves one every `save_every`."""
    rank, folder = args["rank"], Path(args["folder"])
    saved = folder.parent / "saved"
    seed(7)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES))
    model = _wrap(net, args.get("kind", "ddp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainingState(net, optimizer)
    complete = sorted(saved.glob("*/.metadata"), key=lambda path: int(path.parent.name))
    if complete:
        dcp.load({"app": state}, checkpoint_id=complete[-1].parent)
    if args.get("save_first"):
        writer = dcp.FileSystemWriter(folder / "first", overwrite=False)
        dcp.save({"app": state}, storage_writer=writer)
    # A collective after them, whose result a replacement needs.
    agreed: list[Any] = [None] * job.world_size
    dist.all_gather_object(agreed, args["incarnation"])
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(args["steps"], start=state.step):
        with step:
            optimizer.zero_grad()
            data, target = batch(rank, step)
            inject_fault(args, step, "in forward")
            torch.autograd.backward(nn.functional.cross_entropy(model(data), target))
            optimizer.step()
        if job.step > step and job.step % args["save_every"] == 0:
            state.step = job.step
            planner = dcp.DefaultSavePlanner(enable_plan_caching=args.get("caching", False))
            dcp.save({"app": state}, checkpoint_id=saved / str(job.step), planner=planner)
    end = {
        "weights": [local(value).clone() for value in net.state_dict().values()],
        "momentum": [local(optimizer.state[p]["exp_avg"]).clone() for p in net.parameters()],
        "random": generators(),
        "agreed": agreed,
    }
    torch.save(end, folder / f"end-{rank}.pt")
    report = {"replacement": job.is_replacement, "loaded": len(complete)}
    (folder / f"report-{rank}").write_text(json.dumps(report))


def _wrap(net: nn.Module, kind: str) -> Any:
    if kind == "ddp":
        return DDP(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=init_device_mesh("cpu", (4,)))


def reports(world: World) -> list[dict[str, Any]]:
    return [json.loads((world.folder / f"report-{rank}").read_text()) for rank in range(world.size)]


def load(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model of a checkpoint, read by one process."""
    model = {name: torch.zeros(value.shape) for name, value in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is only one process
        dcp.load({"app": {"model": model}}, checkpoint_id=folder, no_dist=True)
    return model


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp(f"calm-{request.param}") / "run"
    return run(folder, with_dcp, kind=request.param, steps=STEPS, save_every=3)


def assert_same_checkpoints(calm: World, world: World, kind: str) -> None:
    names = sorted(path.name for path in (calm.folder.parent / "saved").iterdir())
    assert names == sorted(path.name for path in (world.folder.parent / "saved").iterdir())
    like = {
        "0.weight": torch.zeros(16, WIDTH),
        "0.bias": torch.zeros(16),
        "2.weight": torch.zeros(CLASSES, 16),
        "2.bias": torch.zeros(CLASSES),
    }
    for name in names:
        first = load(calm.folder.parent / "saved" / name, like)
        second = load(world.folder.parent / "saved" / name, like)
        assert same(first, second), f"checkpoint {name} of {kind}"
        assert first["0.weight"].any()


@pytest.mark.parametrize("lost", [0, 2])
def test_replacement_loads_a_checkpoint_that_is_newer_than_the_start(
    calm: World, tmp_path: Path, lost: int
) -> None:
    """The predecessor found no checkpoint; its replacement finds that of step 3."""
    world = run(
        tmp_path / "run",
        with_dcp,
        kind=calm.args["kind"],
        steps=STEPS,
        save_every=3,
        kills=[(lost, 0, 4, "in forward")],
    )
    assert_same(ends(calm), world)
    assert_same_checkpoints(calm, world, calm.args["kind"])
    assert world.incarnations == {rank: int(rank == lost) for rank in range(4)}
    assert reports(world) == [
        {"replacement": rank == lost, "loaded": int(rank == lost)} for rank in range(4)
    ]


def test_replacement_of_a_resumed_job_loads_its_checkpoint(calm: World, tmp_path: Path) -> None:
    kind = calm.args["kind"]
    run(tmp_path / "before", with_dcp, kind=kind, steps=4, save_every=3)
    kills = [(1, 0, 5, "in forward"), (0, 0, 6, "in forward")]
    args: dict[str, Any] = {"kind": kind, "steps": STEPS, "save_every": 3, "kills": kills}
    world = run(tmp_path / "after", with_dcp, **args)
    assert_same(ends(calm), world)
    assert_same_checkpoints(calm, world, kind)
    assert world.incarnations == {0: 1, 1: 1, 2: 0, 3: 0}
    assert [report["loaded"] for report in reports(world)] == [2, 1, 1, 1]


def test_replacement_leaves_the_checkpoint_of_the_set_up_alone(tmp_path: Path) -> None:
    args: dict[str, Any] = {"steps": 6, "save_every": 4, "save_first": True}
    undisturbed = run(tmp_path / "calm" / "run", with_dcp, **args)
    kills = [(0, 0, 2, "in forward"), (3, 0, 4, "in forward")]
    world = run(tmp_path / "disturbed" / "run", with_dcp, kills=kills, **args)
    assert_same(ends(undisturbed), world)
    like = {"0.weight": torch.zeros(16, WIDTH)}
    first = load(undisturbed.folder / "first", like)
    assert first["0.weight"].any()
    assert same(first, load(world.folder / "first", like))
    assert_same_checkpoints(undisturbed, world, "ddp")


def test_save_with_cached_plans_continues_after_a_replacement(tmp_path: Path) -> None:
    args: dict[str, Any] = {"steps": 6, "save_every": 1, "caching": True, "kind": "fsdp"}
    undisturbed = run(tmp_path / "calm" / "run", with_dcp, **args)
    kills = [(0, 0, 2, "in forward"), (3, 0, 4, "in forward")]
    world = run(tmp_path / "disturbed" / "run", with_dcp, kills=kills, **args)
    assert_same(ends(undisturbed), world)
    assert_same_checkpoints(undisturbed, world, "fsdp")


class DyingWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """Dies when it has to write its part, if the test wants it."""

    def __init__(self, path: Path, step: int, args: dict[str, Any]) -> None:
        super().__init__(path)
        self._step, self._args = step, args

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        inject_fault(self._args, self._step, "in the save")
        return super().write_data(*args, **kwargs)


def wait_for_the_fault(job: taskd.Job) -> None:
    """Be late: the update is done, the others are in the next step, where one of them dies."""
    groups, deadline = job._context.groups, time.monotonic() + 60
    while not groups.is_broken():
        assert time.monotonic() < deadline, "no rank has died"
        groups.rendezvous.store.check(["nothing"])  # takes a moment


def with_async_saves(args: dict[str, Any]) -> None:
    """Saves in the background after every step, with a group of its own, as DCP advises."""
    rank, folder = args["rank"], Path(args["folder"])
    seed(7)
    job = taskd.init()
    beside = dist.new_group(backend="gloo")
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES))
    model = _wrap(net, args["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainingState(net, optimizer)
    job.protect(model=model, optimizer=optimizer)
    saving: Any = None
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            data, target = batch(rank, step)
            inject_fault(args, step, "in forward")
            torch.autograd.backward(nn.functional.cross_entropy(model(data), target))
            optimizer.step()
            if is_due(args, "slow", int(step)):
                wait_for_the_fault(job)
        if job.step > step:
            if saving is not None:
                saving.result()
            writer = DyingWriter(folder / "saved" / str(job.step), job.step, args)
            saving = dcp.async_save({"app": state}, storage_writer=writer, process_group=beside)
    if saving is not None:  # a replacement may come after the last step
        saving.result()
    weights = [local(value).clone() for value in net.state_dict().values()]
    torch.save({"weights": weights, "random": generators()}, folder / f"end-{rank}.pt")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("lost", [0, 2])
def test_async_save_that_loses_a_rank_does_not_end_the_training(
    tmp_path: Path, kind: str, lost: int
) -> None:
    undisturbed = run(tmp_path / "calm", with_async_saves, kind=kind)
    kills = [(lost, 0, 2, "in the save"), (3 - lost, 0, 5, "in forward")]
    world = run(tmp_path / "run", with_async_saves, kind=kind, kills=kills)
    assert_same(ends(undisturbed), world)
    assert sum(world.incarnations.values()) == 2
    complete = {int(path.parent.name) for path in (world.folder / "saved").glob("*/.metadata")}
    assert 2 not in complete, "it lacks the part of the lost rank"
    assert complete >= {4, 7, 8}
    like = {"0.weight": torch.zeros(16, WIDTH), "2.bias": torch.zeros(CLASSES)}
    for step in complete:
        expected = load(undisturbed.folder / "saved" / str(step), like)
        assert same(expected, load(world.folder / "saved" / str(step), like)), step


def async_save_in_the_default_group(args: dict[str, Any]) -> None:
    job = taskd.init()
    model = DDP(nn.Linear(2, 2))
    job.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    refused = ""
    try:
        dcp.async_save({"app": model}, checkpoint_id=Path(args["folder"]) / "saved")
    except SettingsError as error:
        refused = str(error)
    torch.save({"refused": refused}, Path(args["folder"]) / f"end-{args['rank']}.pt")


def test_async_save_in_the_group_of_the_training_is_refused(tmp_path: Path) -> None:
    """Its collectives would mix with those of the training."""
    script = async_save_in_the_default_group
    for end in ends(run(tmp_path / "run", script, size=2, ranks_per_node=2)):
        assert 'dist.new_group(backend="gloo")' in end["refused"]


def test_save_after_a_repair_at_the_end_of_a_step_is_left_out(tmp_path: Path) -> None:
    """Rank 1 commits step 2 after rank 0 has died in step 3. Its replacement does not save it."""
    undisturbed = run(tmp_path / "calm", with_async_saves, kind="ddp")
    args: dict[str, Any] = {"kills": [(0, 0, 3, "in forward")], "slow": [(1, 0, 2)]}
    world = run(tmp_path / "run", with_async_saves, kind="ddp", **args)
    assert_same(ends(undisturbed), world)
    complete = {int(path.parent.name) for path in (world.folder / "saved").glob("*/.metadata")}
    assert complete == {1, 2, 4, 5, 6, 7, 8}
    for step in complete:
        files = [
            {path.name for path in (each.folder / "saved" / str(step)).iterdir()}
            for each in (undisturbed, world)
        ]
        assert files[0] == files[1], step


def with_saves(args: dict[str, Any]) -> None:
    """Saves after every second step, in a section or not."""
    rank, folder = args["rank"], Path(args["folder"])
    seed(7)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES))
    model = _wrap(net, args["kind"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainingState(net, optimizer)
    job.protect(model=model, optimizer=optimizer)

    def save() -> None:
        writer = DyingWriter(folder / "saved" / str(job.step), job.step, args)
        dcp.save({"app": state}, storage_writer=writer)

    for step in job.steps(STEPS):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                data, target = batch(rank, step)
                inject_fault(args, step, "in forward")
                torch.autograd.backward(nn.functional.cross_entropy(model(data), target))
                optimizer.step()
        if step % 2 and args["wrapped"]:
            job.section("checkpoint").run(save)
        elif step % 2:
            save()
    weights = [local(value).clone() for value in net.state_dict().values()]
    torch.save({"weights": weights}, folder / f"end-{rank}.pt")


@pytest.mark.parametrize(
    ("kind", "wrapped", "lost"), [("ddp", True, 0), ("fsdp", True, 1), ("fsdp", False, 1)]
)
def test_save_that_loses_a_rank_is_repeated_or_left_out(
    tmp_path: Path, kind: str, wrapped: bool, lost: int
) -> None:
    args: dict[str, Any] = {"kind": kind, "wrapped": wrapped}
    undisturbed = run(tmp_path / "calm", with_saves, **args)
    kills = [(lost, 0, 4, "in the save"), (2, 0, 5, "in forward")]
    world = run(tmp_path / "run", with_saves, kills=kills, **args)
    assert_same(ends(undisturbed), world)
    complete = {int(path.parent.name) for path in (world.folder / "saved").glob("*/.metadata")}
    assert complete == ({2, 4, 6, 8} if wrapped else {2, 6, 8})
    like = {"0.weight": torch.zeros(16, WIDTH), "2.bias": torch.zeros(CLASSES)}
    for step in complete:
        expected = load(undisturbed.folder / "saved" / str(step), like)
        assert same(expected, load(world.folder / "saved" / str(step), like)), step
