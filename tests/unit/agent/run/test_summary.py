"""What a person reads about a job's incidents: faults and pauses are counted separately."""

from __future__ import annotations

import json
from pathlib import Path

from taskd.agent.run.summary import SUMMARY, count, read_incidents


def summary_lines(folder: Path, *incidents: dict[str, object]) -> list[str]:
    usual = {"strategy": "retry", "outcome": "recovered", "parts_ms": {"stopped": 3.0}}
    records = [{"incident": n, **usual, **each} for n, each in enumerate(incidents, 1)]
    (folder / SUMMARY).write_text(json.dumps({"incidents": records}))
    found = read_incidents(str(folder))
    return [count(found), *(incident.line for incident in found)]


FAULT: dict[str, object] = {"faults": [{"rank": 2, "kind": "hung"}]}
ORDER: dict[str, object] = {"faults": [], "strategy": "continue"}


def test_faults_and_pauses_are_counted_separately(tmp_path: Path) -> None:
    assert summary_lines(tmp_path) == ["0 faults"]
    assert summary_lines(tmp_path, FAULT) == [
        "1 fault",
        "  incident 1: rank 2 (hung) -> retry: recovered in 3 ms (stopped 3)",
    ]
    assert summary_lines(tmp_path, FAULT, ORDER, FAULT)[0] == "2 faults, 1 pause by order"
    assert summary_lines(tmp_path, ORDER, ORDER) == [
        "0 faults, 2 pauses by order",
        "  incident 1: by order -> continue: recovered in 3 ms (stopped 3)",
        "  incident 2: by order -> continue: recovered in 3 ms (stopped 3)",
    ]


def test_missing_or_broken_summary_means_no_incidents(tmp_path: Path) -> None:
    assert read_incidents(str(tmp_path)) == []
    (tmp_path / SUMMARY).write_text("half")
    assert read_incidents(str(tmp_path)) == []


def test_incident_that_new_faults_interrupted_is_one(tmp_path: Path) -> None:
    interrupted = FAULT | {"outcome": "superseded", "strategy": "", "parts_ms": {}}
    other: dict[str, object] = {"faults": [{"rank": 3, "kind": "exited"}]}
    assert summary_lines(tmp_path, interrupted, other, FAULT) == [
        "2 faults",
        "  incident 1 to 2: rank 2 (hung), rank 3 (exited) -> retry: recovered in 3 ms (stopped 3)",
        "  incident 3: rank 2 (hung) -> retry: recovered in 3 ms (stopped 3)",
    ]
    assert summary_lines(tmp_path, interrupted)[1] == (
        "  incident 1: rank 2 (hung) -> no strategy: superseded"
    )


def test_restart_of_all_ranks_says_why(tmp_path: Path) -> None:
    restarted = FAULT | {"outcome": "restarted", "because": "no rank holds shard 1of2"}
    assert summary_lines(tmp_path, restarted)[1] == (
        "  incident 1: rank 2 (hung) -> retry: restarted in 3 ms (stopped 3): "
        "no rank holds shard 1of2"
    )
