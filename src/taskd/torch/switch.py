"""Groups move to another network interface without a restart.

A switch is tried before it is trusted: while training stands still, all ranks form one group over
the interfaces that they would use then, and only if that works everywhere do they keep them; the
next repair forms the training's own groups there. With failover on, every repair begins with such
a trial, so that a dead interface is noticed and left. `nic.py` knows which one is in use; on Ascend
the vendor's own call moves the links.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch

from taskd.errors import SettingsError, Transient
from taskd.model import messages as m
from taskd.torch import nic
from taskd.torch.meeting import Meeting
from taskd.torch.nic import BACKUP, PRIMARY
from taskd.torch.transport import Shape, Transport
from taskd.worker.line import Say

log = logging.getLogger(__name__)

SWITCH_TRIAL_S = 60.0
"""A switch that a person asked for may take longer than a failover."""


class DeadLink(Transient):
    """No group can be formed over this interface."""


# Trials


def trial(
    store: str,
    place: str,
    ranks: Sequence[int],
    rank: int,
    backends: Mapping[str, str],
    limit_s: float,
) -> None:
    """Form a group of these ranks as we would now, and cross it once. Raises DeadLink.

    Everybody hears how everybody fared, so that all stay or none.
    """
    timeout = timedelta(seconds=limit_s)
    meeting = Meeting(store, place, timeout)
    shape = Shape("trial", tuple(ranks), list(ranks).index(rank), timeout, backends)
    transport = Transport(shape, meeting.store)
    cut = threading.Timer(limit_s, transport.abort)  # gloo minds its timeout only between connects
    cut.daemon = True
    cut.start()
    why = ""
    try:
        transport.form()
        device = "cuda" if backends.get("cuda") == "nccl" else "cpu"
        inner: Any = transport.inner
        inner.allreduce([torch.ones(1, device=device)]).wait()
    except RuntimeError as error:
        why = f"rank {rank} over {nic.chosen().name}: {error}"[:300]
    finally:
        cut.cancel()
        transport.abort()
        transport.bury(at_rest=not why)
    votes = _votes(meeting, ranks, rank, why)
    if any(votes):
        raise DeadLink("; ".join(filter(None, votes)))


def _votes(meeting: Meeting, ranks: Sequence[int], rank: int, why: str) -> list[str]:
    # Those who wait for a peer in vain are later by their whole limit.
    patience = 2 * meeting.timeout + timedelta(seconds=5)
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
    backends: Mapping[str, str],
    fresh: bool,
) -> None:
    """Before a repair forms its groups: newcomers learn where the others are, and, with failover
    on, all leave a dead interface together."""
    nics = nic.chosen()
    if len(nics.names) < 2:
        return
    place = f"{incident}/nic/{{}}/"
    limit = timedelta(seconds=max(SWITCH_TRIAL_S, nics.trial_s))
    nics.to(_common_side(Meeting(store, place.format("side"), limit), ranks, rank, fresh))
    if not nics.failover:
        return
    try:
        trial(store, place.format("stay"), ranks, rank, backends, nics.trial_s)
        return
    except DeadLink as error:
        log.warning("%s is dead: %s", nics.name, error)
    former = nics.side
    nics.to(BACKUP if former == PRIMARY else PRIMARY)
    try:
        trial(store, place.format("move"), ranks, rank, backends, nics.trial_s)
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


class NicSwitcher:
    """A rider on the process's line to the manager."""

    def __init__(
        self, rank: int, store: str, backends: dict[str, str], world: Callable[[], Sequence[int]]
    ) -> None:
        self._rank, self._store, self._backends, self._world = rank, store, backends, world
        self._say: Say | None = None
        self._answer: m.NicSwitched | None = None
        self._uuid = ""

    def joined(self, say: Say) -> None:
        self._say = say
        if self._answer is not None:
            say(self._answer)

    def heard(self, body: m.Body) -> None:
        if not isinstance(body, m.SwitchNic) or not body.uuid or body.uuid == self._uuid:
            return
        self._uuid, self._answer = body.uuid, None
        threading.Thread(target=self._run, args=(body,), name="taskd-nic", daemon=True).start()

    def _run(self, order: m.SwitchNic) -> None:
        try:
            self._switch(order)
            ok = True
        except (Transient, SettingsError, RuntimeError, ValueError) as error:
            log.warning("the links stay where they are: %s", error)
            ok = False
        self._answer = m.NicSwitched(order.uuid, ok)
        if self._say is not None:
            self._say(self._answer)

    def _switch(self, order: m.SwitchNic) -> None:
        if "npu" in self._backends and find_spec("torch_npu") is not None:
            _switch_npu(order)
            return
        nics = nic.chosen()
        wanted = dict(zip(order.ranks, order.to_backup, strict=True))
        side = nics.side
        for rank, to_backup in wanted.items():
            if rank == self._rank:
                side = BACKUP if to_backup else PRIMARY
        problem = nics.problem(side) if self._rank in wanted else ""
        former = nics.side
        if not problem:
            nics.to(side)
        try:
            if problem:
                # The others wait at the trial: they are told there.
                meeting = Meeting(self._store, f"nic/{order.uuid}/", timedelta(seconds=10))
                meeting.store.set(f"vote/{self._rank}", problem)
                raise DeadLink(problem)
            place = f"nic/{order.uuid}/"
            ranks = self._world()
            trial(self._store, place, ranks, self._rank, self._backends, SWITCH_TRIAL_S)
        except (Transient, RuntimeError):
            nics.to(former)
            raise


def _switch_npu(order: m.SwitchNic) -> None:
    import torch_npu

    ranks, ways = list(order.ranks), list(order.to_backup)
    if not torch_npu.npu._comm_switch_nic(ranks, ways):
        raise DeadLink("torch_npu could not switch")
