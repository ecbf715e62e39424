"""Messages about other ranks or with invalid numbers have no effect on the manager."""

from __future__ import annotations

import asyncio
from pathlib import Path

from taskd.bus.endpoint import Bus, BusConfig
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import (
    Incarnation,
    Incident,
    NodeRank,
    Position,
    Rank,
    Step,
    agent,
    manager,
    worker,
)
from tests.integration.manager.test_manager import PATIENCE_S, AscendAgent, managing

FIRST, NONE, ZERO = Incarnation(0), Incident(0), Step(0)


def hello(rank: int, node: int = 0, pid: int = 7) -> m.WorkerHello:
    return m.WorkerHello(Rank(rank), NodeRank(node), FIRST, pid, NONE, ZERO, "training", True)


def beat(node: int, rank: int, step: int = 1) -> m.NodeHeartbeat:
    return m.NodeHeartbeat(
        NodeRank(node), (m.Progress(Rank(rank), FIRST, Step(step), 0.1, False, 3),)
    )


SAID: list[tuple[Position, m.Body]] = [
    (worker(0, 9), hello(10**30)),
    (worker(0, 9), hello(10**9)),
    (worker(0, 9), hello(-1)),
    (worker(0, 9), hello(9, node=10**12)),
    (worker(0, 9), hello(9, pid=2**40)),
    (worker(0, 9), hello(0)),
    (worker(0, 9), m.WorkerFailed(Rank(0), FIRST, NONE, FaultCause.COMMUNICATION, "no rank 0")),
    (worker(0, 9), m.WorkerExited(Rank(0), FIRST, 7, 1, None, "it is dead, believe me")),
    (worker(0, 9), m.RanksFailed(())),
    (worker(0, 9), m.RanksFailed((Rank(0),))),
    (worker(0, 9), m.EndJob(0, "go home")),
    (worker(0, 9), beat(0, 0)),
    (agent(5), beat(0, 0)),
    (agent(5), beat(5, 10**30)),
    (agent(5), beat(5, -3)),
    (agent(5), beat(5, 0, step=2**70)),
    (agent(5), m.AgentHello(NodeRank(0), "not me", (), "")),
    (agent(5), m.AgentHello(NodeRank(5), "h", (m.LocalWorker(Rank(10**30), FIRST, 7),), "")),
    (agent(5), m.RanksFailed((Rank(-1), Rank(10**30)))),
    (agent(5), m.Unknown("STATUS", 10**40, "\ud800")),
]


def test_bad_messages_are_rejected_and_do_not_break_the_manager(tmp_path: Path) -> None:
    async def play() -> None:
        async with managing(tmp_path, "--strategies", "recover-in-place") as port:
            honest = AscendAgent(port)
            await honest.join(2)
            assert await honest.hears() == m.StartWorkers(2)
            for me, body in SAID:
                peer = Bus(BusConfig(me=me, upstream=f"127.0.0.1:{port}", job="job"))
                await peer.start()
                assert await peer.join(PATIENCE_S)
                await peer.send(manager(), body)
                await peer.close()
            await honest.bus.send(manager(), m.RanksFailed((Rank(0),), 1735689600))
            assert await honest.hears() == m.RestartAgent(1), (
                "a message of another sender was accepted"
            )
            await honest.bus.close()

    asyncio.run(play())


def test_invalid_unicode_is_replaced_by_question_marks(tmp_path: Path) -> None:
    """The text of an exception may contain invalid Unicode; the fault counts nevertheless."""

    async def play() -> None:
        async with managing(tmp_path, "--strategies", "recover-in-place") as port:
            peer = Bus(BusConfig(me=worker(0, 0), upstream=f"127.0.0.1:{port}", job="job"))
            await peer.start()
            assert await peer.join(PATIENCE_S)
            await peer.send(manager(), hello(0))
            failed = m.WorkerFailed(
                Rank(0), FIRST, NONE, FaultCause.EXCEPTION, "no file 'caf\udce9'"
            )
            await peer.send(manager(), failed)
            async with asyncio.timeout(PATIENCE_S):
                while not isinstance((await peer.receive()).body, m.Park):
                    pass
            await peer.close()

    asyncio.run(play())
