"""The matter at hand while one event is handled: what is known, what is to be done, and why.

The functions that make a step hand a `Matter` along; the last of them turns it into the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.job_facts import Job, Round, new_uuid
from taskd.core.clusterd.states import Outcome, State
from taskd.model.clusterd import Command
from taskd.model.codes import RecoverCode


@dataclass(frozen=True, slots=True)
class Matter:
    job: Job
    round: Round
    now: float
    config: RecoveryConfig
    because: str = ""
    before: tuple[Command, ...] = ()
    cause: RecoverCode = RecoverCode.OK
    """What went wrong, where something did; late reports are answered with it."""

    def since(self, because: str) -> Matter:
        """One reason more."""
        return replace(self, because=f"{self.because}; {because}" if self.because else because)

    def doing(self, *commands: Command) -> Matter:
        return replace(self, before=(*self.before, *commands))

    def in_cluster(self, *commands: Command) -> Matter:
        """Only where a cluster is there to read it."""
        return self.doing(*commands) if self.job.config.cluster else self

    def knowing(self, **round_: Any) -> Matter:
        return replace(self, round=replace(self.round, **round_))

    def of_job(self, **job: Any) -> Matter:
        return replace(self, job=replace(self.job, **job))

    def retired(self) -> Matter:
        """The round's uuid is used no more."""
        return self.of_job(past=(*self.job.past, self.round.uuid)[-8:])

    def next_turn(self) -> Matter:
        """A new uuid: under the old one, clients would take the next order for an echo."""
        turn = self.round.turn + 1
        uuid = new_uuid(self.job, self.job.incident, turn, self.now)
        return self.retired().knowing(turn=turn, uuid=uuid)

    def to(self, state: State, *commands: Command) -> Outcome:
        return Outcome(state, (*self.before, *commands), self.because, self.cause)
