from __future__ import annotations

from itertools import pairwise

import pytest

from taskd.core.clusterd.choose_strategy import Question, choose
from taskd.dashboard import incidents, views
from taskd.model.strategies import LADDER, Strategy
from taskd.wire._pb import control_pb2 as pb
from tests.unit.dashboard.history import HOSTILE, History, status


def test_recovery_is_one_incident_with_its_evidence_and_phases() -> None:
    history = History()
    history.add(0, "Idle", "Idle", "registered")
    history.recovery()
    history.report(1)
    found = incidents.read(history.lines)
    shown = views.incident(found, 1)
    assert shown is not None
    assert shown["title"] == "rank 2 exited: signal 9"
    assert (shown["outcome"], shown["open"], shown["good"]) == ("recovered", False, True)
    assert shown["tookMs"] == 100.0
    assert [(lane["name"], lane["tookMs"]) for lane in shown["lanes"]] == [
        ("stopped", 40.0),
        ("step", 60.0),
    ]
    assert [line["because"] for line in shown["decisions"]][-1] == "recover-in-place worked"
    assert len(views.incident_list(found)) == 1


def test_faults_during_a_recovery_belong_to_the_same_incident() -> None:
    history = History()
    event = "FaultReport(faults=[Fault(rank=1, evidence=exit code 3)])"
    history.add(1, "Idle", "Stopping", "fault of rank 1 (exit code 3)", event)
    history.add(2, "Stopping", "Stopping", "fault of rank 3 (signal 9)", event.replace("=1", "=3"))
    history.add(2, "Stopping", "Replacing", "recover is chosen")
    history.add(2, "Replacing", "Idle", "recover worked")
    history.report(1, "superseded")
    history.report(2)
    (shown,) = views.incident_list(incidents.read(history.lines))
    assert (shown["numbers"], shown["outcome"], shown["open"]) == ([1, 2], "recovered", False)
    assert shown["ranks"] == [1, 2, 3]


def test_rank_that_only_lost_its_peer_is_not_the_cause() -> None:
    history = History()
    error = "RuntimeError: Connection reset by peer"
    event = f"FaultReport(faults=[Fault(rank=1, kind=2, evidence={error})])"
    history.add(1, "Idle", "Stopping", f"network error of rank 1 ({error})", event)
    event = "FaultReport(faults=[Fault(rank=2, evidence=signal 9)])"
    because = "it belongs to this round: fault of rank 2 (signal 9)"
    history.add(1, "Stopping", "Stopping", because, event)
    history.add(1, "Stopping", "Replacing", "recover is chosen")
    (early,) = incidents.read(history.lines)
    assert incidents.title(early) == "rank 2: signal 9"
    history.add(1, "Replacing", "Idle", "recover worked")
    history.report(1)
    found = incidents.read(history.lines)
    (brief,) = views.incident_list(found)
    assert (brief["title"], brief["ranks"]) == ("rank 2 exited: signal 9", [2])
    assert [(f["rank"], f["noticed"]) for f in found[0].faults()] == [(2, False), (1, True)]
    rows = views.nodes(status(), found)["nodes"]
    assert {row["node"]: row["incidents"] for row in rows} == {0: 0, 1: 1}


def test_fault_of_an_operator_is_shown_with_the_operators_words() -> None:
    """The manager only knows that clusterd has named the rank."""
    history = History()
    event = "FaultReport(faults=[Fault(rank=2, evidence=reported by grace: hot)])"
    history.add(1, "Idle", "Stopping", "fault of rank 2 (reported by grace: hot)", event)
    history.add(1, "Stopping", "Replacing", "recover is chosen")
    history.add(1, "Replacing", "Idle", "recover worked")
    history.report(1)
    found = incidents.read(history.lines)
    for report in found[0].reports:
        report.faults[0].cause, report.faults[0].evidence = "named", "named by clusterd"
    assert incidents.title(found[0]) == "rank 2: reported by grace: hot"


def test_end_of_the_job_does_not_belong_to_the_last_incident() -> None:
    history = History()
    history.recovery()
    history.add(1, "Idle", "Ended", "node 0 was stopped by SIGTERM")
    (brief,) = views.incident_list(incidents.read(history.lines))
    assert (brief["outcome"], brief["because"]) == ("recovered", "recover-in-place worked")


def test_lost_link_without_another_fault_is_the_cause() -> None:
    history = History()
    event = "FaultReport(faults=[Fault(rank=1, kind=2, evidence=reset)])"
    history.add(1, "Idle", "Stopping", "network error of rank 1 (reset)", event)
    (found,) = incidents.read(history.lines)
    assert incidents.title(found) == "rank 1 communication: reset"


def test_health_reports_and_actions_are_listed() -> None:
    history = History()
    history.add(0, "Idle", "Idle", "rank 3 arrives 12 ms late: data loading", "SubHealth 3")
    history.add(0, "Idle", "Idle", "ada: drain node 1", "OperatorAction")
    history.add(0, "Idle", "Idle", "there is nothing to handle")
    assert [(note["kind"], note["text"]) for note in incidents.notes(history.lines)] == [
        ("action", "ada: drain node 1"),
        ("slow", "rank 3 arrives 12 ms late: data loading"),
    ]


def test_open_incident_is_shown_before_its_report() -> None:
    history = History()
    history.recovery()
    open_ = incidents.read(history.lines[:2])
    (brief,) = views.incident_list(open_)
    assert (brief["open"], brief["title"]) == (True, "rank 2: signal 9")


def test_median_is_that_of_earlier_incidents_only() -> None:
    history = History()
    for number, ms in enumerate((10.0, 30.0, 20.0, 500.0), 1):
        history.recovery(number)
        history.report(number)
        found = incidents.report_in(history.lines.pop())
        assert found is not None
        report = pb.IncidentReport()
        report.CopyFrom(found)  # what was read is remembered, for other tests, too
        del report.phases[:]
        report.phases.extend([pb.Phase(name="seen"), pb.Phase(name="stopped", took_ms=ms)])
        history.add(number, "Idle", "Idle", "", f"IncidentReport {_json(report)}")
    shown = views.incident(incidents.read(history.lines), 4)
    assert shown is not None
    assert shown["lanes"] == [{"name": "stopped", "tookMs": 500.0, "medianMs": 20.0}]


def _json(report: pb.IncidentReport) -> str:
    from google.protobuf.json_format import MessageToJson

    return str(MessageToJson(report, indent=None))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("retryable", [False, True])
def test_ladder_has_every_objection_of_the_real_decision(in_place: bool, retryable: bool) -> None:
    question = Question(
        configured=LADDER,
        offered=("recover", "downgrade", "dump", "exit"),
        retryable=retryable,
        in_place=in_place,
    )
    decision = choose(question)
    history = History()
    history.add(1, "Idle", "Stopping", "fault", "FaultReport(faults=[Fault(rank=0)])")
    history.add(1, "Negotiating", "Replacing", decision.because)
    rows = incidents.ladder(incidents.read(history.lines)[0])
    assert [row["strategy"] for row in rows] == [strategy.value for strategy in LADDER]
    assert [row["strategy"] for row in rows if row["chosen"]] == [decision.strategy.value]
    for row in rows:
        if LADDER.index(Strategy(row["strategy"])) < LADDER.index(decision.strategy):
            assert row["because"] in decision.because


def test_operation_is_not_a_fault() -> None:
    history = History()
    for before, after in pairwise(("Idle", "Pausing", "StressTesting", "Resuming", "Idle")):
        history.add(3, before, after, "stress test")
    (brief,) = views.incident_list(incidents.read(history.lines))
    assert (brief["kind"], brief["open"]) == ("operation", False)


@pytest.mark.parametrize(
    "event",
    ["IncidentReport", "IncidentReport {", "IncidentReport []", "IncidentReport " + "[" * 9999],
)
def test_damaged_report_is_left_out(event: str) -> None:
    history = History()
    history.recovery()
    history.add(1, "Idle", "Idle", "", event)
    (brief,) = views.incident_list(incidents.read(history.lines))
    assert brief["outcome"] == "recovered"


def test_history_cut_in_half_is_shown() -> None:
    history = History()
    for number in range(1, 4):
        history.recovery(number)
        history.report(number)
    for cut in range(len(history.lines)):
        for part in (history.lines[cut:], history.lines[:cut]):
            found = incidents.read(part)
            for index in range(len(found)):
                incidents.shown(found, index)
            views.nodes(status(), found)


def test_hostile_evidence_and_ten_megabytes_are_only_text() -> None:
    history = History()
    history.recovery()
    history.report(1, faults=[pb.IncidentFault(rank=2, evidence="x\n" * 5_000_000 + HOSTILE)])
    shown = views.incident(incidents.read(history.lines), 1)
    assert shown is not None
    assert len(shown["title"]) <= incidents.TITLE
    assert HOSTILE in shown["faults"][0]["evidence"]


def test_node_that_causes_most_incidents_comes_first_with_its_devices() -> None:
    history = History()
    for number in range(1, 4):
        history.recovery(number)
        history.report(number)
    shown = views.nodes(status(), incidents.read(history.lines))
    first = shown["nodes"][0]
    assert (first["node"], first["incidents"], first["devices"]) == (
        1,
        3,
        [{"device": "0", "incidents": 3}],
    )
    assert [node["severity"] for node in shown["nodes"]] == ["warn", "bad"]


def test_health_is_one_word_and_one_sentence() -> None:
    known = status()
    assert views.health_of(known, views.LIVE) == ("training", "Training")
    assert views.health_of(known, views.LOST)[0] == "unknown"
    assert views.health_of(known, views.ENDED)[0] == "done"
    of_disconnected = pb.JobStatus(ranks=[pb.RankStatus(rank=0, phase="unknown")])
    assert views.health_of(of_disconnected, views.LIVE)[0] == "unknown"
    known.stragglers.add(rank=3, cause="data loading")
    assert views.health_of(known, views.LIVE)[0] == "slow"
    known.line.state = "Replacing"
    assert views.health_of(known, views.LIVE)[0] == "recovering"


def test_job_that_has_ended_is_not_recovering() -> None:
    known = status()
    known.line.state, known.line.because = "Ended", "all ranks have finished"
    ended = "The job has ended: all ranks have finished"
    assert views.health_of(known, views.LIVE) == ("done", ended)
    history = History()
    history.add(1, "Idle", "Stopping", "fault of rank 1", "FaultReport(faults=[Fault(rank=1)])")
    history.add(1, "Stopping", "Ended", "nothing is left to try")
    assert views.health_of(known, views.LIVE, incidents.read(history.lines))[0] == "failed"


def test_pace_is_zero_while_no_rank_trains() -> None:
    known = status()
    assert views.job(known, [])["stepsPerS"] == 3.5
    for rank in known.ranks:
        rank.phase = "parked"
    assert views.job(known, [])["stepsPerS"] == 0


def test_pause_by_order_is_not_what_a_recovery_usually_takes() -> None:
    history = History()
    history.add(1, "Idle", "Pausing", "the operator asks for: stress test", "Operation()")
    history.add(1, "Pausing", "StressTesting", "all ranks are parked")
    history.add(1, "StressTesting", "Idle", "the job trains again")
    history.report(1, ranks=())
    history.recovery(2)
    history.report(2)
    found = incidents.read(history.lines)
    pause, recovery = views.incident(found, 1), views.incident(found, 2)
    assert pause is not None
    assert recovery is not None
    assert (pause["kind"], pause["strategy"]) == ("operation", "")
    assert [lane["medianMs"] for lane in recovery["lanes"]] == [None, None]
