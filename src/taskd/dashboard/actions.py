"""What a person can order from the page, as requests to clusterd. Pure.

Every action says in one sentence what it will do: the page asks for confirmation with it, and the
journal keeps it together with the name of the person.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taskd.commands import nic, profile, stress
from taskd.commands.render import KINDS
from taskd.errors import SettingsError
from taskd.model.operations import OPS
from taskd.model.profiling import KEYS
from taskd.wire._pb import control_pb2 as pb
from taskd.wire._pb import profiling_pb2 as trace
from taskd.wire._pb import recover_pb2 as recover

NAMES = ("profile", "stress", "nic", "fault", "drain")
MOST_TEXT = 1_000
DRAINED = "drained"
"""The evidence, if no reason is given."""


@dataclass(frozen=True, slots=True)
class Order:
    """One action: what to call, and for an operation, where its result comes from."""

    sentence: str
    method: str
    request: Any
    result: str = ""
    result_request: Any = None


def order_of(action: str, settings: Mapping[str, Any], status: pb.JobStatus, who: str) -> Order:
    """Raises SettingsError, which names every problem with what was given."""
    match action:
        case "profile":
            return _profile(settings, status)
        case "stress":
            return _stress(settings, status)
        case "nic":
            return _nic(settings, status)
        case "fault":
            return _fault(settings, status, who)
        case "drain":
            return _drain(settings, status, who)
        case _:
            raise SettingsError([f"unknown action {action!r} (expected {', '.join(NAMES)})"])


def _profile(settings: Mapping[str, Any], status: pb.JobStatus) -> Order:
    switch = _text(settings, "switch")
    if switch not in ("on", "off"):
        raise SettingsError([f"switch: unknown value {switch!r} (expected on or off)"])
    value = trace.ProfilingSwitch(**dict.fromkeys(KEYS, switch))
    line = status.line
    request = trace.DataTypeReq(
        jobNsName=f"{line.namespace or 'default'}/{line.name}", profilingSwitch=value
    )
    parts = ", ".join(profile.DOMAINS)
    what = f"start to record {parts}" if switch == "on" else "stop recording"
    return Order(what, "ModifyTrainingDataTraceSwitch", request)


def _stress(settings: Mapping[str, Any], status: pb.JobStatus) -> Order:
    nodes, ops = _text(settings, "nodes") or stress.ALL, _text(settings, "ops")
    request = stress.request_of(status.line.job, nodes, ops or ",".join(OPS))
    where = "all nodes" if nodes == stress.ALL else f"node {nodes}"
    return Order(
        f"pause training for a stress test of {where}",
        "StressTest",
        request,
        "SubscribeStressTestResponse",
        recover.StressTestRequest(jobID=status.line.job),
    )


def _nic(settings: Mapping[str, Any], status: pb.JobStatus) -> Order:
    to = _text(settings, "to")
    if to not in nic.TARGETS:
        raise SettingsError([f"to: unknown value {to!r} (expected {' or '.join(nic.TARGETS)})"])
    ranks = _text(settings, "ranks") or nic.ALL
    request = nic.request_of(status.line.job, status.places, ranks, nic.TARGETS[to])
    which = "all ranks" if ranks == nic.ALL else f"ranks {ranks}"
    return Order(
        f"pause training and move {which} to the {to} network interface",
        "SwitchNicTrack",
        request,
        "SubscribeSwitchNicSignal",
        recover.SwitchNicRequest(jobID=status.line.job),
    )


def _fault(settings: Mapping[str, Any], status: pb.JobStatus, who: str) -> Order:
    kinds = {name: number for number, name in KINDS.items()}
    kind, because = _text(settings, "kind") or "process", _text(settings, "because")
    ranks = _numbers(settings, "ranks")
    if kind not in kinds:
        raise SettingsError([f"kind: unknown value {kind!r} (expected {', '.join(kinds)})"])
    faults = [pb.JobFault(rank=r, fault_type=kinds[kind], evidence=because) for r in ranks]
    report = pb.FaultReport(job=status.line.job, faults=faults, reporter=who)
    shown = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    seen = f": {because}" if because else ""
    return Order(f"report a {kind} fault of {shown}{seen}", "ReportFault", report)


def _drain(settings: Mapping[str, Any], status: pb.JobStatus, who: str) -> Order:
    node = _numbers(settings, "node")[0]
    ranks = [rank.rank for rank in status.ranks if rank.node == node]
    if not ranks:
        raise SettingsError([f"node: no rank runs on node {node}"])
    because = _text(settings, "because") or DRAINED
    faults = [pb.JobFault(rank=r, fault_type="1", evidence=because) for r in ranks]
    report = pb.FaultReport(job=status.line.job, faults=faults, reporter=who, drain=True)
    moved = "its rank moves" if len(ranks) == 1 else f"its {len(ranks)} ranks move"
    why = "" if because == DRAINED else f" ({because})"
    return Order(f"drain node {node}{why}: {moved} away", "ReportFault", report)


def _text(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name, "")
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise SettingsError([f"{name}: expected a text of at most {MOST_TEXT} characters"])
    return value.strip()


def _numbers(settings: Mapping[str, Any], name: str) -> list[int]:
    words = [word for word in _text(settings, name).replace(",", " ").split() if word]
    if not words or not all(word.isdecimal() and len(word) < 9 for word in words):
        raise SettingsError([f"{name}: expected numbers, separated by commas"])
    return sorted({int(word) for word in words})
