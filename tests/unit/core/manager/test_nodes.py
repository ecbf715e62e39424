"""Nodes that leave, come back and replace each other: decisions of manager and agent."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from taskd.core.agent import machine as local
from taskd.core.agent.machine import Node, Waiting, WorkersConfig
from taskd.core.manager.joining import INCARNATIONS_PER_TERM
from taskd.core.manager.states import (
    Awaiting,
    Gathering,
    JobConfig,
    Repairing,
    Reported,
    Training,
)
from taskd.model import messages as m
from taskd.model.agent import (
    Event,
    Interrupted,
    ManagerConnected,
    ManagerDisconnected,
    SendHello,
    SendToManager,
    StartWorker,
)
from taskd.model.clusterd import FaultReport, ResultReport, StrategiesReport
from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step, agent, worker
from taskd.model.manager import (
    NodeBack,
    NodeDisconnected,
    NodeGone,
    NodeSilent,
    NodesRegistered,
)
from tests.unit.core.manager.test_machine import ASK, CONFIG, IN_PLACE, STOP, Play, change

SPARE = NodeRank(2)


def shrunk() -> Play:
    play = Play().training().step(NodeGone(NodeRank(1), "refused")).orders(STOP).parks(0, 1)
    play.orders(change("downgrade")).says(m.Committed, 0, 1, step=8)
    assert isinstance(play.state, Training)
    return play


def joins(play: Play, node: NodeRank, *, warm: bool) -> Play:
    play.receive(agent(node), m.RestartsLeft(3))
    return play.receive(agent(node), m.AgentHello(node, f"host{node}", (), "", warm=warm))


def test_node_that_has_ended_for_certain_is_reported_at_once() -> None:
    play = Play().training().step(NodeDisconnected(NodeRank(1)))
    assert isinstance(play.state, Training)
    play.step(NodeGone(NodeRank(1), "its liveness port is closed"))
    assert isinstance(play.state, Reported)
    [report] = play.sent(FaultReport)
    assert [(fault.rank, fault.cause) for fault in report.faults] == [(2, "lost"), (3, "lost")]


def test_node_that_was_silent_for_a_moment_is_used_again() -> None:
    play = Play(replace(CONFIG, rescheduling=True)).training()
    play.step(NodeSilent(NodeRank(1), "no heartbeat")).orders(STOP).parks(0, 1)
    assert isinstance(play.orders(change("recover")).state, Awaiting)
    assert play.step(NodeBack(NodeRank(1))).sent(m.RequestHello)
    play.agent_joins(1, running=True)
    assert isinstance(play.state, Repairing)
    ended = [member for order in play.sent(m.EndWorkers) for member in order.workers]
    assert [(member.rank, member.incarnation) for member in ended] == [(2, 0), (3, 0)]
    [order] = play.sent(m.ReplaceWorkers)
    assert [(w.rank, w.node, w.incarnation) for w in order.workers] == [(2, 1, 1), (3, 1, 1)]


def test_shrunk_job_grows_back_when_the_node_was_only_silent() -> None:
    play = Play().training().step(NodeSilent(NodeRank(1), "no heartbeat")).orders(STOP).parks(0, 1)
    play.orders(change("downgrade")).says(m.Committed, 0, 1, step=8)
    assert play.step(NodeBack(NodeRank(1))).sent(m.RequestHello)
    play.agent_joins(1, running=True)
    assert len(play.sent(m.EndWorkers)) == 2
    assert offers(play) == [("upgrade",)]


def test_ranks_that_a_spare_has_taken_over_end_on_the_node_that_comes_back() -> None:
    play = joins(Play().training(), SPARE, warm=True).step(NodeSilent(NodeRank(1), "no heartbeat"))
    play.orders(STOP).parks(0, 1).orders(change("recover"))
    play.step(NodeBack(NodeRank(1))).agent_joins(1, running=True)
    assert len(play.sent(m.EndWorkers)) == 2
    assert not play.sent(m.ReplaceWorkers)


def test_node_that_has_joined_again_is_not_asked() -> None:
    play = Play().training().step(NodeSilent(NodeRank(1), "no heartbeat")).agent_joins(1, True)
    assert play.step(NodeBack(NodeRank(1))).last.commands == ()


def test_job_does_not_grow_before_the_node_has_warmed_up() -> None:
    play = joins(shrunk(), NodeRank(1), warm=False)
    assert not play.sent(StrategiesReport)
    play = joins(play, NodeRank(1), warm=True)
    assert offers(play) == [("upgrade",)]


def test_spare_node_starts_nothing_before_it_is_needed() -> None:
    play = joins(Play().training(), SPARE, warm=True)
    assert not play.sent(m.StartWorkers)
    assert isinstance(play.state, Training)


def test_spare_node_takes_over_the_ranks_of_a_lost_node() -> None:
    play = joins(Play().training(), SPARE, warm=True)
    play.step(NodeGone(NodeRank(1), "refused")).orders(STOP).parks(0, 1).orders(change("recover"))
    assert isinstance(play.state, Repairing)
    [order] = play.sent(m.ReplaceWorkers)
    assert [(w.rank, w.node, w.incarnation) for w in order.workers] == [(2, 2, 1), (3, 2, 1)]
    assert {member.rank for member in play.state.plan.members} == {0, 1, 2, 3}


def test_spare_node_that_joins_late_is_used() -> None:
    play = Play(replace(CONFIG, rescheduling=True)).training()
    play.step(NodeGone(NodeRank(1), "refused")).orders(STOP).parks(0, 1).orders(change("recover"))
    assert isinstance(play.state, Awaiting)
    joins(play, SPARE, warm=False)
    assert isinstance(play.state, Repairing)


def test_spare_node_lets_a_shrunk_job_grow() -> None:
    play = joins(shrunk(), SPARE, warm=True)
    assert offers(play) == [("upgrade",)]


def test_node_whose_ranks_have_moved_becomes_a_spare() -> None:
    play = joins(Play().training(), SPARE, warm=True)
    play.step(NodeGone(NodeRank(1), "refused")).orders(STOP).parks(0, 1).orders(change("recover"))
    joins(play, NodeRank(1), warm=True)
    assert not play.sent(m.StartWorkers)
    assert not play.sent(m.ReplaceWorkers)


# Growing that fails


def grows(play: Play, uuid: str) -> Play:
    order = replace(change("upgrade", uuid=uuid), incident=play.state.job.incident, sequence=0)
    play.orders(order).parks(0, 1, step=9)
    assert isinstance(play.state, Repairing)
    return play


def falls_back(play: Play, uuid: str) -> Play:
    play.step(NodeGone(NodeRank(1), "refused"))
    incident = Incident(play.state.job.incident + 1)
    stop = replace(STOP, uuid=uuid, incident=incident, sequence=0)
    play.orders(stop).parks(0, 1, step=9)
    play.orders(replace(change("downgrade", uuid=uuid), incident=incident, sequence=0))
    play.says(m.Committed, 0, 1, step=10)
    assert isinstance(play.state, Training)
    return play


def offers(play: Play) -> list[tuple[str, ...]]:
    return [offer.strategies for offer in play.sent(StrategiesReport)]


def test_job_waits_before_it_grows_again_onto_a_node_that_was_lost() -> None:
    play = falls_back(grows(joins(shrunk(), NodeRank(1), warm=True), "u2"), "u3")
    assert joins(play, NodeRank(1), warm=True).state.deadline == play.state.job.grown_at + 10.0
    assert offers(play) == []
    assert offers(play.late()) == [("upgrade",)]
    play = falls_back(grows(play, "u4"), "u5")
    assert play.state.deadline == play.state.job.grown_at + 20.0


def test_job_does_not_stop_for_a_node_that_has_left_again() -> None:
    play = joins(shrunk(), NodeRank(1), warm=True).step(NodeGone(NodeRank(1), "refused"))
    play.orders(change("upgrade", uuid="u2")).parks(0, 1, step=9)
    [report] = play.sent(ResultReport)
    assert (report.code, report.strategy) == (406, "upgrade")


def test_job_that_is_about_to_finish_does_not_grow() -> None:
    play = shrunk().dies(0, code=0)
    assert offers(joins(play, NodeRank(1), warm=True)) == []


def test_late_rank_must_leave_when_the_job_has_continued_without_it() -> None:
    play = shrunk()
    play.incarnations[3] = 1
    [away] = play.hello(3, phase="joining").sent(m.Leave)
    assert away.incarnation == 1


@pytest.mark.parametrize("kind", [FaultCause.COMMUNICATION, FaultCause.EXCEPTION])
def test_failure_of_a_rank_that_has_left_disturbs_nothing(kind: FaultCause) -> None:
    play = shrunk()
    failed = m.WorkerFailed(Rank(3), Incarnation(0), Incident(0), kind, "peer reset")
    play.receive(worker(1, 3), failed)
    assert isinstance(play.state, Training)
    assert not play.last.commands


def test_restarted_manager_learns_that_the_job_has_shrunk() -> None:
    play = Play()
    for rank in (0, 1):
        hello = m.WorkerHello(
            Rank(rank),
            NodeRank(0),
            Incarnation(0),
            1,
            Incident(3),
            Step(7),
            "training",
            protected=True,
            without=(Rank(2), Rank(3)),
        )
        play.receive(worker(0, rank), hello)
    assert isinstance(play.state, Training)
    assert play.state.job.world == {0, 1}
    assert offers(joins(play, NodeRank(1), warm=True)) == [("upgrade",)]


# The agent of a spare


def ready(event: Event, state: local.State) -> local.Outcome:
    return local.step(state, event, 10.0, WorkersConfig(permission_timeout_s=60.0))


def test_spare_waits_as_long_as_there_is_a_manager() -> None:
    waiting = Waiting(Node(SPARE, (), 5), 70.0)
    linked = ready(ManagerConnected(), waiting)
    assert linked.state.deadline == inf
    assert SendHello((), 0, 5) in linked.commands
    assert ready(ManagerDisconnected(), linked.state).state.deadline == 70.0


def test_spare_starts_the_ordered_ranks() -> None:
    order = m.ReplaceWorkers(
        Incident(4), tuple(m.Member(Rank(r), SPARE, Incarnation(2)) for r in (2, 3))
    )
    outcome = ready(order, Waiting(Node(SPARE, (), 5)))
    assert outcome.commands == tuple(
        StartWorker(Rank(r), Incarnation(2), 0, Incident(4)) for r in (2, 3)
    )
    assert outcome.state.node.ranks == (2, 3)


def test_returning_node_does_not_start_ranks_that_have_moved() -> None:
    order = m.ReplaceWorkers(Incident(4), (m.Member(Rank(0), NodeRank(1), Incarnation(1)),))
    outcome = ready(order, Waiting(Node(NodeRank(1), (Rank(2), Rank(3)), 5)))
    assert [c.rank for c in outcome.commands if isinstance(c, StartWorker)] == [0]
    assert not [c for c in outcome.commands if isinstance(c, SendToManager)]


def test_stopping_a_spare_does_not_stop_the_job() -> None:
    outcome = ready(Interrupted("stopped by SIGINT", 2), Waiting(Node(SPARE, (), 5)))
    assert isinstance(outcome.state, local.Done)
    assert outcome.commands == (SendToManager(m.RanksFailed(())),)


# A new leader


def new_leader(*gone: int) -> Play:
    """Node 0 led the job before; nodes 1 and 2 have joined this manager."""
    play = Play(JobConfig(nodes=3, ranks_per_node=1))
    play.step(NodesRegistered(frozenset(map(NodeRank, range(4))), epoch=2))
    for node in gone:
        play.step(NodeGone(NodeRank(node), "its port is closed"))
    for node in (1, 2):
        play.agent_joins(node, running=True)
        play.hello(node)
    return play


def test_new_leader_waits_for_every_node_that_may_live() -> None:
    assert isinstance(new_leader().state, Gathering)
    play = new_leader(0)
    assert isinstance(play.state, Gathering), "the spare may have ranks of node 0"
    play.step(NodeGone(NodeRank(3), "its port is closed"))
    assert isinstance(play.state, Reported)


def test_ranks_that_no_node_has_are_lost_with_the_former_leader() -> None:
    play = new_leader(0, 3)
    assert isinstance(play.state, Reported)
    (report,) = play.sent(FaultReport)
    assert [(fault.rank, fault.cause) for fault in report.faults] == [(0, FaultCause.LOST)]


def test_silent_node_of_the_former_leader_is_lost_too() -> None:
    play = new_leader(3)
    play.step(NodeSilent(NodeRank(0), "no answer"))
    (report,) = play.sent(FaultReport)
    assert [(fault.rank, fault.cause) for fault in report.faults] == [(0, FaultCause.SILENT)]


def test_lost_rank_gets_an_incarnation_that_no_former_leader_has_given() -> None:
    play = new_leader(0, 3)
    assert play.state.job.view.ranks[Rank(0)].incarnation >= INCARNATIONS_PER_TERM
    returned = m.AgentHello(NodeRank(0), "host0", (m.LocalWorker(Rank(0), Incarnation(7), 1),), "")
    play.receive(agent(0), returned)
    assert play.sent(m.EndWorkers), "the process that came back is a former incarnation"


def test_node_that_answers_but_never_joins_is_lost_after_a_while() -> None:
    play = new_leader(3)
    assert isinstance(play.state, Gathering)
    play.late()
    (report,) = play.sent(FaultReport)
    assert [fault.rank for fault in report.faults] == [0]
    assert play.state.job.view.ranks[Rank(0)].incarnation >= INCARNATIONS_PER_TERM


def test_first_leader_waits_for_all_ranks() -> None:
    play = Play(JobConfig(nodes=3, ranks_per_node=1))
    play.step(NodesRegistered(frozenset({NodeRank(0)}), epoch=1))
    play.agent_joins(0)
    assert isinstance(play.state, Gathering)


def test_orders_name_the_store_of_the_first_node_that_is_present() -> None:
    play = new_leader(0, 3)
    assert play.state.job.view.store() == "host1:29500"


def test_store_of_a_node_that_still_warms_up_is_the_last_choice() -> None:
    play = new_leader(0, 3)
    hello = m.AgentHello(NodeRank(1), "host1", play.locals(1), "host1:29500", warm=False)
    play.receive(agent(1), hello)
    assert play.state.job.view.store() == "host2:29500"


def test_store_of_a_node_that_has_just_come_back_is_used_when_it_answers() -> None:
    play = new_leader(0, 3)
    back = m.AgentHello(NodeRank(0), "host0", (), "host0:29500", warm=False)
    play.receive(agent(0), back)
    assert play.state.job.view.store() == "host1:29500"
    assert play.state.job.view.stores() == {"host1:29500", "host2:29500"}
    play.receive(agent(0), replace(back, warm=True))
    assert play.state.job.view.store() == "host0:29500"


def without_store(play: Play, node: int) -> Play:
    return play.receive(
        agent(node), m.AgentHello(NodeRank(node), f"host{node}", play.locals(node), "")
    )


def test_all_ranks_of_a_plan_meet_at_the_same_store_although_another_node_joins() -> None:
    play = without_store(Play().training(), 0).dies(3).orders(STOP).parks(0, 1, 2)
    play.orders(ASK).orders(IN_PLACE)
    assert [order.store for order in play.sent(m.Repair)] == ["host1:29500"]
    play.incarnations[3] = 1
    play.agent_joins(0, running=True)
    play.started(1).hello(3, "joining")
    assert [order.store for order in play.sent(m.Repair)] == ["host1:29500"]


def test_next_plan_stays_at_the_store_that_is_still_served() -> None:
    play = without_store(Play().training(), 0).dies(3).orders(STOP).parks(0, 1, 2)
    play.orders(ASK).orders(IN_PLACE)
    play.incarnations[3] = 1
    play.started(1).hello(3, "joining").agent_joins(0, running=True)
    for rank in range(4):
        play.says(m.Repaired, rank, step=7)
    play.says(m.Committed, 0, 1, 2, 3, step=8)
    assert isinstance(play.state, Training)
    assert play.state.job.with_store().store == "host1:29500"
    play.step(NodeGone(NodeRank(1), "refused"))
    assert play.state.job.with_store().store == "host0:29500"


def test_rank_that_died_while_no_manager_led_is_replaced_where_it_was() -> None:
    """Rank 0 had moved to the spare node before: only that node's agent knows it."""
    play = new_leader(0)
    play.receive(agent(3), m.WorkerExited(Rank(0), Incarnation(1), 1, None, 9, ""))
    play.receive(agent(3), m.AgentHello(NodeRank(3), "host3", (), "host3:29500"))
    assert play.state.job.view.ranks[Rank(0)].node == 3
    play.orders(STOP).parks(1, 2).orders(ASK).orders(change("recover"))
    [order] = play.sent(m.ReplaceWorkers)
    assert [(member.rank, member.node) for member in order.workers] == [(0, 3)]


def test_exit_of_a_former_incarnation_is_no_fault_of_the_one_that_runs_elsewhere() -> None:
    """Rank 0 had moved from node 0 to the spare node, and trains there."""
    play = Play(JobConfig(nodes=3, ranks_per_node=1))
    play.step(NodesRegistered(frozenset(map(NodeRank, range(4))), epoch=2))
    play.step(NodeGone(NodeRank(2), "its port is closed"))
    play.agent_joins(1, running=True).hello(1)
    play.receive(agent(0), m.WorkerExited(Rank(0), Incarnation(1), 1, None, 9, ""))
    play.receive(agent(0), m.AgentHello(NodeRank(0), "host0", (), "host0:29500"))
    runs = (m.LocalWorker(Rank(0), Incarnation(2), 1),)
    play.receive(agent(3), m.AgentHello(NodeRank(3), "host3", runs, "host3:29500"))
    hello = m.WorkerHello(
        Rank(0), NodeRank(3), Incarnation(2), 1, Incident(1), Step(7), "training", True
    )
    play.receive(worker(3, 0), hello)
    (report,) = play.sent(FaultReport)
    assert [fault.rank for fault in report.faults] == [2]
    assert play.state.job.broken() == {Rank(2)}


def test_rank_of_which_only_an_old_exit_is_known_gets_a_new_incarnation_too() -> None:
    """Its newest process may live on a node that is silent."""
    play = new_leader()
    play.receive(agent(3), m.WorkerExited(Rank(0), Incarnation(1), 1, None, 9, ""))
    play.receive(agent(3), m.AgentHello(NodeRank(3), "host3", (), "host3:29500"))
    play.step(NodeSilent(NodeRank(0), "no answer"))
    assert isinstance(play.state, Reported)
    assert play.state.job.view.ranks[Rank(0)].incarnation >= INCARNATIONS_PER_TERM


def test_rank_of_a_lost_node_does_not_share_a_node_with_another_rank_if_one_is_free() -> None:
    """Rank 1 ran on the spare node, which was lost and has returned; rank 0 runs on node 1."""
    play = Play(JobConfig(nodes=3, ranks_per_node=1))
    play.step(NodesRegistered(frozenset(map(NodeRank, range(4))), epoch=2))
    play.step(NodeGone(NodeRank(0), "its port is closed"))
    runs = (m.LocalWorker(Rank(0), Incarnation(1), 1),)
    play.receive(agent(1), m.AgentHello(NodeRank(1), "host1", runs, "host1:29500"))
    play.receive(
        worker(1, 0),
        m.WorkerHello(
            Rank(0), NodeRank(1), Incarnation(1), 1, Incident(1), Step(7), "training", True
        ),
    )
    play.agent_joins(2, running=True).hello(2)
    play.receive(agent(3), m.AgentHello(NodeRank(3), "host3", (), "host3:29500"))
    (report,) = play.sent(FaultReport)
    assert [fault.rank for fault in report.faults] == [1]
    assert play.state.job.view.ranks[Rank(1)].node == 3


RUNS_ON_THE_SPARE = m.AgentHello(
    NodeRank(3), "host3", (m.LocalWorker(Rank(0), Incarnation(1), 1),), "host3:29500"
)
"""Rank 0 was replaced there while node 0 was cut off."""


def test_rank_that_was_cut_off_is_not_taken_for_its_replacement() -> None:
    """The former leader has replaced it; the new one hears the former process first."""
    play = new_leader()
    play.agent_joins(0, running=True).hello(0, "parked")
    assert isinstance(play.state, Gathering), "its replacement may run on the spare"
    play.receive(agent(3), RUNS_ON_THE_SPARE)
    [end] = play.sent(m.EndWorkers)
    assert [(one.node, one.incarnation) for one in end.workers] == [(0, 0)]
    hello = m.WorkerHello(
        Rank(0), NodeRank(3), Incarnation(1), 1, Incident(1), Step(7), "training", True
    )
    play.receive(worker(3, 0), hello)
    assert isinstance(play.state, Training)
    assert play.state.job.incident == 1
    assert play.state.job.view.ranks[Rank(0)].node == 3


def test_state_of_a_rank_that_was_cut_off_is_not_expected_of_its_replacement() -> None:
    play = new_leader()
    play.agent_joins(0, running=True).hello(0, "parked").parks(0)
    assert play.state.job.holders()
    play.receive(agent(3), RUNS_ON_THE_SPARE)
    assert not play.state.job.holders()
