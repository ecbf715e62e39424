"""Agents keep the shards of all ranks: a restarted manager knows those of ranks that are lost."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.agent import machine as local
from taskd.core.agent.machine import Node, Waiting, WorkersConfig
from taskd.core.manager import machine
from taskd.core.manager.states import Repairing
from taskd.model import messages as m
from taskd.model.agent import ManagerConnected, SendHello
from taskd.model.clusterd import StrategiesReport
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step, agent, worker
from taskd.model.manager import NodeGone, SendMessage
from tests.unit.core.manager.test_machine import ASK, CONFIG, IN_PLACE, STOP, Play

SHARDS = tuple(m.RankShard(Rank(rank), f"half {rank % 2}", rank // 2) for rank in range(4))


def says_shard(play: Play, rank: int, phase: str = "training") -> Play:
    hello = m.WorkerHello(
        Rank(rank),
        NodeRank(rank // 2),
        Incarnation(0),
        1,
        play.state.job.incident,
        Step(7),
        phase,
        protected=True,
        shard=SHARDS[rank].shard,
        replica=SHARDS[rank].replica,
    )
    return play.receive(worker(rank // 2, rank), hello)


def training() -> Play:
    play = Play().agent_joins(0).started(0).agent_joins(1).started(1)
    for rank in range(4):
        says_shard(play, rank)
    return play


def kept(play: Play) -> list[tuple[object, m.KeepShards]]:
    sent = [c for c in play.last.commands if isinstance(c, SendMessage)]
    return [(c.to, c.body) for c in sent if isinstance(c.body, m.KeepShards)]


def hello(node: int, shards: tuple[m.RankShard, ...], *ranks: int) -> m.AgentHello:
    workers = tuple(m.LocalWorker(Rank(rank), Incarnation(0), 1) for rank in ranks)
    return m.AgentHello(NodeRank(node), f"host{node}", workers, "", shards=shards)


def test_agents_get_each_shard_once() -> None:
    play = training()
    assert not kept(says_shard(play, 3)), "nothing has changed"
    play = Play().agent_joins(0).started(0).agent_joins(1).started(1)
    order = m.KeepShards((SHARDS[2],))
    assert kept(says_shard(play, 2)) == [(agent(0), order), (agent(1), order)]


def test_nothing_is_kept_when_every_rank_holds_everything() -> None:
    play = Play().agent_joins(0).started(0).agent_joins(1).started(1)
    assert not kept(play.hello(0))


def test_agent_that_joins_late_or_starts_again_gets_all_shards() -> None:
    play = training()
    assert kept(play.receive(agent(1), hello(1, (), 2, 3))) == [(agent(1), m.KeepShards(SHARDS))]
    assert not kept(play.receive(agent(1), hello(1, SHARDS, 2, 3)))


def test_next_node_keeps_the_shards_when_a_keeper_is_lost() -> None:
    play = Play(replace(CONFIG, nodes=5, ranks_per_node=1))
    for node in range(5):
        play.agent_joins(node).started(node)
    order = replace(hello(4, ()), shards=())
    play.receive(worker(0, 0), m.WorkerHello(*_first(), "training", True, "half 0", 0))
    assert [to for to, _ in kept(play)] == [agent(node) for node in range(4)]
    play.step(NodeGone(NodeRank(2), "refused"))
    shard = m.KeepShards((m.RankShard(Rank(0), "half 0", 0),))
    assert kept(play) == [(agent(4), shard)]
    assert not kept(play.receive(agent(4), replace(order, shards=shard.shards)))


def _first() -> tuple[Rank, NodeRank, Incarnation, int, Incident, Step]:
    return Rank(0), NodeRank(0), Incarnation(0), 1, Incident(0), Step(7)


def test_restarted_manager_repairs_a_sharded_rank_that_it_never_heard() -> None:
    play = Play()
    play.state = machine.begin(CONFIG, 100.0)
    play.receive(agent(0), hello(0, SHARDS, 0, 1)).receive(agent(1), hello(1, SHARDS, 2))
    play.dies(3)
    for rank in range(3):
        says_shard(play, rank)
    play.orders(STOP).parks(0, 1, 2).orders(ASK)
    assert "dump" in play.sent(StrategiesReport)[0].strategies, "every shard is held"
    play.orders(IN_PLACE)
    assert isinstance(play.state, Repairing)
    assert play.state.plan.sources == {3: 1}
    assert play.state.plan.resume == 7


def test_agent_repeats_what_it_keeps() -> None:
    config = WorkersConfig()
    state: local.State = Waiting(Node(NodeRank(1), (Rank(2), Rank(3)), 5))
    for order in (m.KeepShards(SHARDS[2:]), m.KeepShards(SHARDS[:2])):
        state = local.step(state, order, 1.0, config).state
    [said] = [
        command
        for command in local.step(state, ManagerConnected(), 2.0, config).commands
        if isinstance(command, SendHello)
    ]
    assert said.shards == SHARDS
