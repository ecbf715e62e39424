"""The message bus of a job, with one process per position.

    python examples/00_bus.py

A manager, and two nodes with a proxy, an agent and two workers each. Messages of every kind are
delivered. Then the manager is killed with SIGKILL and started again, and all positions can be
reached as before, without a restart of any other process. Exits with 1 if anything fails or takes
too long.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.ids import Position, agent, manager, worker
from taskd.model.messages import Body, RestartsLeft, SetProfiling, StartWorkers, StopWorkers
from taskd.proxy import Proxy, ProxyConfig

NODES, RANKS = 2, 2
TIMEOUT_S = 30.0
ORDERS: dict[str, Body] = {
    "start": StartWorkers(3),
    "profile": SetProfiling(default_domain=True, communication=False),
    "stop": StopWorkers(()),
    "report": RestartsLeft(3),
}


# One position, in its own process


async def run_position(me: Position, listen: str | None, upstream: str | None) -> None:
    """Take orders from standard input, report what happens on standard output."""
    if me.role == "Proxy":
        assert listen is not None
        assert upstream is not None
        rank = int(me.server_rank)
        proxy = Proxy(ProxyConfig(server_rank=rank, listen=listen, upstream=upstream))
        await proxy.start()
        bus = proxy.bus
    else:
        bus = Bus(BusConfig(me=me, listen=listen, upstream=upstream))
        await bus.start()
    report(up=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(report_changes(bus))
        group.create_task(send_as_ordered(bus))
        while me.role != "Proxy":
            got = await bus.receive()
            report(got=type(got.body).__name__, src=str(got.src))


async def report_changes(bus: Bus) -> None:
    async for change in bus.changes():
        peer = getattr(change, "peer", "")
        report(change=type(change).__name__, peer=str(peer))


async def send_as_ordered(bus: Bus) -> None:
    while text := await asyncio.to_thread(sys.stdin.readline):
        dst, order, sync = json.loads(text)
        sent = await bus.send(Position(*dst), ORDERS[order], sync=sync)
        report(sent=sent.code.name, source=str(sent.source))
    os._exit(0)  # The parent process is gone.


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


# The demonstration


@dataclass
class Process:
    me: Position
    process: asyncio.subprocess.Process

    async def send(self, dst: Position, order: str, *, sync: bool = True) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([words_of(dst), order, sync]).encode() + b"\n")
        return await self.next_report("sent")

    async def next_report(self, key: str, value: str | None = None) -> dict[str, Any]:
        """The next report with this key, and with this value if one is given."""
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"{self.me} has ended"
                fields: dict[str, Any] = json.loads(line)
                if key in fields and value in (None, fields[key]):
                    return fields


class Demo:
    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.processes: dict[Position, Process] = {}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started_at:6.2f} s  {text}", flush=True)

    async def start(self, me: Position, listen: str = "", upstream: str = "") -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            json.dumps([words_of(me), listen or None, upstream or None]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        started = self.processes[me] = Process(me, process)
        await started.next_report("up")
        return started

    async def deliver(self, src: Position, dst: Position, order: str) -> None:
        sent = await self.processes[src].send(dst, order)
        assert sent["sent"] == "OK", f"{src} to {dst}: {sent}"
        got = await self.processes[dst].next_report("got")
        assert got["src"] == str(src), got
        self.say(f"{src!s:12} -> {dst!s:12} {got['got']}, acknowledged by {sent['source']}")

    async def broadcast(self, src: Position, dst: Position, order: str, to: list[Position]) -> None:
        sent = await self.processes[src].send(dst, order, sync=False)
        assert sent["sent"] == "OK", f"{src} to {dst}: {sent}"
        for one in to:
            got = await self.processes[one].next_report("got")
            assert got["src"] == str(src), got
        self.say(f"{src!s:12} -> {dst!s:12} reached {', '.join(map(str, to))}")

    async def end(self) -> None:
        for one in self.processes.values():
            if one.process.returncode is None:
                one.process.kill()
            await one.process.wait()


def words_of(position: Position) -> list[str]:
    return [position.role, position.server_rank, position.process_rank]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def main() -> None:
    demo = Demo()
    try:
        await show(demo)
    finally:
        await demo.end()


async def show(demo: Demo) -> None:
    address = f"127.0.0.1:{free_port()}"
    top = await demo.start(manager(), listen=address)
    agents = [agent(node) for node in range(NODES)]
    workers = [worker(rank // RANKS, rank) for rank in range(NODES * RANKS)]
    for node in range(NODES):
        local = f"127.0.0.1:{free_port()}"
        await demo.start(Position("Proxy", str(node), "0"), listen=local, upstream=address)
        for leaf in (agents[node], *(one for one in workers if one.server_rank == str(node))):
            started = await demo.start(leaf, upstream=local)
            await started.next_report("change", "Joined")
    demo.say(f"{len(demo.processes)} processes: a manager, and on each of {NODES} nodes")
    demo.say(f"          a proxy, an agent and {RANKS} workers")

    demo.say("")
    demo.say("Messages of every kind:")
    await demo.deliver(manager(), agents[1], "start")
    await demo.deliver(agents[1], manager(), "report")
    await demo.deliver(manager(), workers[3], "profile")
    await demo.deliver(agents[0], workers[1], "profile")
    await demo.deliver(workers[0], workers[3], "report")
    await demo.broadcast(manager(), Position("Worker", "All", "All"), "profile", workers)
    await demo.broadcast(manager(), Position("Agent", "0,1"), "start", agents)
    refused = await top.send(worker(7, 70), "stop")
    assert refused["sent"] == "NoRoute", refused
    demo.say(f"{manager()!s:12} -> {worker(7, 70)!s:12} refused with NoRoute, as expected")

    demo.say("")
    pids = {me: one.process.pid for me, one in demo.processes.items() if me != manager()}
    os.kill(top.process.pid, signal.SIGKILL)
    await top.process.wait()
    demo.say(f"The manager (pid {top.process.pid}) is killed with SIGKILL.")
    killed = time.monotonic()
    top = await demo.start(manager(), listen=address)
    demo.say(f"A new one (pid {top.process.pid}) has been started.")
    for _ in range(NODES):
        back = await top.next_report("change", "PeerJoined")
        demo.say(f"{back['peer']} has joined it, after {time.monotonic() - killed:.2f} s.")

    demo.say("")
    demo.say("All positions can be reached again:")
    for leaf in (*agents, *workers):
        await demo.deliver(manager(), leaf, "start")
        await demo.deliver(leaf, manager(), "report")
    await demo.broadcast(manager(), Position("Worker", "All", "All"), "stop", workers)
    after = {me: one.process.pid for me, one in demo.processes.items() if me != manager()}
    assert after == pids
    assert all(demo.processes[me].process.returncode is None for me in pids)
    demo.say("No other process was restarted.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        me, listen, upstream = json.loads(sys.argv[1])
        asyncio.run(run_position(Position(*me), listen, upstream))
    else:
        try:
            asyncio.run(main())
        except (AssertionError, TimeoutError) as error:
            print(f"FAILED: {str(error) or 'a timeout has passed'}", file=sys.stderr)
            sys.exit(1)
