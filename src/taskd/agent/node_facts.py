"""Facts about the node for people: counters of its links, and whose copies its memory holds.

Incident reports and the dashboard show them. They are read with each heartbeat, from a few small
files, and sent only when they have changed, or now and then for a manager that is new.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from taskd.model.ids import Rank
from taskd.model.messages import LinkCounter, NodeFacts
from taskd.runtime.clock import Clock, monotonic

REPEAT_S = 30.0
MOST_LINKS = 32
OF_INTERFACE = (
    "carrier_changes",
    "statistics/rx_errors",
    "statistics/tx_errors",
    "statistics/rx_dropped",
    "statistics/tx_dropped",
)
OF_PORT = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
OF_TCP = ("RetransSegs", "AttemptFails", "EstabResets")
_SNAPSHOT = re.compile(r"snapshot-(\d{1,8})\.")
_VIRTUAL = re.compile(r"lo$|veth|docker|cni|cali|flannel|virbr|br-")


class NodeFactsReader:
    """`folder` is the node's folder in shared memory, where the ranks keep their copies."""

    def __init__(self, folder: str, clock: Clock = monotonic, system: Path = Path("/")) -> None:
        self._folder, self._clock, self._system = folder, clock, system
        self._sent: NodeFacts | None = None
        self._sent_at = 0.0

    def changed(self) -> NodeFacts | None:
        """The facts, if they have not been sent before, or not for a while."""
        now, facts = self._clock(), self.read()
        if facts == self._sent and now - self._sent_at < REPEAT_S:
            return None
        self._sent, self._sent_at = facts, now
        return facts

    def read(self) -> NodeFacts:
        return NodeFacts(tuple(self._links()), self._copies())

    def _copies(self) -> tuple[Rank, ...]:
        found = map(_SNAPSHOT.match, _names(self._folder))
        return tuple(sorted({Rank(int(name[1])) for name in found if name}))

    def _links(self) -> Iterator[LinkCounter]:
        interfaces = self._system / "sys/class/net"
        physical = [name for name in _names(interfaces) if not _VIRTUAL.match(name)]
        for name in physical[:MOST_LINKS]:
            yield from _counters(name, interfaces / name, OF_INTERFACE)
        for port in sorted((self._system / "sys/class/infiniband").glob("*/ports/*"))[:MOST_LINKS]:
            name = f"{port.parent.parent.name}/{port.name}"
            yield from _counters(name, port / "counters", OF_PORT)
        yield from _tcp(self._system / "proc/net/snmp")


def _names(folder: str | Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _counters(link: str, folder: Path, names: Iterable[str]) -> Iterator[LinkCounter]:
    for name in names:
        with suppress(OSError, ValueError):
            value = int((folder / name).read_text())
            yield LinkCounter(link, name.rpartition("/")[2], max(0, value))


def _tcp(path: Path) -> Iterator[LinkCounter]:
    """The two lines of TCP: names, then values."""
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.startswith("Tcp:")]
        values = dict(zip(*lines, strict=True)) if len(lines) == 2 else {}
        yield from (LinkCounter("tcp", n, int(values[n])) for n in OF_TCP if n in values)
    except (OSError, ValueError):
        return
