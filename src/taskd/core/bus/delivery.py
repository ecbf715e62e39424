"""One link between two bus nodes: numbers parcels, repeats them after a break, drops duplicates.

Both ends of a link run a `Session`. Each direction numbers its parcels from 1. A parcel stays in
the sender's window until the other end confirms it, so a broken connection is resumed exactly where
it broke: nothing is lost, repeated or reordered while both processes run.

    push -> window -> frame -> (connection) -> take -> the node's routing

A `Session` belongs to one incarnation of its end. An end that has lost its memory (a restarted
process, or a server that has dropped an absent child) starts a new incarnation, and the numbers of
both directions start at 1 again. What is still in the window then depends on the direction. A
report goes upstream to the next incarnation as well, because it may never have arrived. An order
does not go downstream: it was meant for the process that has ended, and an order to kill it must
not kill its successor. The `Seen` list of the final receiver drops the duplicates of such a
repetition.

The classes here are mutable, unlike most of core/: a window holds thousands of parcels, and a copy
for each change would cost quadratic time. They use no clock and no socket.
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
"""Maximum length of the name of an incarnation, in characters."""
MAX_RECEIPTS = 8192
"""Receipts that wait to be written. The oldest is dropped: what waits for it has a timeout."""
KEPT_RECEIPTS = 256
"""Receipts kept for repetition after a break. A duplicate is ignored, so they have no numbers."""
MAX_SEEN = 10_000
CONFIRM_EVERY = 256
"""After this many parcels a confirmation is sent at once."""


@dataclass(slots=True)
class Budget:
    """What all links of one node may hold together, in bytes."""

    limit: int = 1 << 30
    used: int = 0


class ProtocolError(Exception):
    """The other end broke the protocol; the connection must be opened again."""


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
    """One end of a link, in one incarnation."""

    incarnation: str
    repeat_to_new_incarnation: bool
    """Whether the window goes to the peer's next incarnation: True upstream, False downstream."""
    max_window: int = MAX_WINDOW
    max_bytes: int = MAX_WINDOW_BYTES
    peer_incarnation: str = ""
    connected: bool = False
    """A connection is open and both ends have sent their hello."""
    received: int = 0
    """The number of the last parcel taken from the peer."""
    confirmed: int = 0
    """The last `received` that was sent to the peer."""
    budget: Budget = field(default_factory=Budget)
    bytes: int = 0
    _window: deque[Parcel] = field(default_factory=deque)
    _base: int = 1
    """The number of the first parcel in the window."""
    _written: int = 0
    """How many of the window have been written to the current connection."""
    _touched: int = 0
    """How many have been written to any connection: they may have arrived."""
    _receipts: deque[Receipt] = field(default_factory=deque)
    _receipts_written: int = 0

    # The connection

    def open(self) -> Frame:
        """Start on a new connection; returns the first frame to write."""
        self.connected = False
        self._written = 0
        self._receipts_written = 0
        return Frame(received=self.received, hello=Hello(self.incarnation, self.peer_incarnation))

    def hello_received(self, frame: Frame) -> list[Parcel]:
        """The peer's first frame. Returns the parcels lost with its previous incarnation."""
        hello = frame.hello
        if hello is None:
            raise ProtocolError("the first frame has no hello")
        if not 0 < len(hello.incarnation) <= MAX_INCARNATION:
            raise ProtocolError("invalid hello: its incarnation must have 1 to 64 characters")
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
        """Remove it. False: it has been written already, and may have arrived."""
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
        """A frame should be written now. A confirmation alone waits until many parcels came."""
        return self.connected and (
            self._written < len(self._window)
            or self._receipts_written < len(self._receipts)
            or self.received - self.confirmed >= CONFIRM_EVERY
        )

    @property
    def owes_confirmation(self) -> bool:
        return self.connected and self.received > self.confirmed

    def frame(self) -> Frame | None:
        """What is queued, as one frame; None: nothing to write."""
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
        """Everything was written and confirmed."""
        return not self._window and self._receipts_written == len(self._receipts)

    # Inwards

    def take(self, frame: Frame) -> Sequence[Parcel]:
        """Take the parcels of the frame. The two hellos have agreed on the next number of each
        direction, so a gap or an overlap is an error."""
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
        """Drop the peer. Returns what was never confirmed."""
        self.connected = False
        return self._empty()


@dataclass(slots=True)
class Queue:
    """A link to one of Ascend's processes. Without numbers, nothing is repeated after a break."""

    max_window: int = MAX_WINDOW
    max_bytes: int = MAX_WINDOW_BYTES
    budget: Budget = field(default_factory=Budget)
    connected: bool = False
    bytes: int = 0
    _parcels: deque[Parcel] = field(default_factory=deque)
    _receipts: deque[Receipt] = field(default_factory=deque)

    def disconnected(self) -> None:
        """The next stream must not get receipts for messages of this one."""
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
    """The last messages delivered here, so that none is delivered twice."""

    def __init__(self, limit: int = MAX_SEEN) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[Position, str], None] = OrderedDict()

    def __contains__(self, parcel: Parcel) -> bool:
        return (parcel.src, parcel.uuid) in self._known

    def add(self, parcel: Parcel) -> None:
        if not parcel.uuid:
            return  # without a uuid, it cannot be distinguished from another message
        self._known[(parcel.src, parcel.uuid)] = None
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)
