"""After a stress test: the ranks that clusterd names are replaced, bad nodes are not used."""

from __future__ import annotations

from taskd.core.manager.states import JobConfig, Repairing, Training, with_job
from taskd.model import messages as m
from taskd.model.clusterd import FaultReport, ResultReport, StopReport, StrategiesReport
from taskd.model.faults import Fault, FaultCause, FaultKind
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, agent, worker
from taskd.model.manager import IncidentRecord, NodesMarkedBad
from tests.unit.core.manager.test_machine import STOP, Play, change, signal

NODE_1 = tuple(Fault(Rank(rank)) for rank in (2, 3))
FOUND = NodesMarkedBad(frozenset({NodeRank(1)}), "rank 2: 1 of 9 products were wrong")
ASKED = signal("globalFault", "on_global_rank", sequence=2, faults=NODE_1)


def condemned(config: JobConfig | None = None) -> Play:
    play = Play(config) if config is not None else Play()
    play.training().orders(signal("stopTrain", "pause_train", sequence=8)).parks(0, 1, 2, 3)
    play.step(FOUND)
    stop = signal("stopTrain", "stop_train", incident=2, uuid="u2", sequence=9)
    return play.orders(stop).parks(0, 1, 2, 3)


def test_living_ranks_named_by_clusterd_are_replaced() -> None:
    play = Play().training().orders(STOP).parks(0, 1, 2, 3).orders(ASKED)
    assert "retry" not in play.sent(StrategiesReport)[0].strategies
    play.orders(change("recover"))
    replaced = [one.rank for order in play.sent(m.ReplaceWorkers) for one in order.workers]
    assert replaced == [2, 3]


def test_no_rank_is_placed_on_a_node_marked_as_bad() -> None:
    asked = signal(
        "globalFault", "on_global_rank", incident=2, uuid="u2", sequence=10, faults=NODE_1
    )
    offered = condemned().orders(asked).sent(StrategiesReport)[0].strategies
    assert "recover" not in offered
    assert "downgrade" in offered


def test_job_continues_without_the_bad_node_and_its_ranks_leave() -> None:
    asked = signal(
        "globalFault", "on_global_rank", incident=2, uuid="u2", sequence=10, faults=NODE_1
    )
    play = condemned().orders(asked)
    play.orders(change("downgrade", incident=2, uuid="u2"))
    assert isinstance(play.state, Repairing)
    assert [member.rank for member in play.state.plan.members] == [0, 1]
    assert len(play.sent(m.Leave)) == 2


def test_agent_repeats_to_a_restarted_manager_that_its_node_is_bad() -> None:
    play = Play().training().step(FOUND)
    assert play.sent(m.NodeMarkedBad) == [m.NodeMarkedBad(FOUND.evidence)]
    fresh = Play()
    for node in (0, 1):
        ranks = tuple(m.LocalWorker(Rank(2 * node + n), Incarnation(0), 7) for n in (0, 1))
        found = FOUND.evidence if node else ""
        hello = m.AgentHello(NodeRank(node), f"host{node}", ranks, "", condemned=found)
        fresh.receive(agent(node), hello)
    assert fresh.state.job.bad_nodes == FOUND.nodes


def test_no_node_is_marked_as_bad_where_a_cluster_replaces_nodes() -> None:
    play = Play(JobConfig(nodes=2, ranks_per_node=2, rescheduling=True)).training().step(FOUND)
    assert not play.state.job.bad_nodes


def test_job_that_cannot_be_paused_continues() -> None:
    play = Play().training(protected=False)
    play.orders(signal("stopTrain", "pause_train", sequence=1))
    assert [report.code for report in play.sent(StopReport)] == [499]
    play.orders(change("continue"))
    assert isinstance(play.state, Training)
    assert [(r.code, r.strategy) for r in play.sent(ResultReport)] == [(0, "continue")]


def miscomputes(play: Play, rank: int, incident: int = 0) -> Play:
    incarnation = Incarnation(play.incarnations.get(rank, 0))
    failed = m.WorkerFailed(
        Rank(rank),
        incarnation,
        Incident(incident),
        FaultCause.MISCOMPUTED,
        "the gradients that rank 1 has computed differ",
    )
    return play.receive(worker(rank // play.config.ranks_per_node, rank), failed)


def test_rank_with_a_wrong_gradient_gets_a_new_process_and_its_state_is_not_used() -> None:
    play = miscomputes(Play().training(), 1)
    (report,) = play.sent(FaultReport)
    assert [(one.rank, one.kind) for one in report.faults] == [(1, FaultKind.ORDINARY)]
    assert not play.state.job.bad_nodes
    play.orders(STOP).parks(0, 2, 3)
    faults = (Fault(Rank(1)),)
    play.orders(signal("globalFault", "on_global_rank", sequence=2, faults=faults))
    assert "retry" not in play.sent(StrategiesReport)[0].strategies
    play.orders(change("recover", extra="recover-in-place"))
    (replaced,) = (one for order in play.sent(m.ReplaceWorkers) for one in order.workers)
    assert replaced == m.Member(Rank(1), NodeRank(0), Incarnation(1))
    assert isinstance(play.state, Repairing)
    assert play.state.plan.sources[Rank(1)] != 1


def test_device_that_computes_wrong_gradients_twice_is_isolated() -> None:
    play = Play().training()
    before = IncidentRecord(
        Incident(1), (Fault.of(Rank(1), FaultCause.MISCOMPUTED, "wrong"),), (), "recovered"
    )
    play.state = with_job(play.state, past_incidents=(before,))
    miscomputes(play, 1)
    assert play.state.job.bad_nodes == {NodeRank(0)}
    assert len(play.sent(m.NodeMarkedBad)) == 1
    other = Play().training()
    other.state = with_job(other.state, past_incidents=(before,))
    assert not miscomputes(other, 2).state.job.bad_nodes


def test_spare_node_takes_over_at_the_first_wrong_gradient() -> None:
    play = Play(JobConfig(nodes=2, ranks_per_node=2)).training().agent_joins(2)
    miscomputes(play, 1)
    assert play.state.job.bad_nodes == {NodeRank(0)}
    play.orders(STOP).parks(0, 2, 3)
    play.orders(signal("globalFault", "on_global_rank", sequence=2, faults=(Fault(Rank(1)),)))
    play.orders(change("recover"))
    assert isinstance(play.state, Repairing)
    assert [(one.rank, one.node) for one in play.state.plan.replaced] == [(1, 2)]
