"""The agent's senses: what the manager says and how the link to it fares, as events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import get_args

from taskd.bus.endpoint import Bus, Joined, Left
from taskd.model.agent import Event, ManagerConnected, ManagerDisconnected, Order
from taskd.model.messages import SetProfiling

log = logging.getLogger(__name__)

_ORDERS = get_args(Order)


async def listen(
    bus: Bus, happened: Callable[[Event], None], profiling: Callable[[SetProfiling], None]
) -> None:
    """Orders become events; what is no order is for somebody else, or from the future."""
    while True:
        received = await bus.receive()
        if isinstance(received.body, _ORDERS):
            happened(received.body)
        elif isinstance(received.body, SetProfiling):
            profiling(received.body)
        else:
            log.info("%s sent %s, which is no order", received.src, type(received.body).__name__)


async def watch_link(bus: Bus, among: tuple[Bus, ...], happened: Callable[[Event], None]) -> None:
    """Whoever is at the other end of a new link may know nothing of us.

    The way to the manager is open when every bus of this process on it is: the agent's own, and
    the proxy's.
    """
    async for change in bus.changes():
        if isinstance(change, Joined) and all(other.joined for other in among):
            happened(ManagerConnected())
        elif isinstance(change, Left):
            happened(ManagerDisconnected())
