"""The agent's inputs: the manager's orders, and the state of the connection to it, as events."""

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
    bus: Bus, enqueue: Callable[[Event], None], profiling: Callable[[SetProfiling], None]
) -> None:
    """Orders become events. Other messages are ignored: a newer manager may send unknown ones."""
    while True:
        received = await bus.receive_order()
        if isinstance(received.body, _ORDERS):
            enqueue(received.body)
        elif isinstance(received.body, SetProfiling):
            profiling(received.body)
        else:
            log.info(
                "ignoring %s from %s: not an order", type(received.body).__name__, received.src
            )


async def watch_link(bus: Bus, buses: tuple[Bus, ...], enqueue: Callable[[Event], None]) -> None:
    """Report when the manager becomes reachable or unreachable: a new manager knows nothing of us.

    The manager is reachable when all buses of this process on the path to it have joined: the
    agent's own, and the proxy's.
    """
    async for change in bus.changes():
        if isinstance(change, Joined) and all(other.joined for other in buses):
            enqueue(ManagerConnected())
        elif isinstance(change, Left):
            enqueue(ManagerDisconnected())
