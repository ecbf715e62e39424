"""All process groups of this process as one: they are live, solo or broken together.

A step that lost one collective is lost as a whole, so there is one mode for all groups.
`resilient_group.py` asks for it on every call, the gates (`step_cycle.py`) before every update;
`apply_plan.py` and the thread that talks to the manager change it.

    solo --form_all--> repairing --open--> live --absorb, abort--> broken --form_all--> repairing …
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from taskd.errors import Transient
from taskd.torch.groups.in_flight import DeviceCollectives, GlooCollectives
from taskd.torch.groups.store import CurrentStore, Rendezvous
from taskd.torch.loop.loop_position import calling_line
from taskd.torch.startup.setup_results import SetupResults

if TYPE_CHECKING:
    from taskd.torch.groups.resilient_group import ResilientGroup
    from taskd.torch.groups.works import DeviceWork, GlooWork

log = logging.getLogger(__name__)

WRONG_ARGUMENT = "ProcessGroupGloo::"
"""How gloo's messages about wrong arguments begin; it checks them before it talks to any peer."""


class Mode(Enum):
    SOLO = "solo"
    """No rendezvous yet: a collective sees this rank only."""
    REPAIRING = "repairing"
    """Groups are formed, but states still differ: collectives belong to the repair."""
    LIVE = "live"
    BROKEN = "broken"


class GroupsAborted(Transient):
    """Forming the groups was interrupted by a newer incident."""


class Communicates(Exception):
    """A collective was called where this rank runs code without its peers."""


class Groups:
    """The registry of all resilient groups of this process."""

    def __init__(
        self,
        world_size: int,
        on_fault: Callable[[str], None],
        on_collective: Callable[[int, int], None],
    ) -> None:
        """`on_fault` gets the reason of a break, `on_collective` how many have begun and ended."""
        self.mode = Mode.SOLO
        self.absorbing = False
        """Inside a protected step: errors are recorded, not raised."""
        self._is_alone = False
        self.lost = False
        """A collective of this step has ended without its result: its caller has got another value.

        Broken groups alone do not say that: all collectives may have ended well before.
        """
        self.begun = 0
        """Collectives entered; `done` counts those that ended. The beacon shows both."""
        self.done = 0
        self.formed = 0
        """How often the groups have been formed: once at the start, and in every repair."""
        self.formed_for_step: int | None = None
        """`formed` when the last step began; None: before the first one.

        If it is not `formed`, the job was repaired at the end of that step: the code after the step
        runs in the survivors, but never in the replacement.
        """
        self.on_outside: Callable[[], None] = lambda: None
        """Called with each collective outside of steps and sections."""
        self.store = CurrentStore(world_size)
        self.setup = SetupResults()
        self.why = ""
        """Why the groups are broken; empty while they are not."""
        self._gloo = GlooCollectives()
        self._devices = DeviceCollectives(self._find_device_error)
        self._on_fault, self._on_collective = on_fault, on_collective
        self._all: list[ResilientGroup] = []
        self._rendezvous: Rendezvous | None = None
        self._pending_abort = ""
        """Why the groups are to be aborted when the next step begins."""
        self._newest_incident = 0
        """The newest incident that `abort` was called for."""
        self._has_explained = False
        self._splits: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()

    def add(self, group: ResilientGroup) -> None:
        self._all.append(group)
        if self.mode is not Mode.SOLO and self._rendezvous is not None:
            group.form(self._rendezvous.store)

    def __contains__(self, group: object) -> bool:
        return any(group is other for other in self._all)

    def discard(self, group: ResilientGroup) -> None:
        self._all = [other for other in self._all if other is not group]

    def name_split(self, ranks: tuple[int, ...]) -> str:
        """The same name on all of these ranks: they create their groups in the same order."""
        self._splits[ranks] += 1
        return f"split/{'-'.join(map(str, ranks))}/{self._splits[ranks]}"

    @property
    def world(self) -> ResilientGroup:
        """The default group: torch creates it first."""
        return self._all[0]

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the current groups were formed."""
        assert self._rendezvous is not None
        return self._rendezvous

    # Forming

    def form_all(
        self,
        incident: int,
        address: str,
        prefix: str,
        timeout: timedelta,
        members: tuple[int, ...] = (),
    ) -> None:
        """Form all groups again at this store, in the order in which the script created them.

        `members` are the ranks that are in the job from now on; empty: no change.
        """
        self._prepare(incident, address, prefix, timeout)
        for group in self._all:
            if members:
                group.set_members(members)
        self._form(self._all)

    def form_default(
        self, incident: int, address: str, prefix: str, timeout: timedelta, members: tuple[int, ...]
    ) -> None:
        """Form only the default group, of these ranks."""
        self._prepare(incident, address, prefix, timeout)
        self.world.set_members(members)
        self._form([self.world])
        self.formed_for_step = self.formed  # the members do the same from here on

    def _prepare(self, incident: int, address: str, prefix: str, timeout: timedelta) -> None:
        with self._lock:
            if self._newest_incident > incident:
                raise GroupsAborted(
                    f"incident {self._newest_incident} began before the groups of incident "
                    f"{incident} were formed"
                )
            self.mode, self.why, self._pending_abort = Mode.REPAIRING, "", ""
            self._rendezvous = None
            self.formed += 1
        for group in self._all:
            group.abort()
        idle = self.wait_for_gloo()
        for group in self._all:
            group.drop(idle)
        rendezvous = Rendezvous(address, prefix, timeout)
        with self._lock:
            if self.why:
                raise GroupsAborted(self.why)
            self._rendezvous = rendezvous
        self.store.point_at(rendezvous.store)

    def _form(self, groups: list[ResilientGroup]) -> None:
        try:
            for group in groups:
                group.form(self.rendezvous.store)
        except RuntimeError as error:
            raise GroupsAborted(self.why or str(error)) from error

    def open(self) -> None:
        """All ranks have the same state again: give the groups back to training."""
        with self._lock:
            if self.why:
                raise GroupsAborted(self.why)
            self.mode = Mode.LIVE

    # Breaking

    def absorb(self, error: RuntimeError, formed_at: Rendezvous | None = None) -> None:
        """Record the failure of a collective inside a step, and free all that wait.

        Only the first failure is reported; the peers notice it by themselves. `formed_at`: where
        the collective's group was formed. A late failure of an old group is ignored.
        """
        if str(error).startswith(WRONG_ARGUMENT) and not self.is_broken():
            raise error  # a mistake of the script: replaying the step would not help
        why = f"{type(error).__name__}: {error}"
        with self._lock:
            if formed_at not in (None, self._rendezvous) or not self._mark_broken(why):
                return  # it fails because of the first one, which frees them all
            free = self._free_waiting()
        self._on_fault(why)  # before the training thread is freed, which reports that it is parked
        free()

    def abort(self, incident: int, why: str) -> None:
        """Free the training thread from the collective that it waits in. From any thread.

        Between two steps the script's own collectives run, whose errors would be raised: there the
        groups are left alone until the next step begins.
        """
        with self._lock:
            if incident < self._newest_incident:
                return
            self._newest_incident = incident
            if self.mode is Mode.LIVE and not self.absorbing:
                self._pending_abort = why
                return
            self._mark_broken(why)
            free = self._free_waiting()
        free()

    def explain_failure_outside(self) -> None:
        """A collective between two steps has failed, and the script probably ends."""
        if self.formed_for_step is not None and not self._has_explained:
            self._has_explained = True
            log.error(
                "collective at %s has failed, and is in no step or section: all ranks restart if "
                "the script ends. Wrap it in job.section(...) to have it repeated instead",
                calling_line(),
            )

    def is_broken(self) -> bool:
        """Also when an abort is pending."""
        return self.mode is Mode.BROKEN or bool(self._pending_abort)

    # Steps

    def enter_step(self) -> None:
        with self._lock:
            self.absorbing, self.lost = True, False
            self.formed_for_step = self.formed
            if not self._pending_abort:
                return
            self._mark_broken(self._pending_abort)
            free = self._free_waiting()
        free()

    def leave_step(self) -> bool:
        """Whether the groups are broken at the very moment at which the step ends."""
        with self._lock:
            self.absorbing = False
            broken = self.is_broken()
        self._devices.clear()
        self.done = self.begun
        return broken

    @contextmanager
    def alone(self) -> Iterator[None]:
        """This rank runs code that its peers do not run: collectives in it are refused."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def check_peers(self, operation: str) -> None:
        """Refuse a collective that no peer takes part in."""
        if self._is_alone:
            raise Communicates(f"{operation} at {calling_line()}")

    def barrier(self) -> None:
        """Wait until every member has come this far, or the groups are broken."""
        self.world.barrier().wait()
        self.wait_for_devices()

    def is_true_everywhere(self, value: bool) -> bool:
        """Whether every member has called this with True. False if the groups are broken."""
        backends = self.world.shape.backends
        device = "cpu" if "cpu" in backends else next(iter(backends))
        flag = torch.tensor([int(value)], dtype=torch.int64, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        self.wait_for_devices()
        return not self.is_broken() and bool(flag.item())

    # Collectives in flight

    def gloo_started(self, work: GlooWork) -> None:
        """gloo uses this collective's memory from now on."""
        self._on_collective(self.begun, self.done)
        self._gloo.add(work)

    def gloo_ended(self, work: GlooWork) -> None:
        self.done += 1
        self._on_collective(self.begun, self.done)
        self._gloo.remove(work)

    def wait_for_gloo(self) -> bool:
        """After an abort: wait until gloo uses no memory any more. False: some never end."""
        return self._gloo.wait()

    def device_started(self, work: DeviceWork) -> None:
        self._on_collective(self.begun, self.done)
        self._devices.add(work)

    def wait_for_devices(self) -> None:
        """Return when the devices have done, or failed, all collectives of this step."""
        if self._devices.wait():
            self.done = self.begun
            self._on_collective(self.begun, self.done)

    def has_lost(self) -> bool:
        """Whether any collective of this step, up to here, has not given its result."""
        if self._devices.wait() and self.is_broken():
            self.lost = True
        return self.lost

    def queue_device_waits(self) -> Callable[[], bool] | None:
        """What is queued from here on waits on the device for all collectives of this step.

        Returns what tells, when the device has come here, whether they have succeeded. None: there
        were none.
        """
        if not self._devices.queue_waits():
            return None
        begun = self.begun

        def are_complete() -> bool:
            self._find_device_error()
            self.done = max(self.done, begun)
            self._on_collective(self.begun, self.done)
            return not self.is_broken()

        return are_complete

    def _find_device_error(self) -> None:
        rendezvous = self._rendezvous
        if self.absorbing and self.mode is Mode.LIVE:
            for group in self._all:
                if error := group.device_error():
                    self.absorb(RuntimeError(error), rendezvous)
                    return

    def _mark_broken(self, why: str) -> bool:
        """No result of the groups is used from here on. Under the lock; False: it was broken."""
        first = not self.why
        self.mode, self.why = Mode.BROKEN, self.why or why
        return first

    def _free_waiting(self) -> Callable[[], None]:
        """What frees the threads that wait now, in a collective or at the store. Under the lock: by
        the time it is called they may have been freed already, and wait for something new."""
        rendezvous, transports = self._rendezvous, [group.transport for group in self._all]
        works = self._gloo.current()

        def free() -> None:
            if rendezvous is not None:
                rendezvous.abort()
            for transport in transports:
                if transport is not None:
                    transport.abort()
            for work in works:
                work.abandon()

        return free
