"""The manager's counters cover all incidents, although it keeps only the newest records."""

from __future__ import annotations

from taskd.manager.reports.job_metrics import IncidentCounters
from taskd.model.ids import Incident
from taskd.model.manager import IncidentRecord

KEPT = 100


def record(number: int, outcome: str = "recovered") -> IncidentRecord:
    moments = (("seen", float(number)), ("step", number + 0.5))
    return IncidentRecord(Incident(number), (), moments, "recover-in-place", outcome)


def sums(incidents: IncidentCounters) -> dict[str, float]:
    return {
        f"{metric.name} {sample.labels.get('outcome', '')}".strip(): sample.value
        for metric in incidents.metrics("job")
        for sample in metric.samples
    }


def test_counters_continue_when_old_records_are_dropped() -> None:
    incidents, records = IncidentCounters(), tuple[IncidentRecord, ...]()
    assert sums(incidents) == {}
    for number in range(3 * KEPT):
        records = (*records, record(number))[-KEPT:]
        if number % 7 == 0:
            incidents.count(records)
            incidents.count(records)  # repeated: nothing is new
    incidents.count(records)
    assert sums(incidents) == {
        "taskd_incidents_total recovered": 3 * KEPT,
        "taskd_recovery_seconds_total recovered": 1.5 * KEPT,
        "taskd_last_recovery_seconds": 0.5,
    }


def test_equal_records_are_counted_twice() -> None:
    incidents = IncidentCounters()
    first, second = record(1), record(1)
    incidents.count((first,))
    incidents.count((first, second))
    incidents.count((first, second, record(2, "failed")))
    values = sums(incidents)
    assert values["taskd_incidents_total recovered"] == 2
    assert values["taskd_incidents_total failed"] == 1
