"""Every collective of torch works in a resilient group, and survives a peer that dies in it.

The same script runs three times: over plain gloo, over our groups, and over our groups with a rank
that dies as each kind of collective begins. The results must be identical in every bit.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager, _world
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.runtime.torch_versions import minor
from tests.integration.torch.runs import run, same
from tests.integration.torch.scripts import inject_fault
from tests.integration.torch.world import World, join_plain_group

RANKS, WIDTH = 4, 8
ALL_TO_ALL_SINCE = (2, 12)
"""The first torch whose gloo has `all_to_all` of lists."""


class Member:
    """One rank: its number, its groups, and its input to a step."""

    def __init__(self, rank: int, *, native: bool = False) -> None:
        self.rank, self.step = rank, 0
        self.left, self.right = (rank - 1) % RANKS, (rank + 1) % RANKS
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.half = halves[rank // 2]
        # gloo's own way to split a group is not safe, so the native run uses another group of the
        # same ranks. torch names a split by the groups of this process, which differ by rank.
        dist.new_group([0])
        world: Any = dist.group.WORLD
        mine, name = [0, 1] if rank < 2 else [2, 3], f"the {len(_world.pg_names)}th"
        self.split = self.half if native else world.split_group(mine, group_name=name)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))

    def mine(self, width: int = WIDTH) -> torch.Tensor:
        """Different numbers on each rank and in each step."""
        dice = torch.Generator().manual_seed(self.step * RANKS + self.rank)
        return torch.randn(width, generator=dice)

    def parts(self) -> list[torch.Tensor]:
        return list(self.mine().chunk(RANKS))

    def room(self, count: int = RANKS, width: int = WIDTH) -> list[torch.Tensor]:
        return [torch.zeros(width) for _ in range(count)]

    @property
    def is_first(self) -> bool:
        return self.rank == 0


Collective = Callable[[Member], Any]
COLLECTIVES: dict[str, Collective] = {}


def collective(run_it: Collective) -> Collective:
    COLLECTIVES[run_it.__name__] = run_it
    return run_it


@collective
def all_reduce(at: Member) -> Any:
    summed, largest = at.mine(), at.mine()
    dist.all_reduce(summed)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [summed, largest]


@collective
def all_reduce_async(at: Member) -> Any:
    mine = at.mine()
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    work.wait()
    return mine


@collective
def reduce(at: Member) -> Any:
    mine = at.mine()
    dist.reduce(mine, dst=2)
    return mine if at.rank == 2 else None  # undefined on the other ranks


@collective
def broadcast(at: Member) -> Any:
    mine = at.mine()
    dist.broadcast(mine, src=1)
    return mine


@collective
def all_gather(at: Member) -> Any:
    room = at.room()
    dist.all_gather(room, at.mine())
    return room


@collective
def all_gather_into_tensor(at: Member) -> Any:
    room = torch.zeros(RANKS * WIDTH)
    dist.all_gather_into_tensor(room, at.mine())
    return room


@collective
def reduce_scatter(at: Member) -> Any:
    room = torch.zeros(WIDTH // RANKS)
    dist.reduce_scatter(room, at.parts())
    return room


@collective
def reduce_scatter_tensor(at: Member) -> Any:
    room = torch.zeros(WIDTH // RANKS)
    dist.reduce_scatter_tensor(room, at.mine())
    return room


@collective
def all_to_all(at: Member) -> Any:
    if minor(torch.__version__) < ALL_TO_ALL_SINCE:
        return None
    room = at.room(width=WIDTH // RANKS)
    dist.all_to_all(room, at.parts())
    return room


@collective
def all_to_all_single(at: Member) -> Any:
    """With unequal parts: rank r gets r + 1 numbers from each."""
    room = torch.zeros(RANKS * (at.rank + 1))
    dist.all_to_all_single(room, at.mine(10), [at.rank + 1] * RANKS, [1, 2, 3, 4])
    return room


@collective
def gather(at: Member) -> Any:
    room = at.room() if at.is_first else None
    dist.gather(at.mine(), room)
    return room


@collective
def scatter(at: Member) -> Any:
    room = torch.zeros(WIDTH // RANKS)
    dist.scatter(room, at.parts() if at.is_first else None)
    return room


@collective
def barrier(at: Member) -> Any:
    dist.barrier()


@collective
def send_and_recv(at: Member) -> Any:
    """Around the ring; the last rank receives from any source."""
    token = at.mine()
    if not at.is_first:
        source = None if at.rank == RANKS - 1 else at.left
        dist.recv(token, source)
        token += at.mine()
    if at.rank < RANKS - 1:
        dist.send(token, at.right)
    return token


@collective
def isend_and_irecv(at: Member) -> Any:
    room = torch.zeros(WIDTH)
    works = [dist.isend(at.mine(), at.right, tag=3), dist.irecv(room, at.left, tag=3)]
    for work in works:
        assert work is not None
        work.wait()
    return room


@collective
def batch_isend_irecv(at: Member) -> Any:
    room = torch.zeros(WIDTH)
    pair = [dist.P2POp(dist.isend, at.mine(), at.right), dist.P2POp(dist.irecv, room, at.left)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return room


@collective
def objects(at: Member) -> Any:
    of_all: list[Any] = [None] * RANKS
    dist.all_gather_object(of_all, {"rank": at.rank, "step": at.step})
    plan = [f"from rank 3 in step {at.step}" if at.rank == 3 else None]
    dist.broadcast_object_list(plan, src=3)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"for {rank}" for rank in range(RANKS)] if at.is_first else [])
    pile: list[Any] | None = [None] * RANKS if at.is_first else None
    dist.gather_object(at.rank * 10, pile)
    return [of_all, plan, share, pile]


@collective
def all_reduce_coalesced(at: Member) -> Any:
    tensors = [at.mine(), at.mine(3)]
    dist.all_reduce_coalesced(tensors)
    return tensors


@collective
def all_gather_coalesced(at: Member) -> Any:
    room = [[torch.zeros(WIDTH), torch.zeros(3)] for _ in range(RANKS)]
    dist.all_gather_coalesced(room, [at.mine(), at.mine(3)])
    return room


@collective
def coalescing_manager(at: Member) -> Any:
    sums = [at.mine(), at.mine(3)]
    with _coalescing_manager():
        for one in sums:
            dist.all_reduce(one)
    gathered = at.room(2, RANKS * WIDTH)
    with _coalescing_manager():
        for one in gathered:
            dist.all_gather_into_tensor(one, at.mine())
    shares = at.room(2, WIDTH // RANKS)
    with _coalescing_manager():
        for one in shares:
            dist.reduce_scatter_tensor(one, at.mine())
    return [sums, gathered, shares]


@collective
def functional_collectives(at: Member) -> Any:
    world: Any = dist.group.WORLD
    mine = at.mine()
    return [
        _arrived(one)
        for one in (
            functional.all_reduce(mine, "sum", world),
            functional.all_gather_tensor(mine, 0, world),
            functional.reduce_scatter_tensor(mine, "sum", 0, world),
            functional.all_to_all_single(mine, None, None, world),
            functional.broadcast(mine, 1, world),
            *functional.all_reduce_coalesced([mine, mine], "avg", world),
            *functional.all_gather_into_tensor_coalesced([mine, mine], world),
            *functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world),
        )
    ]


@collective
def in_a_subgroup(at: Member) -> Any:
    mine, room = at.mine(), at.room(2)
    dist.all_reduce(mine, group=at.half)
    dist.all_gather(room, mine, group=at.half)
    dist.broadcast(mine, group=at.half, group_src=1)
    return [mine, room]


@collective
def in_a_split_group(at: Member) -> Any:
    mine, room = at.mine(), at.room(2)
    at.split.allreduce([mine]).wait()
    at.split.allgather([room], [mine]).wait()
    return [mine, room]


@collective
def on_a_mesh(at: Member) -> Any:
    mine = at.mine()
    dist.all_reduce(mine, group=at.mesh.get_group("row"))
    dist.all_reduce(mine, group=at.mesh.get_group("column"))
    gathered = functional.all_gather_tensor(mine, 0, at.mesh["row"])
    return [mine, _arrived(gathered)]


def _arrived(pending: torch.Tensor) -> torch.Tensor:
    wait: Callable[[torch.Tensor], torch.Tensor] = functional.wait_tensor
    return wait(pending)


# The script


def every_collective(args: dict[str, Any]) -> None:
    """All collectives in each step, then an update. With `native`: over plain gloo."""
    warnings.simplefilter("ignore", FutureWarning)  # torch has renamed some of them
    rank = args["rank"]
    if args.get("native"):
        store = join_plain_group()
        at = Member(rank, native=True)
        for at.step in range(args["steps"]):
            _write(args, at.step, {name: do(at) for name, do in COLLECTIVES.items()})
        # A rank that ends closes its connections, and a peer might still be in the last collective.
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(RANKS)])
        return
    job = taskd.init()
    at = Member(rank)
    net = nn.Linear(WIDTH, 1)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(args["steps"]):
        at.step, got = int(step), dict[str, Any]()
        with step:
            for name, do in COLLECTIVES.items():
                inject_fault(args, step, name)
                got[name] = do(at)
            optimizer.zero_grad()
            torch.autograd.backward(model(at.mine()).square().mean())
            optimizer.step()
        if job.step > step:
            _write(args, at.step, got)


def all_reduce_between_steps(args: dict[str, Any]) -> None:
    """Between two steps one of two ranks dies while the other waits for it in a collective."""
    if args.get("native"):
        store = join_plain_group()
        store.set(f"connected/{args['rank']}", "")
        store.wait(["connected/0", "connected/1"])
        _lose_a_peer(args)
        return
    job = taskd.init()
    model = DDP(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(args["steps"]):
        if step == 1 and args["incarnation"] == 0 and not _raised(args).exists():
            _lose_a_peer(args)
        with step:
            torch.autograd.backward(model(torch.ones(WIDTH)).square().mean())
            optimizer.step()


def _lose_a_peer(args: dict[str, Any]) -> None:
    inject_fault(args, 1, "between steps")
    try:
        dist.all_reduce(torch.ones(WIDTH))
    except RuntimeError as error:
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        _raised(args).write_text(kind)


def _raised(args: dict[str, Any]) -> Path:
    return Path(args["folder"]) / "raised"


def a_wrong_collective(args: dict[str, Any]) -> None:
    """A list of wrong sizes, inside a step."""
    if args.get("native"):
        join_plain_group()
        step: Any = nullcontext()
    else:
        job = taskd.init()
        model = DDP(nn.Linear(WIDTH, 1))
        job.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        step = next(job.steps(3))
    try:
        with step:
            dist.all_gather([torch.zeros(WIDTH), torch.zeros(5)], torch.ones(WIDTH))
    except RuntimeError as error:
        (Path(args["folder"]) / f"raised-{args['rank']}").write_text(str(error))


def _write(args: dict[str, Any], step: int, got: dict[str, Any]) -> None:
    torch.save(got, Path(args["folder"]) / f"got-{step}-{args['rank']}.pt")


def got(folder: Path, step: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"got-{step}-{rank}.pt")
    return found


# The tests

STEPS = len(COLLECTIVES)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of plain gloo."""
    folder = tmp_path_factory.mktemp("native") / "run"
    run(folder, every_collective, steps=STEPS, native=True)
    return folder


def assert_same_results(native: Path, folder: Path, steps: int) -> None:
    for step in range(steps):
        for rank in range(RANKS):
            wanted, found = got(native, step, rank), got(folder, step, rank)
            for name in COLLECTIVES:
                assert same(wanted[name], found[name]), f"{name} of rank {rank} in step {step}"


def test_results_are_the_same_as_with_gloo(native: Path, tmp_path: Path) -> None:
    world = run(tmp_path / "run", every_collective, steps=2)
    assert world.incident == 0
    assert_same_results(native, world.folder, 2)


def test_results_are_the_same_when_a_rank_dies_in_each_collective(
    native: Path, tmp_path: Path
) -> None:
    """In step n a rank dies as the n-th collective begins; the ranks take turns."""
    kills = [(n % RANKS, n // RANKS, n, name) for n, name in enumerate(COLLECTIVES)]
    world = run(tmp_path / "run", every_collective, steps=STEPS, kills=kills)
    assert sum(world.incarnations.values()) == len(kills)
    assert_same_results(native, world.folder, STEPS)


def test_errors_outside_a_step_are_raised_as_by_gloo(tmp_path: Path) -> None:
    """The surviving rank catches it, enters its next step, and is repaired there."""
    kills = [(1, 0, 1, "between steps")]
    args = {"native": True, "kills": kills}
    (tmp_path / "native").mkdir()
    native = World(all_reduce_between_steps, tmp_path / "native", 2, args=args)

    async def scenario() -> None:
        try:
            await native.start()
            await native.until(lambda: (native.done, native.dead) == ({0}, {1}), "an error")
        finally:
            await native.stop()

    asyncio.run(scenario())
    ours = run(tmp_path / "ours", all_reduce_between_steps, size=2, steps=3, kills=kills)
    raised = (ours.folder / "raised").read_text()
    assert raised == (native.folder / "raised").read_text()
    assert ours.incarnations == {0: 0, 1: 1}


def test_wrong_argument_is_raised_also_inside_a_step(tmp_path: Path) -> None:
    """It is a mistake of the script, not a fault: a replay would repeat it."""
    native = run(tmp_path / "native", a_wrong_collective, size=2, native=True)
    ours = run(tmp_path / "ours", a_wrong_collective, size=2)
    for rank in range(2):
        errors = [(world.folder / f"raised-{rank}").read_text() for world in (native, ours)]
        assert errors[0] == errors[1]
        assert "invalid tensor size" in errors[1]
    assert ours.incident == 0
