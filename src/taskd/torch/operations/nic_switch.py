"""Groups move to another network interface without a restart.

A switch is tried first: while training is parked, all ranks connect to each other over the
interfaces that they would use then, and keep them only if that works for every rank; the next
repair forms the training's groups there. Every repair begins with such a trial, so that a dead
interface is noticed and, with failover on, left. `interfaces.py` knows which one is in use; on
Ascend the vendor's own call moves the links.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec

from taskd.errors import Transient
from taskd.model import messages as m
from taskd.torch.groups.store import Rendezvous
from taskd.torch.operations import interfaces
from taskd.torch.operations.interfaces import BACKUP, PRIMARY
from taskd.worker.operations import ascend_calls as ascend

log = logging.getLogger(__name__)

SWITCH_TRIAL_S = 15.0
"""A switch that a person asked for may take longer than a failover."""
NO_LINK = "-"


class DeadLink(Transient):
    """Not all ranks can be reached over the interfaces in use."""


# Trials


def trial(store: str, prefix: str, ranks: Sequence[int], rank: int, limit_s: float) -> None:
    """Connect to every one of these ranks over the interfaces in use. Raises DeadLink.

    Every rank learns the results of all, so that all stay or none. Plain connections: forming a
    gloo group over a dead link would take several times any limit that it is given.
    """
    rendezvous = Rendezvous(store, prefix, timedelta(seconds=limit_s))
    why = ""
    try:
        _connect(rendezvous, [one for one in ranks if one != rank], rank, limit_s)
    except (OSError, RuntimeError) as error:
        why = f"rank {rank} over {interfaces.current().name}: {error}"[:300]
    problems = _problems_of_all(rendezvous, ranks, rank, why)
    if any(problems):
        raise DeadLink("; ".join(problems))


def _connect(rendezvous: Rendezvous, peers: Sequence[int], rank: int, limit_s: float) -> None:
    nics, store = interfaces.current(), rendezvous.store
    if problem := nics.names and nics.problem(nics.side):
        store.set(f"port/{rank}", NO_LINK)  # no peer should try in vain
        raise RuntimeError(problem)
    host = nics.address() or rendezvous.local_host()
    with socket.create_server((host, 0), backlog=len(peers) + 1) as server:
        store.set(f"port/{rank}", f"{host} {server.getsockname()[1]}")
        for peer in peers:
            published = store.get(f"port/{peer}").decode()
            if published == NO_LINK:
                raise RuntimeError(f"rank {peer} has no link")
            peer_host, port = published.split()
            with socket.create_connection((peer_host, int(port)), limit_s, (host, 0)):
                pass
        # The server stays open until all ranks have tried it, or one has given up.
        store.set(f"tried/{rank}", "-")
        store.wait([f"tried/{peer}" for peer in peers])


def _problems_of_all(
    rendezvous: Rendezvous, ranks: Sequence[int], rank: int, why: str
) -> list[str]:
    # A rank that waits for a peer in vain is late by its whole limit, at each of its waits.
    patience = 3 * rendezvous.timeout + timedelta(seconds=5)
    rendezvous.store.set(f"vote/{rank}", why or "-")
    keys = [f"vote/{one}" for one in ranks]
    try:
        rendezvous.store.wait(keys, patience)
    except RuntimeError as error:
        return [why or f"not all ranks have answered: {error}"[:300]]
    votes = (rendezvous.store.get(key).decode() for key in keys)
    return [text for text in votes if text != "-"]


def agree_on_interface(
    store: str,
    incident: int,
    ranks: Sequence[int],
    rank: int,
    *,
    is_new: bool = False,
    may_leave: bool = False,
) -> None:
    """Before a repair forms its groups: new ranks learn which side the others use, and all try it.

    With failover on, all ranks leave a dead interface together; otherwise the repair fails at once,
    on all ranks and with the reason, where gloo would block some of them. `may_leave`: use any
    interface that works, since nothing is trained over it.
    """
    nics = interfaces.current()
    if len(nics.names) < 2:
        return
    prefix = f"{incident}/nic/{{}}/"
    limit = timedelta(seconds=max(SWITCH_TRIAL_S, nics.trial_s))
    nics.use(_common_side(Rendezvous(store, prefix.format("side"), limit), ranks, rank, is_new))
    try:
        trial(store, prefix.format("stay"), ranks, rank, nics.trial_s)
        return
    except DeadLink as error:
        log.warning("interface %s is dead: %s", nics.name, error)
        if not nics.failover and not may_leave:
            raise
    former = nics.side
    nics.use(BACKUP if former == PRIMARY else PRIMARY)
    try:
        trial(store, prefix.format("move"), ranks, rank, nics.trial_s)
    except DeadLink:
        nics.use(former)
        raise
    log.warning("groups move to interface %s", nics.name)


def _common_side(rendezvous: Rendezvous, ranks: Sequence[int], rank: int, is_new: bool) -> int:
    """Our own side, unless we have just been started: then the one that most others use."""
    side = interfaces.current().side
    rendezvous.store.set(f"side/{rank}", "new" if is_new else str(side))
    if not is_new:
        return side
    published = rendezvous.store.multi_get([f"side/{one}" for one in ranks])
    sides = [int(text) for text in published if text != b"new"]
    return max((PRIMARY, BACKUP), key=sides.count) if sides else side


# The order to switch


class Switcher:
    """Carries out the orders that `worker/operations/nic_order.py` receives."""

    def __init__(
        self,
        rank: int,
        store: Callable[[], str],
        backends: dict[str, str],
        members: Callable[[], Sequence[int]],
    ) -> None:
        """`store`: host:port of the present one."""
        self._rank, self._store, self._backends, self._members = rank, store, backends, members

    def switch(self, order: m.SwitchNic) -> None:
        if "npu" in self._backends and find_spec("torch_npu") is not None:
            ascend.switch(ascend.TORCH, order)
            return
        nics = interfaces.current()
        wanted = dict(zip(order.ranks, order.to_backup, strict=True))
        side = nics.side
        for rank, to_backup in wanted.items():
            if rank == self._rank:
                side = BACKUP if to_backup else PRIMARY
        problem = nics.problem(side) if self._rank in wanted else ""
        former, prefix = nics.side, f"nic/{order.uuid}/"
        moved = False
        try:
            if problem:
                # The others wait at the trial: tell them there.
                rendezvous = Rendezvous(self._store(), prefix, timedelta(seconds=10))
                rendezvous.store.set(f"vote/{self._rank}", problem)
                raise DeadLink(problem)
            nics.use(side)
            trial(self._store(), prefix, self._members(), self._rank, SWITCH_TRIAL_S)
            moved = True
        finally:
            if not moved:
                nics.use(former)
