"""One node of the bus without its sockets: accepts messages, forwards them, reports results.

`core/bus/routing.py` decides where a message goes and `core/bus/delivery.py` delivers it over one
link; a `Relay` combines the two and keeps the messages whose receipt is awaited. `bus/stream.py`
moves frames between relays over gRPC; tests/sim moves them between hundreds of relays in one
thread.

A relay never waits. Each call changes its state at once and leaves what its owner has to do in
`answers`, `changes`, `inbox` and `ready`. `bus/relay_loop.py` handles those after each call.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import Generic, TypeVar

from taskd.core.bus.delivery import Budget, Frame, Link, Queue, Seen, Session
from taskd.core.bus.routing import (
    Hop,
    Routes,
    Side,
    as_destination,
    as_member,
    is_for_many,
    routing_key,
)
from taskd.model.bus import Change, Joined, Left, Parcel, PeerJoined, PeerLeft, Receipt
from taskd.model.codes import NetCode, net_code
from taskd.model.ids import Position, Role

T = TypeVar("T")
Ticket = int
Asker = Ticket | Hop | None
"""What waits for the result: a call in this process, a neighbour, or nothing."""
MAX_TEXT = 256
"""Maximum length of a uuid or a message type, in characters."""
Call = tuple[str, int]
"""Identifies a child's call: its incarnation, and a number that grows with each call."""
NO_CALL: Call = ("", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayConfig:
    max_inbox: int = 16_384
    """Delivered messages that are not fetched yet. More are refused with 5001."""
    max_inbox_bytes: int = 64 << 20
    max_pending: int = 65_536
    """Messages whose receipt is awaited. More are refused with 6000."""
    max_window: int = 8192
    """Messages on their way to one neighbour. More are refused with 6000."""
    max_window_bytes: int = 32 << 20
    max_queued_bytes: int = 1 << 30
    """On their way to all neighbours together; a message to several counts once for each."""
    max_parcel_bytes: int = (8 << 20) - (16 << 10)
    """The largest message with its header; a little below gRPC's limit."""
    max_children: int = 5000
    max_routes: int = 100_000
    child_grace_s: float = 5.0
    """How long a disconnected child may take to reconnect before its routes are removed."""
    up_grace_s: float = 30.0
    """How long messages wait for the upstream connection before they are dropped."""
    hop_patience: float = 5 / 6
    """Each hop waits this fraction of the time of the hop before it, so that it answers first."""
    check_sources: bool = False
    """Refuse a message whose source is not reached through the neighbour that sent it."""


@dataclass(frozen=True, slots=True)
class Answer:
    ticket: Ticket
    code: int
    source: Position | None


@dataclass(slots=True)
class _Open:
    """A message that was passed to a neighbour and whose receipt has not arrived."""

    askers: list[Asker]
    deadline: float


@dataclass(slots=True)
class Relay(Generic[T]):
    me: Position
    top: bool
    read: Callable[[Parcel], T | None]
    """Decodes a message for this process; None: its body is invalid."""
    new_incarnation: Callable[[], str]
    config: RelayConfig = field(default_factory=RelayConfig)
    inbox: deque[T] = field(default_factory=deque)
    answers: list[Answer] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    ready: set[Hop] = field(default_factory=set)
    """The neighbours for which there is something to write."""
    links: dict[Hop, Link] = field(default_factory=dict)
    lost: int = 0
    """Messages that could not be delivered and for whose result nothing waits."""
    because: str = ""
    """Why the last of them was lost."""
    routes: Routes = field(init=False)
    _budget: Budget = field(default_factory=Budget)
    _seen: Seen = field(default_factory=Seen)
    _inbox_sizes: deque[int] = field(default_factory=deque)
    _inbox_bytes: int = 0
    _open: dict[tuple[Hop, str], _Open] = field(default_factory=dict)
    _agenda: list[tuple[float, int, tuple[Hop, str]]] = field(default_factory=list)
    _calls: dict[Position, Call] = field(default_factory=dict)
    _absent: dict[Hop, float] = field(default_factory=dict)
    _next_absence: float = inf
    _serial: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.routes = Routes(self.me, self.top, self.config.max_children, self.config.max_routes)
        self._budget.limit = self.config.max_queued_bytes

    # Messages

    def send(self, parcel: Parcel, ticket: Ticket, now: float) -> None:
        """A message from this process. Exactly one `Answer` follows, now or later."""
        self._accept(parcel, Side.ME, ticket, now)

    def message_received(self, hop: Hop, parcel: Parcel, asker: Asker, now: float) -> None:
        """A message from a neighbour."""
        if self.config.check_sources and not self._comes_from(hop, parcel.src):
            self._answer(asker, parcel.uuid, NetCode.ClientErr, self.me)
        else:
            self._accept(parcel, hop, asker, now)

    def frame_received(self, hop: Hop, frame: Frame, now: float) -> None:
        """A frame from one of our own processes. Raises `ProtocolError`."""
        session = self.links[hop]
        assert isinstance(session, Session)
        for parcel in session.take(frame):
            self.message_received(hop, parcel, hop if parcel.sync else None, now)
        for receipt in frame.receipts:
            self.receipt_received(hop, receipt)
        if session.has_output:
            self.ready.add(hop)

    def receipt_received(self, hop: Hop, receipt: Receipt) -> None:
        """A receipt from a neighbour. One that is not awaited is dropped."""
        waiting = self._open.pop((hop, receipt.uuid), None)
        if waiting is None:
            return
        source = None if isinstance(as_member(receipt.src), NetCode) else receipt.src
        for asker in waiting.askers:
            self._answer(asker, receipt.uuid, receipt.code, source)

    def _accept(self, parcel: Parcel, came_from: Hop, asker: Asker, now: float) -> None:
        dst = as_destination(parcel.dst)
        if isinstance(dst, NetCode):
            return self._answer(asker, parcel.uuid, dst, self.me)
        if parcel.size > self.config.max_parcel_bytes or not _is_valid(parcel):
            return self._answer(asker, parcel.uuid, NetCode.ClientErr, self.me)
        decision = self.routes.decide(dst, came_from)
        many = is_for_many(dst)
        if many or dst != parcel.dst:
            parcel = replace(parcel, dst=dst, sync=parcel.sync and not many)
        if decision.code:
            return self._answer(asker, parcel.uuid, decision.code, self.me, decision.because)
        if not parcel.sync:
            codes = [self._pass_on(parcel, hop) for hop in decision.hops]
            code = next(filter(None, codes), NetCode.OK)
            return self._answer(asker, parcel.uuid, code, self.me)
        (hop,) = decision.hops
        wait_s = parcel.patience_s * (1 if came_from is Side.ME else self.config.hop_patience)
        code = self._pass_on(replace(parcel, patience_s=wait_s), hop)
        if hop is Side.ME or code:
            return self._answer(asker, parcel.uuid, code, self.me)
        return self._await_receipt((hop, parcel.uuid), asker, now + wait_s)

    def _pass_on(self, parcel: Parcel, hop: Hop) -> NetCode:
        """Put it into the inbox or a neighbour's window."""
        if hop is Side.ME:
            return self._deliver(parcel)
        link = self.links.get(hop)
        if link is None:
            return NetCode.ServerErr if hop is Side.UP else NetCode.NetStreamNotInited
        if parcel.sync and not link.connected and _is_leaf(hop):
            return NetCode.NetStreamNotInited  # it has most likely died: fail at once
        if parcel.sync and len(self._open) >= self.config.max_pending:
            return NetCode.NetworkSendLost
        if not link.push(parcel):
            return NetCode.NetworkSendLost
        self.ready.add(hop)
        return NetCode.OK

    def _deliver(self, parcel: Parcel) -> NetCode:
        if parcel in self._seen:
            return NetCode.OK
        size = parcel.size
        full = self.inbox and self._inbox_bytes + size > self.config.max_inbox_bytes
        if full or len(self.inbox) >= self.config.max_inbox:
            return NetCode.RecvBufBusy
        message = self.read(parcel)
        if message is None:
            return NetCode.ClientErr
        self._seen.add(parcel)
        self.inbox.append(message)
        self._inbox_sizes.append(size)
        self._inbox_bytes += size
        return NetCode.OK

    def fetch(self) -> T:
        """The next message out of the inbox."""
        self._inbox_bytes -= self._inbox_sizes.popleft()
        return self.inbox.popleft()

    def _await_receipt(self, key: tuple[Hop, str], asker: Asker, deadline: float) -> None:
        waiting = self._open.get(key)
        if waiting:  # the same message again: one receipt answers both
            waiting.askers.append(asker)
            return
        self._open[key] = _Open([asker], deadline)
        heapq.heappush(self._agenda, (deadline, next(self._serial), key))
        if len(self._agenda) > 2 * len(self._open) + 1024:
            self._agenda = [item for item in self._agenda if self._is_due(item)]
            heapq.heapify(self._agenda)

    def _is_due(self, item: tuple[float, int, tuple[Hop, str]]) -> bool:
        waiting = self._open.get(item[2])
        return waiting is not None and waiting.deadline == item[0]

    def _answer(
        self, asker: Asker, uuid: str, code: int, source: Position | None, because: str = ""
    ) -> None:
        if isinstance(asker, int):
            self.answers.append(Answer(asker, code, source))
        elif asker is None and code:
            self.count_lost(because or net_code(code).sentence)
        elif asker is not None and asker in self.links:
            self.links[asker].push_receipt(Receipt(uuid, code, source))
            self.ready.add(asker)

    def count_lost(self, because: str) -> None:
        """A message is lost for whose result nothing waits."""
        self.lost += 1
        self.because = because

    def refuse(self, hop: Hop, uuid: str, code: NetCode) -> None:
        """Answer a message of this neighbour that cannot be read."""
        self._answer(hop, uuid, code, self.me)

    def _comes_from(self, hop: Hop, src: Position) -> bool:
        if hop is Side.UP:
            return True
        return routing_key(src) == hop or self.routes.hop_to(src) == hop

    # Neighbours

    def register(self, child: Position, now: float, call: Call = NO_CALL) -> NetCode:
        """Add a child. It is removed again unless it opens a stream soon."""
        fault = as_member(child)
        if isinstance(fault, NetCode):
            return fault
        if child.role == Role.MANAGER or routing_key(child) == routing_key(self.me):
            return NetCode.DstTypeIllegal
        if self._is_stale(child, call):
            return NetCode.ClientErr
        code = self.routes.register(child)
        if code == NetCode.OK:
            self._calls[routing_key(child)] = call
        link = self.links.get(routing_key(child))
        if code == NetCode.OK and (link is None or not link.connected):
            self._expect_until(routing_key(child), now + self.config.child_grace_s)
        return code

    def announce(
        self,
        through: Position,
        path: Iterable[Position],
        *,
        replace_all: bool = False,
        call: Call = NO_CALL,
    ) -> NetCode:
        """A child announces the positions that it can reach."""
        if self._is_stale(through, call):
            return NetCode.ClientErr
        members = []
        for position in path:
            member = as_member(position)
            if isinstance(member, NetCode):
                return member
            members.append(member)
        if _is_leaf(through) and any(
            routing_key(member) != routing_key(through) for member in members
        ):
            return NetCode.ClientErr  # agents and workers have no children
        if routing_key(through) in self.routes.children:
            self._calls[routing_key(through)] = call
        return self.routes.announce(through, members, replace_all=replace_all)

    def _is_stale(self, child: Position, call: Call) -> bool:
        """A late or repeated call must not undo what a newer one has announced."""
        incarnation, number = self._calls.get(routing_key(child), NO_CALL)
        return call[0] == incarnation and call[1] < number

    def session(self, hop: Hop) -> Session:
        """The link to one of our own processes; it survives a broken connection."""
        link = self.links.get(hop)
        if isinstance(link, Session):
            return link
        self._abandon(hop)
        session = Session(
            self.new_incarnation(),
            repeat_to_new_incarnation=hop is Side.UP,
            max_window=self.config.max_window,
            max_bytes=self.config.max_window_bytes,
            budget=self._budget,
        )
        self.links[hop] = session
        return session

    def queue(self, hop: Hop) -> Queue:
        """The link to one of Ascend's processes."""
        link = self.links.get(hop)
        if isinstance(link, Queue):
            return link
        self._abandon(hop)
        queue = Queue(self.config.max_window, self.config.max_window_bytes, self._budget)
        self.links[hop] = queue
        return queue

    def hello_received(self, hop: Hop, frame: Frame) -> None:
        """One of our own processes has sent its hello on a new connection."""
        session = self.links[hop]
        assert isinstance(session, Session)
        self._report_lost(hop, session.hello_received(frame))
        self._opened(hop)

    def stream_opened(self, hop: Hop) -> None:
        """The stream to one of Ascend's processes is open."""
        self.links[hop].connected = True
        self._opened(hop)

    def _opened(self, hop: Hop) -> None:
        self._absent.pop(hop, None)
        self.ready.add(hop)
        self.changes.append(
            Joined() if isinstance(hop, Side) else PeerJoined(self.position_of(hop))
        )

    def disconnected(self, hop: Hop, now: float, because: str = "") -> None:
        """The connection to a neighbour has ended."""
        link = self.links.get(hop)
        if link is None:
            return
        was_open = link.connected
        link.disconnected()
        grace_s = self.config.up_grace_s if hop is Side.UP else self.config.child_grace_s
        self._expect_until(hop, now + grace_s)
        if was_open:
            change = Left(because) if isinstance(hop, Side) else PeerLeft(self.position_of(hop))
            self.changes.append(change)

    def _expect_until(self, hop: Hop, deadline: float) -> None:
        self._absent[hop] = deadline
        self._next_absence = min(self._next_absence, deadline)

    def position_of(self, hop: Position) -> Position:
        """The position with which a child registered."""
        return self.routes.children.get(hop, hop)

    def _abandon(self, hop: Hop) -> None:
        link = self.links.pop(hop, None)
        if link is not None:
            self._report_lost(hop, link.abandon())

    def _report_lost(self, hop: Hop, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            if parcel.sync:
                self.receipt_received(hop, Receipt(parcel.uuid, NetCode.NetworkSendLost, self.me))
            else:
                self.count_lost(f"{parcel.dst} is reached through {hop}, which is gone")

    # Time

    @property
    def deadline(self) -> float:
        """The time of the next `tick`."""
        return min(self._agenda[0][0] if self._agenda else inf, self._next_absence)

    def tick(self, now: float) -> None:
        while self._agenda and self._agenda[0][0] <= now:
            item = heapq.heappop(self._agenda)
            if self._is_due(item):
                hop, uuid = item[2]
                # A message that is not written yet is withdrawn: it must not arrive after its
                # failure was reported.
                unsent = hop in self.links and self.links[hop].withdraw(uuid)
                code = NetCode.NetworkSendLost if unsent else NetCode.NetworkAckLost
                self.receipt_received(hop, Receipt(uuid, code, self.me))
        if self._next_absence > now:
            return
        for hop in [hop for hop, until in self._absent.items() if until <= now]:
            del self._absent[hop]
            self._abandon(hop)
            if isinstance(hop, Position):
                self.routes.withdraw(hop)
                self._calls.pop(hop, None)
        self._next_absence = min(self._absent.values(), default=inf)


def _is_valid(parcel: Parcel) -> bool:
    """Only the body and the destination may be long, and the source must be one position."""
    short = len(parcel.uuid) <= MAX_TEXT and len(parcel.mtype) <= MAX_TEXT
    return short and not isinstance(as_member(parcel.src), NetCode)


def _is_leaf(hop: Hop) -> bool:
    return isinstance(hop, Position) and hop.role in (Role.AGENT, Role.WORKER)
