"""Processes of the bus die by SIGKILL and come back; the others stay and find them again."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from taskd.bus.endpoint import Bus, Joined, Left, PeerJoined, PeerLeft, Sent
from taskd.model.codes import NetCode
from taskd.model.ids import EVERY_WORKER, Position, agent, manager, worker
from taskd.model.messages import RestartsLeft, StartWorkers
from tests.integration.bus.bus_nodes import (
    PATIENCE_S,
    bodies_of,
    next_of,
    proxy,
    running_bus,
    until_change,
    until_delivered,
)


class BusProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0

    async def line_with(self, key: str) -> dict[str, Any]:
        """Its next line that has this word."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                line = await self.process.stdout.readline()
                assert line, "the process has ended"
                words: dict[str, Any] = json.loads(line)
                if key in words:
                    return words

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def process_at(me: Position, **settings: str) -> AsyncIterator[BusProcess]:
    settings_of_process = {"me": f"{me.role}/{me.server_rank}/{me.process_rank}", **settings}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.bus_process",
        json.dumps(settings_of_process),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    node = BusProcess(process)
    try:
        node.port = (await node.line_with("port"))["port"]
        yield node
    finally:
        await node.kill()


async def report(bus: Bus, number: int) -> Sent:
    return await bus.send(manager(), RestartsLeft(number), timeout_s=1.0)


def test_restarted_manager_knows_all_positions() -> None:
    async def scenario() -> None:
        async with process_at(manager(), listen="127.0.0.1:0") as first:
            address = f"127.0.0.1:{first.port}"
            async with (
                running_bus(proxy(0), None, upstream=address, serves=True) as prx,
                running_bus(agent(0), prx) as agt,
                running_bus(worker(0, 0), prx) as wrk,
            ):
                assert (await report(wrk, 1)).code == NetCode.OK
                assert (await first.line_with("src"))["number"] == 1
                await first.kill()
                async with running_bus(manager(), None, listen=address) as second:
                    await until_change(second, PeerJoined(proxy(0)))
                    # No process below has joined again, but all of them are known.
                    for leaf in (agt, wrk):
                        sent = await second.send(leaf.me, StartWorkers(7))
                        assert sent.code == NetCode.OK
                        assert (await next_of(leaf)).body == StartWorkers(7)
                    assert (await report(wrk, 2)).code == NetCode.OK

    asyncio.run(scenario())


def test_children_of_a_restarted_proxy_are_reached_again() -> None:
    async def scenario() -> None:
        async with running_bus(manager(), None, serves=True) as mgr:
            up = f"127.0.0.1:{mgr.port}"
            async with process_at(proxy(0), listen="127.0.0.1:0", upstream=up) as first:
                down = f"127.0.0.1:{first.port}"
                async with (
                    running_bus(agent(0), None, upstream=down) as agt,
                    running_bus(worker(0, 0), None, upstream=down) as wrk,
                ):
                    assert (await mgr.send(wrk.me, StartWorkers(1))).code == NetCode.OK
                    watching = asyncio.create_task(until_change(mgr, PeerLeft(proxy(0))))
                    await first.kill()
                    await watching
                    later = Position("Proxy", "0", "1700000001")
                    async with process_at(later, listen=down, upstream=up):
                        for leaf in (agt, wrk):
                            await until_delivered(
                                lambda leaf=leaf: mgr.send(  # type: ignore[misc]
                                    leaf.me, StartWorkers(2), uuid=f"again-{leaf.me}", timeout_s=1.0
                                )
                            )
                        assert await bodies_of([agt]) == [[StartWorkers(2)]]
                        assert await bodies_of([wrk], 2) == [[StartWorkers(1), StartWorkers(2)]]
                        assert (await until_delivered(lambda: report(wrk, 5))).source == manager()
                        everyone = await mgr.send(EVERY_WORKER, StartWorkers(3))
                        assert everyone.code == NetCode.OK
                        assert await bodies_of([wrk]) == [[StartWorkers(3)]]

    asyncio.run(scenario())


def test_killed_worker_is_noticed_at_once_and_its_successor_gets_no_old_orders() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            running_bus(proxy(0), mgr, serves=True) as prx,
        ):
            up = f"127.0.0.1:{prx.port}"
            async with process_at(worker(0, 3), upstream=up) as first:
                while (await first.line_with("change"))["change"] != "Joined":
                    pass
                watching = asyncio.create_task(until_change(prx, PeerLeft(worker(0, 3))))
                await first.kill()
                await watching
                gone = await mgr.send(worker(0, 3), StartWorkers(1))
                assert (gone.code, gone.source) == (NetCode.NetStreamNotInited, prx.me)
                lost = await mgr.send(worker(0, 3), StartWorkers(2), sync=False)
                assert lost.code == NetCode.OK
            async with running_bus(worker(0, 3), prx) as second:
                assert (await mgr.send(worker(0, 3), StartWorkers(3))).code == NetCode.OK
                assert await bodies_of([second]) == [[StartWorkers(3)]]

    asyncio.run(scenario())


def test_messages_sent_while_connections_are_cut_arrive_once_and_in_order() -> None:
    """Both links on the way are cut again and again, in the middle of whatever they carry."""

    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            Cable(mgr.port) as above,
            running_bus(proxy(0), None, upstream=f"127.0.0.1:{above.port}", serves=True) as prx,
            Cable(prx.port) as below,
            running_bus(worker(0, 0), None, upstream=f"127.0.0.1:{below.port}") as wrk,
        ):
            total = 0
            for turn in range(12):
                for _ in range(100):
                    assert (await wrk.send(manager(), RestartsLeft(total), sync=False)).code == 0
                    assert (await mgr.send(wrk.me, StartWorkers(total), sync=False)).code == 0
                    total += 1
                    if total % 30 == 0:
                        await asyncio.sleep(0)
                (above, below)[turn % 2].cut()
                assert await prx.join(PATIENCE_S)
                assert await wrk.join(PATIENCE_S)
            [up] = await bodies_of([mgr], total)
            [down] = await bodies_of([wrk], total)
            assert up == [RestartsLeft(number) for number in range(total)]
            assert down == [StartWorkers(number) for number in range(total)]
            assert above.cuts >= 3
            assert below.cuts >= 3

    asyncio.run(scenario())


class Cable:
    """A TCP relay in between, whose connections can be cut in the middle of anything."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.cuts = 0

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self.cuts += bool(self._open)
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, there[1]}
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()


def test_upstream_changes_are_reported() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            Cable(mgr.port) as wire,
            running_bus(agent(0), None, upstream=f"127.0.0.1:{wire.port}") as agt,
        ):
            changes = agt.changes()
            seen = []
            async with asyncio.timeout(PATIENCE_S):
                async for change in changes:
                    seen.append(type(change))
                    if len(seen) == 1:
                        wire.cut()
                    if len(seen) == 3:
                        break
            assert seen == [Joined, Left, Joined]

    asyncio.run(scenario())


def test_stopped_manager_is_waited_for() -> None:
    async def scenario() -> None:
        async with process_at(manager(), listen="127.0.0.1:0") as boss:
            up = f"127.0.0.1:{boss.port}"
            async with (
                running_bus(proxy(0), None, upstream=up, serves=True) as prx,
                running_bus(agent(0), prx) as agt,
            ):
                boss.process.send_signal(signal.SIGSTOP)
                silent = await agt.send(manager(), RestartsLeft(1), timeout_s=1.0)
                assert silent.code == NetCode.NetworkAckLost
                async with running_bus(worker(0, 0), None, upstream=f"127.0.0.1:{prx.port}") as wrk:
                    # The node works on its own while upstream does not answer.
                    assert (await agt.send(worker(0, 0), RestartsLeft(2))).code == NetCode.OK
                    boss.process.send_signal(signal.SIGCONT)
                    assert (await boss.line_with("number"))["number"] == 1
                    await until_delivered(lambda: report(wrk, 3))
                    assert (await boss.line_with("number"))["number"] == 3

    asyncio.run(scenario())
