"""Transcripts that a newcomer can read. `pytest --rewrite` redraws them; review the diff.

A line without indent is an event for the machine; the indented lines are its answer: the state
and the reason, then what it says to the job (`->`), the operator (`=>`) and the cluster (`~`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from taskd.core.clusterd.machine import NEW, RecoveryConfig, State, step
from taskd.core.clusterd.states import Ended, Idle
from taskd.model.clusterd import (
    ClusterWriteFailed,
    Command,
    Event,
    FaultReport,
    FaultsSeen,
    JobConfig,
    JobRegistered,
    LabelPodGroup,
    OperatorAskedNic,
    OperatorAskedStress,
    PlatformSeen,
    Pod,
    PodsSeen,
    ReplyOperator,
    ResultReport,
    SendStressRanks,
    SendSwitchRanks,
    Signal,
    SignalDelivered,
    StopReport,
    StrategiesReport,
    Subscribed,
    Unsubscribed,
)
from taskd.model.faults import Fault, FaultKind, SeenFault
from taskd.model.ids import JobId, NodeRank, Rank
from taskd.model.operations import NicResult, OpResult, StressResult
from taskd.model.strategies import parse_strategies
from taskd.model.types import Tick

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    actual = "".join(f"{line}\n" for line in Transcript().play(written))
    if request.config.getoption("--rewrite"):
        path.write_text(actual)
    else:
        assert actual == written


@dataclass
class Transcript:
    state: State = NEW
    now: float = 1_000.0
    config: RecoveryConfig = field(default_factory=RecoveryConfig)
    pods: dict[NodeRank, Pod] = field(default_factory=dict)
    backup: Pod | None = None
    platform: PlatformSeen = field(default_factory=PlatformSeen)
    last: Signal | None = None
    labelled: int = 0

    def play(self, story: str) -> Iterator[str]:
        for line in story.splitlines():
            if line.startswith(" "):
                continue
            yield line
            if line and not line.startswith("#"):
                word, *arguments = line.split()
                for event in self.events(word, arguments):
                    yield from self.take(event)

    def take(self, event: Event) -> Iterator[str]:
        outcome = step(self.state, event, self.now, self.config)
        self.state = outcome.state
        code = f" [{int(outcome.answer)}]" if outcome.answer else ""
        because = f": {outcome.because}" if outcome.because else ""
        yield f"  {type(self.state).__name__}{because}{code}"
        for command in outcome.commands:
            if isinstance(command, Signal):
                self.last = command
            if isinstance(command, LabelPodGroup):
                self.labelled = command.sequence
            yield f"    {show(command)}"

    def events(self, word: str, arguments: list[str]) -> Iterator[Event]:
        match word, arguments:
            case "job", _:
                yield JobRegistered(JobId("job"), self.job(arguments), "seed", "job")
                if self.pods:
                    yield self.picture()
                yield Subscribed()
            case "gone", []:
                yield Unsubscribed()
            case "back", []:
                yield Subscribed()
            case "fault", _:
                yield FaultReport(tuple(read_fault(text) for text in arguments))
            case "seen", _:
                yield FaultsSeen(tuple(read_seen(text) for text in arguments))
            case "stopped", _:
                yield StopReport(int((arguments or ["0"])[0]), self.uuid)
            case "offers", _:
                yield StrategiesReport(tuple(arguments), self.uuid)
            case "reports", [code, strategy, *ranks]:
                isolate = tuple(Rank(int(rank)) for rank in ranks)
                yield ResultReport(int(code), strategy, isolate, self.uuid)
            case "wait", [seconds]:
                self.now += float(seconds)
                yield Tick()
            case "heard", []:
                assert self.last is not None
                yield SignalDelivered(self.last.sequence)
            case "label-fails", []:
                yield ClusterWriteFailed(self.labelled, "the API server is away")
            case _:
                yield from self.in_cluster(word, arguments)

    def in_cluster(self, word: str, arguments: list[str]) -> Iterator[Event]:
        match word, arguments:
            case "replaced", nodes:
                for node in nodes:
                    pod = self.pods[NodeRank(int(node))]
                    self.pods[pod.node_rank] = replace(pod, uid=f"{pod.uid}'", name=f"{pod.name}'")
                yield self.picture()
            case "phase", [phase]:
                yield replace(self.picture(), phase=phase)
            case "backup", [node]:
                pod = self.pods[NodeRank(int(node))]
                self.backup = replace(pod, uid=f"{pod.uid}-backup", name="backup", backup=True)
                yield self.picture()
            case "removed", [node]:
                del self.pods[NodeRank(int(node))]
                yield self.picture()
            case "platform", pairs:
                values = dict(pair.split("=", 1) for pair in pairs)
                self.platform = replace(self.platform, **values)
                yield self.platform
            case "nic", ranks:
                switched = tuple(Rank(int(rank)) for rank in ranks)
                yield OperatorAskedNic(switched, (True,) * len(ranks))
            case "nic-result", [result]:
                yield NicResult(result == "ok")
            case "stress", ranks:
                yield OperatorAskedStress({Rank(int(rank)): (0,) for rank in ranks})
            case "stress-result", pairs:
                codes = dict(pair.split("=") for pair in pairs)
                yield StressResult({Rank(int(r)): {"aic": OpResult(c)} for r, c in codes.items()})
            case _:
                raise ValueError(f"unknown line: {word} {arguments}")

    def job(self, arguments: list[str]) -> JobConfig:
        """`strategies=retry,dump nodes=2,2 platform hotSwitch release=10`"""
        words = dict(word.partition("=")[::2] for word in arguments)
        first = 0
        for node, size in enumerate(filter(None, words.get("nodes", "").split(","))):
            ranks = tuple(Rank(rank) for rank in range(first, first + int(size)))
            devices = tuple(str(i) for i in range(len(ranks)))
            name = f"pod{node}"
            pod = Pod(NodeRank(node), name, name, f"host{node}", ranks, devices)
            self.pods[pod.node_rank] = pod
            first += int(size)
        self.config = RecoveryConfig(release_s=float(words.get("release", 0)))
        sub_health = next((word for word in ("hotSwitch", "graceExit") if word in words), "ignore")
        return JobConfig(
            strategies=parse_strategies(words.get("strategies", "")),
            cluster="nodes" in words,
            platform="platform" in words,
            sub_health=sub_health,
            rescheduling="rescheduling" in words,
            super_pod="release" in words,
        )

    def picture(self) -> PodsSeen:
        backup = () if self.backup is None else (self.backup,)
        return PodsSeen((*self.pods.values(), *backup))

    @property
    def uuid(self) -> str:
        return "" if isinstance(self.state, Idle | Ended) else self.state.round.uuid


def read_fault(text: str) -> Fault:
    """`3`, or `3:2` with its type"""
    rank, _, kind = text.partition(":")
    return Fault(Rank(int(rank)), FaultKind(kind or "1"))


def read_seen(text: str) -> SeenFault:
    """`3:SeparateNPU` or `3:RestartBusiness:80E01801`"""
    rank, level, *code = text.split(":")
    return SeenFault(Rank(int(rank)), code[0] if code else "40F84E00", level)


def show(command: Command) -> str:
    match command:
        case Signal():
            parts = [command.type, *(f'"{action}"' for action in command.actions)]
            if command.strategy:
                parts.append(f"strategy={command.strategy}")
            if command.faults:
                faults = ",".join(f"{fault.rank}:{fault.kind}" for fault in command.faults)
                parts.append(f"faults={faults}")
            if command.nodes:
                parts.append(f"nodes={','.join(map(str, command.nodes))}")
            if command.timeout_s:
                parts.append(f"timeout={command.timeout_s}")
            if command.extra:
                parts.append(f"extra={command.extra}")
            return f"-> {' '.join(parts)}  (incident {command.incident})"
        case SendSwitchRanks() | SendStressRanks():
            return f"-> {fields_of(command)}"
        case ReplyOperator():
            return f"=> {command.text}"
        case _:
            return f"~ {fields_of(command)}"


def fields_of(command: Command) -> str:
    names = [name for name in command.__dataclass_fields__ if name != "sequence"]
    values = ", ".join(_plain(getattr(command, name)) for name in names)
    return f"{type(command).__name__}({values})"


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_plain(v)}' for k, v in value.items())}}}"
    return str(value)
