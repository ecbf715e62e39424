"""A small real job for tests: rank processes, a store, a bus, and a test that plays the manager.

The ranks are forked from a server that has torch imported already. The plan of every repair is made
by the real `core/manager/repair_plan`; only the orders are given by hand.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from taskd.bus.endpoint import Bus, BusConfig
from taskd.core.manager.repair_plan import Holder, Placement, Plan, complete_step, plan, shrink
from taskd.model import messages as m
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, manager, worker

PATIENCE_S = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo", "taskd.torch", __name__])

Script = Callable[[dict[str, Any]], None]


def _rank_main(script: Script, env: dict[str, str], told: dict[str, Any]) -> None:
    os.environ.update(env)
    stacks = open(Path(told["folder"]) / f"stacks-{told['rank']}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch

    torch.set_num_threads(1)
    script(told)


def join_natively() -> TCPStore:
    """Inside a rank: torch's own gloo group of all ranks, and nothing of ours. The store is its."""
    host, _, port = os.environ["TASKD_STORE"].partition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return store


@dataclass
class World:
    """Start it, let things happen, wait for the end."""

    script: Script
    folder: Path
    size: int = 4
    told: dict[str, Any] = field(default_factory=dict)
    ranks_per_node: int = 4
    run_s: float = 150.0
    """How long all of it may take."""

    def __post_init__(self) -> None:
        self.incident = Incident(0)
        self.lives: dict[int, int] = dict.fromkeys(range(self.size), 0)
        self.nodes = {rank: rank // self.ranks_per_node for rank in range(self.size)}
        self.processes: dict[int, ForkServerProcess] = {}
        self.hellos: dict[int, m.WorkerHello] = {}
        self.parked: dict[int, m.Parked] = {}
        self.failed: dict[int, m.WorkerFailed] = {}
        self.repaired: dict[int, m.Repaired] = {}
        self.committed: dict[int, m.Committed] = {}
        self.broken: list[m.RepairFailed] = []
        self.dumped: dict[int, m.Dumped] = {}
        self.dead: set[int] = set()
        self.done: set[int] = set()
        self.away: set[int] = set()
        """Ranks that the job goes on without."""
        self.left: dict[int, int | None] = {}
        """Of these, those that the last shrink told to leave, and how they ended."""
        self._telling: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        self.story: list[str] = []
        self.heard: list[m.Body] = []
        self.plans: list[Plan] = []

    async def start(self) -> None:
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0", job="test"))
        await self.bus.start()
        self._hearing = asyncio.create_task(self._hear())
        for rank in range(self.size):
            self.spawn(rank)

    def spawn(self, rank: int) -> None:
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "TASKD_PROXY": f"127.0.0.1:{self.bus.port}",
            "TASKD_JOB_ID": "test",
            "TASKD_NODE_RANK": str(self.nodes[rank]),
            "TASKD_INCARNATION": str(self.lives[rank]),
            "TASKD_INCIDENT": str(self.incident),
            "TASKD_STORE": f"127.0.0.1:{self.store.port}",
            # The matrix extensions are advertised but not usable on some virtual machines.
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "TASKD_DUMP_DIR": str(self.folder.parent / "dump"),
            "TASKD_BEACON": str(self.memory(self.nodes[rank]) / f"beacon-{rank}"),
        }
        told = {**self.told, "rank": rank, "life": self.lives[rank], "folder": str(self.folder)}
        told["ports"] = (self.bus.port, self.store.port)
        process = context.Process(target=_rank_main, args=(self.script, env, told))
        process.start()
        self.dead.discard(rank)
        self.processes[rank] = process
        life = self.lives[rank]
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended, rank, life, process)

    def memory(self, node: int) -> Path:
        """What stands for the shared memory of a node."""
        folder = self.folder / f"node-{node}"
        folder.mkdir(exist_ok=True)
        return folder

    def lose_node(self, node: int, to: int) -> None:
        """Its ranks are dead already; its memory goes with it, its ranks will live elsewhere."""
        shutil.rmtree(self.memory(node))
        for rank, at in self.nodes.items():
            if at == node:
                self.nodes[rank] = to

    def _ended(self, rank: int, life: int, process: ForkServerProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        self._note(f"rank {rank} life {life} ended with {process.exitcode}")
        if rank in self.away:
            self.left[rank] = process.exitcode
        else:
            (self.done if process.exitcode == 0 else self.dead).add(rank)
        self.changed.set()

    async def _hear(self) -> None:
        while True:
            body = (await self.bus.receive()).body
            self._note(str(body))
            self.heard.append(body)
            match body:
                case m.WorkerHello():
                    self.hellos[body.rank] = body
                case m.WorkerFailed() if body.incident == self.incident:
                    self.failed[body.rank] = body
                case m.Parked():
                    self.parked[body.rank] = body
                case m.Repaired():
                    self.repaired[body.rank] = body
                case m.Committed():
                    self.committed[body.rank] = body
                case m.Dumped():
                    self.dumped[body.rank] = body
                case m.RepairFailed() if body.incident == self.incident:
                    self.broken.append(body)
                case _:
                    pass
            self.changed.set()

    def _note(self, what: str) -> None:
        self.story.append(f"{asyncio.get_running_loop().time():.4f} {what}")

    async def until(
        self, what: Callable[[], bool], why: str, patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until it holds, or fail with all that has happened."""
        try:
            async with asyncio.timeout(patience_s):
                while not what():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            for process in self.processes.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGUSR1)  # it says where it stands
            raise AssertionError("\n".join([f"waited for: {why}", *self.story])) from None

    # What the manager does

    async def tell(self, rank: int, body: m.Body) -> None:
        self._note(f"-> {rank}: {body}")
        life, incident = self.lives[rank], self.incident
        while (rank not in self.dead | self.done) and (life, incident) == (
            self.lives[rank],
            self.incident,
        ):
            sent = await self.bus.send(worker(self.nodes[rank], rank), body)
            self._note(f"-> {rank}: {type(body).__name__} {sent}")
            if sent:
                return

    def _tell_aside(self, rank: int, body: m.Body) -> None:
        """Not to wait for one that may be dead."""
        task = asyncio.create_task(self.tell(rank, body))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def park(self, because: str = "a test") -> dict[int, m.Parked]:
        """A new incident; returns where everybody who is alive stands."""
        self.incident = Incident(self.incident + 1)
        self.parked.clear()
        self.failed.clear()
        self.repaired.clear()
        self.committed.clear()
        alive = self.alive()
        for rank in alive:
            self._tell_aside(rank, m.Park(self.incident, because))
        await self.until(
            lambda: all(
                r in self.dead or (self.parked.get(r) and self.parked[r].incident == self.incident)
                for r in alive
            ),
            f"everybody parks for incident {self.incident}",
        )
        return dict(self.parked)

    def alive(self) -> list[int]:
        gone = self.dead | self.done | self.away
        return [rank for rank in range(self.size) if rank not in gone]

    async def mend(self, because: str = "a test") -> None:
        """Park, plan, replace the dead, repair; again until one more step is committed by all."""
        while True:
            stand = await self.park(because)
            if await self._repair(stand):
                return

    async def shrink(self) -> None:
        """Go on without the dead."""
        stand = await self.park("shrink")
        lost = [Placement(*self._place(rank), *self._part(rank)) for rank in sorted(self.dead)]
        made = shrink([one for one in self._holders(stand) if one.rank not in self.dead], lost)
        assert isinstance(made, Plan)
        self.away |= self.dead | set(made.leaving)
        self.left.clear()
        for rank in made.leaving:
            self._tell_aside(rank, m.Leave(self.incident, made.because))
        self.dead.clear()
        await self._order(made, "downgrade")
        await self.until(lambda: set(made.leaving) <= self.left.keys(), "healthy ranks leave, too")

    async def grow(self) -> None:
        """Everybody comes back."""
        stand = await self.park("grow")
        self.dead |= self.away
        self.away.clear()
        assert await self._repair(stand)

    async def _repair(self, stand: dict[int, m.Parked]) -> bool:
        lost = sorted(self.dead)
        for rank in lost:
            self.lives[rank] += 1
            self.spawn(rank)
        holders = [one for one in self._holders(stand) if one.rank not in lost]
        seats = [Placement(*self._place(rank), *self._part(rank)) for rank in lost]
        made = plan(holders, seats)
        assert isinstance(made, Plan), f"{made}\n" + "\n".join(self.story)
        self._note(str(made))
        self.plans.append(made)
        await self.until(
            lambda: all(
                r in self.dead or (r in self.hellos and self.hellos[r].incarnation == self.lives[r])
                for r in lost
            ),
            "the replacements say hello",
        )
        return await self._order(made, "recover")

    async def _order(self, made: Plan, strategy: str) -> bool:
        order = m.Repair(
            self.incident,
            strategy,
            made.members,
            made.resume,
            made.sources,
            f"127.0.0.1:{self.store.port}",
            PATIENCE_S,
            helpers=made.helpers,
        )
        incident = self.incident
        for one in made.members:
            self._tell_aside(one.rank, order)
        await self.until(
            lambda: (
                bool(self.dead or self.broken or self.failed)
                or all(self.has_resumed(one.rank, incident) for one in made.members)
            ),
            "everybody commits a step",
        )
        again = bool(self.dead or self.broken or self.failed)
        self.broken.clear()
        return not again

    def _holders(self, stand: dict[int, m.Parked]) -> list[Holder]:
        return [
            Holder(
                *self._place(rank),
                told.step,
                told.whole,
                told.undo,
                *self._part(rank),
                told.copies,
            )
            for rank, told in stand.items()
        ]

    async def dump(self) -> None:
        """The survivors write what they have, and end."""
        ranks = await self.order_dump()
        await self.until(
            lambda: ranks <= self.dumped.keys() and ranks <= self.done | self.dead,
            "the survivors write, and end",
        )

    async def order_dump(self) -> set[int]:
        """Tell the survivors to write what they have; returns who they are."""
        stand = await self.park("dump")
        step = complete_step(self._holders(stand), {self._part(r)[0] for r in range(self.size)})
        assert step is not None
        writers = [h for h in self._holders(stand) if (h.shard, step) in h.offers()]
        members = tuple(m.Member(h.rank, h.node, h.incarnation) for h in writers)
        order = m.Dump(self.incident, step, str(self.folder.parent / "dump"), members)
        await asyncio.gather(*(self.tell(one.rank, order) for one in members))
        return {one.rank for one in members}

    def _place(self, rank: int) -> tuple[Rank, NodeRank, Incarnation]:
        return Rank(rank), NodeRank(self.nodes[rank]), Incarnation(self.lives[rank])

    def _part(self, rank: int) -> tuple[str, int]:
        """Its shard and replica. One that died before its first word was like any other."""
        hello = self.hellos.get(rank)
        return (hello.shard, hello.replica) if hello else ("", -1)

    def has_resumed(self, rank: int, incident: int) -> bool:
        if rank in self.done:
            return True
        told = self.committed.get(rank)
        return told is not None and told.incident == incident

    async def run(self) -> None:
        """Start, mend whatever happens, and return when all ranks have finished."""
        await self.start()
        while True:
            await self.until(
                lambda: len(self.done) == self.size or bool(self.dead or self.failed),
                "the end, or a fault",
                self.run_s,
            )
            if len(self.done) == self.size:
                return
            await self.mend()

    async def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._hearing.cancel()
        await self.bus.close()
