"""One node of the bus, without its sockets: it takes messages over, passes them on, tells results.

`core/bus/routing.py` says where a message goes and `core/bus/delivery.py` carries it over one
link; a `Relay` puts the two together and keeps the questions that are still open.
`bus/endpoint.py` moves frames between relays over gRPC; tests/sim moves them between hundreds of
relays in one thread.

A relay never waits. Each call changes its state at once and leaves what the outside has to do in
`answers`, `changes`, `inbox` and `ready`, to be fetched after the call.
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
"""Who waits for the result: a caller of this process, a neighbour, or nobody."""
MAX_TEXT = 256
"""Characters in a uuid or a message type."""
Call = tuple[str, int]
"""Tells a child's calls apart: the name of its process, and a number that grows with each call."""
NO_CALL: Call = ("", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayConfig:
    max_inbox: int = 16_384
    """Delivered messages that nobody has fetched yet. More are refused with 5001."""
    max_inbox_bytes: int = 64 << 20
    max_pending: int = 65_536
    """Messages whose receipt is awaited. More are refused with 6000."""
    max_window: int = 8192
    """Messages on their way to one neighbour. More are refused with 6000."""
    max_window_bytes: int = 32 << 20
    max_queued_bytes: int = 1 << 30
    """On their way to all neighbours together, where one message to many counts for each."""
    max_parcel_bytes: int = (8 << 20) - (16 << 10)
    """The largest message, with its header; a little below what gRPC is set to carry."""
    max_children: int = 5000
    max_routes: int = 100_000
    child_grace_s: float = 5.0
    """How long a vanished child may take to come back before its routes are withdrawn."""
    up_grace_s: float = 30.0
    """How long reports wait for the way up before they are given up."""
    hop_patience: float = 5 / 6
    """A hop waits this part of the time that the hop before it waits, so it is the one to tell."""
    check_sources: bool = False
    """Refuse a message whose source is not where it came from."""


@dataclass(frozen=True, slots=True)
class Answer:
    ticket: Ticket
    code: int
    source: Position | None


@dataclass(slots=True)
class _Open:
    """A message that was handed to a neighbour and whose receipt has not come."""

    askers: list[Asker]
    deadline: float


@dataclass(slots=True)
class Relay(Generic[T]):
    me: Position
    top: bool
    read: Callable[[Parcel], T | None]
    """Reads a message that is for this place; None when its body makes no sense."""
    new_incarnation: Callable[[], str]
    config: RelayConfig = field(default_factory=RelayConfig)
    inbox: deque[T] = field(default_factory=deque)
    answers: list[Answer] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    ready: set[Hop] = field(default_factory=set)
    """The neighbours for whom there is something to write."""
    links: dict[Hop, Link] = field(default_factory=dict)
    lost: int = 0
    """Messages without an asker that could not be delivered."""
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
        """A message of this place's own. Exactly one `Answer` follows, now or later."""
        self._accept(parcel, Side.ME, ticket, now)

    def message_received(self, hop: Hop, parcel: Parcel, asker: Asker, now: float) -> None:
        """A message from a neighbour."""
        if self.config.check_sources and not self._comes_from(hop, parcel.src):
            self._answer(asker, parcel.uuid, NetCode.ClientErr, self.me)
        else:
            self._accept(parcel, hop, asker, now)

    def frame_received(self, hop: Hop, frame: Frame, now: float) -> None:
        """A frame from a neighbour of our own kind. Raises `Confused` on a broken protocol."""
        session = self.links[hop]
        assert isinstance(session, Session)
        for parcel in session.take(frame):
            self.message_received(hop, parcel, hop if parcel.sync else None, now)
        for receipt in frame.receipts:
            self.receipt_received(hop, receipt)
        if session.has_output:
            self.ready.add(hop)

    def receipt_received(self, hop: Hop, receipt: Receipt) -> None:
        """A receipt from a neighbour. One that nobody waits for is dropped."""
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
        if parcel.size > self.config.max_parcel_bytes or not _is_sane(parcel):
            return self._answer(asker, parcel.uuid, NetCode.ClientErr, self.me)
        decision = self.routes.decide(dst, came_from)
        many = is_for_many(dst)
        if many or dst != parcel.dst:
            parcel = replace(parcel, dst=dst, sync=parcel.sync and not many)
        if decision.code:
            return self._answer(asker, parcel.uuid, decision.code, self.me, decision.because)
        if not parcel.sync:
            codes = [self._hand(parcel, hop) for hop in decision.hops]
            code = next(filter(None, codes), NetCode.OK)
            return self._answer(asker, parcel.uuid, code, self.me)
        (hop,) = decision.hops
        wait_s = parcel.patience_s * (1 if came_from is Side.ME else self.config.hop_patience)
        code = self._hand(replace(parcel, patience_s=wait_s), hop)
        if hop is Side.ME or code:
            return self._answer(asker, parcel.uuid, code, self.me)
        return self._await_receipt((hop, parcel.uuid), asker, now + wait_s)

    def _hand(self, parcel: Parcel, hop: Hop) -> NetCode:
        """Into the inbox or a neighbour's window."""
        if hop is Side.ME:
            return self._deliver(parcel)
        link = self.links.get(hop)
        if link is None:
            return NetCode.ServerErr if hop is Side.UP else NetCode.NetStreamNotInited
        if parcel.sync and not link.connected and _is_leaf(hop):
            return NetCode.NetStreamNotInited  # It has most likely died: say so at once.
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
        if waiting:  # The same message again: one receipt answers both.
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
        """A message that nobody asks about is gone."""
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
        """A child presents itself. Unless it opens a stream soon, it is forgotten again."""
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
        """A child tells whom it can reach."""
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
            return NetCode.ClientErr  # Behind a leaf there is nobody.
        if routing_key(through) in self.routes.children:
            self._calls[routing_key(through)] = call
        return self.routes.announce(through, members, replace_all=replace_all)

    def _is_stale(self, child: Position, call: Call) -> bool:
        """A call that comes late, or a second time, must not undo what a newer one has said."""
        incarnation, number = self._calls.get(routing_key(child), NO_CALL)
        return call[0] == incarnation and call[1] < number

    def session(self, hop: Hop) -> Session:
        """The lane to a neighbour of our own kind, as it was before the last break if it was."""
        link = self.links.get(hop)
        if isinstance(link, Session):
            return link
        self._give_up(hop)
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
        """The lane to a neighbour of Ascend's."""
        link = self.links.get(hop)
        if isinstance(link, Queue):
            return link
        self._give_up(hop)
        queue = Queue(self.config.max_window, self.config.max_window_bytes, self._budget)
        self.links[hop] = queue
        return queue

    def hello_received(self, hop: Hop, frame: Frame) -> None:
        """A neighbour of our own kind has said hello on a new connection."""
        session = self.links[hop]
        assert isinstance(session, Session)
        self._report_lost(hop, session.hello_received(frame))
        self._opened(hop)

    def stream_opened(self, hop: Hop) -> None:
        """The stream to a neighbour of Ascend's is open."""
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
            told = Left(because) if isinstance(hop, Side) else PeerLeft(self.position_of(hop))
            self.changes.append(told)

    def _expect_until(self, hop: Hop, deadline: float) -> None:
        self._absent[hop] = deadline
        self._next_absence = min(self._next_absence, deadline)

    def position_of(self, hop: Position) -> Position:
        """A child by the position that it registered with."""
        return self.routes.children.get(hop, hop)

    def _give_up(self, hop: Hop) -> None:
        link = self.links.pop(hop, None)
        if link is not None:
            self._report_lost(hop, link.abandon())

    def _report_lost(self, hop: Hop, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            if parcel.sync:
                self.receipt_received(hop, Receipt(parcel.uuid, NetCode.NetworkSendLost, self.me))
            else:
                self.count_lost(f"{parcel.dst} is reached through {hop}, which has gone")

    # Time

    @property
    def deadline(self) -> float:
        """When `tick` has something to do, unless something happens before."""
        return min(self._agenda[0][0] if self._agenda else inf, self._next_absence)

    def tick(self, now: float) -> None:
        while self._agenda and self._agenda[0][0] <= now:
            item = heapq.heappop(self._agenda)
            if self._is_due(item):
                hop, uuid = item[2]
                # What was never written is taken back: it must not arrive after it has failed.
                unsent = hop in self.links and self.links[hop].withdraw(uuid)
                code = NetCode.NetworkSendLost if unsent else NetCode.NetworkAckLost
                self.receipt_received(hop, Receipt(uuid, code, self.me))
        if self._next_absence > now:
            return
        for hop in [hop for hop, until in self._absent.items() if until <= now]:
            del self._absent[hop]
            self._give_up(hop)
            if isinstance(hop, Position):
                self.routes.withdraw(hop)
                self._calls.pop(hop, None)
        self._next_absence = min(self._absent.values(), default=inf)


def _is_sane(parcel: Parcel) -> bool:
    """No field but the body and the destination may be long, and the source is a place."""
    short = len(parcel.uuid) <= MAX_TEXT and len(parcel.mtype) <= MAX_TEXT
    return short and not isinstance(as_member(parcel.src), NetCode)


def _is_leaf(hop: Hop) -> bool:
    return isinstance(hop, Position) and hop.role in (Role.AGENT, Role.WORKER)
