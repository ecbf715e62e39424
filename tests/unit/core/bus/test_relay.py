"""One node of the bus: results, deadlines, absences, bounds."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.bus.delivery import Frame, Session
from taskd.core.bus.relay import Answer, Relay, RelayConfig
from taskd.core.bus.routing import Hop, Side, routing_key
from taskd.model.bus import Joined, Left, Parcel, PeerJoined, PeerLeft, Receipt
from taskd.model.codes import NetCode
from taskd.model.ids import EVERY_WORKER, Position, Role, agent, manager, worker

PROXY = Position(Role.PROXY, "0", "1700000000")
HOP = routing_key(PROXY)


def relay_at(me: Position, **config: object) -> Relay[str]:
    incarnations = iter(f"{me}-{number}" for number in range(10_000))
    return Relay(
        me,
        me == manager(),
        lambda parcel: parcel.body if parcel.body != "bad" else None,
        lambda: next(incarnations),
        RelayConfig(**config),  # type: ignore[arg-type]
    )


def parcel(
    dst: Position,
    uuid: str = "u",
    *,
    src: Position | None = None,
    body: str = "x",
    sync: bool = True,
) -> Parcel:
    return Parcel(uuid, "test", sync, src or manager(), dst, body, 3.0)


def with_child(relay: Relay[str], child: Position, *below: Position) -> Session:
    """The child registers, announces and opens its stream."""
    assert relay.register(child, 0.0) == NetCode.OK
    assert relay.announce(child, [child, *below]) == NetCode.OK
    session = opened(relay, routing_key(child), "child")
    relay.tick(relay.deadline)  # its grace is over
    return session


def opened(relay: Relay[str], hop: Hop, incarnation: str) -> Session:
    session = relay.session(hop)
    session.open()
    peer = Session(
        incarnation, repeat_to_new_incarnation=True, peer_incarnation=session.incarnation
    )
    relay.hello_received(hop, peer.open())
    return session


def test_message_for_this_node_is_answered_at_once() -> None:
    relay = relay_at(manager())
    relay.send(parcel(manager()), 1, 0.0)
    assert relay.answers == [Answer(1, NetCode.OK, manager())]
    assert list(relay.inbox) == ["x"]


def test_receipt_answers_its_sender() -> None:
    relay = relay_at(manager())
    with_child(relay, PROXY, agent(0))
    relay.send(parcel(agent(0)), 1, 0.0)
    assert relay.answers == []
    relay.receipt_received(HOP, Receipt("other", 0, agent(0)))
    assert relay.answers == []
    relay.receipt_received(HOP, Receipt("u", NetCode.RecvBufBusy, agent(0)))
    relay.receipt_received(HOP, Receipt("u", NetCode.OK, agent(0)))
    assert relay.answers == [Answer(1, NetCode.RecvBufBusy, agent(0))]


def test_each_hop_waits_less_than_the_one_before_and_answers() -> None:
    relay = relay_at(PROXY)
    opened(relay, Side.UP, "up")
    with_child(relay, worker(0, 0))
    relay.message_received(Side.UP, parcel(worker(0, 0)), Side.UP, 10.0)
    assert relay.deadline == pytest.approx(12.5)
    down = relay.session(worker(0, 0)).frame()
    assert down is not None
    assert down.parcels[0].patience_s == pytest.approx(2.5)
    relay.tick(12.6)
    frame = relay.session(Side.UP).frame()
    assert frame is not None
    assert list(frame.receipts) == [Receipt("u", NetCode.NetworkAckLost, PROXY)]


def test_unwritten_message_is_withdrawn_at_its_deadline() -> None:
    relay = relay_at(manager())
    session = with_child(relay, PROXY, agent(0))
    relay.send(parcel(agent(0), "written"), 1, 0.0)
    session.frame()
    relay.disconnected(HOP, 0.0)
    relay.send(parcel(agent(0), "queued"), 2, 0.0)
    relay.tick(3.0)
    assert {answer.ticket: answer.code for answer in relay.answers} == {
        1: NetCode.NetworkAckLost,
        2: NetCode.NetworkSendLost,
    }
    opened(relay, HOP, "child")
    frame = session.frame()
    assert frame is not None
    assert [item.uuid for item in frame.parcels] == ["written"]


def test_repeated_message_gets_two_answers() -> None:
    relay = relay_at(PROXY)
    with_child(relay, worker(0, 0))
    relay.message_received(Side.UP, parcel(worker(0, 0)), 1, 0.0)
    relay.message_received(Side.UP, parcel(worker(0, 0)), 2, 0.0)
    relay.receipt_received(worker(0, 0), Receipt("u", NetCode.OK, worker(0, 0)))
    assert [answer.ticket for answer in relay.answers] == [1, 2]


def test_disconnected_leaf_fails_at_once_and_is_removed_after_the_grace() -> None:
    relay = relay_at(PROXY, child_grace_s=5.0)
    with_child(relay, worker(0, 0))
    relay.disconnected(worker(0, 0), 100.0)
    assert relay.changes[-1] == PeerLeft(worker(0, 0))
    relay.send(parcel(worker(0, 0), src=PROXY), 1, 101.0)
    assert relay.answers == [Answer(1, NetCode.NetStreamNotInited, PROXY)]
    assert relay.deadline == 105.0
    relay.tick(105.0)
    assert relay.deadline == inf
    relay.message_received(Side.UP, parcel(worker(0, 0)), 2, 106.0)
    assert relay.answers[-1] == Answer(2, NetCode.NoRoute, PROXY)


def test_disconnected_proxy_keeps_its_messages_for_the_grace() -> None:
    relay = relay_at(manager(), child_grace_s=1.0)
    with_child(relay, PROXY, agent(0))
    relay.disconnected(HOP, 100.0)
    relay.send(parcel(agent(0)), 1, 100.1)
    relay.send(parcel(agent(0), "async", sync=False), 2, 100.1)
    assert relay.answers == [Answer(2, NetCode.OK, manager())]
    relay.tick(101.0)
    assert relay.answers[1:] == [Answer(1, NetCode.NetworkSendLost, manager())]
    assert relay.lost == 1


def test_child_that_reconnects_in_time_keeps_its_session() -> None:
    relay = relay_at(manager())
    before = with_child(relay, PROXY, agent(0))
    relay.disconnected(HOP, 100.0)
    assert opened(relay, HOP, "child") is before
    relay.tick(1000.0)
    relay.send(parcel(agent(0), sync=False), 1, 1000.0)
    assert relay.answers == [Answer(1, NetCode.OK, manager())]


def test_upstream_connection_is_reported_when_open() -> None:
    relay = relay_at(agent(0), up_grace_s=30.0)
    relay.send(parcel(manager(), src=agent(0)), 1, 0.0)
    assert relay.answers == [Answer(1, NetCode.ServerErr, agent(0))]
    opened(relay, Side.UP, "up")
    relay.disconnected(Side.UP, 10.0, "cut")
    assert relay.changes == [Joined(), Left("cut")]
    relay.send(parcel(manager(), "v", src=agent(0)), 2, 11.0)
    relay.tick(40.0)
    assert relay.answers[1:] == [Answer(2, NetCode.NetworkSendLost, agent(0))]
    relay.send(parcel(manager(), "w", src=agent(0)), 3, 41.0)
    assert relay.answers[-1] == Answer(3, NetCode.ServerErr, agent(0))


def test_registered_child_without_a_stream_is_removed_after_the_grace() -> None:
    relay = relay_at(manager(), child_grace_s=5.0)
    relay.register(agent(0), 0.0)
    relay.announce(agent(0), [agent(0)])
    relay.send(parcel(agent(0)), 1, 1.0)
    assert relay.answers == [Answer(1, NetCode.NetStreamNotInited, manager())]
    relay.tick(5.0)
    assert relay.routes.children == {}


def test_late_call_does_not_undo_a_newer_one() -> None:
    relay = relay_at(manager())
    assert relay.register(PROXY, 0.0, ("first", 2)) == NetCode.OK
    assert (
        relay.announce(PROXY, [PROXY, agent(0)], replace_all=True, call=("first", 2)) == NetCode.OK
    )
    late = relay.announce(PROXY, [PROXY], replace_all=True, call=("first", 1))
    assert late == relay.register(PROXY, 0.0, ("first", 1)) == NetCode.ClientErr
    assert agent(0) in relay.routes.below()
    assert relay.register(PROXY, 0.0, ("second", 1)) == NetCode.OK


def test_broadcast_is_answered_when_it_is_forwarded() -> None:
    relay = relay_at(manager())
    session = with_child(relay, PROXY, worker(0, 0), worker(0, 1))
    relay.send(parcel(EVERY_WORKER), 1, 0.0)
    assert relay.answers == [Answer(1, NetCode.OK, manager())]
    frame = session.frame()
    assert frame is not None
    [copy] = frame.parcels
    assert not copy.sync


def test_invalid_body_is_refused_and_may_be_sent_again() -> None:
    relay = relay_at(manager())
    relay.send(parcel(manager(), body="bad"), 1, 0.0)
    relay.send(parcel(manager(), body="good"), 2, 0.0)
    assert [answer.code for answer in relay.answers] == [NetCode.ClientErr, NetCode.OK]


def test_source_not_behind_its_neighbour_is_refused() -> None:
    relay = relay_at(manager(), check_sources=True)
    with_child(relay, PROXY, agent(0))
    with_child(relay, agent(5))
    relay.message_received(HOP, parcel(manager(), "a", src=agent(0)), 1, 0.0)
    relay.message_received(agent(5), parcel(manager(), "b", src=agent(0)), 2, 0.0)
    assert [answer.code for answer in relay.answers] == [NetCode.OK, NetCode.ClientErr]


def test_each_queue_has_a_bound_and_a_code() -> None:
    relay = relay_at(manager(), max_inbox=1, max_pending=2, max_window=3, max_parcel_bytes=4000)
    with_child(relay, PROXY, agent(0))
    for ticket in range(2):
        relay.send(parcel(manager(), f"inbox{ticket}"), ticket, 0.0)
    for ticket in range(2, 5):
        relay.send(parcel(agent(0), f"pending{ticket}"), ticket, 0.0)
    for ticket in range(5, 7):
        relay.send(parcel(agent(0), f"window{ticket}", sync=False), ticket, 0.0)
    relay.send(parcel(agent(0), body="x" * 2000), 7, 0.0)
    assert {answer.ticket: answer.code for answer in relay.answers} == {
        0: NetCode.OK,
        1: NetCode.RecvBufBusy,
        4: NetCode.NetworkSendLost,
        5: NetCode.OK,
        6: NetCode.NetworkSendLost,
        7: NetCode.ClientErr,
    }


def test_bytes_are_bounded_in_inbox_and_windows() -> None:
    relay = relay_at(manager(), max_inbox_bytes=20_000, max_queued_bytes=20_000)
    with_child(relay, PROXY, agent(0))
    large = "x" * 10_000
    for dst in (manager(), agent(0)):
        for ticket in range(2):
            relay.send(parcel(dst, f"{dst}{ticket}", body=large, sync=False), ticket, 0.0)
    codes = [answer.code for answer in relay.answers]
    assert codes == [NetCode.OK, NetCode.RecvBufBusy, NetCode.OK, NetCode.NetworkSendLost]
    relay.fetch()
    relay.disconnected(HOP, 0.0)
    relay.tick(100.0)
    relay.send(parcel(manager(), body=large), 9, 0.0)
    assert relay.answers[-1].code == NetCode.OK
    assert relay._budget.used == 0


@pytest.mark.parametrize(
    "bad",
    [
        Parcel("u" * 300, "t", True, agent(0), manager(), "x", 3.0),
        Parcel("u", "t" * 300, True, agent(0), manager(), "x", 3.0),
        Parcel("u", "t", True, Position("Agent", "0" * 300), manager(), "x", 3.0),
        Parcel("u", "t", True, agent(0), manager(), "ü" * (5 << 20), 3.0),
    ],
)
def test_long_fields_are_refused(bad: Parcel) -> None:
    relay = relay_at(manager())
    relay.message_received(HOP, bad, 1, 0.0)
    assert relay.answers == [Answer(1, NetCode.ClientErr, manager())]


def test_100_000_registrations_fill_the_table_and_no_more() -> None:
    relay = relay_at(manager())
    codes = [relay.register(worker(0, rank), 0.0) for rank in range(100_000)]
    assert codes.count(NetCode.OK) == len(relay.routes.children) == 5000
    assert set(codes[5000:]) == {NetCode.ExceedMaxRegistryNum}
    relay.tick(60.0)
    assert relay.register(agent(0), 60.0) == NetCode.OK


def test_deadlines_of_answered_messages_are_removed() -> None:
    relay = relay_at(manager())
    with_child(relay, PROXY, agent(0))
    for number in range(20_000):
        relay.send(parcel(agent(0), str(number)), number, 0.0)
        relay.receipt_received(HOP, Receipt(str(number), 0, agent(0)))
        session = relay.session(HOP)
        session.frame()
        relay.frame_received(HOP, Frame(received=number + 1), 0.0)
    assert len(relay._agenda) < 3000
    assert relay._open == {}


@pytest.mark.parametrize("child", [manager(), Position("Boss", "0"), Position("Agent", "x")])
def test_invalid_child_is_refused(child: Position) -> None:
    assert relay_at(manager()).register(child, 0.0) != NetCode.OK


def test_join_is_reported() -> None:
    relay = relay_at(manager())
    with_child(relay, PROXY)
    assert relay.changes == [PeerJoined(PROXY)]


def test_lost_messages_are_counted_with_the_reason() -> None:
    relay = relay_at(manager())
    relay.message_received(HOP, parcel(agent(9), sync=False), None, 0.0)
    assert relay.lost == 1
    assert relay.because == "Agent:9: Mgr:0 knows no path to it"


# Anything at all

anyone = st.sampled_from(
    [manager(), PROXY, agent(0), worker(0, 0), worker(1, 8), EVERY_WORKER, Position("?", "x")]
)
hops = st.sampled_from([Side.UP, HOP, agent(0), worker(0, 0)])
uuids = st.sampled_from(["a", "b", "c", ""])
happenings = st.one_of(
    st.tuples(st.just("send"), anyone, uuids, st.booleans()),
    st.tuples(st.just("arrived"), hops, anyone, anyone, uuids, st.booleans()),
    st.tuples(st.just("acked"), hops, uuids, st.integers(0, 7000)),
    st.tuples(st.just("register"), anyone),
    st.tuples(st.just("announce"), anyone, st.lists(anyone, max_size=3), st.booleans()),
    st.tuples(st.just("open"), hops, st.sampled_from(["first", "second"])),
    st.tuples(st.just("broken"), hops),
    st.tuples(st.just("wait"), st.floats(0, 10)),
)


@given(st.lists(happenings, max_size=40), st.booleans())
def test_relay_survives_any_sequence_of_calls(calls: list[Any], top: bool) -> None:
    """Whatever comes in whatever order: it never raises, and no question is answered twice."""
    relay = relay_at(manager() if top else PROXY, max_pending=3, max_window=4, max_inbox=2)
    now, tickets = 0.0, 0
    for kind, *what in calls:
        if kind == "send":
            tickets += 1
            dst, uuid, sync = what
            relay.send(parcel(dst, uuid, src=relay.me, sync=sync), tickets, now)
        elif kind == "arrived":
            hop, src, dst, uuid, sync = what
            relay.message_received(
                hop, parcel(dst, uuid, src=src, sync=sync), hop if sync else None, now
            )
        elif kind == "acked":
            relay.receipt_received(what[0], Receipt(what[1], what[2], None))
        elif kind == "register":
            relay.register(what[0], now)
        elif kind == "announce":
            relay.announce(what[0], what[1], replace_all=what[2])
        elif kind == "open":
            if what[0] is Side.UP or what[0] in relay.routes.children:
                opened(relay, *what)
        elif kind == "broken":
            relay.disconnected(what[0], now)
        else:
            now += what[0]
            relay.tick(now)
            assert relay.deadline > now
        assert len(relay._open) <= 3
        assert len(relay.inbox) <= 2
    relay.tick(inf)
    answered = [answer.ticket for answer in relay.answers]
    assert sorted(answered) == list(range(1, tickets + 1))
