"""The same search where every rank holds a part of the state that no other rank has.

Before the update the ranks vote; a rank that is stopped during the vote parks there and can still
finish or undo the step. After each commit the state is copied to one of two files in the node's
memory, which survive the rank; the gate waits for the copy (`StepCycle`, `Recovery.may_finish` and
`Snapshots.start` in `taskd.torch`). Checked in each state: can all ranks resume at one step, and
was at most the current step lost?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from taskd.core.manager.repair.repair_plan import Holder
from taskd.core.worker import states
from taskd.model.faults import FaultCause
from taskd.model.ids import Rank, Step
from taskd.model.messages import Copy, Park, Parked, Repair
from taskd.model.worker import (
    CopiesChanged,
    FirstStepCommitted,
    LocalRepairDone,
    LocalRepairFailed,
    StepFailed,
    ThreadParked,
)
from tests.sim.explore_repair import (
    COMPUTING,
    DONE,
    MEETING,
    MET,
    PARKED,
    Explorer,
    Files,
    Proc,
    World,
    deliver,
    tale,
)

VOTING = "voting"
VOTE = 1000
"""Added to a step number, it is the number of the step's vote among the collectives."""

Moved = tuple[str, Proc, tuple[object, ...]]


@dataclass
class ShardedExplorer(Explorer):
    votes: bool = True
    """False: a planted bug that the search must find."""
    waits: bool = True
    """False: another planted bug: the update does not wait for the copy of what it changes."""
    attempts: bool = False
    """The script's loop cannot go back: ranks that would have to get a new process."""

    def _start(self) -> World:
        world = super()._start()
        procs = tuple(replace(proc, copying=0) for proc in world.procs)
        return replace(world, procs=procs, files=((-1, -1),) * self.ranks)

    def _shard(self, rank: int) -> str:
        return f"shard {rank}"

    def _holder(self, proc: Proc, report: Parked) -> Holder:
        plain = super()._holder(proc, report)
        return replace(
            plain,
            undo=report.undo,
            copies=report.copies,
            shard=self._shard(proc.rank),
            earliest=report.earliest,
        )

    # What can happen next

    def _hear(
        self, world: World, proc: Proc, order: Park | Repair
    ) -> tuple[Proc, tuple[object, ...]]:
        if isinstance(order, Park):
            proc, _ = deliver(proc, CopiesChanged(_copies(world)))
        return deliver(proc, order)

    def _someone_is_missing(self, world: World) -> bool:
        return world.stale or super()._someone_is_missing(world)

    def _stop(self, world: World) -> World:
        return replace(super()._stop(world), stale=False)

    def _planned(self, world: World, record: tuple[str, ...]) -> Iterator[World]:
        """A death after the order to park begins another incident."""
        if not world.stale:
            yield from super()._planned(world, record)

    def _deaths(self, world: World, proc: Proc) -> Iterator[tuple[str, World]]:
        for what, gone in super()._deaths(world, proc):
            yield what, replace(gone, stale=world.is_stopped)
        if proc.copying >= 0 and not self._is_watched(world):
            whole = self._put(world, proc, after := replace(proc, copying=-1), (), "has a copy")
            for what, gone in super()._deaths(whole, after):
                yield f"{what} with its copy whole", replace(gone, stale=world.is_stopped)

    def _is_watched(self, world: World) -> bool:
        """Whether other ranks may read the node's memory. If not, the time at which a copy is
        complete matters only to its own rank: at its gate, and at its death."""
        return world.faults_left < self.faults

    def _thread(self, world: World, proc: Proc, record: tuple[str, ...]) -> Iterator[Moved]:
        watched = self._is_watched(world)
        if proc.copying >= 0 and watched:
            yield "has a copy", replace(proc, copying=-1), ()
        match proc.thread:
            case "reduced" if proc.aborted:
                yield from self._stands(world, proc)
            case "reduced" if proc.copying < 0 or not self.waits or not watched:
                # The gate waits for the copy of the state that the update changes.
                yield "votes", replace(proc, thread=VOTING), ()
            case "reduced":
                return
            case "voting":
                yield from self._voting(world, proc)
            case "computing" | "entered" if proc.copying >= 0:
                yield from self._until_copied(world, proc, record)
            case "meeting" | "met":
                yield from self._meeting(world, proc, record)
            case _:
                yield from super()._thread(world, proc, record)

    def _until_copied(self, world: World, proc: Proc, record: tuple[str, ...]) -> Iterator[Moved]:
        """Parking waits for the copy; a complete collective completes anyway."""
        for what, after, said in super()._thread(world, replace(proc, copying=-1), record):
            if after.thread != PARKED:
                yield what, replace(after, copying=proc.copying), said

    def _stands(self, world: World, proc: Proc) -> Iterator[Moved]:
        if proc.copying < 0:
            yield self._park(world, proc)

    def _voting(self, world: World, proc: Proc) -> Iterator[Moved]:
        assert proc.held is not None
        members = self._members(world, proc.group)
        here = {r for g, s, r in world.entered if (g, s) == (proc.group, proc.held + VOTE)}
        if here >= members or not self.votes:
            yield self._commit(proc, COMPUTING)
        if proc.aborted:
            yield self._park_inside(world, proc)
        elif self._is_broken(world, proc.group):
            failed, said = deliver(proc, StepFailed(FaultCause.COMMUNICATION, "a peer is lost"))
            what, at, more = self._park_inside(world, failed)
            yield f"fails and {what}", at, said + more

    def _park_inside(self, world: World, proc: Proc) -> Moved:
        assert proc.held is not None
        at = ThreadParked(
            Step(proc.held + 1),
            whole=True,
            undo=True,
            copies=_copies(world),
            earliest=self._earliest(proc),
        )
        waiting = replace(proc, thread=PARKED, aborted=False, both=True)
        return ("parks in the vote", *deliver(waiting, at))

    def _park(self, world: World, proc: Proc) -> Moved:
        held = proc.held
        at = ThreadParked(
            Step(held or 0),
            whole=held is not None,
            copies=_copies(world),
            earliest=self._earliest(proc),
        )
        return ("parks", *deliver(replace(proc, thread=PARKED, aborted=False), at))

    def _earliest(self, proc: Proc) -> Step:
        return Step(proc.held if self.attempts and proc.held is not None else 0)

    def _commit(self, proc: Proc, then: str) -> Moved:
        """One move: a rank that dies during its update leaves the same copies as before it."""
        assert proc.held is not None
        step = Step(proc.held + 1)
        stepped = replace(proc, thread=then, held=step, both=False)
        if isinstance(proc.machine, states.Resumed):
            return ("commits", *deliver(stepped, FirstStepCommitted(step)))
        return "commits", stepped, ()

    def _meeting(self, world: World, proc: Proc, record: tuple[str, ...]) -> Iterator[Moved]:
        plan_ = proc.plan
        assert plan_ is not None
        if proc.copying >= 0:
            return  # a repair waits for it, too
        if self.attempts and proc.held is not None:
            assert plan_.resume >= proc.held, tale(f"rank {proc.rank} cannot go back", record)
        if proc.both:
            assert proc.held is not None
            if plan_.resume == proc.held + 1:
                yield self._commit(proc, MEETING)
            else:
                yield "leaves the vote", replace(proc, both=False), ()
            return
        members = {int(member.rank) for member in plan_.members}
        if proc.aborted or members - {one.rank for one in world.procs}:
            yield self._given_up(world, proc)
            return
        there = {
            one.rank
            for one in world.procs
            if one.plan is not None
            and one.plan.incident == plan_.incident
            and one.thread in (MEETING, MET)
            and not one.both
        }
        if proc.thread == MEETING and (members <= there or self._all_met(world, plan_)):
            if self._has_source(world, proc, record):
                yield "has its state", replace(proc, thread=MET, held=plan_.resume), ()
            else:
                yield self._given_up(world, proc)
        takers = {int(taker) for taker, giver in plan_.sources.items() if giver == proc.rank}
        given = all((plan_.incident, taker) in world.taken for taker in takers)
        if proc.thread == MET and given:
            repaired = replace(proc, thread=COMPUTING, group=plan_.incident, plan=None)
            yield (
                "is repaired",
                *deliver(repaired, LocalRepairDone(plan_.incident, Step(plan_.resume))),
            )

    def _given_up(self, world: World, proc: Proc) -> Moved:
        assert proc.plan is not None
        broke = LocalRepairFailed(proc.plan.incident, "the repair cannot complete")
        abandoned, said = deliver(replace(proc, plan=None, aborted=False), broke)
        what, at, more = self._park(world, abandoned)
        return f"abandons the plan and {what}", at, said + more

    def _has_source(self, world: World, proc: Proc, record: tuple[str, ...]) -> bool:
        """A listed copy may have been overwritten since: then another plan follows."""
        assert proc.plan is not None
        resume, source = proc.plan.resume, proc.plan.sources.get(Rank(proc.rank))
        if source is None and proc.held == resume:
            return True
        assert source is None or source != proc.rank, tale("its own source", record)
        return resume in world.files[proc.rank]

    # The files

    def _put(
        self, world: World, before: Proc, after: Proc, said: tuple[object, ...], what: str = ""
    ) -> World:
        files = list(world.files)
        mine = files[after.rank]
        if what == "votes":
            assert after.held is not None
            vote = (after.group, after.held + VOTE, after.rank)
            if self.waits and after.copying >= 0:
                files[after.rank] = _written(mine, after.copying)
                after = replace(after, copying=-1)
            world = replace(world, entered=world.entered | {vote})
        elif what == "has a copy" and before.copying == before.held:
            files[after.rank] = _written(mine, before.copying)
        elif what == "commits" or what == "is repaired":
            assert after.held is not None
            if what == "is repaired":
                mine = (_unless_after(mine[0], after.held), _unless_after(mine[1], after.held))
            copying = -1 if after.held in mine else after.held
            if copying >= 0:
                mine = _torn(mine)
            files[after.rank] = mine
            moved = replace(after, copying=copying)
            return super()._put(replace(world, files=tuple(files)), before, moved, said, what)
        return super()._put(replace(world, files=tuple(files)), before, after, said, what)

    # What must hold

    def _is_lost(self, world: World, holders: list[Holder], record: tuple[str, ...]) -> None:
        """Only a rank that is lost before its first complete copy ends the job."""
        if not world.procs or any(proc.thread == DONE for proc in world.procs):
            self.endings.add("lost at the end" if world.procs else "no rank is left")
            return
        living = {proc.rank for proc in world.procs}
        never = [rank for rank, files in enumerate(world.files) if files == (-1, -1)]
        gone = [rank for rank in never if rank not in living or self._is_empty(world, rank)]
        assert gone, tale(f"lost, with {world.files} on the node", record)
        self.endings.add("lost before the first copy")

    def _is_empty(self, world: World, rank: int) -> bool:
        return any(proc.rank == rank and proc.held is None for proc in world.procs)

    def _is_the_best(self, resume: int, living: list[Proc], record: tuple[str, ...]) -> None:
        best = max((proc.held for proc in living if proc.held is not None), default=0)
        assert resume >= best - 1, tale(f"the job goes back from step {best} to {resume}", record)

    def _ended(self, world: World, record: tuple[str, ...]) -> None:
        done = all(proc.thread == DONE for proc in world.procs)
        left = any(proc.thread == DONE for proc in world.procs)
        if done or not (left or (-1, -1) in world.files):
            super()._ended(world, record)


def _copies(world: World) -> tuple[Copy, ...]:
    return tuple(
        Copy(f"shard {rank}", Step(step))
        for rank, files in enumerate(world.files)
        for step in sorted(files)
        if step >= 0
    )


def _torn(files: Files) -> Files:
    """The older one is overwritten."""
    return (-1, files[1]) if files[0] <= files[1] else (files[0], -1)


def _written(files: Files, step: int) -> Files:
    return (step, files[1]) if files[0] == -1 else (files[0], step)


def _unless_after(step: int, resume: int) -> int:
    return -1 if step > resume else step
