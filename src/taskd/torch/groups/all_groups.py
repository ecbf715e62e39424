"""All process groups of this process as one: alive, alone, or broken together.

A step that lost one collective is lost as a whole, so there is one mode for all groups. `group.py`
asks it on every call, the gates (`step.py`) before every update; `repair.py` and the worker's
thread change it.

    alone --meet--> mending --open--> live --absorb, abort--> broken --meet--> mending …
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from taskd.errors import Transient
from taskd.torch.groups import gloo_threads as threads
from taskd.torch.groups.device_collectives import Landing
from taskd.torch.groups.store import Meeting, SharedStore
from taskd.torch.setup_results import Setup

if TYPE_CHECKING:
    from taskd.torch.groups.resilient_group import ResilientGroup
    from taskd.torch.groups.works import Guarded, Streamed


GLANCE_S = 0.005
"""How often gloo's threads are looked at while they do not report their end."""
MISUSE = "ProcessGroupGloo::"
"""How gloo begins its complaints about arguments, before it asks any peer."""


class Mode(Enum):
    ALONE = "alone"
    """Not met yet: collectives see ourselves only."""
    MENDING = "mending"
    """Met again, but not yet of one state: collectives are the repair's own."""
    LIVE = "live"
    BROKEN = "broken"


class GroupsAborted(Transient):
    """Forming the groups was cut short: there is a newer incident."""


class Groups:
    """The registry that every resilient group of this process belongs to."""

    def __init__(
        self, world: int, on_fault: Callable[[str], None], on_collective: Callable[[int, int], None]
    ) -> None:
        self.mode = Mode.ALONE
        self.absorbing = False
        """Inside a protected step: errors are remembered, not raised."""
        self.begun = 0
        """Collectives entered, and `done` those that ended: what the beacon shows."""
        self.done = 0
        self._flying: set[Guarded] = set()
        self._landing = Landing(self._ask)
        self._landed = threading.Condition()
        self.store = SharedStore(world)
        self.setup = Setup()
        self.why = ""
        self._on_fault, self._on_collective = on_fault, on_collective
        self._all: list[ResilientGroup] = []
        self._meeting: Meeting | None = None
        self._pending = ""
        """Why the groups are to be aborted once the next step begins."""
        self._told = 0
        """The newest incident that we were told of."""
        self._splits: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()

    def add(self, group: ResilientGroup) -> None:
        self._all.append(group)
        if self.mode is not Mode.ALONE and self._meeting is not None:
            group.form(self._meeting.store)

    def discard(self, group: ResilientGroup) -> None:
        self._all = [other for other in self._all if other is not group]

    def name_split(self, ranks: tuple[int, ...]) -> str:
        """The same on all of these ranks: they make their groups in the same order."""
        self._splits[ranks] += 1
        return f"split/{'-'.join(map(str, ranks))}/{self._splits[ranks]}"

    @property
    def world(self) -> ResilientGroup:
        """The default group: torch creates it first."""
        return self._all[0]

    @property
    def meeting(self) -> Meeting:
        """Where the current groups met."""
        assert self._meeting is not None
        return self._meeting

    def meet(
        self,
        incident: int,
        address: str,
        place: str,
        timeout: timedelta,
        members: tuple[int, ...] = (),
    ) -> None:
        """Form all groups anew at this store, in the order in which the script made them.

        `members` are the ranks that are in the job from now on; none: all, as ever.
        """
        self._prepare(incident, address, place, timeout)
        for group in self._all:
            if members:
                group.become(members)
        self._form(self._all)

    def gather(
        self, incident: int, address: str, place: str, timeout: timedelta, members: tuple[int, ...]
    ) -> None:
        """Form the default group only, of some ranks only."""
        self._prepare(incident, address, place, timeout)
        self.world.become(members)
        self._form([self.world])

    def _prepare(self, incident: int, address: str, place: str, timeout: timedelta) -> None:
        with self._lock:
            if self._told > incident:
                raise GroupsAborted(f"incident {self._told} has come before {incident} was met")
            self.mode, self.why, self._pending = Mode.MENDING, "", ""
            self._meeting = None
        for group in self._all:
            group.abort()
        at_rest = self.settle()
        for group in self._all:
            group.drop(at_rest)
        meeting = Meeting(address, place, timeout)
        with self._lock:
            if self.why:
                raise GroupsAborted(self.why)
            self._meeting = meeting
        self.store.point_at(meeting.store)

    def _form(self, groups: list[ResilientGroup]) -> None:
        try:
            for group in groups:
                group.form(self.meeting.store)
        except RuntimeError as error:
            raise GroupsAborted(self.why or str(error)) from error

    def open(self) -> None:
        """Everything is of one state again: the groups belong to the training."""
        with self._lock:
            if self.why:
                raise GroupsAborted(self.why)
            self.mode = Mode.LIVE

    def absorb(self, error: RuntimeError, met: Meeting | None = None) -> None:
        """A collective has failed inside a step. The first failure is told; the peers notice.

        `met`: where its group had met. What fails late says nothing about the groups of today.
        """
        if str(error).startswith(MISUSE) and not self.trouble():
            raise error  # the script's own mistake: no replay would make it right
        why = f"{type(error).__name__}: {error}"
        with self._lock:
            if met not in (None, self._meeting) or not self._flip(why):
                return  # it fails with the first one, which frees them all
            free = self._waiting()
        self._on_fault(why)  # before the training thread is freed, which would say that it stands
        free()

    def abort(self, incident: int, why: str) -> None:
        """Free the training thread from whatever collective it waits in. From any thread.

        Between steps the user's own collectives run, whose errors would be raised: there the
        groups are left alone until the next step begins.
        """
        with self._lock:
            if incident < self._told:
                return
            self._told = incident
            if self.mode is Mode.LIVE and not self.absorbing:
                self._pending = why
                return
            self._flip(why)
            free = self._waiting()
        free()

    def enter(self) -> None:
        """A protected step begins."""
        with self._lock:
            self.absorbing = True
            if not self._pending:
                return
            self._flip(self._pending)
            free = self._waiting()
        free()

    def leave(self) -> bool:
        """It has ended, well or not. Whether the groups are in trouble at that very moment."""
        with self._lock:
            self.absorbing = False
            trouble = self.trouble()
        self._landing.forget()
        self.done = self.begun
        return trouble

    def trouble(self) -> bool:
        return self.mode is Mode.BROKEN or bool(self._pending)

    def begin(self, work: Guarded) -> None:
        """gloo has this collective now, and its memory."""
        self._on_collective(self.begun, self.done)
        with self._landed:
            self._flying.add(work)

    def end(self, work: Guarded) -> None:
        """gloo is done with it."""
        self.done += 1
        self._on_collective(self.begun, self.done)
        with self._landed:
            self._flying.discard(work)
            if not self._flying:
                self._landed.notify_all()

    def launch(self, work: Streamed) -> None:
        """A device has this collective now."""
        self._on_collective(self.begun, self.done)
        self._landing.launch(work)

    def land(self) -> None:
        """Whatever devices had to do for this step is done, or has failed."""
        if self._landing.land():
            self.done = self.begun
            self._on_collective(self.begun, self.done)

    def arrive(self) -> None:
        """Wait until every member has come this far, or there is trouble."""
        self.world.barrier().wait()
        self.land()

    def _ask(self) -> None:
        met = self._meeting
        if self.absorbing and self.mode is Mode.LIVE:
            for group in self._all:
                if problem := group.problem():
                    self.absorb(RuntimeError(problem), met)
                    return

    def settle(self) -> bool:
        """After an abort: wait until gloo touches no memory any more. False: some never end."""
        before: dict[int, str] = {}
        with self._landed:
            while self._flying:
                if not self._landed.wait(GLANCE_S):
                    now = threads.at_work()
                    if threads.asleep(before, now):
                        self._flying.clear()
                        return False
                    before = now
        return True

    def _flip(self, why: str) -> bool:
        """From here on nothing that the groups give is used. Under the lock; False: it is so."""
        first = not self.why
        self.mode, self.why = Mode.BROKEN, self.why or why
        return first

    def _waiting(self) -> Callable[[], None]:
        """What frees those who wait now, in a collective or at the store. Under the lock: by the
        time it is called they may have been freed otherwise, and wait for something new."""
        meeting, transports = self._meeting, [group.transport for group in self._all]
        with self._landed:
            flying = list(self._flying)

        def free() -> None:
            if meeting is not None:
                meeting.cut()
            for transport in transports:
                if transport is not None:
                    transport.abort()
            for work in flying:
                work.give_up()

        return free
