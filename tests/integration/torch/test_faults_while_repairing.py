"""A second fault during a repair: while state is sent, copied, or written to a checkpoint.

The real code runs up to a chosen byte, and there the process dies by SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from taskd.model.ids import Rank
from taskd.torch.state import state_link
from taskd.torch.state.transfer import StateImage, Written
from tests.integration.run import run_job
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.world import Script, World

STEPS = 6
INCARNATIONS = {0: 0, 1: 0, 2: 0, 3: 0}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def put(owner: Any, name: str, torn: Callable[..., object]) -> None:
    setattr(owner, name, torn)


def dies_sending(args: dict[str, Any]) -> None:
    """The rank and incarnation that dies, and after how many bytes of its state."""
    rank, incarnation, bytes_left = args["dies_sending"]
    serve = state_link.serve

    def torn(rendezvous: Any, me: int, receivers: Any, write: state_link.Write) -> None:
        left = bytes_left

        def write_some(request: state_link.StateRequest, send: state_link.Send) -> None:
            def send_some(view: memoryview) -> None:
                nonlocal left
                raw = view.cast("B")
                send(raw[:left])
                left -= raw.nbytes
                if left <= 0:
                    die()

            write(request, send_some)

        serve(rendezvous, me, receivers, write_some)

    if (args["rank"], args["incarnation"]) == (rank, incarnation):
        put(state_link, "serve", torn)


def dies_copying(args: dict[str, Any]) -> None:
    """The rank and incarnation that dies, and the step of which it writes only half a copy."""
    rank, incarnation, step = args["dies_copying"]
    write_into = StateImage.write_into

    def torn(image: StateImage, target: torch.Tensor, written: Written) -> Written:
        if image._draft.step != step:
            return write_into(image, target, written)
        whole, half = torch.empty_like(target), target.numel() // 2
        write_into(image, whole, {})
        target[:half] = whole[:half]
        die()

    if (args["rank"], args["incarnation"]) == (rank, incarnation):
        put(StateImage, "write_into", torn)


def dies_writing(args: dict[str, Any]) -> None:
    """The rank that dies while the others wait for its part of the checkpoint."""
    if args["rank"] == args["dies_writing"]:
        put(FileSystemWriter, "write_data", lambda *_: die())


def torn_ddp(args: dict[str, Any]) -> None:
    _tear(args, scripts.ddp)


def torn_fsdp(args: dict[str, Any]) -> None:
    _tear(args, scripts.fsdp)


def _tear(args: dict[str, Any], script: Script) -> None:
    tears: dict[str, Callable[[dict[str, Any]], None]] = {
        "dies_sending": dies_sending,
        "dies_copying": dies_copying,
        "dies_writing": dies_writing,
    }
    for name, tear in tears.items():
        if name in args:
            tear(args)
    script(args)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("ddp") / "run", scripts.ddp, steps=STEPS))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("fsdp") / "run", scripts.fsdp, steps=STEPS))


def sources(world: World) -> list[Mapping[Rank, Rank]]:
    """Which rank receives from which, in each plan."""
    return [plan.sources for plan in world.plans]


def test_source_dies_while_it_sends(ddp: list[Any], tmp_path: Path) -> None:
    """The receiver has half a state, and receives a complete one from another source."""
    world = run(
        tmp_path / "run",
        torn_ddp,
        steps=STEPS,
        kills=[(2, 0, 3, "in backward")],
        dies_sending=(0, 0, 40_000),
    )
    first, second = sources(world)
    assert first == {2: 0}
    assert second.keys() == {0, 2}
    assert set(second.values()) <= {1, 3}
    assert world.incarnations == {**INCARNATIONS, 0: 1, 2: 1}
    assert_same(ddp, world)


def test_source_of_a_copy_dies_while_it_sends(fsdp: list[Any], tmp_path: Path) -> None:
    """The copy that it sent is still in the node's memory, and so is its own last copy."""
    world = run(
        tmp_path / "run",
        torn_fsdp,
        steps=STEPS,
        kills=[(2, 0, 3, "in backward")],
        dies_sending=(0, 0, 10_000),
    )
    first, second = sources(world)
    assert first == {2: 0}
    assert 0 in second
    assert set(second.values()) <= {1, 3}
    assert world.incarnations == {**INCARNATIONS, 0: 1, 2: 1}
    assert_same(fsdp, world)


def test_rank_dies_in_the_middle_of_its_snapshot(fsdp: list[Any], tmp_path: Path) -> None:
    """Half a copy is not used: all ranks return to the step of the copy before it."""
    world = run(tmp_path / "run", torn_fsdp, steps=STEPS, dies_copying=(1, 0, 4))
    (plan,) = world.plans
    assert plan.resume == 3
    assert world.incarnations == {**INCARNATIONS, 1: 1}
    assert_same(fsdp, world)


def test_rank_dies_while_the_emergency_checkpoint_is_written(
    ddp: list[Any], tmp_path: Path
) -> None:
    """The others end and report why; half a checkpoint is not used."""
    folder = tmp_path / "lost"
    folder.mkdir()
    args = {"steps": STEPS, "kills": [(1, 0, 3, "in backward")], "dies_writing": 3}
    world = World(torn_ddp, folder, args=args)

    async def scenario() -> None:
        try:
            await world.start()
            await world.until(lambda: bool(world.dead), "a death", world.run_s)
            await world.order_dump()
            await world.until(
                lambda: world.dumped.keys() == {0, 2} and world.done == {0, 2},
                "the others end",
            )
        finally:
            await world.stop()

    asyncio.run(scenario())
    assert world.dead == {1, 3}
    assert all(report.because for report in world.dumped.values()), world.dumped
    assert not list((tmp_path / "dump").glob("step-*/taskd.json"))
    assert_same(ddp, run(tmp_path / "next", scripts.ddp, steps=STEPS))


WITH_ITS_OWN_CHECKPOINT = """
    import os, pathlib, signal
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import taskd.torch as taskd

    job = taskd.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own, begun = pathlib.Path(f"own-{job.rank}.pt"), 0
    if own.exists():
        begun, weights = torch.load(own, weights_only=False)
        net.load_state_dict(weights)
    job.protect(model=net, optimizer=optimizer, snapshot_every=0)
    print("begins at", begun, "in attempt", attempt, flush=True)
    for step in job.steps(6 - begun):
        if (attempt, job.rank, step) == (0, 1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        with step:
            net(torch.full((2, 8), begun + step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if job.step == 3 and not attempt:
            torch.save((3, net.state_dict()), own)
    weights = net.weight.full_tensor().detach()
    if job.rank == 0:
        torch.save(weights, "weights.pt")
"""


def test_shard_without_holder_restarts_from_the_scripts_own_checkpoint(tmp_path: Path) -> None:
    """Every shard exists once and no copies are made: all ranks restart."""
    path = run_job.script(tmp_path, WITH_ITS_OWN_CHECKPOINT)
    ended = run_job.run(tmp_path, "--nproc-per-node=2", path)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        for begun, attempt in ((0, 0), (3, 1)):
            assert f"[rank {rank}]: begins at {begun} in attempt {attempt}\n" in ended.out
    assert "1 fault: all ranks have finished" in ended.err
    assert torch.allclose(torch.load(tmp_path / "weights.pt"), _trained_alone())


def _trained_alone() -> torch.Tensor:
    """The same six steps in one process."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        loss = net(torch.full((2, 8), step + 1.0)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()
