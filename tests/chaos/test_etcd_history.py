"""Histories of the real etcd of a job, while its members are killed and stopped: linearizable."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from random import Random

import psutil
import pytest

from taskd.clusterd.etcd.etcd_client import EtcdClient, has_value, put
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdUnanswered
from taskd.runtime.address import free_port
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from tests.chaos.linearizable import Call, is_linearizable
from tests.integration.etcd.etcd_server import binary
from tests.integration.etcd.member_node import MemberNode, cluster
from tests.integration.etcd.test_etcd_client import ready

KEY, CLIENTS, FAULTS = "x", 3, 6


def test_search_finds_what_is_not_linearizable() -> None:
    first = Call(0, 1, expected=0, write=1)
    assert is_linearizable([first, Call(2, 3, expected=1)])
    assert not is_linearizable([first, Call(2, 3, expected=0)]), "a stale read"
    assert not is_linearizable([first, Call(2, 3, expected=0, write=2)]), "a lost update"
    both = Call(0, 3, expected=0, write=2)
    assert not is_linearizable([first, both]), "two writes have replaced the same value"
    lost = Call(0, inf, expected=0, write=1, succeeded=None)
    assert is_linearizable([lost, Call(2, 3, expected=1)])
    assert is_linearizable([lost, Call(2, 3, expected=0)])
    assert not is_linearizable([lost, Call(2, 3, expected=1), Call(4, 5, expected=0)])


async def work(
    number: int, client: EtcdClient, random: Random, history: list[Call], stop: asyncio.Event
) -> None:
    """Compare-and-set with values that no other client writes, and reads."""
    count, known = 0, 0
    while not stop.is_set():
        start = monotonic()
        try:
            if random.random() < 0.4:
                (found,) = await client.range(KEY)
                known = int(found.value)
                history.append(Call(start, monotonic(), known))
                continue
            count += 1
            value = 1_000 * (number + 1) + count
            call = Call(start, inf, known, value, None)
            try:
                answer = await client.transact(
                    [has_value(KEY, str(known).encode())], [put(KEY, str(value).encode())]
                )
            except EtcdBusy:
                continue
            except EtcdUnanswered:
                history.append(call)
                raise
            done = Call(start, monotonic(), known, value, answer.succeeded)
            history.append(done)
            known = value if answer.succeeded else known
        except (EtcdUnanswered, EtcdBusy):
            await asyncio.sleep(0.05)
        await asyncio.sleep(random.uniform(0, 0.05))


async def disturb(nodes: list[MemberNode], random: Random, history: list[Call]) -> None:
    for _ in range(FAULTS):
        reached = len(history) + 10
        async for _ in Tries(every(0.02)):
            if len(history) >= reached:
                break
        with suppress(psutil.NoSuchProcess, ValueError):
            (etcd,) = psutil.Process(random.choice(nodes).popen.pid).children()
            if random.random() < 0.5:
                etcd.kill()  # its launcher starts it again, with its data
            else:
                etcd.suspend()
                await asyncio.sleep(random.uniform(0.2, 1.0))
                etcd.resume()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, 2])
def test_history_of_a_disturbed_etcd_is_linearizable(seed: int) -> None:
    async def scenario() -> None:
        random, history, stop = Random(seed), list[Call](), asyncio.Event()
        addresses = [node.facts["client"] for node in nodes]
        clients = [
            EtcdClient(addresses[at:] + addresses[:at], nodes[0].settings, call_s=1.0)
            for at in range(CLIENTS)
        ]
        for client in clients:
            await ready(client)
        await clients[0].transact([], [put(KEY, b"0")])
        working = [
            asyncio.create_task(work(at, client, Random(seed + at), history, stop))
            for at, client in enumerate(clients)
        ]
        await disturb(nodes, random, history)
        stop.set()
        await asyncio.gather(*working)
        for client in clients:
            await client.close()
        assert len(history) >= 10 * FAULTS
        assert is_linearizable(history), history

    binary()
    with cluster(f"127.0.0.1:{free_port()}", 3) as nodes:
        asyncio.run(scenario())
