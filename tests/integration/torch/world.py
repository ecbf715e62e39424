"""A small real job for tests: rank processes, a store, a bus, and a test that acts as manager.

The ranks are forked from a server that has already imported torch. Every repair plan is made by the
real `core/manager/repair/repair_plan`; only the orders are sent by the test.
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
from torch.distributed import TCPStore

from taskd.bus.endpoint import Bus, BusConfig
from taskd.core.manager.repair.repair_plan import (
    Holder,
    Placement,
    Plan,
    complete_step,
    needs,
    plan,
    shrink,
)
from taskd.model import messages as m
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, manager, worker

PATIENCE_S = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo", "taskd.torch", __name__])

Script = Callable[[dict[str, Any]], None]


def _rank_main(script: Script, env: dict[str, str], args: dict[str, Any]) -> None:
    os.environ.update(env)
    stacks = open(Path(args["folder"]) / f"stacks-{args['rank']}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch

    torch.set_num_threads(1)
    script(args)


def join_plain_group() -> TCPStore:
    """In a rank: initialise torch's own gloo group, without TaskD. Returns its store."""
    host, _, port = os.environ["TASKD_STORE"].partition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return store


@dataclass
class World:
    """A job of a few ranks: start it, inject faults, wait for the end."""

    script: Script
    folder: Path
    size: int = 4
    args: dict[str, Any] = field(default_factory=dict)
    """For the script, beside its rank, incarnation and folder."""
    ranks_per_node: int = 4
    run_s: float = 150.0
    """How long the whole run may take."""

    def __post_init__(self) -> None:
        self.incident = Incident(0)
        self.incarnations: dict[int, int] = dict.fromkeys(range(self.size), 0)
        self.nodes = {rank: rank // self.ranks_per_node for rank in range(self.size)}
        self.processes: dict[int, ForkServerProcess] = {}
        self.hellos: dict[int, m.WorkerHello] = {}
        self.held: dict[int, m.WorkerHello] = {}
        """The last hello of each rank that had state."""
        self.parked: dict[int, m.Parked] = {}
        self.failed: dict[int, m.WorkerFailed] = {}
        self.repaired: dict[int, m.Repaired] = {}
        self.committed: dict[int, m.Committed] = {}
        self.broken: list[m.RepairFailed] = []
        self.dumped: dict[int, m.Dumped] = {}
        self.dead: set[int] = set()
        self.done: set[int] = set()
        self.away: set[int] = set()
        """Ranks that the job continues without."""
        self.left: dict[int, int | None] = {}
        """Exit codes of those that the last shrink ordered to leave."""
        self._sending: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        self.history: list[str] = []
        self.received: list[m.Body] = []
        self.plans: list[Plan] = []

    async def start(self) -> None:
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0", job="test"))
        await self.bus.start()
        self._receiving = asyncio.create_task(self._receive())
        for rank in range(self.size):
            self.spawn(rank)

    def spawn(self, rank: int) -> None:
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "TASKD_PROXY": f"127.0.0.1:{self.bus.port}",
            "TASKD_JOB_ID": "test",
            "TASKD_SEAL": "key of the test",
            "TASKD_NODE_RANK": str(self.nodes[rank]),
            "TASKD_INCARNATION": str(self.incarnations[rank]),
            "TASKD_INCIDENT": str(self.incident),
            "TASKD_STORE": f"127.0.0.1:{self.store.port}",
            # The matrix extensions are advertised but not usable on some virtual machines.
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "TASKD_DUMP_DIR": str(self.folder.parent / "dump"),
            "TASKD_BEACON": str(self.memory(self.nodes[rank]) / f"beacon-{rank}"),
        }
        args = {
            **self.args,
            "rank": rank,
            "incarnation": self.incarnations[rank],
            "folder": str(self.folder),
        }
        args["ports"] = (self.bus.port, self.store.port)
        process = context.Process(target=_rank_main, args=(self.script, env, args))
        process.start()
        self.dead.discard(rank)
        self.processes[rank] = process
        incarnation = self.incarnations[rank]
        asyncio.get_running_loop().add_reader(
            process.sentinel, self._ended, rank, incarnation, process
        )

    def memory(self, node: int) -> Path:
        """The folder that represents the shared memory of a node."""
        folder = self.folder / f"node-{node}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def lose_node(self, node: int, to: int) -> None:
        """Its ranks are dead already; delete its memory and move its ranks to another node."""
        shutil.rmtree(self.memory(node))
        for rank, at in self.nodes.items():
            if at == node:
                self.nodes[rank] = to

    def _ended(self, rank: int, incarnation: int, process: ForkServerProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        self._log(f"rank {rank} incarnation {incarnation} ended with {process.exitcode}")
        if rank in self.away:
            self.left[rank] = process.exitcode
        else:
            (self.done if process.exitcode == 0 else self.dead).add(rank)
        self.changed.set()

    async def _receive(self) -> None:
        while True:
            body = (await self.bus.receive()).body
            self._log(str(body))
            self.received.append(body)
            match body:
                case m.WorkerHello():
                    self.hellos[body.rank] = body
                    if body.phase != "joining" or body.rank not in self.held:
                        self.held[body.rank] = body
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

    def _log(self, what: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():.4f} {what}")

    async def until(
        self, what: Callable[[], bool], why: str, patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until the condition holds, or fail with the history."""
        try:
            async with asyncio.timeout(patience_s):
                while not what():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            for process in self.processes.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGUSR1)  # it writes its stack
            raise AssertionError("\n".join([f"waited for: {why}", *self.history])) from None

    # The manager's part

    async def send(self, rank: int, body: m.Body) -> None:
        self._log(f"-> {rank}: {body}")
        incarnation, incident = self.incarnations[rank], self.incident
        while (rank not in self.dead | self.done) and (incarnation, incident) == (
            self.incarnations[rank],
            self.incident,
        ):
            sent = await self.bus.send(worker(self.nodes[rank], rank), body)
            self._log(f"-> {rank}: {type(body).__name__} {sent}")
            if sent:
                return

    def _send_in_background(self, rank: int, body: m.Body) -> None:
        """Do not wait for a rank that may be dead."""
        task = asyncio.create_task(self.send(rank, body))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def park(self, because: str = "a test") -> dict[int, m.Parked]:
        """Begin a new incident; returns the reports of all living ranks."""
        self.incident = Incident(self.incident + 1)
        self.parked.clear()
        self.failed.clear()
        self.repaired.clear()
        self.committed.clear()
        alive = self.alive()
        for rank in alive:
            self._send_in_background(rank, m.Park(self.incident, because))
        await self.until(
            lambda: all(
                r in self.dead or (self.parked.get(r) and self.parked[r].incident == self.incident)
                for r in alive
            ),
            f"all ranks park for incident {self.incident}",
        )
        return dict(self.parked)

    def alive(self) -> list[int]:
        gone = self.dead | self.done | self.away
        return [rank for rank in range(self.size) if rank not in gone]

    async def recover(self, because: str = "a test") -> None:
        """Park, plan, replace the dead, repair; repeat until all ranks have committed a step."""
        while True:
            parked = await self.park(because)
            if await self._repair(parked):
                return

    async def shrink(self) -> None:
        """Continue without the dead ranks."""
        parked = await self.park("shrink")
        lost = [Placement(*self._place(rank), *self._part(rank)) for rank in sorted(self.dead)]
        made = shrink([one for one in self._holders(parked) if one.rank not in self.dead], lost)
        assert isinstance(made, Plan)
        self.away |= self.dead | set(made.leaving)
        self.left.clear()
        for rank in made.leaving:
            self._send_in_background(rank, m.Leave(self.incident, made.because))
        self.dead.clear()
        await self._order(made, "downgrade")
        await self.until(lambda: set(made.leaving) <= self.left.keys(), "healthy ranks leave, too")

    async def grow(self) -> None:
        """All missing ranks come back."""
        parked = await self.park("grow")
        self.dead |= self.away
        self.away.clear()
        assert await self._repair(parked)

    async def _repair(self, parked: dict[int, m.Parked]) -> bool:
        lost = sorted(self.dead)
        for rank in lost:
            self.incarnations[rank] += 1
            self.spawn(rank)
        holders = [one for one in self._holders(parked) if one.rank not in lost]
        seats = [
            Placement(*self._place(rank), *self._part(rank), self._own_since(rank)) for rank in lost
        ]
        made = plan(holders, seats)
        assert isinstance(made, Plan), f"{made}\n" + "\n".join(self.history)
        self._log(str(made))
        self.plans.append(made)
        new = [int(one.rank) for one in made.replaced]
        await self._replace([rank for rank in new if rank not in lost])
        await self.until(
            lambda: all(
                r in self.dead
                or (r in self.hellos and self.hellos[r].incarnation == self.incarnations[r])
                for r in new
            ),
            "a hello from each replacement",
        )
        return await self._order(made, "recover")

    async def _replace(self, running: list[int]) -> None:
        """End these processes and start their next incarnations."""
        for rank in running:
            self.processes[rank].kill()
        await self.until(lambda: set(running) <= self.dead, "the end of the replaced processes")
        for rank in running:
            self.incarnations[rank] += 1
            self.spawn(rank)

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
            own_sources=made.own_sources,
            own_since=made.own_since,
            shards=made.shards,
            turn=made.turn,
            sections=made.sections,
        )
        incident = self.incident
        for one in made.members:
            self._send_in_background(one.rank, order)
        await self.until(
            lambda: (
                bool(self.dead or self.broken or self.failed)
                or all(self.has_resumed(one.rank, incident) for one in made.members)
            ),
            "all ranks commit a step",
        )
        again = bool(self.dead or self.broken or self.failed)
        self.broken.clear()
        return not again

    def _holders(self, parked: dict[int, m.Parked]) -> list[Holder]:
        return [
            Holder(
                *self._place(rank),
                report.step,
                report.whole,
                report.undo,
                *self._part(rank),
                report.copies,
                report.earliest,
                self._own_since(rank),
                report.turn,
                report.sections,
                report.outside,
            )
            for rank, report in parked.items()
        ]

    async def dump(self) -> None:
        """The survivors write the emergency checkpoint and end."""
        ranks = await self.order_dump()
        await self.until(
            lambda: ranks <= self.dumped.keys() and ranks <= self.done | self.dead,
            "the survivors write and end",
        )

    async def order_dump(self) -> set[int]:
        """Order the survivors to write the emergency checkpoint; returns their ranks."""
        parked = await self.park("dump")
        seats = [
            Placement(*self._place(rank), *self._part(rank), self._own_since(rank))
            for rank in range(self.size)
        ]
        step = complete_step(self._holders(parked), needs(seats))
        assert step is not None
        writers = [h for h in self._holders(parked) if (h.shard, step) in h.offers()]
        members = tuple(m.Member(h.rank, h.node, h.incarnation) for h in writers)
        order = m.Dump(self.incident, step, str(self.folder.parent / "dump"), members)
        await asyncio.gather(*(self.send(one.rank, order) for one in members))
        return {one.rank for one in members}

    def _place(self, rank: int) -> tuple[Rank, NodeRank, Incarnation]:
        return Rank(rank), NodeRank(self.nodes[rank]), Incarnation(self.incarnations[rank])

    def _part(self, rank: int) -> tuple[str, int]:
        """Its shard and replica. A rank that died before its hello is taken as unsharded."""
        hello = self.held.get(rank)
        return (hello.shard, hello.replica) if hello else ("", -1)

    def _own_since(self, rank: int) -> int:
        hello = self.held.get(rank)
        return hello.own_since if hello else -1

    def has_resumed(self, rank: int, incident: int) -> bool:
        if rank in self.done:
            return True
        report = self.committed.get(rank)
        return report is not None and report.incident == incident

    async def run(self) -> None:
        """Start, repair every fault, and return when all ranks have finished."""
        await self.start()
        while True:
            await self.until(
                lambda: len(self.done) == self.size or bool(self.dead or self.failed),
                "the end, or a fault",
                self.run_s,
            )
            if len(self.done) == self.size:
                return
            await self.recover()

    async def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._receiving.cancel()
        await self.bus.close()
