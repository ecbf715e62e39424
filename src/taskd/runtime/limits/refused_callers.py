"""Keeps strangers that call again and again from taking the time of a server.

Each refused call costs a Python server half a millisecond, and each new connection some memory. So
when one address has more calls refused than a server can bear, its refused connections are closed,
and the kernel drops most of its attempts to connect: a filter on the listening sockets, which costs
the server nothing. Connections of others, also of the same address, stay open.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections import Counter
from contextlib import suppress
from urllib.parse import unquote

from taskd.runtime.clock import Clock, monotonic
from taskd.runtime.limits import connect_filter, connection_limit
from taskd.runtime.limits.connect_filter import Address
from taskd.runtime.limits.rate_limit import Buckets, Rate

log = logging.getLogger(__name__)

WINDOW_S = 0.25
MOST_PER_S = 200.0
"""Connections of one address with refused calls."""
CALLS = Rate(300, 1_000)
"""Refused calls of one address, on whichever connection."""
FEWEST, MOST = 2, 16
"""Of so many attempts to connect of such addresses one passes: no fewer than a server can bear,
because others of the same address connect, too, and so that it is noticed when it calms down."""
HOLD_S = 5.0
FLOOD_CALLS = 1_000
"""How many calls count for one that `note_flood` reports."""
MOST_PEERS, MOST_ADDRESSES = 10_000, 32


class RefusedCallers:
    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._refused: set[tuple[Address, int]] = set()
        self._calls, self._too_many = Buckets(CALLS, MOST_PEERS, clock), set[Address]()
        self._held: dict[Address, float] = {}
        self._counted: Counter[Address] = Counter()
        """The refused calls of this window."""
        self.pass_one_in = FEWEST
        self._noted, self._flooded = asyncio.Event(), asyncio.Event()

    def note(self, peer: str) -> None:
        """A call of this peer, as gRPC names it, was refused."""
        if len(self._refused) < MOST_PEERS and (found := address_of(peer)) is not None:
            self._refused.add(found)
            self._counted[found[0]] += 1
            if not self._calls.take(str(found[0])):
                self._too_many.add(found[0])
            self._noted.set()

    def note_flood(self, peer: str) -> None:
        """One call of this peer costs as much as a thousand others: it is cut off at once."""
        found = address_of(peer)
        if found is None or found in self._refused:
            return
        self.note(peer)
        self._too_many.add(found[0])
        self._counted[found[0]] += FLOOD_CALLS
        self._flooded.set()
        connection_limit.close_peers({(str(found[0]), found[1])})

    def due(self) -> tuple[set[Address], set[tuple[Address, int]]]:
        """At the end of a window: the addresses to hold off, and the connections to close."""
        now, refused, self._refused = self._clock(), self._refused, set()
        too_many, self._too_many = self._too_many, set()
        calls, self._counted = self._counted, Counter()
        loads: dict[Address, float] = {}
        for address, count in Counter(address for address, _ in refused).items():
            passed = self.pass_one_in if address in self._held else 1
            tried = passed * count / (MOST_PER_S * WINDOW_S)
            if tried > 1:
                too_many.add(address)
            loads[address] = max(tried, passed * calls[address] / (CALLS.per_second * WINDOW_S))
        for address in too_many:
            if address in self._held or len(self._held) < MOST_ADDRESSES:
                self._held[address] = now + HOLD_S
        self._held = {address: until for address, until in self._held.items() if until > now}
        # Stricter at once, more generous step by step.
        heaviest = max((loads.get(address, 0.0) for address in self._held), default=0.0)
        wanted = 2 ** max(math.ceil(heaviest) - 1, 0).bit_length()
        self.pass_one_in = min(max(wanted, self.pass_one_in // 2, FEWEST), MOST)
        return set(self._held), {peer for peer in refused if peer[0] in self._held}

    async def watch(self, port: int) -> None:
        """For the server that listens on this port. Runs forever."""
        before: tuple[set[Address], int] = set(), FEWEST
        while True:
            if not before[0]:
                await self._noted.wait()  # a server without strangers does nothing
            self._noted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WINDOW_S):
                    await self._flooded.wait()
            self._flooded.clear()
            held, peers = self.due()
            if peers:
                connection_limit.close_peers({(str(address), port) for address, port in peers})
            now = held, self.pass_one_in
            if held != before[0] or (held and now != before):
                _say(held - before[0])
                connect_filter.hold_off(port, *now)
                before = now


def _say(new: set[Address]) -> None:
    if new:
        log.warning(
            "connections of addresses with too many refused calls are held off: addresses=%s",
            ",".join(sorted(map(str, new))[:5]),
        )


def address_of(peer: str) -> tuple[Address, int] | None:
    """From `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`."""
    _, _, where = unquote(peer).partition(":")
    host, _, port = where.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return mapped or address, int(port)
    except ValueError:
        return None
