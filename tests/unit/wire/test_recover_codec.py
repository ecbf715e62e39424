"""The Recover codec: what one side writes, the other side reads."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.clusterd.interceptors import limit_bytes, weight_of
from taskd.model.clusterd import (
    FaultReport,
    ResultReport,
    SendStressRanks,
    SendSwitchRanks,
    Signal,
    StopReport,
    StrategiesReport,
)
from taskd.model.faults import Fault, FaultCause, FaultKind
from taskd.model.ids import Incident, JobId, NodeRank, Rank
from taskd.model.operations import NicResult, OpResult, StressResult
from taskd.model.strategies import WireStrategy
from taskd.wire import recover_codec as codec
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire.recover_codec import rank_of

JOB = JobId("job")
FAULTS = (Fault(Rank(1), FaultKind.NETWORK, "reset"), Fault(Rank(2)))
BARE = tuple(Fault(fault.rank, fault.kind) for fault in FAULTS)
READERS: dict[str, Any] = {
    "ReportProcessFault": codec.fault_report,
    "ReportStopComplete": codec.stop_report,
    "ReportRecoverStrategy": codec.strategies_report,
    "ReportRecoverStatus": codec.result_report,
    "ReplySwitchNicResult": codec.nic_result,
    "ReplyStressTestResult": codec.stress_result,
}
REPORTS: list[Any] = [
    FaultReport(FAULTS),
    StopReport(404, "uuid", "not ready", BARE),
    StrategiesReport((WireStrategy.RECOVER, "unheard-of"), "uuid", BARE),
    ResultReport(201, WireStrategy.DOWNGRADE, (Rank(2), Rank(3)), "uuid", "smaller"),
    NicResult(True),
    StressResult({Rank(3): {"0": OpResult("2", "broken")}}),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_reports_are_read_as_they_were_written(report: Any) -> None:
    method, request = codec.report_request(JOB, report)
    assert request.jobId == JOB
    assert READERS[method](request) == report


def test_only_rank_kind_and_evidence_of_a_fault_travel() -> None:
    fault = Fault.of(Rank(1), FaultCause.HUNG, "no progress", seen_at=5.0)
    _, request = codec.report_request(JOB, FaultReport((fault,)))
    assert codec.fault_report(request).faults == (Fault(Rank(1), evidence="no progress"),)


def test_signals_and_orders_are_read_as_they_were_written() -> None:
    signal = Signal(
        uuid="uuid",
        incident=Incident(3),
        type="changeStrategy",
        actions=("change_strategy",),
        faults=BARE,
        strategy=WireStrategy.RECOVER,
        timeout_s=33,
        nodes=(NodeRank(1),),
        extra="recover-in-place",
        sequence=7,
    )
    assert codec.signal_of(codec.signal_message(JOB, signal)) == signal
    switch = SendSwitchRanks((Rank(2), Rank(3)), (True, False))
    assert codec.switch_of(codec.switch_message(JOB, switch)) == switch
    stress = SendStressRanks({Rank(2): (0, 1)})
    assert codec.stress_of(codec.stress_message(JOB, stress)) == stress


def test_unreadable_ranks_are_skipped_and_the_others_count() -> None:
    ranks = [pb.FaultRank(rankId=text, faultType="9") for text in ("x", "4", "-1")]
    request = pb.ProcessFaultRequest(jobId=JOB, faultRanks=ranks, evidence=["a", "b", "c"])
    assert codec.fault_report(request) == FaultReport((Fault(Rank(4), evidence="b"),))
    del request.faultRanks[1]
    with pytest.raises(codec.InvalidRequest, match="none of the ranks is a number"):
        codec.fault_report(request)


def test_unknown_strategy_keeps_its_word() -> None:
    message = pb.ProcessManageSignal(signalType="changeStrategy", changeStrategy="unheard-of")
    assert codec.signal_of(message).strategy == "unheard-of"


@pytest.mark.parametrize("text", ["", "-1", "1.0", "x", "10000000", "9" * 40, "\u0663"])
def test_invalid_ranks_are_recognized(text: str) -> None:
    assert rank_of(text) is None


@pytest.mark.parametrize("evidence", ["x", "x" * 4_000, "é" * 300])
@pytest.mark.parametrize("ranks", [1, 64, 65, 2_000, codec.MAX_LIST])
def test_a_report_of_all_ranks_is_one_that_clusterd_accepts(ranks: int, evidence: str) -> None:
    faults = tuple(Fault.of(Rank(r), FaultCause.EXITED, evidence, 0.0) for r in range(ranks))
    name, request = codec.report_request("job", FaultReport(faults))
    method, raw = f"/Recover/{name}", request.SerializeToString()
    assert weight_of(method)(raw, limit_bytes(method)) <= limit_bytes(method)
    assert request.evidence, "at least of the first ranks"
    assert len(codec.faults_of(request.faultRanks, request.evidence)) == ranks
