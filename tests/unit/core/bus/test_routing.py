"""Where a message goes, one rule a test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.bus.routing import Routes, Side, as_destination, as_member, is_for_many, routing_key
from taskd.model.codes import NetCode
from taskd.model.ids import (
    ALL,
    EVERY_AGENT,
    EVERY_WORKER,
    NO_PROCESS,
    Position,
    Role,
    agent,
    manager,
    worker,
)


def proxy(node: int, started: str = "1700000000") -> Position:
    return Position(Role.PROXY, str(node), started)


def at_manager() -> Routes:
    """Two nodes of two workers and an agent each."""
    routes = Routes(manager(), top=True)
    for node in range(2):
        routes.register(proxy(node))
        below = [agent(node), worker(node, 2 * node), worker(node, 2 * node + 1)]
        routes.announce(proxy(node), [proxy(node), *below])
    return routes


def at_proxy() -> Routes:
    routes = Routes(proxy(0), top=False)
    for leaf in (agent(0), worker(0, 0), worker(0, 1)):
        routes.register(leaf)
        routes.announce(leaf, [leaf])
    return routes


FIRST, SECOND = routing_key(proxy(0)), routing_key(proxy(1))


@pytest.mark.parametrize(
    ("given_dst", "normal"),
    [
        (Position("Mgr", "0", ""), manager()),
        (Position("Agent", "3", "whatever"), agent(3)),
        (Position("Agent", "007"), agent(7)),
        (Position("Worker", "All", "some All"), EVERY_WORKER),
        (Position("Worker", "1,2,1", "04,5"), Position("Worker", "1,2", "4,5")),
        (None, NetCode.NilPosition),
        (Position("mgr", "0"), NetCode.DstRoleIllegal),
        (Position("", ""), NetCode.DstRoleIllegal),
        (Position("Agent", ""), NetCode.DstSrvRankIllegal),
        (Position("Agent", "-1"), NetCode.DstSrvRankIllegal),
        (Position("Agent", "1, 2"), NetCode.DstSrvRankIllegal),
        (Position("Agent", "٣"), NetCode.DstSrvRankIllegal),
        (Position("Agent", "9" * 40), NetCode.DstSrvRankIllegal),
        (Position("Agent", "1," * 200_000 + "1"), NetCode.DstSrvRankIllegal),
        (Position("Worker", "0", NO_PROCESS), NetCode.DstProcessRankIllegal),
        (Position("Worker", "0", "all"), NetCode.DstProcessRankIllegal),
    ],
)
def test_destination_has_one_normal_form_or_a_code(
    given_dst: Position | None, normal: Position | NetCode
) -> None:
    assert as_destination(given_dst) == normal


def test_message_for_this_node_stays_here() -> None:
    assert at_manager().decide(manager(), FIRST).hops == (Side.ME,)
    assert at_proxy().decide(routing_key(proxy(0)), Side.UP).hops == (Side.ME,)


def test_message_goes_through_the_child_that_announced_its_destination() -> None:
    assert at_manager().decide(worker(1, 3), Side.ME).hops == (SECOND,)
    assert at_manager().decide(SECOND, Side.ME).hops == (SECOND,)
    assert at_proxy().decide(worker(0, 1), Side.UP).hops == (worker(0, 1),)


def test_agent_reaches_a_worker_of_its_node_without_upstream() -> None:
    assert at_proxy().decide(worker(0, 1), agent(0)).hops == (worker(0, 1),)


def test_unknown_destination_goes_upstream() -> None:
    assert at_proxy().decide(worker(1, 3), worker(0, 0)).hops == (Side.UP,)
    assert at_manager().decide(worker(1, 3), FIRST).hops == (SECOND,)


def test_message_from_upstream_never_goes_back_upstream() -> None:
    assert at_proxy().decide(worker(1, 3), Side.UP).code == NetCode.NoRoute


def test_top_without_a_route_answers_no_route() -> None:
    decision = at_manager().decide(agent(9), FIRST)
    assert decision.code == NetCode.NoRoute
    assert decision.because == "Agent:9: Mgr:0 knows no path to it"


def test_message_does_not_go_back_where_it_came_from() -> None:
    assert at_manager().decide(worker(0, 0), FIRST).code == NetCode.NoRoute


def test_broadcast_goes_to_each_neighbour_once() -> None:
    assert at_manager().decide(EVERY_WORKER, Side.ME).hops == (FIRST, SECOND)
    assert at_proxy().decide(EVERY_WORKER, Side.UP).hops == (worker(0, 0), worker(0, 1))


def test_broadcast_from_a_child_goes_to_siblings_and_upstream() -> None:
    hops = at_proxy().decide(EVERY_WORKER, worker(0, 0)).hops
    assert hops == (worker(0, 1), Side.UP)
    assert at_manager().decide(EVERY_WORKER, FIRST).hops == (SECOND,)


def test_broadcast_reaches_a_matching_node_unless_it_is_the_sender() -> None:
    everyone = Position(Role.PROXY, ALL)
    assert at_proxy().decide(everyone, Side.UP).hops == (Side.ME,)
    assert at_proxy().decide(everyone, Side.ME).hops == (Side.UP,)


def test_list_goes_only_to_neighbours_that_lead_to_its_members() -> None:
    routes = at_manager()
    assert routes.decide(Position(Role.AGENT, "1,7"), Side.ME).hops == (SECOND,)
    both = Position(Role.WORKER, "0,1", "1,2")
    assert routes.decide(both, Side.ME).hops == (FIRST, SECOND)
    assert routes.decide(Position(Role.AGENT, "7,8"), Side.ME).code == NetCode.NoRoute


def test_restarted_proxy_replaces_the_one_before() -> None:
    routes = at_manager()
    routes.register(proxy(0, "1700009999"))
    assert len(routes.children) == 2
    assert routes.decide(worker(0, 0), Side.ME).hops == (FIRST,)


def test_replacing_announcement_removes_old_positions() -> None:
    routes = at_manager()
    routes.announce(proxy(0), [proxy(0), agent(0)], replace_all=True)
    assert routes.decide(worker(0, 0), Side.ME).code == NetCode.NoRoute
    assert routes.decide(agent(0), Side.ME).hops == (FIRST,)


def test_moved_position_is_reached_through_its_new_child() -> None:
    routes = at_manager()
    routes.announce(proxy(1), [worker(0, 0)])
    assert routes.decide(worker(0, 0), Side.ME).hops == (SECOND,)
    routes.withdraw(proxy(0))
    assert routes.decide(worker(0, 0), Side.ME).hops == (SECOND,)
    assert routes.decide(worker(0, 1), Side.ME).code == NetCode.NoRoute


def test_this_node_and_other_children_cannot_be_announced() -> None:
    routes = at_manager()
    routes.announce(proxy(1), [manager(), proxy(0)])
    assert routes.decide(manager(), Side.ME).hops == (Side.ME,)
    assert routes.decide(FIRST, Side.ME).hops == (FIRST,)


def test_tables_are_bounded() -> None:
    routes = Routes(manager(), top=True, max_children=2, max_routes=3)
    assert routes.register(proxy(0)) == routes.register(proxy(1)) == NetCode.OK
    assert routes.register(proxy(2)) == NetCode.ExceedMaxRegistryNum
    assert routes.register(proxy(1, "later")) == NetCode.OK
    many = [worker(0, rank) for rank in range(4)]
    assert routes.announce(proxy(0), many) == NetCode.ExceedMaxRegistryNum
    assert len(routes.below()) == 3
    routes.withdraw(proxy(0))
    assert routes.register(proxy(2)) == NetCode.OK


def test_unregistered_child_cannot_announce() -> None:
    assert Routes(manager(), top=True).announce(proxy(0), [agent(0)]) == NetCode.ClientErr


# Anything at all

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from([ALL, NO_PROCESS, "0", "1", "2", "0,1", "1,2,3", "", ",", "01"]),
)
roles = st.one_of(st.sampled_from([*Role]), st.text(max_size=6))
positions = st.builds(Position, roles, texts, texts)


@given(positions)
def test_normal_form_is_stable(given_dst: Position) -> None:
    normal = as_destination(given_dst)
    if isinstance(normal, Position):
        assert as_destination(normal) == normal
    member = as_member(given_dst)
    if isinstance(member, Position) and member.role != Role.PROXY:
        assert not is_for_many(routing_key(member))
        assert as_destination(routing_key(member)) == routing_key(member)


@given(positions, st.sampled_from([Side.ME, Side.UP, FIRST, SECOND]))
def test_any_decision_is_safe(given_dst: Position, came_from: Side | Position) -> None:
    dst = as_destination(given_dst)
    if isinstance(dst, NetCode):
        return
    for routes in (at_manager(), at_proxy()):
        decision = routes.decide(dst, came_from)
        assert bool(decision.hops) != bool(decision.code)
        assert len(set(decision.hops)) == len(decision.hops)
        if came_from is not Side.ME:
            assert came_from not in decision.hops
        if routes.top:
            assert Side.UP not in decision.hops
        if not is_for_many(dst):
            assert len(decision.hops) <= 1


announcements = st.tuples(
    st.integers(0, 5), st.lists(st.integers(0, 30), max_size=6), st.booleans()
)


@given(st.lists(announcements))
def test_no_sequence_of_announcements_breaks_the_tables(
    announcements: list[tuple[int, list[int], bool]],
) -> None:
    routes = Routes(manager(), top=True, max_children=4, max_routes=12)
    for node, ranks, leaves in announcements:
        if leaves:
            routes.withdraw(proxy(node))
            continue
        routes.register(proxy(node))
        routes.announce(
            proxy(node), [worker(0, rank) for rank in ranks], replace_all=bool(ranks[:1])
        )
        below = routes.below()
        assert len(below) == len(set(below)) <= 12
        assert len(routes.children) <= 4
        for position in below:
            [hop] = routes.decide(position, Side.ME).hops
            assert hop in routes.children


def test_every_agent_is_every_agent() -> None:
    assert at_manager().decide(EVERY_AGENT, Side.ME).hops == (FIRST, SECOND)
