"""A part of the script between steps that all ranks pass together, and repeat after a fault.

Evaluation, checkpoints, and other collectives that belong to no step. The ranks meet at the end of
a section: a rank that is lost before makes all others repeat it. A rank that passes knows that all
others have come to the end; so after a fault those that have come and not passed need not repeat
it (`Plan.sections` of `repair_plan.py`). Results are kept in the job's store for the
replacement of a rank, which finds the section complete.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.distributed import Store

from taskd.errors import SettingsError
from taskd.model.messages import NO_TURN
from taskd.torch import random_state
from taskd.torch.groups.all_groups import Mode
from taskd.torch.loop.loop_position import ALL_SECTIONS
from taskd.torch.recovery import Recovery
from taskd.torch.startup.setup_copies import SetupCopies
from taskd.torch.state.sealed import in_this_attempt, seal, unseal
from taskd.torch.step import Attempt
from taskd.torch.step_cycle import Abandon, StepCycle

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BYTES = 16 << 20
"""A larger result is not kept."""
TURNS_KEPT = 2


class Section:
    """A part of the script outside of steps that is repeated as a whole after a fault.

    [`Job.section`][taskd.torch.Job.section] creates it. Iterate over it to get its attempts, or
    let it `run` a function. All ranks must pass the same sections in the same order.
    """

    def __init__(self, name: str, cycle: StepCycle, recovery: Recovery | None) -> None:
        self._run = SectionRun(name, cycle, recovery)

    def __iter__(self) -> Iterator[Attempt]:
        """Yield attempts until the section is complete on all ranks."""
        while self._run.another_attempt():
            yield Attempt(self._run)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the function in an attempt, until the section is complete on all ranks.

        Returns:
            What the function has returned in the last attempt. In a replacement that joins after
            the section: what it has returned to the predecessor.
        """
        for attempt in self:
            with attempt:
                self._run.value = function(*args, **kwargs)
        value: T = self._run.value
        return value


class SectionRun:
    """One section of one turn of the loop."""

    def __init__(self, name: str, cycle: StepCycle, recovery: Recovery | None) -> None:
        context = cycle.context
        position = context.position
        self._name, self._cycle, self._context, self._recovery = name, cycle, context, recovery
        self.value: Any = None
        self._is_complete = False
        if position.turn == NO_TURN and position.sections >= ALL_SECTIONS:
            raise SettingsError(
                [f"section {name!r} needs `for attempt in step: with attempt:`, not `with step:`"]
            )
        self._at = position.turn, position.sections

    @property
    def _is_protected(self) -> bool:
        return self._recovery is not None and self._context.is_protected

    def another_attempt(self) -> bool:
        """Bring the job to the start of the section. False: it is complete."""
        context, recovery = self._context, self._recovery
        if self._is_complete:
            return False
        if recovery is not None and context.is_protected:
            results = self._results()
            if context.groups.mode is Mode.SOLO:
                if results.is_passed(self._at):
                    return self._skip()
                recovery.run()
            while context.needs_recovery():
                recovery.run()
            if context.position.done_until > self._at:
                return self._skip()
        self._seed(0)
        return True

    def begin(self) -> None:
        self.value = None
        if self._is_protected:
            self._cycle.begin_section(self._name)

    def end(self, error: BaseException | None) -> bool:
        """Whether the exception that left the section, if any, was handled."""
        if not self._is_protected:
            if error is None:
                self._complete()
            return False
        if error is None:
            self._results().save(self._at, self.value)
        arrived, passed = self._cycle.end_section(error)
        if passed:
            self._complete()
            return False
        if not self._context.needs_recovery() or not isinstance(error, Exception | Abandon | None):
            return False
        log.info("section %r is repeated: %s", self._name, self._context.groups.why)
        self._cycle.abandon_section()
        if arrived and self._context.position.done_until > self._at:
            self._complete()
        return True

    def _skip(self) -> bool:
        self.value = self._results().load(self._at)
        self._complete()
        return False

    def _complete(self) -> None:
        self._is_complete = True
        self._context.position.sections += 1
        self._cycle.report_progress()
        if self._is_protected and self._context.groups.mode is not Mode.SOLO:
            self._results().mark_passed(self._at)
        self._seed(1)

    def _seed(self, after: int) -> None:
        turn, number = self._at
        phase = random_state.AFTER + 1 + 2 * number + after
        random_state.seed_step(self._context.base_seeds, turn & (1 << 64) - 1, phase)

    def _results(self) -> SectionResults:
        mark = self._context.start_mark
        assert mark is not None
        copies = self._context.groups.setup.copies
        return SectionResults(mark.store, copies, self._context.rank, self._name)


class SectionResults:
    """What sections have returned on one rank, in the job's store."""

    def __init__(self, store: Store, copies: SetupCopies | None, rank: int, name: str) -> None:
        """`copies`: what outlives the store; only the sections of the set-up are among it."""
        self._store, self._copies, self._rank, self._name = store, copies, rank, name

    def save(self, at: tuple[int, int], value: object) -> None:
        if value is None and self._copies is None:
            return
        key = self._key(at)
        try:
            sealed = seal(value, in_this_attempt(key))
            if len(sealed) > MAX_BYTES:
                raise ValueError(f"it has {len(sealed)} bytes, more than {MAX_BYTES}")
            self._store.set(key, sealed)  # type: ignore[arg-type]
            self._keep(at, key, sealed)
            old = self._key((at[0] - TURNS_KEPT, at[1]))
            if at[0] >= TURNS_KEPT:
                self._store.delete_key(old)
        except (RuntimeError, ValueError, TypeError, AttributeError, pickle.PickleError) as error:
            log.warning("cannot keep the result of section %r: %s", self._name, error)

    def load(self, at: tuple[int, int]) -> Any:
        key = self._key(at)
        try:
            if self._store.check([key]):
                sealed = self._store.get(key)
                self._keep(at, key, sealed)
                return unseal(sealed, in_this_attempt(key))
            if self._copies is not None:
                log.warning(
                    "the result of section %r was lost with the node of its store: it is None here",
                    self._name,
                )
        except RuntimeError as error:
            log.warning("cannot read the result of section %r: %s", self._name, error)
        return None

    def mark_passed(self, at: tuple[int, int]) -> None:
        """Only for sections of the set-up: of later ones the plan knows."""
        if at[0] == NO_TURN:
            self._store.set(f"passed/{at[1]}", "1")
            self._keep(at, f"passed/{at[1]}", b"1")

    def is_passed(self, at: tuple[int, int]) -> bool:
        return self._store.check([f"passed/{at[1]}"])

    def _keep(self, at: tuple[int, int], key: str, value: bytes) -> None:
        if self._copies is not None and at[0] == NO_TURN:
            self._copies.keep(key, value)

    def _key(self, at: tuple[int, int]) -> str:
        return f"section/{self._rank}/{at[0]}/{at[1]}"
