"""One link: windows, broken connections and incarnations."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from taskd.core.bus.delivery import (
    CONFIRM_EVERY,
    FRAME_RECEIPTS,
    KEPT_RECEIPTS,
    MAX_RECEIPTS,
    Frame,
    Hello,
    ProtocolError,
    Queue,
    Seen,
    Session,
)
from taskd.model.bus import Parcel, Receipt
from taskd.model.codes import NetCode
from taskd.model.ids import agent, manager
from taskd.wire._pb.link_pb2 import Frame as FramePb
from taskd.wire.bus_frames import frame_from_pb, frame_to_pb


def parcel(name: str, body: str = "", *, sync: bool = False) -> Parcel:
    return Parcel(name, "test", sync, agent(0), manager(), body, 3.0 if sync else 0.0)


def child(incarnation: str = "child", **limits: Any) -> Session:
    return Session(incarnation, repeat_to_new_incarnation=True, **limits)


def parent(incarnation: str = "parent", **limits: Any) -> Session:
    return Session(incarnation, repeat_to_new_incarnation=False, **limits)


def connect(one: Session, other: Session) -> list[Parcel]:
    """A new connection. Returns what was lost with a previous incarnation, on either side."""
    first, second = one.open(), other.open()
    return [*one.hello_received(second), *other.hello_received(first)]


def names(parcels: object) -> list[str]:
    assert isinstance(parcels, list | tuple)
    return [item.uuid for item in parcels]


def test_all_queued_parcels_go_into_one_frame() -> None:
    down, up = parent(), child()
    connect(down, up)
    for name in "abc":
        down.push(parcel(name))
    frame = down.frame()
    assert frame is not None
    assert (frame.first, names(frame.parcels)) == (1, ["a", "b", "c"])
    assert names(up.take(frame)) == ["a", "b", "c"]
    assert down.frame() is None


def test_unreceived_parcels_are_written_again() -> None:
    down, up = parent(), child()
    connect(down, up)
    down.push(parcel("a"))
    up.take(down.frame() or Frame())
    down.push(parcel("b"))
    down.frame()  # It is lost with the connection.
    down.disconnected()
    up.disconnected()
    down.push(parcel("c"))
    assert connect(down, up) == []
    frame = down.frame()
    assert frame is not None
    assert (frame.first, names(frame.parcels)) == (2, ["b", "c"])


def test_only_confirmation_frees_the_window() -> None:
    down, up = parent(max_window=2), child()
    connect(down, up)
    assert down.push(parcel("a"))
    assert down.push(parcel("b"))
    assert not down.push(parcel("c"))
    frame = down.frame()
    assert frame is not None
    assert not down.push(parcel("c"))
    up.take(frame)
    assert up.owes_confirmation
    confirmation = up.frame()
    assert confirmation is not None
    down.take(confirmation)
    assert down.push(parcel("c"))
    assert down.bytes == parcel("c").size


def test_window_is_bounded_in_bytes_but_always_takes_one_parcel() -> None:
    down = parent(max_bytes=1000)
    assert down.push(parcel("a", "x" * 5000))
    assert not down.push(parcel("b"))


def test_confirmation_waits_for_a_frame_or_for_many_parcels() -> None:
    down, up = parent(), child()
    connect(down, up)
    down.push(parcel("a"))
    up.take(down.frame() or Frame())
    assert not up.has_output
    for number in range(CONFIRM_EVERY):
        down.push(parcel(str(number)))
    up.take(down.frame() or Frame())
    assert up.has_output


def test_report_goes_to_the_next_incarnation_of_the_server() -> None:
    old, up = parent("old"), child()
    connect(old, up)
    up.push(parcel("a"))
    up.frame()
    up.disconnected()
    new = parent("new")
    assert connect(new, up) == []
    frame = up.frame()
    assert frame is not None
    assert (frame.first, names(frame.parcels)) == (1, ["a"])
    assert names(new.take(frame)) == ["a"]


def test_order_does_not_go_to_the_next_incarnation_of_a_child() -> None:
    down, old = parent(), child("old")
    connect(down, old)
    down.push(parcel("written"))
    down.frame()
    down.disconnected()
    down.push(parcel("queued"))
    new = child("new")
    assert names(connect(down, new)) == ["written", "queued"]
    down.push(parcel("fresh"))
    frame = down.frame()
    assert frame is not None
    assert (frame.first, names(frame.parcels)) == (1, ["fresh"])
    new.take(frame)


def test_receipts_are_repeated_after_a_break_but_not_to_a_new_incarnation() -> None:
    down, up = parent(), child()
    connect(down, up)
    up.push_receipt(Receipt("a", 0, None))
    up.frame()
    up.disconnected()
    connect(down, up)
    frame = up.frame()
    assert frame is not None
    assert names(frame.receipts) == ["a"]
    up.disconnected()
    connect(parent("new"), up)
    assert up.frame() is None


def test_receipts_are_bounded_before_and_after_they_are_written() -> None:
    down, up = parent(), child()
    connect(down, up)
    for number in range(MAX_RECEIPTS + 10):
        up.push_receipt(Receipt(str(number), 0, None))
    written = 0
    while (frame := up.frame()) is not None:
        assert len(frame.receipts) <= FRAME_RECEIPTS
        written += len(frame.receipts)
    assert written == MAX_RECEIPTS
    up.disconnected()
    connect(down, up)
    again = up.frame()
    assert again is not None
    assert len(again.receipts) == KEPT_RECEIPTS


@pytest.mark.parametrize(
    "frame",
    [
        Frame(first=2, parcels=[parcel("x")]),
        Frame(first=0, parcels=[parcel("x")]),
        Frame(received=1),
    ],
)
def test_gap_or_false_confirmation_is_a_protocol_error(frame: Frame) -> None:
    down, up = parent(), child()
    connect(down, up)
    with pytest.raises(ProtocolError):
        down.take(frame)


@pytest.mark.parametrize(
    "frame", [Frame(), Frame(hello=Hello("", "")), Frame(hello=Hello("x", "parent"), received=5)]
)
def test_invalid_hello_is_a_protocol_error(frame: Frame) -> None:
    down = parent()
    down.open()
    with pytest.raises(ProtocolError):
        down.hello_received(frame)


def test_recent_duplicates_are_detected() -> None:
    seen = Seen(limit=2)
    for name in ("a", "b", "c"):
        assert parcel(name) not in seen
        seen.add(parcel(name))
    assert parcel("c") in seen
    assert parcel("a") not in seen
    seen.add(parcel(""))
    assert parcel("") not in seen
    assert len(seen) == 2


def test_receipts_are_not_sent_on_the_next_stream_of_an_ascend_peer() -> None:
    queue = Queue(connected=True)
    queue.push(parcel("a"))
    queue.push_receipt(Receipt("q", 0, None))
    queue.disconnected()
    queue.push_receipt(Receipt("r", 0, None))
    assert queue.next_receipt() is None
    kept = queue.next_parcel()
    assert kept is not None
    assert kept.uuid == "a"
    assert queue.bytes == 0


class Link(RuleBasedStateMachine):
    """Any sequence of sends, losses and breaks: each side gets all, once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = {"up": child(), "down": parent()}
        self.sent: dict[str, list[str]] = {"up": [], "down": []}
        self.got: dict[str, list[str]] = {"up": [], "down": []}
        self.wire: dict[str, list[Frame]] = {"up": [], "down": []}
        self.open = False

    @staticmethod
    def other(side: str) -> str:
        return "down" if side == "up" else "up"

    @rule(side=st.sampled_from(["up", "down"]))
    def push(self, side: str) -> None:
        name = f"{side}{len(self.sent[side])}"
        assert self.ends[side].push(parcel(name))
        self.sent[side].append(name)

    @precondition(lambda self: not self.open)
    @rule()
    def connect(self) -> None:
        assert connect(self.ends["up"], self.ends["down"]) == []
        self.open = True

    @precondition(lambda self: self.open)
    @rule(side=st.sampled_from(["up", "down"]))
    def write(self, side: str) -> None:
        frame = self.ends[side].frame()
        if frame is not None:
            self.wire[side].append(
                frame_from_pb(FramePb.FromString(frame_to_pb(frame).SerializeToString()))
            )

    @precondition(lambda self: self.open)
    @rule(side=st.sampled_from(["up", "down"]))
    def arrive(self, side: str) -> None:
        if self.wire[side]:
            parcels = self.ends[self.other(side)].take(self.wire[side].pop(0))
            self.got[side] += [item.uuid for item in parcels]

    @precondition(lambda self: self.open)
    @rule()
    def cut(self) -> None:
        self.open = False
        for side in ("up", "down"):
            self.wire[side].clear()
            self.ends[side].disconnected()

    @invariant()
    def nothing_is_lost_repeated_or_reordered(self) -> None:
        for side in ("up", "down"):
            assert self.got[side] == self.sent[side][: len(self.got[side])]

    def teardown(self) -> None:
        if not self.open:
            self.connect()
        for _ in range(2):
            for side in ("up", "down"):
                self.write(side)
                while self.wire[side]:
                    self.arrive(side)
        assert self.got == self.sent


TestLink = Link.TestCase

words = st.text(max_size=20)
parcels = st.builds(
    Parcel,
    words,
    words,
    st.just(True),
    st.builds(lambda a, b: agent(a), st.integers(0, 9), st.none()),
    st.just(manager()),
    words,
    st.integers(0, 10**6).map(lambda ms: ms / 1000),
)


@given(
    st.builds(
        Frame,
        st.integers(0, 2**60),
        st.lists(parcels, max_size=3),
        st.lists(st.builds(Receipt, words, st.sampled_from([*map(int, NetCode)]), st.none())),
        st.integers(0, 2**60),
        st.one_of(st.none(), st.builds(Hello, words, words)),
    )
)
def test_frame_survives_encoding(frame: Frame) -> None:
    pb = FramePb.FromString(frame_to_pb(frame).SerializeToString())
    assert frame_from_pb(pb) == frame


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_protocol_error(noise: bytes) -> None:
    try:
        frame = frame_from_pb(FramePb.FromString(noise))
    except (DecodeError, ProtocolError):
        return
    for session in (child(), parent()):
        session.open()
        try:
            session.hello_received(frame)
            session.take(frame)
        except ProtocolError:
            continue
