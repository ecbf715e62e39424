"""Which faults concern a job, and when: filters, companions, hiding, relations, public faults."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from taskd.core.clusterd.fault_centre.fault_filter import CODES, LEVELS, FaultFilter, read_filter
from taskd.core.clusterd.fault_centre.fault_levels import Health, level_of, worst, worst_health
from taskd.core.clusterd.fault_centre.hiding import JobRules
from taskd.core.clusterd.fault_centre.judge import Judged, judge, recent
from taskd.core.clusterd.fault_centre.public_faults import (
    MAX_FAULTS,
    Influence,
    PublicCodes,
    PublicFault,
    PublicFaults,
    PublicReport,
    as_node_faults,
    codes_of,
    problem_of,
    problem_of_fault,
)
from taskd.core.clusterd.fault_centre.relations import Evidence
from taskd.model.clusterd import Pod
from taskd.model.ids import NodeRank, Rank
from taskd.model.node_faults import NODE, SWITCH, NodeFault

PODS = (
    Pod(NodeRank(0), "p0", node="n0", ranks=(Rank(0), Rank(1)), devices=("0", "1")),
    Pod(NodeRank(1), "p1", node="n1", ranks=(Rank(2), Rank(3)), devices=("0", "1")),
)
MEMORY = NodeFault("n1", "0", "80E01801", "RestartBusiness", 100.0)
CORE = NodeFault("n1", "0", "80CB8009", "RestartNPU", 102.0)
LINK = NodeFault("n1", "1", "81078603", "NotHandleFault", 100.0)
COLLECTIVE = NodeFault("n0", "0", "8C1F860B", "NotHandleFault", 130.0)
SWITCH_LINK = NodeFault(
    "n1", code="[0x08520003,na,L2,na]", level="NotHandle", since=100.0, part=SWITCH
)
MINOR = NodeFault("n1", "0", "80E18005", "RestartRequest", 100.0)
RETRY = JobRules(retry=True, master="n0")


def judged(
    *faults: NodeFault,
    now: float,
    rules: JobRules | None = None,
    chosen: FaultFilter | None = None,
    evidence: Evidence | None = None,
    pods: tuple[Pod, ...] = PODS,
) -> Judged:
    return judge(
        faults, pods, rules or JobRules(), chosen or FaultFilter(), evidence or Evidence(), now
    )


def seen(result: Judged) -> list[tuple[int, str, str]]:
    return [(fault.rank, fault.code, fault.level) for fault in result.seen]


def test_only_faults_of_the_jobs_devices_count() -> None:
    others = (NodeFault("n1", "7", "x", "SeparateNPU"), NodeFault("n9", "0", "x", "SeparateNPU"))
    result = judged(MINOR, *others, now=200.0)
    assert seen(result) == [(2, "80E18005", "RestartRequest")]
    assert result.seen[0].pod == "p1"
    assert result.again_at == inf


@pytest.mark.parametrize(
    ("fault", "level"),
    [
        (NodeFault("n1", level="SeparateFault", part=NODE), "SeparateNPU"),
        (NodeFault("n1", code="c", level="PreSeparateFault", part="CPU"), "PreSeparateNPU"),
        (NodeFault("n1", code="c", level="NotHandleFault", part="Disk"), "NotHandleFault"),
        (NodeFault("n1", code="s", level="RestartRequest", part=SWITCH), "SeparateNPU"),
        (NodeFault("n1", code="s", level="SubHealthFault", part=SWITCH), "SubHealthFault"),
        (NodeFault("n1", code="s", level="NotHandle", part=SWITCH), "NotHandleFault"),
    ],
)
def test_fault_of_a_node_or_switch_concerns_all_its_ranks(fault: NodeFault, level: str) -> None:
    assert seen(judged(fault, now=1.0)) == [(2, fault.code, level), (3, fault.code, level)]


def test_worst_level_and_health() -> None:
    assert worst(["SubHealthFault", "SeparateNPU", "RestartNPU"]) == "SeparateNPU"
    assert worst([]) == ""
    assert worst(["", "SubHealthFault", "SomethingNew"]) == "SomethingNew"
    assert worst_health(["NotHandleFault", ""]) is Health.HEALTHY
    assert worst_health(["PreSeparateNPU", "NotHandleFault"]) is Health.SUB_HEALTHY
    assert worst_health(["PreSeparateNPU", "RestartRequest"]) is Health.UNHEALTHY
    assert worst_health(["SomethingNew"]) is Health.UNHEALTHY
    assert level_of(MINOR) == "RestartRequest"


# The user's filter


def test_filter_is_read_with_its_defaults_and_mistakes_are_named() -> None:
    chosen, mistakes = read_filter(
        {
            CODES: "8C1F8608:30, 4C1F8608 ,[0x08520003,na,L2,na]:5，80E01801:x,:7,a:86401",  # noqa: RUF001
            LEVELS: "RestartRequest",
        }
    )
    assert chosen.codes == {"8C1F8608": 30.0, "4C1F8608": 60.0, "[0x08520003,na,L2,na]": 5.0}
    assert chosen.levels == {"RestartRequest": 60.0}
    assert [mistake.split("'")[1] for mistake in mistakes] == ["80E01801:x", ":7", "a:86401"]
    assert read_filter({CODES: "[a,b]"})[0].codes == {"[a,b]": 60.0}


def test_filtered_fault_counts_when_it_lasts_too_long() -> None:
    chosen = FaultFilter({"80E18005": 30.0}, {"RestartRequest": 20.0})
    early = judged(MINOR, now=129.0, chosen=chosen)
    assert early.seen == ()
    assert early.shown == ()
    assert early.withheld == {MINOR.key}
    assert early.again_at == 130.0
    late = judged(MINOR, now=130.0, chosen=chosen)
    assert len(late.seen) == len(late.shown) == 1


# Companions of a memory error


def test_core_error_next_to_a_memory_error_is_dropped() -> None:
    result = judged(MEMORY, CORE, now=103.0, rules=RETRY)
    assert seen(result) == [(2, "80E01801", "RestartBusiness")]


def test_core_error_alone_waits_for_a_memory_error_and_then_counts() -> None:
    early = judged(CORE, now=103.0, rules=RETRY)
    assert (early.seen, early.again_at) == ((), 107.0)
    assert seen(judged(CORE, now=107.0, rules=RETRY)) == [(2, "80CB8009", "RestartNPU")]


def test_core_error_next_to_the_jobs_own_report_is_dropped() -> None:
    reported = replace(RETRY, reported={("n1", "0"): 105.0})
    assert judged(CORE, now=110.0, rules=reported).seen == ()


# Hiding from the scheduler


def test_memory_error_is_hidden_while_the_job_may_repeat_its_step() -> None:
    early = judged(MEMORY, now=109.0, rules=RETRY)
    assert len(early.seen) == 1
    assert early.shown == ()
    assert early.again_at == 110.0
    assert judged(MEMORY, now=110.0, rules=RETRY).shown == (MEMORY,)


def test_reported_memory_error_is_hidden_until_the_repetition_must_be_over() -> None:
    rules = replace(RETRY, reported={("n1", "0"): 108.0})
    assert judged(MEMORY, now=137.0, rules=rules).shown == ()
    assert judged(MEMORY, now=138.0, rules=rules).shown == (MEMORY,)


def test_report_that_came_too_late_hides_nothing() -> None:
    rules = replace(RETRY, reported={("n1", "0"): 111.0})
    assert judged(MEMORY, now=112.0, rules=rules).shown == (MEMORY,)


def test_nothing_is_hidden_from_the_scheduler_without_retry() -> None:
    assert judged(MEMORY, now=100.0).shown == (MEMORY,)


def test_reports_count_for_a_minute_and_for_their_device() -> None:
    times = {Rank(3): 100.0, Rank(9): 100.0}
    assert recent(times, PODS, 159.0) == {("n1", "1"): 100.0}
    assert recent(times, PODS, 160.0) == {}


def test_unreported_failed_collective_becomes_a_fault_after_a_minute() -> None:
    early = judged(COLLECTIVE, now=189.0, rules=RETRY)
    assert seen(early) == [(0, "8C1F860B", "NotHandleFault")]
    assert early.again_at == 190.0
    late = judged(COLLECTIVE, now=190.0, rules=RETRY)
    assert seen(late) == [(0, "8C1F860B", "RestartBusiness")]
    assert late.shown[0].level == "RestartBusiness"


def test_reported_failed_collective_stays_what_it_is() -> None:
    rules = replace(RETRY, reported={("n0", "0"): 131.0})
    assert seen(judged(COLLECTIVE, now=190.0, rules=rules)) == [(0, "8C1F860B", "NotHandleFault")]


IN_PLACE = JobRules(in_place=True, master="n0")


def test_minor_fault_is_hidden_while_processes_restart_in_place() -> None:
    early = judged(MINOR, now=159.0, rules=IN_PLACE)
    assert len(early.seen) == 1
    assert early.shown == ()
    assert early.again_at == 160.0
    assert judged(MINOR, now=160.0, rules=IN_PLACE).shown == (MINOR,)


@pytest.mark.parametrize(
    "other",
    [
        NodeFault("n1", "1", "w", "SeparateNPU", 100.0),
        NodeFault("n1", level="SeparateFault", part=NODE, since=100.0),
    ],
)
def test_minor_fault_is_shown_where_a_worse_one_needs_a_new_node(other: NodeFault) -> None:
    assert MINOR in judged(MINOR, other, now=101.0, rules=IN_PLACE).shown


def test_sub_health_is_tolerated_only_if_the_job_ignores_it() -> None:
    slow = NodeFault("n1", "1", "s", "SubHealthFault", 100.0)
    assert MINOR not in judged(MINOR, slow, now=101.0, rules=IN_PLACE).shown
    strict = replace(IN_PLACE, ignores_sub_health=False)
    assert MINOR in judged(MINOR, slow, now=101.0, rules=strict).shown


def test_nothing_is_hidden_if_the_first_node_cannot_restart_in_place() -> None:
    first = (replace(MINOR, node="n0"), NodeFault("n0", "1", "w", "SeparateNPU", 100.0))
    assert MINOR in judged(MINOR, *first, now=101.0, rules=IN_PLACE).shown


def test_faults_of_a_pod_that_is_being_replaced_are_shown() -> None:
    rules = replace(IN_PLACE, leaving=frozenset({"n1"}))
    assert judged(MINOR, now=101.0, rules=rules).shown == (MINOR,)


# Relations


def test_lost_link_alone_is_harmless() -> None:
    result = judged(LINK, now=101.0)
    assert [fault.level for fault in result.seen] == ["NotHandleFault"]
    assert result.again_at == 400.0


def test_lost_link_and_failed_collective_separate_the_node_of_the_link() -> None:
    first = judged(LINK, now=101.0)
    # The link is back when the collective fails on another node.
    second = judged(COLLECTIVE, now=131.0, evidence=first.evidence)
    (related,) = [fault for fault in second.seen if fault.label]
    assert (related.rank, related.level, related.label) == (3, "SeparateNPU", "Separate")
    assert related.pod == "p1"
    # It lasts until the pod is replaced, and is never taken back.
    third = judged(now=10_000.0, evidence=second.evidence)
    assert [fault.label for fault in third.seen] == ["Separate"]
    replaced = (PODS[0], replace(PODS[1], uid="p2"))
    assert judged(now=10_000.0, evidence=third.evidence, pods=replaced).seen == ()


def test_lost_link_explains_nothing_after_its_lifetime() -> None:
    first = judged(LINK, now=101.0)
    late = judged(COLLECTIVE, now=401.0, evidence=first.evidence)
    assert not [fault for fault in late.seen if fault.label]


def test_sub_healthy_verdict_gets_worse_but_not_better() -> None:
    slow = NodeFault("n0", "0", "8C1F8609", "NotHandleFault", 110.0)
    first = judged(LINK, slow, now=111.0)
    assert {fault.label for fault in first.seen} == {"", "SubHealth"}
    second = judged(LINK, COLLECTIVE, now=131.0, evidence=first.evidence)
    assert {fault.label for fault in second.seen} == {"", "Separate"}
    third = judged(LINK, slow, now=140.0, evidence=second.evidence)
    assert {fault.label for fault in third.seen} == {"", "Separate"}


def test_switch_link_separates_all_ranks_of_its_node() -> None:
    result = judged(SWITCH_LINK, COLLECTIVE, now=131.0)
    assert [fault.rank for fault in result.seen if fault.label == "Separate"] == [2, 3]


def test_switch_link_that_stays_lost_makes_its_node_sub_healthy() -> None:
    first = judged(SWITCH_LINK, now=101.0)
    assert first.again_at == 400.0
    second = judged(SWITCH_LINK, now=400.0, evidence=first.evidence)
    assert {fault.label for fault in second.seen} == {"", "SubHealth"}


# Public faults

LEVEL_OF = PublicCodes({"220001001": "SeparateNPU", "200001012": "SubHealthFault"})
FAULT = PublicFault(
    id="fault-0001",
    type="Storage",
    code="220001001",
    time_ms=1_760_000_000_000,
    assertion="occur",
    influence=(Influence("n1", "", (0, 1)),),
)
REPORT = PublicReport(
    id="message-1",
    timestamp_ms=1_760_000_000_000,
    version="1.0",
    resource="CCAE",
    faults=(FAULT,),
)


def assertion(word: str) -> PublicReport:
    return replace(REPORT, faults=(replace(FAULT, assertion=word),))


def test_public_fault_occurs_and_recovers_after_at_least_five_seconds() -> None:
    faults = PublicFaults()
    assert faults.apply(REPORT, LEVEL_OF, 100.0) == {"n1"}
    assert faults.apply(REPORT, LEVEL_OF, 101.0) == set()
    found = list(as_node_faults(faults.on("n1")))
    assert [(one.device, one.level, one.reporter) for one in found] == [
        ("0", "SeparateNPU", "CCAE"),
        ("1", "SeparateNPU", "CCAE"),
    ]
    assert faults.next_end == inf
    assert faults.apply(assertion("recover"), LEVEL_OF, 102.0) == {"n1"}
    assert faults.next_end == 105.0
    assert faults.expire(104.0) == set()
    assert faults.expire(105.0) == {"n1"}
    assert not faults.entries


def test_public_fault_of_the_moment_ends_by_itself() -> None:
    faults = PublicFaults()
    faults.apply(assertion("once"), LEVEL_OF, 100.0)
    assert faults.next_end == 105.0


def test_recovery_of_an_unknown_fault_changes_nothing() -> None:
    assert PublicFaults().apply(assertion("recover"), LEVEL_OF, 100.0) == set()


def test_number_of_public_faults_is_limited() -> None:
    faults = PublicFaults()
    faults.apply(REPORT, LEVEL_OF, 1.0)
    entry = next(iter(faults.entries.values()))
    faults.entries |= {("n", "CCAE", str(number)): entry for number in range(MAX_FAULTS)}
    other = replace(REPORT, faults=(replace(FAULT, id="fault-0002"),))
    assert faults.apply(other, LEVEL_OF, 1.0) == set()


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (replace(REPORT, id="short"), "id must"),
        (replace(REPORT, timestamp_ms=1), "timestamp"),
        (replace(REPORT, timestamp_ms=1_700_000_000_000), "2025"),
        (replace(REPORT, version="2"), "version"),
        (replace(REPORT, resource="me"), "resource"),
        (replace(REPORT, faults=()), "1 to 100"),
        (replace(REPORT, faults=(FAULT,) * 101), "1 to 100"),
    ],
)
def test_invalid_report_is_refused_with_the_reason(report: PublicReport, says: str) -> None:
    assert says in problem_of(report, LEVEL_OF)
    assert problem_of(REPORT, LEVEL_OF) == ""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (replace(FAULT, id="x y z 1 2 3"), "faultId"),
        (replace(FAULT, type="Weather"), "faultType"),
        (replace(FAULT, code="22000100"), "faultCode"),
        (replace(FAULT, code="999999999"), "faultCode"),
        (replace(FAULT, time_ms=0), "faultTime"),
        (replace(FAULT, assertion="perhaps"), "assertion"),
        (replace(FAULT, location={"k" * 17: ""}), "faultLocation"),
        (replace(FAULT, influence=()), "influence"),
        (replace(FAULT, description="a\nb"), "description"),
        (replace(FAULT, influence=(Influence("N1", "", (0,)),)), "node"),
        (replace(FAULT, influence=(Influence("", "sn", (0,)),)), "node"),
        (replace(FAULT, influence=(Influence("n1", "", (0, 0)),)), "different"),
        (replace(FAULT, influence=(Influence("n1", "", (32,)),)), "0 to 31"),
        (replace(FAULT, influence=(Influence("n1", "", ()),)), "different"),
    ],
)
def test_invalid_public_fault_is_dropped_and_the_others_count(
    fault: PublicFault, says: str
) -> None:
    assert says in problem_of_fault(fault, LEVEL_OF)
    assert problem_of_fault(FAULT, LEVEL_OF) == ""
    both = replace(REPORT, faults=(fault, replace(FAULT, id="fault-0003")))
    assert PublicFaults().apply(both, LEVEL_OF, 1.0) == {"n1"}


def test_code_file_gives_levels_and_reporters() -> None:
    lists = {"SeparateNPUCodes": ["010001002"], "NotHandleFaultCodes": None}
    codes = codes_of({"publicFaultCode": lists, "publicFaultResource": ["me"]})
    assert codes == PublicCodes({"010001002": "SeparateNPU"}, ("me",))
    wrongs: list[object] = [[], {}, {"publicFaultCode": {"SeparateNPUCodes": 7}}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"publicFaultCode|SeparateNPUCodes"):
            codes_of(wrong)
