"""The cluster's side: scheduler, platform and operator, which are slow and may forget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from taskd.model.clusterd import (
    AnnotatePod,
    AnnotatePodGroup,
    ClusterWriteDone,
    ClusterWriteFailed,
    Command,
    DeletePod,
    FaultsSeen,
    LabelPodGroup,
    OperatorAskedNic,
    OperatorAskedStress,
    PlatformSeen,
    PodsSeen,
    ReplyOperator,
    SendStressRanks,
    SendSwitchRanks,
    Signal,
)
from taskd.model.faults import SeenFault
from taskd.model.ids import NodeRank, Rank
from taskd.model.operations import NicResult, OpResult, StressResult

if TYPE_CHECKING:
    from tests.sim.clusterd_world import World

LEVELS = ("RestartBusiness", "RestartBusiness", "SeparateNPU", "SubHealthFault")


class Cluster:
    def __init__(self, world: World) -> None:
        self.world = world
        self.annotations = PlatformSeen()
        self.paused = False
        self.replies: list[str] = []
        self.asked = 0
        self.doomed: set[str] = set()
        """The pods that the scheduler must delete."""

    # Views that are sent to clusterd repeatedly

    def show(self) -> None:
        """Send the complete view repeatedly; the next one replaces a lost one."""
        self.look()
        self.world.later(120.0 if self.world.troubled else 2000.0, self.show)

    def look(self) -> None:
        truth = self.world.truth
        if not self.world.job.cluster or truth.ended:
            return
        if self.world.chance(0.8):
            pods = (*truth.pods.values(), *truth.backups.values())
            self.world.post(PodsSeen(pods, truth.phase))
        if self.world.chance(0.8):
            seen = [
                replace(truth.devices[pod.uid], pod=pod.uid)
                for pod in truth.pods.values()
                if pod.uid in truth.devices
            ]
            self.world.post(FaultsSeen(tuple(seen)))
        if self.world.job.platform and self.world.chance(0.8):
            self.world.post(self.annotations)

    def _soon(self) -> None:
        self.world.later(5.0, self.look)

    # Devices

    def break_device(self, rank: Rank) -> None:
        truth = self.world.truth
        pod = truth.pods.get(truth.node_of(rank))
        if pod is None or not self.world.job.cluster:
            return
        level = self.world.random.choice(LEVELS)
        if self.world.theme == "hot switch" and self.world.chance(0.7):
            level = "SubHealthFault"
        code = self.world.random.choice(["40F84E00", "40F84E00", "80E01801", "8C1F860B"])
        if level == "SubHealthFault":
            code = "40F84E00"
        truth.devices[pod.uid] = SeenFault(rank, code, level, pod.uid)
        if level == "RestartBusiness":
            self.world.later(30.0, lambda: self._heal(pod.uid))
        self._soon()

    def _heal(self, uid: str) -> None:
        self.world.truth.devices.pop(uid, None)
        self._soon()

    # Pods

    def pod_fails(self, node: NodeRank) -> None:
        truth = self.world.truth
        if node not in truth.pods:
            return
        truth.remove(node)
        if not self.world.job.cluster:
            truth.place(node)
            return
        if node == 0:
            self.world.client.stop()
        else:
            self.world.client.notice()
        within_s = 100.0 if self.world.chance(0.85) else 3000.0
        self.world.later(within_s, lambda: self._replace(node))
        self._soon()

    def _replace(self, node: NodeRank) -> None:
        if node not in self.world.truth.pods:
            self.world.truth.place(node)
            if node == 0:
                self.world.client.start()
            self._soon()

    def restart_job(self) -> None:
        """Everything is new: pods, processes and the manager."""
        if self.world.truth.ended:
            return
        truth = self.world.truth
        truth.phase = "Pending"
        for node in truth.homes:
            truth.remove(node)
        truth.backups.clear()
        self.world.client.stop()
        self._soon()
        self.world.later(60.0, self._job_runs)

    def _job_runs(self) -> None:
        if self.world.truth.phase == "Running":
            return
        self.world.truth.start()
        self.world.client.start()
        self._soon()

    # Commands

    def perform(self, command: Command) -> None:
        match command:
            case ReplyOperator():
                self.asked -= 1
                self.replies.append(command.text)
                return
            case SendSwitchRanks():
                self.world.post_later(20.0, NicResult(self.world.chance(0.8)))
                return
            case SendStressRanks(ops):
                self._stress(tuple(ops))
                return
            case Signal():
                raise AssertionError("signals go to the client")
            case _:
                failed = self.world.chance(0.03)
                sequence = command.sequence
                event = ClusterWriteFailed(sequence, "a conflict") if failed else None
                result = event or ClusterWriteDone(sequence)
                self.world.post_later(5.0, result)
                if not failed:
                    self._write(command)

    def _write(self, command: Command) -> None:
        match command:
            case LabelPodGroup(value="pause"):
                self.paused = True
                within_s = 60.0 if self.world.chance(0.9) else 3000.0
                self.world.later(within_s, self._restart_if_paused)
            case LabelPodGroup(value="on"):
                self.paused = False
            case AnnotatePodGroup(key="ProcessConfirmFault", value=value):
                self.annotations = replace(self.annotations, confirm=value)
                self.world.later(self.world.pace(), self._platform_answers)
            case AnnotatePod(pod=uid, key="needOperatorOpe", value="create"):
                if self.world.chance(0.8):
                    self.world.later(40.0, lambda: self._back_up(uid))
            case AnnotatePod(pod=uid, key="needOperatorOpe", value="delete"):
                backups = self.world.truth.backups
                for node in [node for node, pod in backups.items() if pod.uid == uid]:
                    del backups[node]
            case AnnotatePod(pod=uid, key="needVolcanoOpe", value=value):
                self.doomed = self.doomed - {uid} | ({uid} if value == "delete" else set())
                if value == "delete" and self.world.chance(0.9):
                    self.world.later(40.0, lambda: self._delete(uid))
            case DeletePod(pod=uid):
                for node in [node for node, pod in self.world.truth.pods.items() if pod.uid == uid]:
                    self.pod_fails(node)
            case _:
                pass

    def _restart_if_paused(self) -> None:
        if self.paused:
            self.restart_job()

    def _back_up(self, uid: str) -> None:
        for node, pod in list(self.world.truth.pods.items()):
            if pod.uid == uid:
                self.world.truth.place(node, backup=True)
                self._soon()

    def _delete(self, uid: str) -> None:
        truth = self.world.truth
        for node, pod in list(truth.pods.items()):
            if pod.uid != uid or uid not in self.doomed:
                continue
            if node == 0:
                self.restart_job()
            elif node in truth.backups:
                truth.devices.pop(uid, None)
                truth.pods[node] = truth.backups.pop(node)
                self._soon()
            else:
                self.pod_fails(node)

    # The platform

    def platform_names(self, word: str) -> None:
        strange = "99:1" if self.world.chance(0.05) else None
        self.annotations = PlatformSeen(strategy=word, confirm=strange)
        self._soon()

    def _platform_answers(self) -> None:
        self.annotations = replace(self.annotations, result="")
        self._soon()
        self.world.later(60.0, self._platform_ranks)
        if self.world.chance(0.9):
            self.world.later(100.0, self._platform_clears)

    def _platform_ranks(self) -> None:
        table = self.world.random.choice(["true", "true", "true", "false", None])
        self.annotations = replace(self.annotations, rank_table=table)
        self._soon()

    def _platform_clears(self) -> None:
        word = self.world.random.choice(["retry", "recover", "recover", "dump", "exit"])
        self.annotations = PlatformSeen(strategy=word)

    # The operator

    def ask_nic(self) -> None:
        ranks = tuple(self.world.truth.ranks)[:2]
        outcome = self.world.post(OperatorAskedNic(ranks, (True,) * len(ranks)))
        self.asked += outcome is not None and outcome.answer == 0

    def ask_stress(self) -> None:
        ops = {rank: (0, 1) for rank in list(self.world.truth.ranks)[-2:]}
        outcome = self.world.post(OperatorAskedStress(ops))
        self.asked += outcome is not None and outcome.answer == 0

    def _stress(self, ranks: tuple[Rank, ...]) -> None:
        def done() -> None:
            codes = ["0"] * 8 + ["1", "2", "3", "4"]
            results = {
                rank: {"aic": OpResult(self.world.random.choice(codes), "")} for rank in ranks
            }
            self.world.post(StressResult(results))

        self.world.later(self.world.pace() * 4, done)
