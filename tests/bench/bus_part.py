"""The other processes of the bus benchmark: `python -m tests.bench.bus_part PART [ARGUMENTS]`.

Each prints its port or `ready` first. CLOCK_MONOTONIC is the same in all processes of a machine, so
their times can be compared.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import psutil

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.ids import EVERY_WORKER, Position, Role, agent, manager, worker
from taskd.model.messages import Park
from taskd.wire._pb import tasknet_pb2 as pb
from taskd.wire._pb.tasknet_pb2_grpc import TaskNetServicer, add_TaskNetServicer_to_server

WORKERS = 8


def write(*words: object) -> None:
    print(*words, flush=True)


async def line() -> str:
    text: str = await asyncio.to_thread(sys.stdin.readline)
    return text.strip()


class Echo(TaskNetServicer):
    """Bare gRPC: answers a call."""

    async def TransferMessage(self, request: pb.Message, context: Any) -> pb.Ack:
        return pb.Ack(uuid=request.header.uuid)


async def _count(messages: Any, context: Any) -> pb.Ack:
    """A bare stream of messages in one direction, to compare the bus with."""
    count = 0
    async for _ in messages:
        count += 1
    return pb.Ack(code=count)


async def bare() -> None:
    server = grpc.aio.server()
    add_TaskNetServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
    stream = grpc.stream_unary_rpc_method_handler(
        _count,
        request_deserializer=pb.Message.FromString,
        response_serializer=pb.Ack.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("Bare", {"Stream": stream})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write(port)
    await line()


async def proxy(upstream: str) -> None:
    me = Position(Role.PROXY, "0", "1")
    bus = Bus(BusConfig(me=me, listen="127.0.0.1:0", upstream=upstream))
    await bus.start()
    await bus.join()
    write(bus.port)
    await line()


async def leaf(upstream: str, every: str) -> None:
    """A worker that prints the time after every `every` messages."""
    bus = Bus(BusConfig(me=worker(0, 0), upstream=upstream))
    await bus.start()
    await bus.join()
    write("ready")
    while True:
        for _ in range(int(every)):
            await bus.receive()
        write(time.monotonic())


async def fleet(upstream: str, first: str, count: str) -> None:
    """Many proxies, each with an agent and eight workers that are only announced."""
    async with AsyncExitStack() as stack:
        buses = []
        for node in range(int(first), int(first) + int(count)):
            me = Position(Role.PROXY, str(node), "1")
            bus = Bus(BusConfig(me=me, upstream=upstream))
            relay = bus._relay_loop._relay
            leaves = [agent(node)]
            leaves += [worker(node, node * WORKERS + local) for local in range(WORKERS)]
            for child in leaves:
                relay.register(child, float("inf"))
                relay.announce(child, [child])
                relay.queue(child)
                relay.stream_opened(child)
            await bus.start()
            stack.push_async_callback(bus.close)
            buses.append((bus, bus._relay_loop.wake_for(leaves[1])))
        for bus, _ in buses:
            assert await bus.join(60.0), bus.disconnect_reason
        write("ready")
        while await line():
            for _, arrived in buses:
                await arrived.wait()
                arrived.clear()
            write(time.monotonic())


async def boss() -> None:
    """A manager that broadcasts on request and prints its start time and memory."""
    bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0"))
    await bus.start()
    write(bus.port)
    while await line():
        began = time.monotonic()
        await bus.send(EVERY_WORKER, Park(incident=1, because="bench"), sync=False)  # type: ignore[arg-type]
        handed = time.monotonic()
        write(began, handed, psutil.Process().memory_info().rss, len(bus.below()))


if __name__ == "__main__":
    part, *arguments = sys.argv[1:]
    asyncio.run({f.__name__: f for f in (bare, proxy, leaf, fleet, boss)}[part](*arguments))
