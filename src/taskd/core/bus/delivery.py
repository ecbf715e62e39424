"""One link between two bus nodes: numbers, repeats after a break, drops what came twice.

Both ends of a link run a `Session`. Each direction counts its parcels from 1. A parcel stays in the
sender's window until the other end says that it has taken it over, so a broken connection is
resumed exactly where it broke: nothing is lost, repeated or reordered while both ends live.

    push -> window -> frame -> (connection) -> take -> the node's routing

A `Session` is one life of one end. An end that has lost its memory (a restarted process, or a
server that has given up on an absent child) begins a new life, and the numbers of both directions
begin at 1 again. What was still in the window then is a question of direction: a report goes
up to the next life as well, for it may never have arrived; an order does not, because it was meant
for the process that has ended, and killing its successor would be a poor service. The
`Seen` list of the final receiver drops what such a repetition brings twice.

The classes here are mutable, unlike most of core/: a window holds thousands of parcels, and
a copy for each of them would cost the square of it. They still know no clock and no socket.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from taskd.model.bus import Parcel, Receipt
from taskd.model.ids import Position

MAX_WINDOW = 8192
"""Parcels in one window."""
MAX_WINDOW_BYTES = 32 << 20
MAX_FRAME = 512
"""Parcels in one frame."""
MAX_FRAME_BYTES = 1 << 20
FRAME_RECEIPTS = 512
"""Receipts in one frame."""
MAX_INCARNATION = 64
"""Characters in the name of a life."""
MAX_RECEIPTS = 8192
"""Receipts that wait to be written. The oldest gives way: its asker gives up by itself."""
KEPT_RECEIPTS = 256
"""Receipts kept for repetition after a break. One that comes twice is for nothing, and harmless,
so they need no numbers."""
MAX_SEEN = 10_000
CONFIRM_EVERY = 256
"""So many parcels are taken before a confirmation is due at once."""


@dataclass(slots=True)
class Budget:
    """What all lanes of one node may hold together, in bytes."""

    limit: int = 1 << 30
    used: int = 0


class ProtocolError(Exception):
    """The other end broke the protocol; the connection must be made anew."""


@dataclass(frozen=True, slots=True)
class Hello:
    incarnation: str
    peer_incarnation: str


@dataclass(frozen=True, slots=True)
class Frame:
    first: int = 0
    parcels: Sequence[Parcel] = ()
    receipts: Sequence[Receipt] = ()
    received: int = 0
    hello: Hello | None = None


@dataclass(slots=True)
class Session:
    """One end of a link, in one life."""

    incarnation: str
    repeat_to_new_incarnation: bool
    """Whether a window outlives the peer it was meant for: True on the way up, False down."""
    max_window: int = MAX_WINDOW
    max_bytes: int = MAX_WINDOW_BYTES
    peer_incarnation: str = ""
    connected: bool = False
    """A connection is open and both have said hello."""
    received: int = 0
    """The last number of the peer's that was taken over."""
    confirmed: int = 0
    """The last `received` that the peer was told."""
    budget: Budget = field(default_factory=Budget)
    bytes: int = 0
    _window: deque[Parcel] = field(default_factory=deque)
    _base: int = 1
    """The number of the first parcel in the window."""
    _written: int = 0
    """How many of the window have been written to the present connection."""
    _touched: int = 0
    """How many have been written to any: they may have arrived somewhere."""
    _receipts: deque[Receipt] = field(default_factory=deque)
    _receipts_written: int = 0

    # The connection

    def open(self) -> Frame:
        """A new connection: the first frame to write."""
        self.connected = False
        self._written = 0
        self._receipts_written = 0
        return Frame(received=self.received, hello=Hello(self.incarnation, self.peer_incarnation))

    def hello_received(self, frame: Frame) -> list[Parcel]:
        """The peer's first frame. Returns the parcels that were lost with its former life."""
        hello = frame.hello
        if hello is None:
            raise ProtocolError("the first frame has no hello")
        if not 0 < len(hello.incarnation) <= MAX_INCARNATION:
            raise ProtocolError("the hello names no life")
        lost: list[Parcel] = []
        if hello.incarnation != self.peer_incarnation:
            if self.peer_incarnation and not self.repeat_to_new_incarnation:
                lost = self._empty()
            self.peer_incarnation = hello.incarnation
            self.received = 0
            self._receipts.clear()
        if hello.peer_incarnation == self.incarnation:
            self._confirm(frame.received)
        else:
            self._base = 1
        self.confirmed = self.received
        self.connected = True
        return lost

    def disconnected(self) -> None:
        self.connected = False

    # Outwards

    def has_room(self, size: int) -> bool:
        return self.budget.used + size <= self.budget.limit and (
            not self._window
            or (len(self._window) < self.max_window and self.bytes + size <= self.max_bytes)
        )

    def push(self, parcel: Parcel) -> bool:
        """Queue it. False when the window is full."""
        size = parcel.size
        if not self.has_room(size):
            return False
        self._window.append(parcel)
        self.bytes += size
        self.budget.used += size
        return True

    def withdraw(self, uuid: str) -> bool:
        """Take it back. False when it has been written already, and may have arrived."""
        for index in range(self._touched, len(self._window)):
            if self._window[index].uuid == uuid:
                self._free(self._window[index].size)
                del self._window[index]
                return True
        return False

    def _free(self, size: int) -> None:
        self.bytes -= size
        self.budget.used -= size

    def _empty(self) -> list[Parcel]:
        parcels = list(self._window)
        self._window.clear()
        self._written = self._touched = 0
        self._free(self.bytes)
        return parcels

    def push_receipt(self, receipt: Receipt) -> None:
        self._receipts.append(receipt)
        if len(self._receipts) > MAX_RECEIPTS:
            self._receipts.popleft()
            self._receipts_written = max(0, self._receipts_written - 1)

    @property
    def has_output(self) -> bool:
        """Something is worth a frame now; a confirmation alone is only after many parcels."""
        return self.connected and (
            self._written < len(self._window)
            or self._receipts_written < len(self._receipts)
            or self.received - self.confirmed >= CONFIRM_EVERY
        )

    @property
    def owes_confirmation(self) -> bool:
        return self.connected and self.received > self.confirmed

    def frame(self) -> Frame | None:
        """All that is queued, as one frame; None when there is nothing to say at all."""
        if not self.connected:
            return None
        parcels: list[Parcel] = []
        size = 0
        for parcel in islice(self._window, self._written, self._written + MAX_FRAME):
            size += parcel.size
            if parcels and size > MAX_FRAME_BYTES:
                break
            parcels.append(parcel)
        until = self._receipts_written + (FRAME_RECEIPTS if size <= MAX_FRAME_BYTES else 0)
        receipts = list(islice(self._receipts, self._receipts_written, until))
        if not parcels and not receipts and not self.owes_confirmation:
            return None
        first = self._base + self._written if parcels else 0
        self._written += len(parcels)
        self._touched = max(self._touched, self._written)
        self._receipts_written += len(receipts)
        while self._receipts_written > KEPT_RECEIPTS:
            self._receipts.popleft()
            self._receipts_written -= 1
        self.confirmed = self.received
        return Frame(first, parcels, receipts, self.received)

    @property
    def is_idle(self) -> bool:
        """Everything was written and taken over."""
        return not self._window and self._receipts_written == len(self._receipts)

    # Inwards

    def take(self, frame: Frame) -> Sequence[Parcel]:
        """Take over the parcels of the frame. Both hellos have told where each side goes on, so
        there can be neither a gap nor an overlap."""
        self._confirm(frame.received)
        if frame.parcels and frame.first != self.received + 1:
            raise ProtocolError(f"parcel {frame.first} came after {self.received}")
        self.received += len(frame.parcels)
        return frame.parcels

    def _confirm(self, received: int) -> None:
        if received < self._base:
            return
        count = received - self._base + 1
        if count > len(self._window):
            raise ProtocolError(f"parcel {received} was confirmed but never sent")
        for _ in range(count):
            self._free(self._window.popleft().size)
        self._base += count
        self._written = max(0, self._written - count)
        self._touched = max(0, self._touched - count)

    def abandon(self) -> list[Parcel]:
        """Give up on the peer: what was never confirmed."""
        self.connected = False
        return self._empty()


@dataclass(slots=True)
class Queue:
    """The same for a peer of Ascend's: no numbers, so nothing can be repeated after a break."""

    max_window: int = MAX_WINDOW
    max_bytes: int = MAX_WINDOW_BYTES
    budget: Budget = field(default_factory=Budget)
    connected: bool = False
    bytes: int = 0
    _parcels: deque[Parcel] = field(default_factory=deque)
    _receipts: deque[Receipt] = field(default_factory=deque)

    def disconnected(self) -> None:
        """Its next stream knows nothing of the questions that came over this one."""
        self.connected = False
        self._receipts.clear()

    def has_room(self, size: int) -> bool:
        return self.budget.used + size <= self.budget.limit and (
            not self._parcels
            or (len(self._parcels) < self.max_window and self.bytes + size <= self.max_bytes)
        )

    def push(self, parcel: Parcel) -> bool:
        size = parcel.size
        if not self.has_room(size):
            return False
        self._parcels.append(parcel)
        self.bytes += size
        self.budget.used += size
        return True

    def withdraw(self, uuid: str) -> bool:
        for index, parcel in enumerate(self._parcels):
            if parcel.uuid == uuid:
                self._free(parcel.size)
                del self._parcels[index]
                return True
        return False

    def _free(self, size: int) -> None:
        self.bytes -= size
        self.budget.used -= size

    def push_receipt(self, receipt: Receipt) -> None:
        if self.connected and len(self._receipts) < MAX_RECEIPTS:
            self._receipts.append(receipt)

    @property
    def has_output(self) -> bool:
        return self.connected and bool(self._parcels or self._receipts)

    @property
    def is_idle(self) -> bool:
        return not self._parcels and not self._receipts

    def next_parcel(self) -> Parcel | None:
        if not self._parcels:
            return None
        parcel = self._parcels.popleft()
        self._free(parcel.size)
        return parcel

    def next_receipt(self) -> Receipt | None:
        return self._receipts.popleft() if self._receipts else None

    def abandon(self) -> list[Parcel]:
        self.connected = False
        lost = list(self._parcels)
        self._parcels.clear()
        self._receipts.clear()
        self._free(self.bytes)
        return lost


Link = Session | Queue


class Seen:
    """The last messages that were delivered here, so that none is delivered twice."""

    def __init__(self, limit: int = MAX_SEEN) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[Position, str], None] = OrderedDict()

    def __contains__(self, parcel: Parcel) -> bool:
        return (parcel.src, parcel.uuid) in self._known

    def add(self, parcel: Parcel) -> None:
        if not parcel.uuid:
            return  # Nothing tells it from another one without a name.
        self._known[(parcel.src, parcel.uuid)] = None
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)
