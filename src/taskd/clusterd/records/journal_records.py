"""How a job is written to the journal and read back.

A record holds the machine's whole state and the cluster writes that are ordered but not done yet.
After a restart they are done again; writes are idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any

from taskd.core.clusterd import job_facts as recovery_job
from taskd.core.clusterd import states as recovery_states
from taskd.core.clusterd.states import NEW, Outcome, State
from taskd.model import clusterd as recovery
from taskd.model import faults, strategies
from taskd.model.clusterd import ClusterCommand, Event
from taskd.model.faults import Fault
from taskd.model.ids import JobId
from taskd.runtime.journal.journal_values import Entry, Write
from taskd.wire import tagged_json as tagged

SHOWN = 8
"""How many items of a list are shown."""
TYPES = tagged.types_of(faults, strategies, recovery, recovery_job, recovery_states)


@dataclass(frozen=True, slots=True)
class PastRound:
    incident: int
    began: float
    took_s: float
    strategy: str
    outcome: str
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    state: State
    undone: tuple[ClusterCommand, ...] = ()
    """Cluster writes that are ordered and not known to be done, in order."""
    rounds: tuple[PastRound, ...] = ()
    """The last finished rounds, newest first."""


TYPES |= {kind.__name__: kind for kind in (Record, PastRound)}
TYPES["FaultRank"] = Fault  # what older versions wrote


def first(job: JobId) -> Record:
    return Record(replace(NEW, job=replace(NEW.job, id=job)))


def write(
    job: JobId, before: Record, after: Record, event: Event, step: Outcome, at: float
) -> Write:
    """Large parts that change rarely are written as notes when they change, not every time."""
    ended = isinstance(event, recovery.JobDeleted)
    old, new = _rarely_changing(before), _rarely_changing(after)
    notes: list[tuple[str, str | None]] = []
    if ended:
        # Delete all notes of the job in the same transaction.
        notes = [(f"{kind}/{job}", None) for kind in (*new, "declared", "trace")]
    else:
        changed = [kind for kind in new if new[kind] != old[kind]]
        notes = [(f"{kind}/{job}", tagged.write(new[kind])) for kind in changed]
    small = tagged.write(_with(after, pods=(), places={}, rounds=()))
    return Write(job, small, at, (entry(job, before, event, step, at),), ended, tuple(notes))


def read(job: JobId, text: str, notes: Mapping[str, str]) -> Record:
    """Raises UnreadableRecord if another version wrote what this one cannot read."""
    record: Record = tagged.read(text, TYPES)
    noted = {
        kind: tagged.read(notes[f"{kind}/{job}"], TYPES)
        for kind in _rarely_changing(record)
        if f"{kind}/{job}" in notes
    }
    return _with(record, **(_rarely_changing(record) | noted))


def entry(job: JobId, before: Record, event: Event, step: Outcome, at: float) -> Entry:
    return Entry(
        job=job,
        incident=step.state.job.incident,
        at=at,
        event=describe(event),
        before=type(before.state).__name__,
        after=type(step.state).__name__,
        because=step.because,
        commands=tuple(describe(command) for command in step.commands),
    )


def describe(value: Any) -> str:
    """One line for people: the name, and the fields that differ from their default."""
    if isinstance(value, Enum):
        return str(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        shown = []
        for item in fields(value):
            content = getattr(value, item.name)
            if content not in ("", None, (), {}, frozenset()) and content != item.default:
                shown.append(f"{item.name}={describe(content)}")
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, tuple | frozenset):
        shown = [describe(item) for item in islice(value, SHOWN)]
        return f"[{', '.join(shown)}{f', … {len(value)} in all' if len(value) > SHOWN else ''}]"
    if isinstance(value, Mapping):
        return describe(tuple(f"{key}: {describe(item)}" for key, item in value.items()))
    return str(value)


def _rarely_changing(record: Record) -> dict[str, Any]:
    job = record.state.job
    return {"pods": job.pods, "places": job.places, "rounds": record.rounds}


def _with(record: Record, *, pods: Any, places: Any, rounds: Any) -> Record:
    job = replace(record.state.job, pods=pods, places=places)
    return replace(record, state=replace(record.state, job=job), rounds=rounds)
