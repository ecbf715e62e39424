"""Operations on a healthy job: a NIC switch or a stress test while the job is paused.

The job is paused, the operation runs, the job resumes. A fault on the way starts an ordinary round,
and the operator gets a reply.
"""

from __future__ import annotations

import json
from dataclasses import replace

from taskd.core.clusterd import signals
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.job_facts import Job
from taskd.core.clusterd.round.round_end import kill
from taskd.core.clusterd.round.round_start import begin, new_incident
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import (
    Idle,
    Operating,
    Outcome,
    Pausing,
    Resuming,
    StressTesting,
    SwitchingNic,
    Task,
)
from taskd.model.clusterd import (
    AnnotateNode,
    Command,
    Operation,
    OperatorAskedNic,
    OperatorAskedStress,
    ReplyOperator,
    ResetOperation,
    ResultReport,
    SendStressRanks,
    SendSwitchRanks,
    StopReport,
    WriteResetConfig,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Rank
from taskd.model.operations import FAULTY, OPS, TIMED_OUT, UNSETTLED, StressResult


def ask(
    state: Idle, event: OperatorAskedNic | OperatorAskedStress, now: float, config: RecoveryConfig
) -> Outcome:
    if problem := _problem(state.job, event):
        return Outcome(state, because=problem, answer=RecoverCode.OMParamInvalid)
    match event:
        case OperatorAskedNic(ranks, to_backup):
            task = Task(operation=Operation.NIC, ranks=ranks, to_backup=to_backup)
            timeout_s = 0
        case OperatorAskedStress(ops):
            task = Task(operation=Operation.STRESS, ranks=tuple(sorted(ops)), ops=ops)
            timeout_s = signals.STRESS_PAUSE_TIMEOUT_S
    turn = new_incident(state.job, now, config, f"the operator asks for: {task.operation}")
    order = signals.pause_train(turn.job, turn.round, timeout_s)
    deadline = now + config.stop_timeout_s
    return turn.go_to(Pausing(turn.job, turn.round, task, order, deadline), order)


def _problem(job: Job, event: OperatorAskedNic | OperatorAskedStress) -> str:
    ranks = tuple(event.ops) if isinstance(event, OperatorAskedStress) else event.ranks
    unknown = sorted(rank for rank in ranks if not job.has(rank))
    if not ranks:
        return "the request names no rank"
    if unknown:
        return f"ranks {unknown} do not belong to the job"
    match event:
        case OperatorAskedNic() if job.config.no_backup_nic:
            return "the job has no backup interface: start it with --nics PRIMARY,BACKUP"
        case OperatorAskedNic() if len(event.to_backup) != len(ranks):
            return f"{len(ranks)} ranks, but {len(event.to_backup)} directions"
        case OperatorAskedStress(ops):
            for rank, wanted in ops.items():
                if not wanted or len(set(wanted)) != len(wanted) or set(wanted) - set(OPS.values()):
                    return f"rank {rank}: invalid test {list(wanted)} (expected 0 and 1, once each)"
        case _:
            pass
    return ""


def paused(state: Pausing, turn: Turn, event: StopReport) -> Outcome:
    if event.code != RecoverCode.OK:
        return resume(turn, state.task, "om failed, pause train failed")
    turn = turn.with_reason("all ranks are parked")
    task, deadline = state.task, turn.now + turn.config.operation_timeout_s
    if task.operation is Operation.NIC:
        command = SendSwitchRanks(task.ranks, task.to_backup)
        return turn.go_to(SwitchingNic(turn.job, turn.round, task, deadline), command)
    turn = turn.with_commands(signals.pause_agents(turn.job, turn.round))
    turn = turn.with_cluster_commands(WriteResetConfig(ResetOperation.FLUSHING))
    testing = StressTesting(turn.job, turn.round, task, False, deadline)
    return turn.go_to(testing, SendStressRanks(task.ops))


def pause_expired(state: Pausing, turn: Turn) -> Outcome:
    return resume(
        replace(turn, cause=RecoverCode.WaitReportTimeout), state.task, "pause train timeout"
    )


def nic_result(state: SwitchingNic, turn: Turn, ok: bool) -> Outcome:
    if ok:
        return resume(turn.with_reason("the links are switched"), state.task, "switch nic finish")
    return nic_failed(state, turn, "switch nic failed")


def nic_failed(state: SwitchingNic, turn: Turn, what: str) -> Outcome:
    """The links of these ranks are in an unknown state now."""
    text = f"switch nic failed, {what}"
    faults = [Fault(rank, FaultKind.NETWORK, evidence=text) for rank in state.task.ranks]
    reply = ReplyOperator(Operation.NIC, text)
    return _to_round(turn, faults, text, reply, nic_failed=True)


def fault_reported(state: SwitchingNic | StressTesting, turn: Turn, event: ResultReport) -> Outcome:
    """The job reports a fault in the middle of the operation."""
    if isinstance(state, SwitchingNic):
        return nic_failed(state, turn, "report error when switching nic")
    text = "recv fault, when stressing test"
    deadline = turn.now + turn.config.operation_timeout_s
    turn = turn.with_reason(f"{text} ({event.code})")
    return turn.go_to(
        replace(state, hit=True, deadline=deadline), ReplyOperator(Operation.STRESS, text)
    )


def stress_result(state: StressTesting, turn: Turn, event: StressResult) -> Outcome:
    turn = stress_over(state, turn)
    table = _table(turn.job, event)
    codes = {
        rank: {result.code for result in results.values()}
        for rank, results in event.results.items()
    }
    broken = turn.job.nodes_of(rank for rank, found in codes.items() if FAULTY in found)
    unsettled = sorted(rank for rank, found in codes.items() if found & {TIMED_OUT, UNSETTLED})
    if broken:
        names = [pod.node for node in broken if (pod := turn.job.pod_at(node)) is not None]
        text = f"stress test find fault, isolate node:{','.join(names)},result:{table}"
        turn = turn.with_cluster_commands(
            *(AnnotateNode(name, "NodeHealthyStatus", "UnHealthy") for name in names)
        )
        ranks = sorted({*turn.job.ranks_of(broken), *unsettled})
        return _stress_failed(state, turn, tuple(ranks), text)
    if unsettled:
        text = f"stress test timeout fault, faultRank:{unsettled},result:{table}"
        return _stress_failed(state, turn, tuple(unsettled), text)
    if state.hit:
        return _stress_failed(state, turn, (), f"stress test finish, result:{table}")
    turn = turn.with_reason("all devices passed the test")
    return resume(turn, state.task, f"stress test finish, result:{table}")


def stress_expired(state: StressTesting, turn: Turn) -> Outcome:
    text = "stress test failed, report stress test timeout"
    return _stress_failed(state, stress_over(state, turn), (), text)


def _stress_failed(state: StressTesting, turn: Turn, ranks: tuple[Rank, ...], text: str) -> Outcome:
    faults = [Fault(rank, hardware=True, in_place=False, evidence="stress test") for rank in ranks]
    reply = ReplyOperator(state.task.operation, text)
    return _to_round(turn, faults, _short(text), reply)


def stress_over(state: Operating, turn: Turn) -> Turn:
    """The test is over: agents may start processes again."""
    if not isinstance(state, StressTesting):
        return turn
    turn = turn.with_cluster_commands(WriteResetConfig(ResetOperation.CLEAR))
    return turn.with_commands(signals.continue_agents(turn.job, turn.round))


def _to_round(
    turn: Turn,
    faults: list[Fault],
    because: str,
    *commands: Command,
    nic_failed: bool = False,
) -> Outcome:
    return begin(
        turn.with_uuid_retired().job,
        faults,
        turn.now,
        turn.config,
        because,
        commands=(*turn.commands, *commands),
        stopped=True,
        nic_failed=nic_failed,
    )


def resume(turn: Turn, task: Task, text: str) -> Outcome:
    """Also after a failed pause: the ranks that did park must resume."""
    order = signals.continue_train(turn.job, turn.round)
    deadline = turn.now + turn.config.status_timeout_s
    turn = turn.with_reason(_short(text))
    return turn.go_to(Resuming(turn.job, turn.round, task, text, order, deadline), order)


def resumed(state: Resuming, turn: Turn, event: ResultReport) -> Outcome:
    if event.code == RecoverCode.OK:
        turn = turn.with_reason("the job trains again")
        return turn.go_to(
            Idle(turn.with_uuid_retired().job), ReplyOperator(state.task.operation, state.text)
        )
    turn = turn.with_reason(f"the job could not resume ({event.code})")
    return _not_resumed(state, turn, "continue train failed", RecoverCode.OK)


def resume_expired(state: Resuming, turn: Turn) -> Outcome:
    return _not_resumed(state, turn, "continue train timeout", RecoverCode.WaitReportTimeout)


def _not_resumed(state: Resuming, turn: Turn, what: str, cause: RecoverCode) -> Outcome:
    text = f"{state.task.operation} failed, {what}"
    return kill(
        turn.with_reason(text).with_commands(ReplyOperator(state.task.operation, text)), cause
    )


def abandon_operation(state: Operating, turn: Turn) -> Turn:
    """A fault interrupts the operation."""
    texts = {
        Operation.NIC: "switch nic failed, report error when switching nic",
        Operation.STRESS: "recv fault, when stressing test",
    }
    operation = state.task.operation
    turn = stress_over(state, turn)
    if isinstance(state, StressTesting) and state.hit:
        return turn
    return turn.with_commands(ReplyOperator(operation, texts[operation]))


def tested(state: Operating) -> frozenset[Rank]:
    """The ranks whose devices report faults because of the test."""
    return frozenset(state.task.ops) if isinstance(state, StressTesting) else frozenset()


def _short(text: str) -> str:
    return text.partition("result:")[0].rstrip(" ,")


def _table(job: Job, event: StressResult) -> str:
    """The results by node and device, which are the names that the operator uses."""
    table: dict[str, dict[str, object]] = {}
    for rank, results in sorted(event.results.items()):
        node, device = _place(job, rank)
        found = {op: {"code": r.code, "result": r.text} for op, r in sorted(results.items())}
        table.setdefault(node, {})[device] = {"rankResult": found}
    return json.dumps(table, separators=(",", ":"))


def _place(job: Job, rank: Rank) -> tuple[str, str]:
    pod = job.pod_of(rank)
    if pod is None:
        return "", str(rank)
    index = pod.ranks.index(rank)
    return pod.node or str(pod.node_rank), pod.devices[index] if index < len(pod.devices) else str(
        rank
    )
