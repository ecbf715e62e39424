from __future__ import annotations

from dataclasses import replace

from taskd.core.manager.states import Job, JobConfig, initial_job
from taskd.manager.reports import incident_reports as reports
from taskd.manager.reports.incident_reports import IncidentReports
from taskd.manager.reports.job_status import nodes_of, shards_of
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.manager import IncidentRecord
from taskd.model.messages import Progress

OFFSET = 1_000.0


def progress(rank: int, collective: int = 7, stack: str = "") -> Progress:
    return Progress(Rank(rank), Incarnation(0), Step(3), 0.1, True, collective, stack=stack)


def record(number: int, evidence: str = "signal 9") -> IncidentRecord:
    fault = Fault.of(Rank(1), FaultCause.EXITED, evidence)
    moments = (("seen", 10.0), ("stopped", 10.25), ("step", 11.0))
    return IncidentRecord(Incident(number), (fault,), moments, "recover-in-place", "recovered")


def job() -> Job:
    return initial_job(JobConfig(nodes=2, ranks_per_node=2))


def test_each_closed_incident_is_reported_once_with_its_phases() -> None:
    collected, before = IncidentReports("job", OFFSET), job()
    opened = replace(before, open_incident=record(1))
    closed = replace(before, past_incidents=(record(1),))
    collected.observe(before, opened, {1: progress(1)})
    collected.observe(opened, closed, {1: progress(1, collective=99)})
    collected.observe(closed, closed, {})
    (report,) = collected.waiting
    assert [(p.name, p.at_unix_ms, p.took_ms) for p in report.phases] == [
        ("seen", 1_010_000, 0.0),
        ("stopped", 1_010_250, 250.0),
        ("step", 1_011_000, 750.0),
    ]
    assert [(f.rank, f.node, f.cause) for f in report.faults] == [(1, 0, "exited")]
    assert report.ranks[0].collective == 7, "the activity is that before the incident"


def test_records_that_are_dropped_do_not_repeat_old_ones() -> None:
    collected, state = IncidentReports("job", OFFSET), job()
    for number in range(1, 300):
        after = replace(state, past_incidents=(*state.past_incidents, record(number))[-100:])
        collected.observe(state, after, {})
        state = after
    assert [report.incident for report in collected.waiting] == list(range(1, 300))


def test_report_of_a_large_job_has_bounds() -> None:
    activity = {rank: progress(rank, stack="x" * 100_000) for rank in range(10_000)}
    activity[9_999] = progress(9_999, collective=6, stack="behind")
    found = reports.activity_of(activity, {5_000})
    ranks = [each.rank for each in found]
    assert len(found) == reports.MAX_RANKS
    assert {5_000, 9_999} <= set(ranks)
    assert ranks == sorted(ranks)
    assert sum(len(each.stack) for each in found) <= reports.MAX_STACKS


def test_ranks_of_an_earlier_step_are_behind_those_of_a_later_one() -> None:
    """Collectives are counted from the beginning of each step."""
    activity = {rank: progress(rank, collective=1) for rank in range(10_000)}
    activity[9_999] = replace(activity[9_999], step=Step(2), collective=8)
    found = reports.activity_of(activity, set())
    assert 9_999 in [each.rank for each in found]


def test_evidence_that_is_not_unicode_can_be_sent() -> None:
    collected, before = IncidentReports("job", OFFSET), job()
    bad = record(1, "\udcff" + "x" * reports.MAX_EVIDENCE * 2 + "\udcff")
    collected.observe(before, replace(before, past_incidents=(bad,)), {})
    (report,) = collected.waiting
    assert len(report.SerializeToString()) < 2 * reports.MAX_EVIDENCE


def test_nodes_show_where_the_only_replicas_are() -> None:
    state = job()
    views = {
        rank: replace(view, said_hello=True, shard="a" if rank < 2 else "b")
        for rank, view in state.view.ranks.items()
    }
    here = {node: replace(known, present=True) for node, known in state.view.nodes.items()}
    view = replace(state.view, nodes=here, ranks=state.view.ranks.update(views))
    state = replace(state, view=view, bad_nodes=frozenset({NodeRank(1)}))
    copies = {NodeRank(1): frozenset({Rank(0), Rank(2)}), NodeRank(7): frozenset({Rank(2)})}
    shards = shards_of(state, copies)
    assert [(s.shard, list(s.replicas), list(s.copies)) for s in shards] == [
        ("a", [0], [1]),
        ("b", [1], [1]),
    ]
    first, second = nodes_of(state, shards)
    assert (list(first.only_here), list(second.only_here)) == (["a"], ["b"])
    assert (list(first.not_copied), list(second.not_copied)) == ([], ["b"])
    assert (first.ranks, second.ranks) == (2, 2)
    assert "failed a stress test" in second.problem
