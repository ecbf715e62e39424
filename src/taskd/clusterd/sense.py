"""Requests and cluster objects to events. What a peer may have left out or made up ends here.

A rank that is no number is passed over and the rest of the report counts: one bad entry must not
hide the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence, Sized

from taskd.clusterd.cluster.interface import Json, Key, Kind
from taskd.clusterd.cluster.objects import JobFacts
from taskd.model.clusterd import (
    FaultsReported,
    OperatorAskedNic,
    OperatorAskedStress,
    OpResult,
    Pod,
    StatusReported,
    StopCompleted,
    StrategiesReported,
    StressResult,
)
from taskd.model.faults import Fault, FaultKind, SeenFault
from taskd.model.ids import Rank
from taskd.wire._pb import recover_pb2 as pb

MAX_RANK = 10_000_000
MAX_LIST = 16_384
"""More ranks in one report than any job has."""
MAX_TEXT = 4_000
SHORT_TEXT = 200
"""What one of very many may say."""
KINDS = {kind.value: kind for kind in FaultKind}
STRESS_OPS = {0, 1}
DEVICE_REPORT = "mindx-dl-deviceinfo-"
ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""What Go's JSON escapes and ours does not."""
STRAGGLER, SUB_HEALTH = "straggler", "SubHealthFault"


class Invalid(ValueError):
    """The request cannot be meant; says what is wrong with it."""


def rank_of(text: str) -> Rank | None:
    if not (text.isascii() and text.isdecimal()) or len(text) > 8 or int(text) >= MAX_RANK:
        return None
    return Rank(int(text))


def ranks_of(texts: Sequence[str]) -> tuple[Rank, ...]:
    _check_length(texts)
    found = {rank for rank in map(rank_of, texts) if rank is not None}
    return tuple(sorted(found))


def _check_length(listed: Sized) -> None:
    if len(listed) > MAX_LIST:
        raise Invalid(f"at most {MAX_LIST} ranks fit into one report, not {len(listed)}")


def faults_of(listed: Sequence[pb.FaultRank], evidence: Sequence[str] = ()) -> tuple[Fault, ...]:
    _check_length(listed)
    faults = []
    limit = MAX_TEXT if len(listed) <= 64 else SHORT_TEXT
    for number, item in enumerate(listed):
        rank = rank_of(item.rankId)
        if rank is not None:
            kind = KINDS.get(item.faultType, FaultKind.ORDINARY)
            told = evidence[number][:limit] if number < len(evidence) else ""
            faults.append(Fault(rank, kind, evidence=told))
    return tuple(faults)


def faults_reported(request: pb.ProcessFaultRequest) -> FaultsReported:
    faults = faults_of(request.faultRanks, request.evidence)
    if request.faultRanks and not faults:
        raise Invalid("none of the ranks is a number")
    return FaultsReported(faults)


def stop_completed(request: pb.StopCompleteRequest) -> StopCompleted:
    return StopCompleted(
        code=request.status.code,
        uuid=request.uuid,
        info=request.status.info[:MAX_TEXT],
        faults=faults_of(request.faultRanks),
    )


def strategies_reported(request: pb.RecoverStrategyRequest) -> StrategiesReported:
    return StrategiesReported(
        strategies=tuple(word.strip()[:64] for word in request.strategies[:64]),
        uuid=request.uuid,
        faults=faults_of(request.faultRanks),
    )


def status_reported(request: pb.RecoverStatusRequest) -> StatusReported:
    return StatusReported(
        code=request.status.code,
        strategy=request.strategy,
        isolate=ranks_of(request.isolateRankIds),
        uuid=request.uuid,
        info=request.status.info[:MAX_TEXT],
    )


def nic_asked(request: pb.SwitchNics, facts: JobFacts) -> OperatorAskedNic:
    pods = {pod.node: pod for pod in facts.pods}
    ranks, ops = [], []
    for node, listed in sorted(request.nicOps.items()):
        pod = pods.get(node)
        if pod is None:
            raise Invalid(f"the job has no pod on node {node!r}")
        if not listed.dev or len(listed.dev) != len(listed.op):
            raise Invalid(f"node {node!r}: {len(listed.dev)} devices, {len(listed.op)} directions")
        for device, to_backup in zip(listed.dev, listed.op, strict=True):
            ranks.append(_rank_on(pod, device))
            ops.append(to_backup)
    if not ranks:
        raise Invalid("no device is named")
    return OperatorAskedNic(tuple(ranks), tuple(ops))


def _rank_on(pod: Pod, device: str) -> Rank:
    for rank, there in zip(pod.ranks, pod.devices, strict=False):
        if there == device:
            return rank
    raise Invalid(f"device {device!r} of node {pod.node!r} does not belong to the job")


def stress_asked(request: pb.StressTestParam, facts: JobFacts) -> OperatorAskedStress:
    pods = {pod.node: pod for pod in facts.pods}
    if request.allNodesOps:
        wanted = {node: list(request.allNodesOps) for node in pods}
    else:
        wanted = {node: list(listed.ops) for node, listed in request.stressParam.items()}
    if not wanted:
        raise Invalid("no node is named")
    ops: dict[Rank, tuple[int, ...]] = {}
    for node, listed in sorted(wanted.items()):
        if node not in pods:
            raise Invalid(f"the job has no pod on node {node!r}")
        if not listed or len(set(listed)) != len(listed) or not STRESS_OPS.issuperset(listed):
            raise Invalid(f"node {node!r}: operations are 0 and 1, each at most once, not {listed}")
        ops |= {rank: tuple(listed) for rank in pods[node].ranks}
    return OperatorAskedStress(ops)


def stress_result(request: pb.StressTestResult) -> StressResult:
    _check_length(request.stressResult)
    results = {}
    for text, told in request.stressResult.items():
        rank = rank_of(text)
        if rank is not None:
            results[rank] = {
                op[:64]: OpResult(item.code, item.result[:MAX_TEXT])
                for op, item in told.rankResult.items()
            }
    return StressResult(results)


def device_report(node: str) -> Key:
    return Key(Kind.CONFIG_MAP, "kube-system", f"{DEVICE_REPORT}{node}")


def is_whole(body: Json) -> bool:
    """Does the report's CheckCode fit? It is the SHA-256 of DeviceInfo, as Go writes JSON."""
    try:
        told = json.loads(body["data"]["DeviceInfoCfg"])
        info = told["DeviceInfo"]
        counted = {
            "DeviceList": dict(sorted(info["DeviceList"].items())),
            "UpdateTime": info.get("UpdateTime", 0),
        }
        text = json.dumps(counted, separators=(",", ":"), ensure_ascii=False)
        found = hashlib.sha256(text.translate(ESCAPED).encode()).hexdigest()
        return bool(found == told["CheckCode"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def faults_seen(facts: JobFacts, device_maps: Iterable[tuple[str, Json]]) -> tuple[SeenFault, ...]:
    """What the nodes' device reports say about the devices under the job's ranks."""
    reports = {node: list(device_faults(body)) for node, body in device_maps}
    seen = []
    for pod in facts.pods:
        for rank, device in zip(pod.ranks, pod.devices, strict=False):
            for name, code, level in reports.get(pod.node, ()):
                if name.rpartition("-")[2] == device:
                    seen.append(SeenFault(rank, code, level, pod.uid))
    return tuple(sorted(seen))


def stragglers_seen(facts: JobFacts, ranks: Iterable[Rank]) -> list[SeenFault]:
    """A rank that is too slow is as good as a device that ails: what follows is configured."""
    slow = set(ranks)
    return [
        SeenFault(rank, STRAGGLER, SUB_HEALTH, pod.uid)
        for pod in facts.pods
        for rank in pod.ranks
        if rank in slow
    ]


def device_faults(body: Json) -> Iterable[tuple[str, str, str]]:
    """(device name, code, level) from a `mindx-dl-deviceinfo-<node>` ConfigMap."""
    try:
        told = json.loads(body["data"]["DeviceInfoCfg"])
        lists = told.get("DeviceInfo", {}).get("DeviceList", {})
        entries = [
            entry
            for key, text in lists.items()
            if key.endswith("-Fault")
            for entry in json.loads(text or "[]")
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return
    for entry in entries:
        if isinstance(entry, dict):
            level = entry.get("fault_level") or entry.get("large_model_fault_level") or ""
            for code in str(entry.get("fault_code", "")).split(","):
                yield str(entry.get("npu_name", "")), code.strip(), str(level)
