"""The record of the open incident: its faults, when each phase was complete, and its outcome.

clusterd opens and numbers incidents; faults that come before that belong to the next one.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager.states import Job
from taskd.core.rank_sets import RankTable
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Incident, Rank
from taskd.model.manager import NO_INCIDENT, IncidentRecord

SECONDARY = FaultKind.NETWORK
"""The kind of fault that a rank reports when another rank fails."""
RECORDS_KEPT = 100


def without_fault(job: Job, rank: Rank) -> Job:
    """The fault was that of a former incarnation, and a newer one runs."""
    if rank not in job.faults:
        return job
    known = {r: fault for r, fault in job.faults.items() if r != rank}
    record = job.open_incident
    if record is not None:
        faults = tuple(fault for fault in record.faults if fault.rank != rank)
        record = replace(record, faults=faults) if faults else None
    return replace(job, faults=known, open_incident=record)


def add_faults(job: Job, faults: tuple[Fault, ...]) -> Job:
    """Add faults to the open incident. clusterd opens the next incident, not the manager."""
    if any(fault.kind == SECONDARY for fault in job.faults.values()):
        # A failed connection is reported by two ranks, a failed collective by many: keep one.
        faults = tuple(fault for fault in faults if fault.kind != SECONDARY)
        if not faults:
            return job
    known = {**job.faults, **{fault.rank: fault for fault in faults}}
    record = job.open_incident
    if any(not fault.kind.retryable for fault in known.values()):
        # A rank has died: the collectives that failed on the others are only consequences.
        known = {r: fault for r, fault in known.items() if fault.kind != SECONDARY}
        faults = tuple(fault for fault in faults if fault.kind != SECONDARY)
        if record is not None:
            record = replace(record, faults=tuple(f for f in record.faults if f.kind != SECONDARY))
    if record is None:
        record = IncidentRecord(
            NO_INCIDENT, faults, (("seen", min(fault.seen_at for fault in faults)),)
        )
    else:
        record = replace(record, faults=(*record.faults, *faults))
    return replace(job, faults=known, open_incident=record)


def mark_phase(job: Job, name: str, at: float) -> Job:
    if job.open_incident is None or any(
        name == marked for marked, _ in job.open_incident.timestamps
    ):
        return job
    return replace(
        job,
        open_incident=replace(
            job.open_incident, timestamps=(*job.open_incident.timestamps, (name, at))
        ),
    )


def start_incident(job: Job, incident: Incident, uuid: str, now: float) -> Job:
    """clusterd has numbered the incident. An older one that is still open is superseded."""
    record = job.open_incident
    if record is not None and record.incident not in (NO_INCIDENT, incident):
        because = "; ".join(filter(None, (record.because, f"incident {incident} followed")))
        job = close_incident(job, "superseded", because)
        record = None
    if record is None:
        faults = job.known_faults()
        began = max((fault.seen_at for fault in faults), default=now)
        record = IncidentRecord(incident, faults, (("seen", began),))
    record = replace(record, incident=incident)
    return replace(
        job, incident=incident, uuid=uuid, parked=RankTable(), plan_sent=False, open_incident=record
    )


def close_incident(job: Job, outcome: str, because: str) -> Job:
    if job.open_incident is None:
        return job
    done = replace(job.open_incident, outcome=outcome, because=because)
    return replace(
        job, open_incident=None, past_incidents=(*job.past_incidents, done)[-RECORDS_KEPT:]
    )
