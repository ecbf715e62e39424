"""Groups move to another network interface without a restart.

A switch is tried before it is trusted: while training stands still, all ranks reach for each other
over the interfaces that they would use then, and only if that works everywhere do they keep them;
the next repair forms the training's groups there. Every repair begins with such a trial, so that a
dead interface is noticed and, with failover on, left. `nic.py` knows which one is in use; on Ascend
the vendor's own call moves the links.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec

from taskd.errors import Transient
from taskd.model import messages as m
from taskd.torch.groups.store import Meeting
from taskd.torch.operations import interfaces as nic
from taskd.torch.operations.interfaces import BACKUP, PRIMARY
from taskd.worker.operations import ascend_calls as ascend

log = logging.getLogger(__name__)

SWITCH_TRIAL_S = 15.0
"""A switch that a person asked for may take longer than a failover."""
SHUT = "-"


class DeadLink(Transient):
    """Not everybody can be reached over the interfaces in use."""


# Trials


def trial(store: str, place: str, ranks: Sequence[int], rank: int, limit_s: float) -> None:
    """Reach every one of these ranks over the interfaces in use. Raises DeadLink.

    Everybody hears how everybody fared, so that all stay or none. Plain connections: forming a
    gloo group over a dead link would hold us up for several times any limit that it is given.
    """
    meeting = Meeting(store, place, timedelta(seconds=limit_s))
    why = ""
    try:
        _reach(meeting, [one for one in ranks if one != rank], rank, limit_s)
    except (OSError, RuntimeError) as error:
        why = f"rank {rank} over {nic.chosen().name}: {error}"[:300]
    votes = _votes(meeting, ranks, rank, why)
    if any(votes):
        raise DeadLink("; ".join(votes))


def _reach(meeting: Meeting, peers: Sequence[int], rank: int, limit_s: float) -> None:
    nics = nic.chosen()
    if problem := nics.names and nics.problem(nics.side):
        meeting.store.set(f"door/{rank}", SHUT)  # nobody is to try it in vain
        raise RuntimeError(problem)
    host = nics.address() or meeting.my_host()
    with socket.create_server((host, 0), backlog=len(peers) + 1) as door:
        meeting.store.set(f"door/{rank}", f"{host} {door.getsockname()[1]}")
        for peer in peers:
            told = meeting.store.get(f"door/{peer}").decode()
            if told == SHUT:
                raise RuntimeError(f"rank {peer} has no link")
            there, port = told.split()
            with socket.create_connection((there, int(port)), limit_s, (host, 0)):
                pass
        # The door stays open until all have tried it, or somebody has given up.
        meeting.store.set(f"tried/{rank}", "-")
        meeting.store.wait([f"tried/{peer}" for peer in peers])


def _votes(meeting: Meeting, ranks: Sequence[int], rank: int, why: str) -> list[str]:
    # Those who wait for a peer in vain are later by their whole limit, at each of their waits.
    patience = 3 * meeting.timeout + timedelta(seconds=5)
    meeting.store.set(f"vote/{rank}", why or "-")
    keys = [f"vote/{one}" for one in ranks]
    try:
        meeting.store.wait(keys, patience)
    except RuntimeError as error:
        return [why or f"not everybody has answered: {error}"[:300]]
    told = (meeting.store.get(key).decode() for key in keys)
    return [text for text in told if text != "-"]


def settle(
    store: str,
    incident: int,
    ranks: Sequence[int],
    rank: int,
    *,
    fresh: bool = False,
    may_leave: bool = False,
) -> None:
    """Before a repair forms its groups: newcomers learn where the others are, and all try the
    interfaces in use. With failover on, a dead one is left by all together; otherwise the repair
    fails at once, everywhere and with the reason, where gloo would hold some of us up.
    `may_leave`: over any interface that works, since nothing is trained there."""
    nics = nic.chosen()
    if len(nics.names) < 2:
        return
    place = f"{incident}/nic/{{}}/"
    limit = timedelta(seconds=max(SWITCH_TRIAL_S, nics.trial_s))
    nics.to(_common_side(Meeting(store, place.format("side"), limit), ranks, rank, fresh))
    try:
        trial(store, place.format("stay"), ranks, rank, nics.trial_s)
        return
    except DeadLink as error:
        log.warning("%s is dead: %s", nics.name, error)
        if not nics.failover and not may_leave:
            raise
    former = nics.side
    nics.to(BACKUP if former == PRIMARY else PRIMARY)
    try:
        trial(store, place.format("move"), ranks, rank, nics.trial_s)
    except DeadLink:
        nics.to(former)
        raise
    log.warning("groups move to %s", nics.name)


def _common_side(meeting: Meeting, ranks: Sequence[int], rank: int, fresh: bool) -> int:
    """Ours, unless we have just been started: then where most of the others are."""
    side = nic.chosen().side
    meeting.store.set(f"side/{rank}", "new" if fresh else str(side))
    if not fresh:
        return side
    told = meeting.store.multi_get([f"side/{one}" for one in ranks])
    sides = [int(text) for text in told if text != b"new"]
    return max((PRIMARY, BACKUP), key=sides.count) if sides else side


# The order to switch


class Switcher:
    """Carries out what `worker/operations/nic_order.py` has heard."""

    def __init__(
        self, rank: int, store: str, backends: dict[str, str], world: Callable[[], Sequence[int]]
    ) -> None:
        self._rank, self._store, self._backends, self._world = rank, store, backends, world

    def switch(self, order: m.SwitchNic) -> None:
        if "npu" in self._backends and find_spec("torch_npu") is not None:
            ascend.switch(ascend.TORCH, order)
            return
        nics = nic.chosen()
        wanted = dict(zip(order.ranks, order.to_backup, strict=True))
        side = nics.side
        for rank, to_backup in wanted.items():
            if rank == self._rank:
                side = BACKUP if to_backup else PRIMARY
        problem = nics.problem(side) if self._rank in wanted else ""
        former = nics.side
        moved = False
        try:
            if problem:
                # The others wait at the trial: they are told there.
                meeting = Meeting(self._store, f"nic/{order.uuid}/", timedelta(seconds=10))
                meeting.store.set(f"vote/{self._rank}", problem)
                raise DeadLink(problem)
            nics.to(side)
            trial(self._store, f"nic/{order.uuid}/", self._world(), self._rank, SWITCH_TRIAL_S)
            moved = True
        finally:
            if not moved:
                nics.to(former)
