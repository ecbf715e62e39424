"""A whole bus in one thread: hundreds of relays, virtual time, a network that cuts and delays.

The network keeps the guarantees of TCP and gRPC and no others: what is written to one connection
arrives in order or not at all, calls and streams overtake each other, either end may learn late
that a connection has broken, and a call may come twice, or long after its caller gave up.

What really happened (which node sent, received and was answered what) is recorded here, outside of
the relays.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from taskd.core.bus.delivery import Frame, Session
from taskd.core.bus.relay import Relay, RelayConfig
from taskd.core.bus.routing import Hop, Side, is_for_many, routing_key
from taskd.model.bus import Parcel
from taskd.model.codes import NetCode
from taskd.model.ids import ALL, Position, Role, agent, manager, worker

MAX_STEPS = 2_000_000
TIMEOUT_S = 3.0
CONFIG = RelayConfig()


@dataclass(eq=False)
class Node:
    """One process of the bus. It may be killed and restarted; `incarnation` counts."""

    me: Position
    parent: Node | None
    relay: Relay[Parcel]
    incarnation: int = 0
    alive: bool = True
    attempt: int = 0
    calls: int = 0
    news: list[Position] = field(default_factory=list)
    """Positions not announced to the parent since the last join."""
    announcing: bool = False
    connection: Connection | None = None
    streams: dict[Position, Connection] = field(default_factory=dict)
    """The server's view: which connection each child's stream runs on."""
    tick_at: float = inf


@dataclass(eq=False)
class Connection:
    """A stream between a child and its parent. Each direction is first in, first out."""

    child: Node
    parent: Node
    open: bool = True
    arrival: dict[Node, float] = field(default_factory=dict)
    hello_received: set[Node] = field(default_factory=set)
    noticed: set[Node] = field(default_factory=set)
    """The ends that know that it has broken."""


@dataclass
class Sending:
    """What really happened to one message."""

    number: int
    src: Node
    src_incarnation: int
    dst: Position
    sync: bool
    at: float
    results: list[tuple[int, float]] = field(default_factory=list)
    delivered: list[tuple[Node, int]] = field(default_factory=list)


class World:
    def __init__(self, seed: int, *, racks: int = 4, nodes: int = 6, ranks: int = 8) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.history: list[str] = []
        self.sendings: dict[str, Sending] = {}
        self.last_seen: dict[tuple[Node, int, Node, int], int] = defaultdict(lambda: -1)
        self.kills = 0
        self.cuts = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._numbers = count()
        self._lives = count(1)
        self.nodes: list[Node] = []
        self.calm = False
        self._grow(racks, nodes, ranks)

    # The tree

    def _grow(self, racks: int, nodes: int, ranks: int) -> None:
        top = self._add(manager(), None)
        rank, server = 0, 0
        for rack in range(racks):
            # One rack has one level more than the others, so that paths differ in length.
            above = self._add(Position(Role.PROXY, str(1000 + rack), "1"), top)
            if rack == 0:
                above = self._add(Position(Role.PROXY, "2000", "1"), above)
            for _ in range(nodes):
                prx = self._add(Position(Role.PROXY, str(server), "1"), above)
                self._add(agent(server), prx)
                for _ in range(ranks):
                    self._add(worker(server, rank), prx)
                    rank += 1
                server += 1

    def _add(self, me: Position, parent: Node | None) -> Node:
        node = Node(me, parent, self._relay(me))
        self.nodes.append(node)
        if parent is not None:
            self._later(0.5, lambda: self._join(node, node.incarnation))
        return node

    def _relay(self, me: Position) -> Relay[Parcel]:
        return Relay(
            me,
            me.role == Role.MANAGER,
            lambda parcel: parcel,
            lambda: f"l{next(self._lives)}",
            CONFIG,
        )

    # What happens to the bus

    def kill(self, node: Node, *, for_s: float) -> None:
        """The process ends, its connections break, and it is restarted after `for_s`."""
        if not node.alive:
            return
        self.kills += 1
        self._note(f"{node.me} is killed")
        node.alive = False
        node.incarnation += 1
        for connection in [node.connection, *node.streams.values()]:
            if connection is not None:
                self._cut(connection)
        node.streams = {}
        node.connection = None
        self._later(for_s, lambda: self._restart(node))

    def _restart(self, node: Node) -> None:
        if node.me.role == Role.PROXY:
            node.me = Position(Role.PROXY, node.me.server_rank, str(1 + node.incarnation))
        node.relay = self._relay(node.me)
        node.alive, node.attempt, node.calls, node.tick_at = True, 0, 0, inf
        self._note(f"{node.me} is restarted")
        if node.parent is not None:
            self._join(node, node.incarnation)

    def cut(self, node: Node) -> None:
        if node.connection is not None and node.connection.open:
            self.cuts += 1
            self._note(f"{node.me} is cut off")
            self._cut(node.connection)

    def _cut(self, connection: Connection) -> None:
        if not connection.open:
            return
        connection.open = False
        for end in (connection.child, connection.parent):
            self._later(self._slow(0.02, 1.0), lambda end=end: self._learn(connection, end))  # type: ignore[misc]

    def _learn(self, connection: Connection, end: Node) -> None:
        """One end notices that the connection is gone."""
        if end in connection.noticed:
            return
        connection.noticed.add(end)
        if end is connection.child:
            if end.alive and end.connection is connection:
                end.connection = None
                end.relay.disconnected(Side.UP, self.now)
                self._settle(end)
                incarnation = end.incarnation
                self._later(0.05, lambda: self._join(end, incarnation))
        elif end.alive and end.streams.get(routing_key(connection.child.me)) is connection:
            self._end_stream(end, connection)

    def _evict(self, parent: Node, held: Connection) -> None:
        """A newer stream of the same child replaces this one."""
        self._cut(held)
        held.noticed.add(parent)
        self._end_stream(parent, held)

    def _end_stream(self, parent: Node, connection: Connection) -> None:
        hop = next(hop for hop, held in parent.streams.items() if held is connection)
        del parent.streams[hop]
        parent.relay.disconnected(hop, self.now)
        self._settle(parent)

    # Joining, as bus/client.py does it

    def _join(self, node: Node, incarnation: int) -> None:
        if not node.alive or node.incarnation != incarnation or node.connection is not None:
            return
        node.attempt += 1
        node.news, node.announcing = [], False
        me, number, stamp = node.me, node.attempt, self._stamp(node)

        def again() -> None:
            self._later(0.3, lambda: self._join(node, incarnation))

        def still() -> bool:
            return node.alive and node.incarnation == incarnation and node.attempt == number

        def register(parent: Node) -> NetCode:
            code = parent.relay.register(me, self.now, stamp)
            held = parent.streams.get(routing_key(me))
            if code == NetCode.OK and held is not None:
                self._evict(parent, held)
            return code

        def registered() -> None:
            if still():
                path = (me, *node.relay.routes.below())

                def announced() -> None:
                    if still():
                        self._open(node)
                        newer = set(node.relay.routes.below()) - set(path)
                        self._announce_up(node, sorted(newer))

                self._call(node, self._announcing(node, path, replace_all=True), announced, again)

        self._call(node, register, registered, again)

    def _stamp(self, node: Node) -> tuple[str, int]:
        node.calls += 1
        return f"{node.me}#{node.incarnation}", node.calls

    def _announcing(
        self, node: Node, path: Sequence[Position], *, replace_all: bool
    ) -> Callable[[Node], NetCode]:
        me, stamp = node.me, self._stamp(node)

        def announce(parent: Node) -> NetCode:
            code = parent.relay.announce(me, path, replace_all=replace_all, call=stamp)
            if code == NetCode.OK:
                self._announce_up(parent, path)
            return code

        return announce

    def _announce_up(self, node: Node, path: Sequence[Position]) -> None:
        """A proxy announces upstream, one call at a time; if disconnected, its next join does."""
        if node.parent is None or node.connection is None:
            return
        node.news += path
        if not node.announcing and node.news:
            node.announcing = True
            news, node.news, attempt = node.news, [], node.attempt

            def announced() -> None:
                if node.attempt == attempt:
                    node.announcing = False
                    self._announce_up(node, ())

            def doubt() -> None:
                if node.alive and node.attempt == attempt:
                    self.cut(node)

            self._call(node, self._announcing(node, news, replace_all=False), announced, doubt)

    def _call(
        self,
        node: Node,
        what: Callable[[Node], NetCode],
        then: Callable[[], None],
        otherwise: Callable[[], None],
    ) -> None:
        """A unary call: it, or its answer, may get lost; it may take effect after the caller has
        given up; and it may come twice."""
        parent = node.parent
        assert parent is not None

        def arrive() -> None:
            if not parent.alive:
                self._later(0.01, otherwise)
                return
            code = what(parent)
            self._settle(parent)
            if self._lossy(0.02):
                self._later(1.0, late)
            if self._lossy(0.03):
                self._later(1.0, otherwise)
            else:
                self._later(0.01, then if code == NetCode.OK else otherwise)

        def late() -> None:
            if parent.alive:
                what(parent)
                self._settle(parent)

        if self._lossy(0.03):
            self._later(1.0, otherwise)
        elif self._lossy(0.02):
            self._later(1.0, otherwise)
            self._later(3.0, late)
        else:
            self._later(0.01, arrive)

    def _open(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.connection = Connection(node, parent)
        if parent.alive:
            self._write(node.connection, node, node.relay.session(Side.UP).open())
        else:
            self._cut(node.connection)

    def _accept(self, connection: Connection) -> Hop | None:
        """The parent's answer to a new stream."""
        parent, child = connection.parent, connection.child
        hop = routing_key(child.me)
        if parent.relay.routes.children.get(hop) != child.me:
            self._cut(connection)
            return None
        held = parent.streams.get(hop)
        if held is not None:
            self._evict(parent, held)
        parent.streams[hop] = connection
        self._write(connection, parent, parent.relay.session(hop).open())
        return hop

    # Frames

    def _write(self, connection: Connection, sender: Node, frame: Frame) -> None:
        receiver = connection.parent if sender is connection.child else connection.child
        at = max(connection.arrival.get(sender, 0.0), self.now + self._slow(0.005, 0.3))
        connection.arrival[sender] = at
        incarnation = receiver.incarnation
        self._at(at, lambda: self._arrive(connection, receiver, incarnation, frame))

    def _arrive(
        self, connection: Connection, receiver: Node, incarnation: int, frame: Frame
    ) -> None:
        if not connection.open or not receiver.alive or receiver.incarnation != incarnation:
            return
        hop = self._hop(connection, receiver)
        if hop is None and receiver is connection.parent and frame.hello is not None:
            hop = self._accept(connection)
        if hop is None:
            return
        if receiver not in connection.hello_received:
            connection.hello_received.add(receiver)
            receiver.relay.hello_received(hop, frame)
        else:
            receiver.relay.frame_received(hop, frame, self.now)
        self._settle(receiver)
        session = receiver.relay.links[hop]
        assert isinstance(session, Session)
        if session.owes_confirmation:
            self._later(0.02, lambda: self._flush(connection, receiver))

    def _hop(self, connection: Connection, end: Node) -> Hop | None:
        """How this end calls the other one, if the stream is (still) the one that counts."""
        if end is connection.child:
            return Side.UP if end.connection is connection else None
        hop = routing_key(connection.child.me)
        return hop if end.streams.get(hop) is connection else None

    def _flush(self, connection: Connection, sender: Node) -> None:
        """The writer of one end wakes: everything queued becomes frames."""
        hop = self._hop(connection, sender)
        if hop is None or not sender.alive or sender not in connection.hello_received:
            return
        session = sender.relay.links[hop]
        assert isinstance(session, Session)
        while (frame := session.frame()) is not None:
            self._write(connection, sender, frame)

    def _settle(self, node: Node) -> None:
        """Fetch what a relay has left, as bus/relay_loop.py does."""
        relay = node.relay
        while relay.inbox:
            self._delivered(node, relay.fetch())
        for answer in relay.answers:
            self._result(node, answer.ticket, answer.code)
        relay.answers.clear()
        relay.changes.clear()
        for hop in sorted(relay.ready, key=str):
            connection = node.connection if hop is Side.UP else node.streams.get(hop)  # type: ignore[arg-type]
            if connection is not None:
                self._later(0.002, lambda c=connection: self._flush(c, node))  # type: ignore[misc]
        relay.ready.clear()
        if relay.deadline < node.tick_at:
            self._arm(node)

    def _arm(self, node: Node) -> None:
        node.tick_at = node.relay.deadline
        relay = node.relay

        def tick() -> None:
            if node.alive and node.relay is relay:
                node.tick_at = inf
                relay.tick(self.now)
                self._settle(node)
                if relay.deadline < node.tick_at:
                    self._arm(node)

        if node.tick_at != inf:
            self._at(max(node.tick_at, self.now), tick)

    # The truth

    def send(self, src: Node, dst: Position, *, sync: bool) -> Sending | None:
        if not src.alive:
            return None
        number = next(self._numbers)
        uuid = f"m{number}"
        sending = Sending(number, src, src.incarnation, dst, sync, self.now)
        self.sendings[uuid] = sending
        parcel = Parcel(uuid, "sim", sync, src.me, dst, "", TIMEOUT_S)
        src.relay.send(parcel, number, self.now)
        self._settle(src)
        return sending

    def _result(self, node: Node, ticket: int, code: int) -> None:
        sending = self.sendings[f"m{ticket}"]
        sending.results.append((code, self.now))
        self._check(len(sending.results) == 1, f"m{ticket} was answered twice: {sending.results}")
        self._check(self.now <= sending.at + TIMEOUT_S + 1e-6, f"m{ticket} was answered late")
        if code == NetCode.OK and sending.sync and not is_for_many(sending.dst):
            self._check(bool(sending.delivered), f"m{ticket} to {sending.dst}: OK, not delivered")

    def _delivered(self, node: Node, parcel: Parcel) -> None:
        sending = self.sendings[parcel.uuid]
        self._note(f"{parcel.uuid} of {parcel.src} reaches {node.me}")
        self._check(fits(sending.dst, node.me), f"{parcel.uuid} for {sending.dst} at {node.me}")
        self._check(
            (node, node.incarnation) not in sending.delivered,
            f"{parcel.uuid} reached {node.me} twice",
        )
        sending.delivered.append((node, node.incarnation))
        pair = (sending.src, sending.src_incarnation, node, node.incarnation)
        self._check(
            self.last_seen[pair] < sending.number,
            f"{parcel.uuid} of {parcel.src} came to {node.me} after m{self.last_seen[pair]}",
        )
        self.last_seen[pair] = sending.number

    # Time

    def run(self, until: float) -> None:
        for _ in range(MAX_STEPS):
            if not self._agenda or self._agenda[0][0] > until:
                self.now = until
                return
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()
        raise AssertionError(f"no end after {MAX_STEPS} steps")

    def at(self, when: float, happen: Callable[[], None]) -> None:
        self._at(when, happen)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._serial), happen))

    def _later(self, within_s: float, happen: Callable[[], None]) -> None:
        self._at(self.now + self.random.uniform(0, within_s), happen)

    def _slow(self, usual_s: float, now_and_then_s: float) -> float:
        slow = not self.calm and self.random.random() < 0.02
        return self.random.uniform(0, now_and_then_s if slow else usual_s)

    def _lossy(self, chance: float) -> bool:
        return not self.calm and self.random.random() < chance

    def _note(self, what: str) -> None:
        self.history.append(f"{self.now:9.4f} {what}")

    def _check(self, holds: bool, what: str) -> None:
        assert holds, "\n".join([what, *self.history[-40:], f"{self.now:9.4f} {what}"])


def fits(dst: Position, me: Position) -> bool:
    """Written again, not with the code under test."""

    def one(ranks: str, mine: str) -> bool:
        return ranks == ALL or mine in ranks.split(",")

    same_process = me.role != Role.WORKER or one(dst.process_rank, me.process_rank)
    return dst.role == me.role and one(dst.server_rank, me.server_rank) and same_process
