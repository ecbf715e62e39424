"""The values of the message bus: parcels, receipts, results of sends, changes of connections.

`core/bus/relay.py` decides about them, `bus/endpoint.py` gives them to the rest of the program.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.model.messages import Body

OVERHEAD = 3072
"""The most bytes that the other fields of a parcel take; their lengths are checked."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message on its way. Only its destination decodes the body."""

    uuid: str
    mtype: str
    sync: bool
    src: Position
    dst: Position
    body: str
    patience_s: float
    """How long the sending hop waits for the receipt. Used only with `sync`."""

    @property
    def size(self) -> int:
        """An upper bound of its size on the wire, in bytes."""
        body = self.body
        text = len(body) if body.isascii() else len(body.encode(errors="replace"))
        return text + len(self.dst.server_rank) + len(self.dst.process_rank) + OVERHEAD


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a `sync` parcel: `src` accepted it, or it failed at `src` with this code."""

    uuid: str
    code: int
    src: Position | None


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a send."""

    code: NetCode
    source: Position | None
    """The process that answered: the destination, or the hop that failed. None: timeout."""

    def __bool__(self) -> bool:
        return self.code == NetCode.OK


@dataclass(frozen=True, slots=True)
class Received:
    src: Position
    dst: Position
    uuid: str
    mtype: str
    body: Body
    epoch: int = 0
    """Of the manager that sent it; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Connected to upstream: registered, paths announced, stream open. Also after a reconnect."""


@dataclass(frozen=True, slots=True)
class Left:
    """Disconnected from upstream. The bus is already trying to join again."""

    because: str = ""


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A direct child has opened its stream."""

    peer: Position


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A direct child's stream has ended. Its routes stay for a while, in case it reconnects."""

    peer: Position


Change = Joined | Left | PeerJoined | PeerLeft


@dataclass(frozen=True, slots=True)
class TcpState:
    """What our kernel knows about the TCP connection to a neighbour."""

    unconfirmed: bool
    """The peer's machine has not acknowledged everything that we sent."""
    quiet_s: float
    """Seconds since the peer's machine last acknowledged anything."""
    usual_s: float
    """How long an acknowledgement takes at most, as TCP estimates it."""
