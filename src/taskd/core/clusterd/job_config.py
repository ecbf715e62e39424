"""All timeouts of a round, and the recovery settings that a PodGroup carries.

There are two groups of waits. Deadlines limit the wait for an answer and cost nothing if the answer
comes. Settling times let the cluster or the network settle; they are 0 unless the hardware needs
them, so a round on a plain machine has no fixed wait at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from taskd.model.clusterd import JobConfig
from taskd.model.strategies import known_strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    stop_timeout_s: float = 900.0
    """How long the job may take to stop or pause all its ranks."""
    strategy_timeout_s: float = 900.0
    """How long the job may take to say which strategies it offers."""
    status_timeout_s: float = 900.0
    """How long a repair may take, from the order to the first committed step."""
    operation_timeout_s: float = 900.0
    """How long a link switch-over or a stress test may take."""
    pre_exit_timeout_s: float = 10.0
    """How long the processes on a broken device may take to exit; then the round begins."""
    platform_timeout_s: float = 300.0
    """How long the AI platform may take for each answer."""
    reschedule_timeout_s: float = 270.0
    """How long the scheduler may take to replace lost pods, unless the job sets its own limit."""
    resources_timeout_s: float = 20.0
    """How long to wait for free resources before the job continues with fewer ranks."""
    exit_timeout_s: float = 20.0
    """How long to watch for new pods after the job was ordered to exit."""
    running_timeout_s: float = 135.0
    """How long the scheduler may take to restart the whole job."""
    kill_timeout_s: float = 60.0
    """How long to wait for a client to receive the order to end, before the scheduler is asked."""
    backup_timeout_s: float = 60.0
    """How long the backup pod of a hot switch may take to start."""
    removal_timeout_s: float = 300.0
    """How long the old pod of a hot switch may take to disappear."""
    heal_timeout_s: float = 15.0
    """How long a minor device fault may take to heal, before its pod must be replaced."""

    flush_s: float = 0.0
    """Settling: until the cluster reports all faults of one cause (Kubernetes: 1)."""
    release_s: float = 0.0
    """Settling: until healthy nodes of a super pod have released the lost one (Ascend: 10)."""
    convergence_s: float = 0.0
    """Settling: until the network has found new routes, before a step is retried (Ascend: 3)."""
    pickup_s: float = 0.0
    """Settling: until agents that poll reset-config have read it, before it is cleared (5)."""

    again_after_s: float = 30.0
    """When to handle a fault that outlasts its round, or to set a label that failed, again."""
    late_report_s: float = 10.0
    """How much later than the cluster a job may report the loss of a pod: until then, its first
    report is not held against the pod that has replaced it."""
    hot_switch_again_after_s: float = 600.0
    """How long to wait after a failed hot switch before the next one."""
    hot_switch_refused_s: float = 86400.0
    """How long not to try a hot switch with a job that has said that it cannot move."""
    max_interruptions: int = 3
    """How often new faults may interrupt a strategy before it is given up, unless the job would
    end."""
    max_hot_switch_pods: int = 10
    """With more sub-healthy pods than this, none is moved: moving one would not help."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, settling = getattr(self, item.name), item.name in _SETTLING
            if value < 0 or (value == 0 and not settling):
                raise ValueError(f"{item.name} must be {'0 or ' * settling}positive, got {value}")


_SETTLING = {"flush_s", "release_s", "convergence_s", "pickup_s"}

ON = "process-recover-enable"
NO_BACKUP_NIC = "taskd/no-backup-nic"
"""An annotation of our own, for jobs that their manager has declared."""


def read_pod_group(
    labels: Mapping[str, str], annotations: Mapping[str, str]
) -> tuple[JobConfig, tuple[str, ...]]:
    """The job's recovery settings, and the mistakes in them.

    As in Ascend's ClusterD, a mistake costs its own word only: the rest of the list counts.
    """
    strategies, problem = known_strategies(
        annotations.get("recover-strategy", ""), "recover-strategy"
    )
    mistakes = [f"{problem}; ignoring it"] if problem else []
    timeout = None
    if text := annotations.get("wait-reschedule-timeout", "").strip():
        if text.isdecimal() and 30 <= int(text) <= 270:
            timeout = float(text)
        else:
            mistakes.append(
                f"wait-reschedule-timeout: invalid value {text!r} (expected 30 to 270); "
                "using the default"
            )
    config = JobConfig(
        strategies=strategies,
        cluster=True,
        platform="ProcessRecoverStrategy" in annotations,
        sub_health=labels.get("subHealthyStrategy", "ignore"),
        framework=labels.get("framework", "pytorch"),
        rescheduling=labels.get("fault-scheduling") in ("grace", "force")
        or labels.get("pod-rescheduling") == "on",
        reschedule_timeout_s=timeout,
        no_backup_nic=annotations.get(NO_BACKUP_NIC) == "true",
    )
    return config, tuple(mistakes)


def is_on(labels: Mapping[str, str]) -> bool:
    """`pause` is our own label on a job that the scheduler restarts: recovery is on there, too."""
    return labels.get(ON) in ("on", "pause") or labels.get("subHealthyStrategy") == "hotSwitch"
