"""summary.json: a restarted manager adds to what its predecessor has written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from taskd.clusterd.records.journal_records import PastRound
from taskd.core.manager import machine
from taskd.core.manager.states import Ended, Job, Training
from taskd.manager.reports.job_status import SUMMARY, SummaryFile
from taskd.manager.settings import ManagerConfig
from taskd.model.faults import Fault
from taskd.model.ids import Incident, Rank
from taskd.model.manager import IncidentRecord


def job_with(*incidents: int) -> Job:
    job = machine.begin(ManagerConfig(job_id="mine").job, 0.0).job
    records = tuple(IncidentRecord(Incident(n), (), (("seen", 0.0),)) for n in incidents)
    return replace(job, past_incidents=records)


def shown(folder: Path) -> list[int]:
    return [item["incident"] for item in json.loads((folder / SUMMARY).read_text())["incidents"]]


def test_summary_keeps_the_incidents_of_a_former_manager(tmp_path: Path) -> None:
    config = ManagerConfig(job_id="mine", state_dir=tmp_path)
    SummaryFile(config).write(Training(job_with(1, 2)))
    restarted = SummaryFile(config)
    restarted.write(Training(job_with(3)))
    restarted.write(Ended(job_with(3, 4), 0, "all ranks have finished"))
    assert shown(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("job", ["other", "mine"])
def test_summary_of_another_run_is_left_out(tmp_path: Path, job: str) -> None:
    before = SummaryFile(ManagerConfig(job_id=job, state_dir=tmp_path))
    before.write(Ended(job_with(1), 1, "no strategy is left"))
    SummaryFile(ManagerConfig(job_id="mine", state_dir=tmp_path)).write(Training(job_with(2)))
    assert shown(tmp_path) == [2]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": "mine", "incidents": 3}', "{"])
def test_damaged_summary_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / SUMMARY).write_text(text)
    SummaryFile(ManagerConfig(job_id="mine", state_dir=tmp_path)).write(Training(job_with(2)))
    assert shown(tmp_path) == [2]


def past(incident: int) -> PastRound:
    return PastRound(incident, 0.0, 1.0, "recover", "done", (Fault(Rank(1), evidence="signal 9"),))


def test_incident_that_its_manager_could_not_write_is_taken_from_clusterd(tmp_path: Path) -> None:
    config = ManagerConfig(job_id="mine", state_dir=tmp_path)
    SummaryFile(config).complete([], Training(job_with()))
    killed = SummaryFile(config)
    killed.complete([past(1)], Training(job_with()))
    last = SummaryFile(config)
    last.complete([past(2), past(1)], Training(job_with()))
    last.write(Ended(job_with(3), 0, "all ranks have finished"))
    assert shown(tmp_path) == [1, 2, 3]


def test_incidents_of_an_earlier_run_that_clusterd_knows_are_left_out(tmp_path: Path) -> None:
    config = ManagerConfig(job_id="mine", state_dir=tmp_path)
    SummaryFile(config).complete([past(7)], Training(job_with()))
    last = SummaryFile(config)
    last.complete([past(8), past(7)], Training(job_with()))
    last.write(Ended(job_with(9), 0, "all ranks have finished"))
    assert shown(tmp_path) == [8, 9]
