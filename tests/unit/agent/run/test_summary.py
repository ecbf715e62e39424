"""What a person reads about a job's incidents: faults and pauses are counted separately."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from taskd.agent.run import plan
from taskd.agent.run.arguments import add_arguments
from taskd.agent.run.plan import Plan
from taskd.agent.run.summary import (
    JOURNAL,
    SUMMARY,
    Incident,
    Summary,
    count,
    hint,
    read_incidents,
)
from taskd.core.agent.states import Done, Node, Stopping, Training
from taskd.model.ids import Incarnation, NodeRank, Rank
from taskd.model.messages import WorkerExited


def summary_lines(folder: Path, *incidents: dict[str, object]) -> list[str]:
    usual = {"strategy": "retry", "outcome": "recovered", "parts_ms": {"stopped": 3.0}}
    records = [{"incident": n, **usual, **each} for n, each in enumerate(incidents, 1)]
    (folder / SUMMARY).write_text(json.dumps({"incidents": records}))
    found = read_incidents(str(folder))
    return [count(found), *(incident.line for incident in found)]


FAULT: dict[str, object] = {"faults": [{"rank": 2, "kind": "hung"}]}
ERROR = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no data'
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
        "  incident 1: paused by order for 3 ms (stopped 3)",
        "  incident 2: paused by order for 3 ms (stopped 3)",
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
        "  incident 1: rank 2 (hung) -> recovery: not finished when the job ended"
    )


@pytest.mark.parametrize(
    ("kind", "evidence", "shown"),
    [
        ("exited", "signal 9", "signal 9"),
        ("exited", "exit code 1", "exit code 1"),
        ("exited", f"exit code 1\n{ERROR}", "exit code 1: ValueError: no data"),
        ("exited", "", "exited"),
        ("exited", "signal 11: \x1b[2Jgone", "signal 11: \\x1b[2Jgone"),
        ("named", "named by clusterd: …", "reported"),
    ],
)
def test_cause_says_how_the_rank_ended(
    tmp_path: Path, kind: str, evidence: str, shown: str
) -> None:
    fault: dict[str, object] = {"faults": [{"rank": 2, "kind": kind, "evidence": evidence}]}
    line = summary_lines(tmp_path, fault)[1]
    assert line == f"  incident 1: rank 2 ({shown}) -> retry: recovered in 3 ms (stopped 3)"


@pytest.mark.parametrize("ordered", [False, True])
def test_process_that_was_ended_after_its_script_is_not_shown_as_failed(ordered: bool) -> None:
    node = Node(NodeRank(0), (Rank(0),), remaining=0)
    exited = WorkerExited(Rank(0), Incarnation(0), 1, None, 15, "", script_ended=True)
    done = Done(node, 0, "")
    summary = Summary(lambda: 0.0)
    before = Stopping(node, {}, 0, "", 0.0) if ordered else Training(node, {}, {}, together=False)
    summary.observe(exited, before, done)
    shown = any("counts as finished" in line for line in summary.lines(done, "", []))
    assert shown is not ordered


def test_restart_of_all_ranks_says_why(tmp_path: Path) -> None:
    restarted = FAULT | {"outcome": "restarted", "because": "no rank holds shard 1of2"}
    assert summary_lines(tmp_path, restarted)[1] == (
        "  incident 1: rank 2 (hung) -> retry: restarted in 3 ms (stopped 3): "
        "no rank holds shard 1of2"
    )


def planned(folder: Path, *words: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (folder / "t.py").touch()
    return plan.read(parser.parse_args(["--job-id=a b", *words, str(folder / "t.py")]))


def test_hint_names_a_command_that_finds_the_incidents(tmp_path: Path) -> None:
    fault, pause = Incident("", True), Incident("", False)
    assert hint([pause], planned(tmp_path)) == []
    assert "--state-dir" in hint([fault], planned(tmp_path))[0]
    kept = planned(tmp_path, f"--state-dir={tmp_path}")
    assert hint([fault], kept) == []
    (tmp_path / JOURNAL).touch()
    command = "for a report: taskd replay 'a b'"
    journal = f"{command} --journal {tmp_path}/clusterd.journal --html report.html"
    assert hint([fault], kept) == [journal]
    elsewhere = planned(tmp_path, f"--state-dir={tmp_path}", "--clusterd=host:8899")
    assert hint([fault], elsewhere) == [f"{command} --server host:8899 --html report.html"]


def test_summary_of_a_former_leader_gives_way_to_what_the_later_ones_have_saved(
    tmp_path: Path,
) -> None:
    usual = {"strategy": "recover", "outcome": "recovered", "parts_ms": {}}
    fault = {"rank": 1, "kind": "lost"}
    saved = [{"incident": number, "faults": [fault], **usual} for number in (1, 2)]
    assert count(read_incidents(str(tmp_path), saved)) == "2 faults"
    former = {"incidents": saved[:1], "exit_code": None}
    (tmp_path / SUMMARY).write_text(json.dumps(former))
    assert count(read_incidents(str(tmp_path), saved)) == "2 faults"
    last = {"incidents": [*saved, {**saved[0], "incident": 3}], "exit_code": 0}
    (tmp_path / SUMMARY).write_text(json.dumps(last))
    assert count(read_incidents(str(tmp_path), saved)) == "3 faults"
