"""The handling of one event: what is known so far, the commands so far, and the reasons.

The functions that decide pass a `Turn` along; the last of them makes the outcome from it.
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
    """What went wrong, if anything did. Late reports get this code as their answer."""

    def with_reason(self, because: str) -> Turn:
        """Add a reason."""
        return replace(self, because=f"{self.because}; {because}" if self.because else because)

    def with_commands(self, *commands: Command) -> Turn:
        return replace(self, commands=(*self.commands, *commands))

    def with_cluster_commands(self, *commands: Command) -> Turn:
        """Add these commands only if there is a cluster that reads the result."""
        return self.with_commands(*commands) if self.job.config.cluster else self

    def with_round(self, **round_: Any) -> Turn:
        return replace(self, round=replace(self.round, **round_))

    def with_job(self, **job: Any) -> Turn:
        return replace(self, job=replace(self.job, **job))

    def with_uuid_retired(self) -> Turn:
        """The round's uuid is out of use: reports that carry it are late."""
        return self.with_job(past=(*self.job.past, self.round.uuid)[-8:])

    def with_new_uuid(self) -> Turn:
        """Take a new uuid: clients take a second order under the same uuid for a duplicate."""
        number = self.round.uuid_number + 1
        uuid = new_uuid(self.job, self.job.incident, number, self.now)
        return self.with_uuid_retired().with_round(uuid_number=number, uuid=uuid)

    def go_to(self, state: State, *commands: Command) -> Outcome:
        return Outcome(state, (*self.commands, *commands), self.because, self.cause)
