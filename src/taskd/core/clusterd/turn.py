"""The turn at hand while one event is handled: what is known, what is to be done, and why.

The functions that make a step hand a `Turn` along; the last of them turns it into the step.
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
class Turn:
    job: Job
    round: Round
    now: float
    config: RecoveryConfig
    because: str = ""
    commands: tuple[Command, ...] = ()
    cause: RecoverCode = RecoverCode.OK
    """What went wrong, where something did; late reports are answered with it."""

    def with_reason(self, because: str) -> Turn:
        """One reason more."""
        return replace(self, because=f"{self.because}; {because}" if self.because else because)

    def with_commands(self, *commands: Command) -> Turn:
        return replace(self, commands=(*self.commands, *commands))

    def with_cluster_commands(self, *commands: Command) -> Turn:
        """Only where a cluster is there to read it."""
        return self.with_commands(*commands) if self.job.config.cluster else self

    def with_round(self, **round_: Any) -> Turn:
        return replace(self, round=replace(self.round, **round_))

    def with_job(self, **job: Any) -> Turn:
        return replace(self, job=replace(self.job, **job))

    def with_uuid_retired(self) -> Turn:
        """The round's uuid is used no more."""
        return self.with_job(past=(*self.job.past, self.round.uuid)[-8:])

    def with_new_uuid(self) -> Turn:
        """A new uuid: under the old one, clients would take the next order for an echo."""
        number = self.round.uuid_number + 1
        uuid = new_uuid(self.job, self.job.incident, number, self.now)
        return self.with_uuid_retired().with_round(uuid_number=number, uuid=uuid)

    def go_to(self, state: State, *commands: Command) -> Outcome:
        return Outcome(state, (*self.commands, *commands), self.because, self.cause)
