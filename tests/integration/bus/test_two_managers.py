"""The manager changes: nodes move to the next one, and refuse what the former one has sent."""

from __future__ import annotations

import asyncio

import pytest

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.ids import Incident, agent, manager
from taskd.model.messages import EndJob, Park, RestartsLeft
from taskd.runtime.address import free_port
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from tests.integration.bus.bus_nodes import PATIENCE_S, next_of

JOB = {"job": "job-1", "token": "s3cret"}


async def manager_of(epoch: int) -> Bus:
    bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0", epoch=epoch, **JOB))  # type: ignore[arg-type]
    await bus.start()
    return bus


def test_node_moves_to_the_next_manager_and_obeys_it_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        former, leader = await manager_of(1), await manager_of(2)
        config = BusConfig(me=agent(0), upstream=f"127.0.0.1:{former.port}", **JOB)  # type: ignore[arg-type]
        node = Bus(config)
        await node.start()
        try:
            assert await node.join(PATIENCE_S)
            assert await former.send(agent(0), Park(Incident(1), "of epoch 1"))
            assert (await node.receive_order()).epoch == 1
            await node.redirect(f"127.0.0.1:{leader.port}")
            assert await node.join(PATIENCE_S)
            assert await node.send(manager(), RestartsLeft(1))
            assert (await next_of(leader)).body == RestartsLeft(1)
            assert await leader.send(agent(0), Park(Incident(2), "of epoch 2"))
            assert (await node.receive_order()).epoch == 2
            # A former leader that wakes up, and that a node still reaches somehow.
            await node.redirect(f"127.0.0.1:{former.port}")
            assert await node.join(PATIENCE_S)
            assert await former.send(agent(0), EndJob(1, "I lead"))
            await node.redirect(f"127.0.0.1:{leader.port}")
            assert await node.join(PATIENCE_S)
            assert await leader.send(agent(0), Park(Incident(3), "of epoch 2"))
            async with asyncio.timeout(PATIENCE_S):
                received = await node.receive_order()
            assert received.body == Park(Incident(3), "of epoch 2")
        finally:
            for bus in (node, former, leader):
                await bus.close()

    asyncio.run(scenario())
    assert "EndJob from" in caplog.text
    assert "epoch 1 is over, and epoch 2 has begun" in caplog.text


def test_manager_of_another_run_of_the_job_gets_no_node_that_knows_its_own() -> None:
    """A first node that has lost its files starts the job again, at the same address."""

    async def scenario() -> None:
        other = Bus(BusConfig(me=manager(), listen="127.0.0.1:0", epoch=1, run="b", **JOB))  # type: ignore[arg-type]
        await other.start()
        at = f"127.0.0.1:{other.port}"
        node = Bus(BusConfig(me=agent(0), upstream=f"127.0.0.1:{free_port()}", **JOB))  # type: ignore[arg-type]
        await node.start()
        await node.redirect(at, "a")
        fresh = Bus(BusConfig(me=agent(1), upstream=at, **JOB))  # type: ignore[arg-type]
        await fresh.start()
        try:
            assert await fresh.join(PATIENCE_S)
            async for _ in Tries(every(0.05), deadline=monotonic() + PATIENCE_S):
                if "another run" in node.disconnect_reason:
                    break
            assert "another run of the job" in node.disconnect_reason
            assert other.below() == (agent(1),)
        finally:
            for bus in (node, fresh, other):
                await bus.close()

    asyncio.run(scenario())
