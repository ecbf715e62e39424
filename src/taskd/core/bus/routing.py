"""Where a message goes next, and which code an invalid one gets.

A bus node knows its own position, the children that have registered, and for every downstream
position the child through which it is reached:

    for this node           -> this node
    a downstream position   -> through that child
    anything else           -> upstream; NoRoute at the top, or when it came from upstream

A message to several positions (`All`, or a list of ranks) goes to every matching neighbour once.
The next hop splits it again, and it never goes back where it came from. `core/bus/relay.py` uses
this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from taskd.model.codes import NetCode
from taskd.model.ids import ALL, NO_PROCESS, Position, Role

MAX_CHILDREN = 5000
MAX_ROUTES = 100_000
MAX_DIGITS = 9
MAX_FREE_TEXT = 32
MAX_LIST = 100_000
"""Maximum length of a list of ranks, in characters."""

_ROLES = frozenset(Role)


class Side(Enum):
    """The two hops that are not a child."""

    ME = "me"
    UP = "up"


Hop = Position | Side
"""A neighbour: a child by its routing key, or one of the two sides."""


def routing_key(position: Position) -> Position:
    """The part of a position that identifies it. Only the process rank of workers does; that of a
    proxy is the time of its start."""
    if position.role == Role.WORKER or position.process_rank == NO_PROCESS:
        return position
    return replace(position, process_rank=NO_PROCESS)


def as_destination(given: Position | None) -> Position | NetCode:
    """The destination in normal form, or the code of what is wrong with it."""
    if given is None:
        return NetCode.NilPosition
    if given.role not in _ROLES:
        return NetCode.DstRoleIllegal
    servers = _ranks(given.server_rank)
    if servers is None:
        return NetCode.DstSrvRankIllegal
    if given.role != Role.WORKER:
        return Position(given.role, servers)
    processes = _ranks(given.process_rank)
    if processes is None:
        return NetCode.DstProcessRankIllegal
    return Position(given.role, servers, processes)


def as_member(given: Position | None) -> Position | NetCode:
    """A position that a peer claims for itself: exactly one, not a pattern."""
    if given is None:
        return NetCode.NilPosition
    if given.role not in _ROLES:
        return NetCode.DstRoleIllegal
    if not _is_one_rank(given.server_rank):
        return NetCode.DstSrvRankIllegal
    free_text = given.role != Role.WORKER and len(given.process_rank) <= MAX_FREE_TEXT
    if not (free_text or _is_one_rank(given.process_rank)):
        return NetCode.DstProcessRankIllegal
    return given


def is_for_many(dst: Position) -> bool:
    return _is_pattern(dst.server_rank) or _is_pattern(dst.process_rank)


def _is_pattern(ranks: str) -> bool:
    return ranks == ALL or "," in ranks


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _is_one_rank(text: str) -> bool:
    return _is_rank(text) and (text == "0" or text[0] != "0")


def _ranks(text: str) -> str | None:
    """`All`, or the numbers of the list in their order without duplicates."""
    if ALL in text:
        return ALL
    if _is_one_rank(text):
        return text
    parts = text.split(",") if len(text) <= MAX_LIST else [""]
    if not all(_is_rank(part) for part in parts):
        return None
    return ",".join(dict.fromkeys(str(int(part)) for part in parts))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A destination of several positions, parsed once."""

    role: str
    servers: frozenset[str] | None
    processes: frozenset[str] | None

    @staticmethod
    def of(dst: Position) -> Pattern:
        def members(ranks: str) -> frozenset[str] | None:
            return None if ranks == ALL else frozenset(ranks.split(","))

        processes = members(dst.process_rank) if dst.role == Role.WORKER else None
        return Pattern(dst.role, members(dst.server_rank), processes)

    def fits(self, position: Position) -> bool:
        return (
            position.role == self.role
            and (self.servers is None or position.server_rank in self.servers)
            and (self.processes is None or position.process_rank in self.processes)
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The next hops of one message. With a code other than OK it is not forwarded."""

    hops: tuple[Hop, ...] = ()
    code: NetCode = NetCode.OK
    because: str = ""


@dataclass(slots=True)
class Routes:
    """The children and downstream positions of one node. Bounded: what does not fit is refused."""

    me: Position
    top: bool
    """This node has no upstream."""
    max_children: int = MAX_CHILDREN
    max_routes: int = MAX_ROUTES
    children: dict[Position, Position] = field(default_factory=dict)
    """Routing key of each registered child -> the position it registered with."""
    _hop_to: dict[Position, Position] = field(default_factory=dict)
    _below: dict[Position, dict[Position, Position]] = field(default_factory=dict)
    """Child -> routing key -> the position announced, in the order of announcement."""

    def register(self, child: Position) -> NetCode:
        key = routing_key(child)
        if key not in self.children and len(self.children) >= self.max_children:
            return NetCode.ExceedMaxRegistryNum
        self.children[key] = child
        return NetCode.OK

    def announce(
        self, through: Position, path: Iterable[Position], *, replace_all: bool = False
    ) -> NetCode:
        """These positions are reached through this child; `replace_all` drops earlier ones."""
        hop = routing_key(through)
        if hop not in self.children:
            return NetCode.ClientErr
        if replace_all:
            self._forget_below(hop)
        below = self._below.setdefault(hop, {})
        for position in path:
            key = routing_key(position)
            before = self._hop_to.get(key)
            if key == routing_key(self.me) or (key in self.children and key != hop):
                continue  # this node and its children are not behind another child
            if before is None and len(self._hop_to) >= self.max_routes:
                return NetCode.ExceedMaxRegistryNum
            if before is not None and before != hop:
                del self._below[before][key]
            self._hop_to[key] = hop
            below[key] = position
        return NetCode.OK

    def withdraw(self, child: Position) -> None:
        """Remove a child that was disconnected for too long, and everything behind it."""
        hop = routing_key(child)
        self._forget_below(hop)
        self._below.pop(hop, None)
        self.children.pop(hop, None)

    def _forget_below(self, hop: Position) -> None:
        for key in self._below.pop(hop, {}):
            del self._hop_to[key]

    def below(self) -> tuple[Position, ...]:
        """All downstream positions, as they were announced."""
        return tuple(position for known in self._below.values() for position in known.values())

    def hop_to(self, position: Position) -> Position | None:
        return self._hop_to.get(routing_key(position))

    def decide(self, dst: Position, came_from: Hop) -> Decision:
        """`dst` is in normal form."""
        if is_for_many(dst):
            return self._decide_many(Pattern.of(dst), came_from)
        if dst == routing_key(self.me):
            return Decision((Side.ME,))
        hop = self._hop_to.get(dst)
        if hop is not None and hop != came_from:
            return Decision((hop,))
        if hop is None and not self.top and came_from is not Side.UP:
            return Decision((Side.UP,))
        reason = "it came from there" if hop is not None else f"{self.me} knows no path to it"
        return Decision(code=NetCode.NoRoute, because=f"{dst}: {reason}")

    def _decide_many(self, pattern: Pattern, came_from: Hop) -> Decision:
        hops: dict[Hop, None] = {}
        if came_from is not Side.ME and pattern.fits(routing_key(self.me)):
            hops[Side.ME] = None
        for key, hop in self._hop_to.items():
            if hop not in hops and hop != came_from and pattern.fits(key):
                hops[hop] = None
        if not self.top and came_from is not Side.UP:
            hops[Side.UP] = None
        if not hops:
            return Decision(code=NetCode.NoRoute, because=f"no position matches {pattern}")
        return Decision(tuple(hops))
