"""What passes over the bus and what its users see of it: parcels, receipts, results, changes.

`core/bus/relay.py` decides about these values, `bus/endpoint.py` gives them to the rest of the
program.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.model.messages import Body

OVERHEAD = 3072
"""The most that the other fields of a parcel take, once their lengths have been checked."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message on its way. Nobody but its destination reads the body."""

    uuid: str
    mtype: str
    sync: bool
    src: Position
    dst: Position
    body: str
    patience_s: float
    """How long the hop that sent it waits for the receipt. Meaningless unless `sync`."""

    @property
    def size(self) -> int:
        """At least what it takes on the wire, in bytes."""
        body = self.body
        text = len(body) if body.isascii() else len(body.encode(errors="replace"))
        return text + len(self.dst.server_rank) + len(self.dst.process_rank) + OVERHEAD


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a `sync` parcel: taken over by `src`, or failed at `src` with this code."""

    uuid: str
    code: int
    src: Position | None


@dataclass(frozen=True, slots=True)
class Sent:
    """How a send ended."""

    code: NetCode
    source: Position | None
    """Who says so: the final receiver, or the hop that failed. None: nobody answered in time."""

    def __bool__(self) -> bool:
        return self.code == NetCode.OK


@dataclass(frozen=True, slots=True)
class Received:
    src: Position
    dst: Position
    uuid: str
    mtype: str
    body: Body


@dataclass(frozen=True, slots=True)
class Joined:
    """The way up is open: registered, paths announced, stream running. Also after every break."""


@dataclass(frozen=True, slots=True)
class Left:
    """The way up has broken. The bus is already trying to join again."""

    because: str = ""


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A direct child has opened its stream."""

    peer: Position


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A direct child's stream has ended. Its routes stay for a while, in case it comes back."""

    peer: Position


Change = Joined | Left | PeerJoined | PeerLeft


@dataclass(frozen=True, slots=True)
class TcpState:
    """What the kernel knows of the connection to a neighbour, without the neighbour's help."""

    unconfirmed: bool
    """Something that we have sent has not been confirmed by its machine."""
    quiet_s: float
    """How long ago its machine last confirmed anything."""
    usual_s: float
    """How long a confirmation takes at most, as TCP estimates it."""
