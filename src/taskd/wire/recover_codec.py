"""The messages of the Recover service <-> our values, for clusterd and for all its clients.

Peers may send anything. An entry that cannot be read (a rank that is not a number) is skipped and
the rest of the message counts: one bad entry must not hide the others. A request that makes no
sense as a whole raises `InvalidRequest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from taskd.core.agent.error_text import shortened
from taskd.model.clusterd import (
    FaultReport,
    OperatorAskedNic,
    OperatorAskedStress,
    Pod,
    Report,
    ResultReport,
    SendStressRanks,
    SendSwitchRanks,
    Signal,
    StopReport,
    StrategiesReport,
)
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Incident, JobId, NodeRank, Rank
from taskd.model.operations import OPS, NicResult, OpResult, StressResult
from taskd.model.strategies import wire_strategy
from taskd.wire._pb import recover_pb2 as pb

MAX_RANK = 10_000_000
MAX_LIST = 16_384
"""More ranks in one report than any job has."""
MAX_TEXT = 4_000
SHORT_TEXT, SHORT_FROM = 200, 64
"""In a report of more ranks than that, each rank's evidence is cut to the short length."""
SENT_TEXT = 2_000
"""Of each rank's evidence, the characters that we send."""
SENT_BYTES, SENT_PART_BYTES = 512 << 10, 64
"""Of all evidence in one report, and what each counts at least: clusterd refuses requests above
2 MiB, and all ranks may fail with a long traceback."""


class InvalidRequest(ValueError):
    """The request makes no sense; the text says what is wrong with it."""


# Parts


def rank_of(text: str) -> Rank | None:
    if not (text.isascii() and text.isdecimal()) or len(text) > 8 or int(text) >= MAX_RANK:
        return None
    return Rank(int(text))


def ranks_of(texts: Sequence[str]) -> tuple[Rank, ...]:
    _check_length(texts)
    found = {rank for rank in map(rank_of, texts) if rank is not None}
    return tuple(sorted(found))


def _check_length(items: Sized) -> None:
    if len(items) > MAX_LIST:
        raise InvalidRequest(f"too many ranks in one report: {len(items)} (at most {MAX_LIST})")


def faults_of(items: Sequence[pb.FaultRank], evidence: Sequence[str] = ()) -> tuple[Fault, ...]:
    _check_length(items)
    limit = MAX_TEXT if len(items) <= SHORT_FROM else SHORT_TEXT
    faults = []
    for number, item in enumerate(items):
        rank = rank_of(item.rankId)
        if rank is not None:
            text = evidence[number][:limit] if number < len(evidence) else ""
            faults.append(Fault(rank, FaultKind.parse(item.faultType), text))
    return tuple(faults)


def fault_ranks(faults: Iterable[Fault]) -> list[pb.FaultRank]:
    return [pb.FaultRank(rankId=str(fault.rank), faultType=fault.kind.value) for fault in faults]


def _sent_evidence(faults: Sequence[Fault]) -> list[str]:
    """Of the first faults, as much as one report can have."""
    limit = SENT_TEXT if len(faults) <= SHORT_FROM else SHORT_TEXT
    texts, left = list[str](), SENT_BYTES
    for fault in faults:
        text = shortened(fault.evidence, limit)
        left -= max(len(text.encode(errors="replace")), SENT_PART_BYTES)
        if left < 0:
            break
        texts.append(text)
    return texts if any(texts) else []


# Reports: client -> clusterd


def report_request(job: str, report: Report | NicResult | StressResult) -> tuple[str, Any]:
    """The name of the method, and the request."""
    match report:
        case FaultReport(faults):
            return "ReportProcessFault", pb.ProcessFaultRequest(
                jobId=job, faultRanks=fault_ranks(faults), evidence=_sent_evidence(faults)
            )
        case StopReport(code, uuid, info, faults):
            return "ReportStopComplete", pb.StopCompleteRequest(
                jobId=job,
                status=pb.Status(code=code, info=info),
                faultRanks=fault_ranks(faults),
                uuid=uuid,
            )
        case StrategiesReport(strategies, uuid, faults):
            return "ReportRecoverStrategy", pb.RecoverStrategyRequest(
                jobId=job, faultRanks=fault_ranks(faults), strategies=strategies, uuid=uuid
            )
        case ResultReport(code, strategy, isolated, uuid, info):
            return "ReportRecoverStatus", pb.RecoverStatusRequest(
                jobId=job,
                status=pb.Status(code=code, info=info),
                strategy=strategy,
                isolateRankIds=[str(rank) for rank in isolated],
                uuid=uuid,
            )
        case NicResult(ok):
            return "ReplySwitchNicResult", pb.SwitchResult(jobId=job, result=ok)
        case StressResult(results):
            return "ReplyStressTestResult", pb.StressTestResult(
                jobId=job, stressResult={str(rank): _rank_result(r) for rank, r in results.items()}
            )


def _rank_result(results: Mapping[str, OpResult]) -> pb.StressTestRankResult:
    return pb.StressTestRankResult(
        rankResult={
            op: pb.StressTestOpResult(code=result.code, result=result.text)
            for op, result in results.items()
        }
    )


def fault_report(request: pb.ProcessFaultRequest) -> FaultReport:
    faults = faults_of(request.faultRanks, request.evidence)
    if request.faultRanks and not faults:
        raise InvalidRequest("none of the ranks is a number")
    return FaultReport(faults)


def stop_report(request: pb.StopCompleteRequest) -> StopReport:
    return StopReport(
        code=request.status.code,
        uuid=request.uuid,
        info=request.status.info[:MAX_TEXT],
        faults=faults_of(request.faultRanks),
    )


def strategies_report(request: pb.RecoverStrategyRequest) -> StrategiesReport:
    words = (word.strip()[:64] for word in request.strategies[:64])
    return StrategiesReport(
        strategies=tuple(map(wire_strategy, words)),
        uuid=request.uuid,
        faults=faults_of(request.faultRanks),
    )


def result_report(request: pb.RecoverStatusRequest) -> ResultReport:
    return ResultReport(
        code=request.status.code,
        strategy=wire_strategy(request.strategy),
        isolated=ranks_of(request.isolateRankIds),
        uuid=request.uuid,
        info=request.status.info[:MAX_TEXT],
    )


def nic_result(request: pb.SwitchResult) -> NicResult:
    return NicResult(request.result)


def stress_result(request: pb.StressTestResult) -> StressResult:
    _check_length(request.stressResult)
    results = {}
    for text, per_op in request.stressResult.items():
        rank = rank_of(text)
        if rank is not None:
            results[rank] = {
                op[:64]: OpResult(item.code, item.result[:MAX_TEXT])
                for op, item in per_op.rankResult.items()
            }
    return StressResult(results)


# Orders: clusterd -> client


def signal_message(job: JobId, signal: Signal) -> pb.ProcessManageSignal:
    return pb.ProcessManageSignal(
        uuid=signal.uuid,
        jobId=job,
        signalType=signal.type,
        actions=signal.actions,
        faultRanks=fault_ranks(signal.faults),
        changeStrategy=signal.strategy,
        timeout=signal.timeout_s,
        nodeRankIds=[str(node) for node in signal.nodes],
        extraParams=signal.extra,
        because=signal.because,
        incident=signal.incident,
        sequence=signal.sequence,
    )


def keep_alive(job: JobId, uuid: str, incident: int) -> pb.ProcessManageSignal:
    return pb.ProcessManageSignal(uuid=uuid, jobId=job, signalType="keep-alive", incident=incident)


def signal_of(message: pb.ProcessManageSignal) -> Signal:
    return Signal(
        uuid=message.uuid,
        incident=Incident(message.incident),
        type=message.signalType,
        actions=tuple(message.actions),
        faults=faults_of(message.faultRanks),
        strategy=wire_strategy(message.changeStrategy),
        timeout_s=message.timeout,
        nodes=tuple(NodeRank(int(node)) for node in message.nodeRankIds if node.isdecimal()),
        extra=message.extraParams,
        because=message.because,
        sequence=message.sequence,
    )


def switch_message(job: JobId, order: SendSwitchRanks) -> pb.SwitchRankList:
    ranks = [str(rank) for rank in order.ranks]
    return pb.SwitchRankList(rankID=ranks, op=order.to_backup, jobId=job)


def switch_of(message: pb.SwitchRankList) -> SendSwitchRanks:
    moves = [
        (rank, to_backup)
        for text, to_backup in zip(message.rankID, message.op, strict=False)
        if (rank := rank_of(text)) is not None
    ]
    return SendSwitchRanks(tuple(rank for rank, _ in moves), tuple(way for _, way in moves))


def stress_message(job: JobId, order: SendStressRanks) -> pb.StressTestRankParams:
    params = {str(rank): pb.StressOpList(ops=ops) for rank, ops in order.ops.items()}
    return pb.StressTestRankParams(stressParam=params, jobId=job)


def stress_of(message: pb.StressTestRankParams) -> SendStressRanks:
    return SendStressRanks(
        {
            rank: tuple(item.ops)
            for text, item in message.stressParam.items()
            if (rank := rank_of(text)) is not None
        }
    )


# Operations: operator -> clusterd. Operators name nodes and devices, the job's pods the ranks.


def nic_asked(request: pb.SwitchNics, job_pods: Iterable[Pod]) -> OperatorAskedNic:
    pods = {pod.node: pod for pod in job_pods}
    ranks, ops = [], []
    for node, listed in sorted(request.nicOps.items()):
        pod = pods.get(node)
        if pod is None:
            raise InvalidRequest(f"the job has no pod on node {node!r}")
        if not listed.dev or len(listed.dev) != len(listed.op):
            raise InvalidRequest(
                f"node {node!r}: {len(listed.dev)} devices, {len(listed.op)} directions"
            )
        for device, to_backup in zip(listed.dev, listed.op, strict=True):
            ranks.append(_rank_on(pod, device))
            ops.append(to_backup)
    if not ranks:
        raise InvalidRequest("the request names no device")
    return OperatorAskedNic(tuple(ranks), tuple(ops))


def _rank_on(pod: Pod, device: str) -> Rank:
    for rank, there in zip(pod.ranks, pod.devices, strict=False):
        if there == device:
            return rank
    raise InvalidRequest(f"device {device!r} of node {pod.node!r} does not belong to the job")


def stress_asked(request: pb.StressTestParam, job_pods: Iterable[Pod]) -> OperatorAskedStress:
    pods = {pod.node: pod for pod in job_pods}
    if request.allNodesOps:
        wanted = {node: list(request.allNodesOps) for node in pods}
    else:
        wanted = {node: list(listed.ops) for node, listed in request.stressParam.items()}
    if not wanted:
        raise InvalidRequest("the request names no node")
    ops: dict[Rank, tuple[int, ...]] = {}
    for node, listed in sorted(wanted.items()):
        if node not in pods:
            raise InvalidRequest(f"the job has no pod on node {node!r}")
        if not listed or len(set(listed)) != len(listed) or set(listed) - set(OPS.values()):
            raise InvalidRequest(
                f"node {node!r}: invalid operations {listed} (expected 0 and 1, each at most once)"
            )
        ops |= {rank: tuple(listed) for rank in pods[node].ranks}
    return OperatorAskedStress(ops)


def stress_request(job: str, ops: Sequence[int]) -> pb.StressTestParam:
    """Ask for a stress test of all nodes."""
    return pb.StressTestParam(jobID=job, allNodesOps=ops)
