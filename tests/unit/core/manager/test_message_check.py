"""Accepted messages never break the manager's machine, whatever they contain, in any order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.manager import machine
from taskd.core.manager.message_check import MOST_RANKS, problem_in
from taskd.core.manager.states import JobConfig
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Position, Rank, Role, Step
from taskd.model.ids import agent as at_node
from taskd.model.ids import worker as at_rank
from taskd.model.manager import (
    Event,
    MessageReceived,
    NodeConnected,
    NodeDisconnected,
    NodeSilent,
    RankHung,
)
from taskd.model.profiling import EVERYTHING, Pace
from taskd.model.types import Tick

few = st.integers(0, 4)
rank, node = few.map(Rank), few.map(NodeRank)
for kind, numbers in (
    (Rank, rank),
    (NodeRank, node),
    (Incident, few),
    (Incarnation, few),
    (Step, few),
    (Pace, st.none()),
):
    st.register_type_strategy(kind, numbers)

SAID = (
    *(m.WorkerHello, m.WorkerFailed, m.Parked, m.Repaired, m.RepairFailed, m.Committed, m.Dumped),
    *(m.AgentHello, m.WorkersStarted, m.WorkerExited, m.EndJob, m.RanksFailed, m.RestartsLeft),
    *(m.Unknown, m.KeptAlive, m.AgentRegistered, m.WorkerRegistered, m.StressTested),
)


def speaker(body: m.Body) -> Position:
    """The sender from which this message is accepted."""
    if isinstance(body, m.AgentHello | m.WorkersStarted):
        return at_node(body.node)
    if isinstance(body, m.WorkerHello):
        return at_rank(body.node, body.rank)
    if hasattr(body, "rank") and not isinstance(body, m.WorkerExited):
        return at_rank(0, body.rank)
    return at_node(0)


heard = st.one_of(*(st.from_type(kind) for kind in SAID)).map(
    lambda body: MessageReceived(speaker(body), body)
)
happened: st.SearchStrategy[Event] = st.one_of(
    heard,
    heard,
    st.builds(NodeConnected, node),
    st.builds(NodeDisconnected, node),
    st.builds(NodeSilent, node, st.just("quiet")),
    st.builds(RankHung, rank, st.just("still")),
    st.just(Tick()),
)


@given(st.lists(happened, max_size=12))
def test_machine_handles_every_accepted_message(events: list[Event]) -> None:
    config = JobConfig(nodes=2, ranks_per_node=2)
    state = machine.begin(config, 0.0)
    for number, event in enumerate(events):
        if isinstance(event, MessageReceived) and problem_in(event.src, event.body):
            continue
        state = machine.step(state, event, float(number), config).state  # type: ignore[assignment]


FIRST, NONE = Incarnation(0), Incident(0)


def hello(node: int = 0, phase: str = "training") -> m.WorkerHello:
    return m.WorkerHello(Rank(1), NodeRank(node), FIRST, 1234, NONE, Step(1), phase, True)


def failed(kind: FaultCause) -> m.WorkerFailed:
    return m.WorkerFailed(Rank(1), FIRST, NONE, kind, "")


@pytest.mark.parametrize(
    ("src", "body", "why"),
    [
        (at_rank(0, 1), m.Committed(Rank(2), FIRST, NONE, Step(1)), "the sender is not rank 2"),
        (at_node(1), m.Committed(Rank(1), FIRST, NONE, Step(1)), "the sender is not rank 1"),
        (at_node(1), m.WorkersStarted(NodeRank(2), ()), "the sender is not node 2"),
        (at_rank(1, 1), m.NodeHeartbeat(NodeRank(1), ()), "the sender is not node 1"),
        (at_rank(0, 1), m.EndJob(0, ""), "only an agent may send this"),
        (at_rank(0, 1), hello(node=1), "the sender is not on node 1"),
        (at_rank(0, 1), hello(phase="x" * 20_000), "a text has more than 16384 characters"),
        (at_rank(0, 1), failed(FaultCause.LOST), "a worker cannot report a fault of kind lost"),
        (at_rank(0, 1), failed(FaultCause.EXCEPTION), ""),
        (Position(Role.PROXY, "0"), m.RanksFailed(()), "only an agent may send this"),
        (at_node(0), m.RanksFailed((Rank(-1),)), "ranks: -1 is out of range"),
        (
            at_rank(0, MOST_RANKS),
            m.Committed(Rank(MOST_RANKS), FIRST, NONE, Step(1)),
            f"rank: {MOST_RANKS} is out of range",
        ),
        (
            at_rank(0, 1),
            m.Repaired(Rank(1), FIRST, NONE, Step(1), math.nan),
            "groups_s: nan is not a finite number",
        ),
        (at_rank(0, 1), m.Committed(Rank(1), FIRST, NONE, Step(2**62)), ""),
        (at_node(0), m.RestartsLeft(32767), ""),
        (Position(Role.PROXY, "1"), m.NodeHeartbeat(NodeRank(1), ()), ""),
        (Position(Role.PROXY, "0"), m.NodeHeartbeat(NodeRank(1), ()), "the sender is not node 1"),
    ],
)
def test_message_about_another_rank_or_with_invalid_numbers_is_rejected(
    src: Position, body: m.Body, why: str
) -> None:
    assert problem_in(src, body) == why


def test_heartbeat_with_paces_is_accepted() -> None:
    """Found in a real run: `in range` with a flag took minutes."""
    paces = tuple(Pace(Rank(number), Incarnation(0), EVERYTHING, steps=7) for number in range(2))
    assert problem_in(at_node(0), m.NodeHeartbeat(NodeRank(0), (), paces=paces)) == ""
