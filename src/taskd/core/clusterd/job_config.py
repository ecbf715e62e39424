"""How long a round waits for whom, and what a PodGroup says about its job.

The waits fall in two groups. Deadlines bound the wait for an answer: they cost nothing when the
answer comes. Settling times let a cluster or a fabric come to rest; they are 0 unless the hardware
needs them, so that on a plain machine a round has no wait at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from taskd.model.clusterd import JobConfig
from taskd.model.strategies import Strategy, parse_strategies


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    stop_timeout_s: float = 900.0
    """How long the job may take to stop or pause all its ranks."""
    strategy_timeout_s: float = 900.0
    """How long the job may take to say which strategies it offers."""
    status_timeout_s: float = 900.0
    """How long a repair may take, from the order to the first step that is committed again."""
    operation_timeout_s: float = 900.0
    """How long a link switch-over or a stress test may take."""
    pre_exit_timeout_s: float = 10.0
    """How long the processes on a broken device may take to leave; then the round begins."""
    platform_timeout_s: float = 300.0
    """How long the AI platform may take for each of its answers."""
    reschedule_timeout_s: float = 270.0
    """How long the scheduler may take to bring lost pods back, unless the job says otherwise."""
    resources_timeout_s: float = 20.0
    """How long to wait for free resources before the job goes on with fewer ranks."""
    exit_timeout_s: float = 20.0
    """How long to watch for new pods once the job was told to exit."""
    running_timeout_s: float = 135.0
    """How long the scheduler may take to restart the whole job."""
    kill_timeout_s: float = 60.0
    """How long to wait for a client to hear that its job ends, before the scheduler is asked."""
    backup_timeout_s: float = 60.0
    """How long the backup pod of a hot switch may take to run."""
    removal_timeout_s: float = 300.0
    """How long the old pod of a hot switch may take to go."""
    heal_timeout_s: float = 15.0
    """How long a device fault of a light kind may take to pass, before its pod must leave."""

    flush_s: float = 0.0
    """Settling: until all faults of one cause are in the cluster's picture (Kubernetes: 1)."""
    release_s: float = 0.0
    """Settling: until healthy nodes of a super pod have let go of the lost one (Ascend: 10)."""
    convergence_s: float = 0.0
    """Settling: until the fabric has found new routes, before a step is repeated (Ascend: 3)."""
    pickup_s: float = 0.0
    """Settling: until agents that poll reset-config have read it, before it is cleared (5)."""

    again_after_s: float = 30.0
    """A fault that outlasts its round, or a label that could not be set, is taken up again then."""
    hot_switch_again_after_s: float = 600.0
    """After a hot switch that failed, the next one is not tried before."""
    max_interruptions: int = 3
    """A strategy that new faults have cut short so often without one success is given up."""
    max_hot_switch_pods: int = 10
    """With more pods than that ailing, moving one of them is no cure."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, settling = getattr(self, item.name), item.name in _SETTLING
            if value < 0 or (value == 0 and not settling):
                raise ValueError(f"{item.name} must be {'0 or ' * settling}positive, got {value}")


_SETTLING = {"flush_s", "release_s", "convergence_s", "pickup_s"}

ON = "process-recover-enable"


def read_pod_group(labels: Mapping[str, str], annotations: Mapping[str, str]) -> JobConfig:
    """The job's recovery settings. Everything that is wrong is said in one `ValueError`."""
    problems = []
    strategies: tuple[Strategy, ...] = (Strategy.EXIT,)
    try:
        strategies = parse_strategies(annotations.get("recover-strategy", ""))
    except ValueError as error:
        problems.append(str(error))
    timeout = None
    if text := annotations.get("wait-reschedule-timeout", "").strip():
        if text.isdecimal() and 30 <= int(text) <= 270:
            timeout = float(text)
        else:
            problems.append(f"wait-reschedule-timeout: 30 to 270 is accepted, not {text!r}")
    if problems:
        raise ValueError("; ".join(problems))
    return JobConfig(
        strategies=strategies,
        cluster=True,
        platform="ProcessRecoverStrategy" in annotations,
        sub_health=labels.get("subHealthyStrategy", "ignore"),
        framework=labels.get("framework", "pytorch"),
        rescheduling=labels.get("fault-scheduling") in ("grace", "force")
        or labels.get("pod-rescheduling") == "on",
        reschedule_timeout_s=timeout,
    )


def is_on(labels: Mapping[str, str]) -> bool:
    """`pause` is our own mark on a job that the scheduler restarts: recovery is on there, too."""
    return labels.get(ON) in ("on", "pause") or labels.get("subHealthyStrategy") == "hotSwitch"
