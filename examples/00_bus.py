"""The message bus of a job, with every place a process of its own.

    python examples/00_bus.py

A manager, two nodes with a proxy, an agent and two workers each. Messages of every kind arrive;
then the manager is killed with SIGKILL and started again, and everybody is reached as before,
without anybody else having been restarted. Exits with 1 if anything does not happen in time.
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
IN_TIME_S = 30.0
ORDERS: dict[str, Body] = {
    "start": StartWorkers(3),
    "profile": SetProfiling(default_domain=True, communication=False),
    "stop": StopWorkers(()),
    "report": RestartsLeft(3),
}


# One place, in its own process


async def place(me: Position, listen: str | None, upstream: str | None) -> None:
    """Does what its standard input says, tells what happens on its standard output."""
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
    tell(up=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch(bus))
        group.create_task(obey(bus))
        while me.role != "Proxy":
            got = await bus.receive()
            tell(got=type(got.body).__name__, src=str(got.src))


async def watch(bus: Bus) -> None:
    async for change in bus.changes():
        peer = getattr(change, "peer", "")
        tell(change=type(change).__name__, peer=str(peer))


async def obey(bus: Bus) -> None:
    while text := await asyncio.to_thread(sys.stdin.readline):
        dst, order, sync = json.loads(text)
        sent = await bus.send(Position(*dst), ORDERS[order], sync=sync)
        tell(sent=sent.code.name, source=str(sent.source))
    os._exit(0)  # The one who has started us is gone.


def tell(**words: object) -> None:
    print(json.dumps(words), flush=True)


# The story


@dataclass
class Process:
    me: Position
    process: asyncio.subprocess.Process

    async def send(self, dst: Position, order: str, *, sync: bool = True) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([words_of(dst), order, sync]).encode() + b"\n")
        return await self.told("sent")

    async def told(self, key: str, value: str | None = None) -> dict[str, Any]:
        """The next thing of this kind that it tells."""
        assert self.process.stdout is not None
        async with asyncio.timeout(IN_TIME_S):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"{self.me} has ended"
                words: dict[str, Any] = json.loads(line)
                if key in words and value in (None, words[key]):
                    return words


class Story:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.processes: dict[Position, Process] = {}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.2f} s  {text}", flush=True)

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
        await started.told("up")
        return started

    async def deliver(self, src: Position, dst: Position, order: str) -> None:
        sent = await self.processes[src].send(dst, order)
        assert sent["sent"] == "OK", f"{src} to {dst}: {sent}"
        got = await self.processes[dst].told("got")
        assert got["src"] == str(src), got
        self.say(f"{src!s:12} -> {dst!s:12} {got['got']}, acknowledged by {sent['source']}")

    async def spread(self, src: Position, dst: Position, order: str, to: list[Position]) -> None:
        sent = await self.processes[src].send(dst, order, sync=False)
        assert sent["sent"] == "OK", f"{src} to {dst}: {sent}"
        for one in to:
            got = await self.processes[one].told("got")
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


async def tell_the_story() -> None:
    story = Story()
    try:
        await tell_all(story)
    finally:
        await story.end()


async def tell_all(story: Story) -> None:
    top = f"127.0.0.1:{free_port()}"
    boss = await story.start(manager(), listen=top)
    agents = [agent(node) for node in range(NODES)]
    workers = [worker(rank // RANKS, rank) for rank in range(NODES * RANKS)]
    for node in range(NODES):
        local = f"127.0.0.1:{free_port()}"
        await story.start(Position("Proxy", str(node), "0"), listen=local, upstream=top)
        for leaf in (agents[node], *(one for one in workers if one.server_rank == str(node))):
            started = await story.start(leaf, upstream=local)
            await started.told("change", "Joined")
    story.say(f"{len(story.processes)} processes: a manager, and on each of {NODES} nodes")
    story.say(f"          a proxy, an agent and {RANKS} workers")

    story.say("")
    story.say("Messages of every kind:")
    await story.deliver(manager(), agents[1], "start")
    await story.deliver(agents[1], manager(), "report")
    await story.deliver(manager(), workers[3], "profile")
    await story.deliver(agents[0], workers[1], "profile")
    await story.deliver(workers[0], workers[3], "report")
    await story.spread(manager(), Position("Worker", "All", "All"), "profile", workers)
    await story.spread(manager(), Position("Agent", "0,1"), "start", agents)
    refused = await boss.send(worker(7, 70), "stop")
    assert refused["sent"] == "NoRoute", refused
    story.say(f"{manager()!s:12} -> {worker(7, 70)!s:12} refused with NoRoute, as it should")

    story.say("")
    pids = {me: one.process.pid for me, one in story.processes.items() if me != manager()}
    os.kill(boss.process.pid, signal.SIGKILL)
    await boss.process.wait()
    story.say(f"The manager (pid {boss.process.pid}) is killed with SIGKILL.")
    killed = time.monotonic()
    boss = await story.start(manager(), listen=top)
    story.say(f"A new one (pid {boss.process.pid}) has been started.")
    for _ in range(NODES):
        back = await boss.told("change", "PeerJoined")
        story.say(f"{back['peer']} has joined it, after {time.monotonic() - killed:.2f} s.")

    story.say("")
    story.say("Everybody is reached again:")
    for leaf in (*agents, *workers):
        await story.deliver(manager(), leaf, "start")
        await story.deliver(leaf, manager(), "report")
    await story.spread(manager(), Position("Worker", "All", "All"), "stop", workers)
    after = {me: one.process.pid for me, one in story.processes.items() if me != manager()}
    assert after == pids
    assert all(story.processes[me].process.returncode is None for me in pids)
    story.say("Nobody else was restarted.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        me, listen, upstream = json.loads(sys.argv[1])
        asyncio.run(place(Position(*me), listen, upstream))
    else:
        try:
            asyncio.run(tell_the_story())
        except (AssertionError, TimeoutError) as error:
            print(f"FAILED: {str(error) or 'something came too late'}", file=sys.stderr)
            sys.exit(1)
