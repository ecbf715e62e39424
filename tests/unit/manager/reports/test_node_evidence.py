from __future__ import annotations

from dataclasses import replace

from taskd.core.manager.states import JobConfig, initial_job
from taskd.manager.reports.incident_reports import IncidentReports
from taskd.manager.reports.node_evidence import WINDOW_S, NodeEvidence
from taskd.manager.sense import with_stack
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.manager import IncidentRecord
from taskd.model.messages import LinkCounter, NodeFacts, Progress

NODE = NodeRank(1)


def facts(errors: int, drops: int = 5) -> NodeFacts:
    links = LinkCounter("eth0", "rx_errors", errors), LinkCounter("eth0", "rx_dropped", drops)
    return NodeFacts(links, (Rank(3),))


def test_only_counters_that_have_grown_in_the_last_minute_are_evidence() -> None:
    evidence = NodeEvidence()
    evidence.take(NODE, facts(errors=7), now=0.0)
    assert list(evidence.changes()) == []
    evidence.take(NODE, facts(errors=9), now=10.0)
    assert list(evidence.changes()) == [(NODE, "eth0", "rx_errors", 2, 9)]
    evidence.take(NODE, facts(errors=9), now=11.0 + WINDOW_S)
    assert list(evidence.changes()) == [], "it happened before"
    assert evidence.copies == {NODE: {3}}


def test_counter_that_began_again_is_not_evidence() -> None:
    evidence = NodeEvidence()
    evidence.take(NODE, facts(errors=7), now=0.0)
    evidence.take(NODE, facts(errors=0), now=1.0)
    assert list(evidence.changes()) == []


def test_incident_report_holds_the_changes_of_links() -> None:
    evidence = NodeEvidence()
    evidence.take(NODE, facts(errors=7), now=0.0)
    evidence.take(NODE, facts(errors=9), now=1.0)
    before = initial_job(JobConfig(nodes=2, ranks_per_node=2))
    fault = Fault.of(Rank(1), FaultCause.EXITED, "signal 9")
    record = IncidentRecord(Incident(1), (fault,), (("seen", 1.0),))
    collected = IncidentReports("job", 0.0, evidence.changes)
    collected.observe(before, replace(before, past_incidents=(record,)), {})
    (report,) = collected.waiting
    (link,) = report.links
    assert (link.node, link.link, link.counter, link.change, link.total) == (
        1,
        "eth0",
        "rx_errors",
        2,
        9,
    )


def beat(idle_s: float, stack: str = "", incarnation: int = 0) -> Progress:
    return Progress(Rank(1), Incarnation(incarnation), Step(3), idle_s, True, 7, stack=stack)


def test_stacks_that_are_sent_once_are_kept_until_the_rank_moves() -> None:
    sent = with_stack(beat(0.6, "main.py line 3"), beat(0.2))
    later = with_stack(beat(1.2), sent)
    assert later.stack == "main.py line 3"
    assert with_stack(beat(0.1), later).stack == "", "it has moved"
    assert with_stack(beat(2.0, incarnation=1), later).stack == "", "another process"
