"""What goes wrong in ClusterD's state machine, and cannot go wrong here.

The numbers are those of the table in docs/appendix/clusterd-weaknesses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from taskd.core.clusterd.job_config import is_on, read_pod_group
from taskd.core.clusterd.machine import RecoveryConfig
from taskd.core.clusterd.states import (
    AwaitingBackup,
    AwaitingRemoval,
    Ended,
    Growing,
    HandedOver,
    Idle,
    Killing,
    Migrating,
    Negotiating,
    PreExiting,
    Replacing,
    Resuming,
    Retrying,
    Settling,
    Shrinking,
    Shrunk,
    Stopping,
    StressTesting,
)
from taskd.model.clusterd import (
    AnnotatePod,
    ClusterWriteDone,
    ClusterWriteFailed,
    FaultReport,
    FaultsSeen,
    LabelPodGroup,
    OperatorAskedNic,
    OperatorAskedStress,
    PlatformSeen,
    Pod,
    ReplyOperator,
    ResultReport,
    Signal,
    SignalDelivered,
    StopReport,
    StrategiesReport,
    Subscribed,
    Unsubscribed,
    WriteResetConfig,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind, SeenFault
from taskd.model.ids import NodeRank, Rank
from taskd.model.operations import NicResult, StressResult
from taskd.model.strategies import Strategy
from tests.unit.core.clusterd.recovering import ALL, Machine, at


def seen(rank: int, level: str = "SeparateNPU", code: str = "40F84E00") -> FaultsSeen:
    return FaultsSeen((SeenFault(Rank(rank), code, level),))


def handed_over(machine: Machine) -> None:
    machine.fault(3)
    machine.wait(900)
    at(machine, HandedOver)


class TestPauseIsALease:
    """2: a PodGroup that carries `pause` when clusterd or the round dies never recovers again."""

    def test_label_pause_counts_as_enabled(self) -> None:
        assert is_on({"process-recover-enable": "pause"})
        assert not is_on({"process-recover-enable": "off"})
        assert not is_on({})

    def test_kill_resets_the_label(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        handed_over(machine)
        machine.wait(135)
        at(machine, Killing)
        assert machine.said(LabelPodGroup)[0].value == "on"

    def test_failed_or_lost_label_write_is_repeated(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        handed_over(machine)
        machine.see_pods(phase="Pending")
        machine.see_pods()
        at(machine, Idle)
        (label,) = machine.said(LabelPodGroup)
        machine.send(ClusterWriteFailed(label.sequence, "conflict"))
        machine.wait(30)
        (again,) = machine.said(LabelPodGroup)
        machine.wait(30)
        (lost,) = machine.said(LabelPodGroup)
        machine.send(ClusterWriteDone(lost.sequence))
        assert not machine.state.job.paused
        assert again.value == lost.value == "on"
        assert machine.state.deadline < float("inf")
        assert not machine.wait(30).commands
        assert machine.state.deadline == float("inf")

    def test_registration_resets_the_label_unless_the_scheduler_restarts(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        assert machine.register().commands[0] == LabelPodGroup(
            "process-recover-enable", "on", machine.state.job.sequence
        )
        handed_over(machine)
        assert not machine.register().commands


class TestStreamsOutliveRounds:
    """3: every subscription and every lost stream resets the round."""

    def test_a_subscription_continues_the_round(self) -> None:
        machine = Machine(ALL)
        machine.fault(3)
        machine.stopped()
        before = machine.state.job.incident
        machine.send(Unsubscribed(), Subscribed())
        at(machine, Negotiating)
        assert machine.state.job.incident == before

    def test_persisting_fault_starts_another_round_after_a_failed_one(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.send(seen(3))
        machine.wait(10)
        machine.wait(900)
        machine.wait(135)
        machine.send(SignalDelivered(machine.order.sequence))
        at(machine, Idle)
        machine.send(seen(3))
        at(machine, Idle)
        machine.wait(30)
        at(machine, PreExiting)

    def test_handled_fault_does_not_start_another_round(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.send(seen(3, "RestartBusiness"))
        machine.wait(10)
        machine.stopped()
        machine.offers()
        machine.replace_pods(1)
        machine.reports(0, "recover")
        machine.wait(0)
        machine.send(seen(3, "RestartBusiness"))
        at(machine, Idle)
        machine.send(FaultsSeen(()), seen(3, "RestartBusiness"))
        at(machine, PreExiting)


class TestEscalation:
    """4: faults after the global fault are cached, then forgotten."""

    @pytest.mark.parametrize("reached", ["negotiate", "repair", "shrunk", "grow"])
    def test_a_new_fault_begins_a_new_incident_in_any_state(self, reached: str) -> None:
        machine = Machine("elastic-training")
        steps: list[Callable[[], object]] = [
            machine.stopped,
            machine.offers,
            lambda: machine.reports(0, "downgrade"),
            lambda: machine.offers("upgrade"),
        ]
        machine.fault(3)
        for take in steps[: 1 + ["negotiate", "repair", "shrunk", "grow"].index(reached)]:
            take()
        before = machine.uuid
        machine.fault(1)
        at(machine, Stopping)
        assert machine.order.incident == 2
        assert machine.uuid != before
        assert [fault.rank for fault in machine.order.faults] == [1, 3]

    def test_device_fault_waits_for_the_result_of_a_repair_by_mindio(self) -> None:
        """MindIO takes no order to stop then. A rank that dies of the fault ends the repair."""
        machine = Machine("recover,dump", pods=(2, 2, 2))
        machine.fault(3)
        machine.send(StopReport(0), StrategiesReport(("recover", "dump", "exit")))
        at(machine, Replacing)
        machine.send(seen(5))
        assert not machine.commands()
        machine.replace_pods(1)
        machine.send(ResultReport(0, "recover"))
        at(machine, Idle)
        machine.wait(0)
        at(machine, PreExiting)
        assert [fault.rank for fault in machine.order.faults] == [5]

    def test_fault_during_an_operation_is_replied_to_the_operator(self) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedNic((Rank(0),), (True,)))
        machine.stopped()
        machine.fault(1)
        at(machine, Stopping)
        (reply,) = machine.said(ReplyOperator)
        assert reply.text == "switch nic failed, report error when switching nic"


class TestHardwareFaults:
    """5: a hardware fault starts no round; one signal is sent, and all depends on its delivery."""

    def test_round_begins_without_a_report_of_the_client(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.send(seen(3))
        at(machine, PreExiting)
        assert machine.order.actions == ("pre exit process",)
        machine.send(Unsubscribed(), Subscribed())
        assert machine.order.type == "preExitProcess"
        machine.wait(10)
        assert machine.order.type == "stopTrain"

    def test_without_subscriber_the_job_is_stopped_at_once(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.send(Unsubscribed(), seen(3))
        at(machine, Stopping)

    def test_neighbours_that_exited_are_not_a_new_incident(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.send(seen(3))
        machine.fault(2, 3)
        at(machine, Stopping)
        assert machine.order.incident == 1


def test_7_every_wait_for_a_signal_ends() -> None:
    machine = Machine("recover", pods=(2, 2))
    machine.send(Unsubscribed())
    machine.fault(3)
    machine.wait(900)
    at(machine, HandedOver)
    for _ in range(3):
        machine.wait(135)
        at(machine, Killing)
        machine.wait(60)
        at(machine, HandedOver)
    machine.send(Subscribed())
    assert machine.order.type == "killMaster"


def test_12_unexpected_results_are_refused() -> None:
    machine = Machine("retry")
    assert machine.send(NicResult(True)).answer == RecoverCode.OrderMix
    assert machine.send(StressResult({})).answer == RecoverCode.OrderMix
    at(machine, Idle)


def test_19_and_34_the_reset_config_is_optional() -> None:
    """A failed write of it is logged and stops nothing."""
    machine = Machine("recover-in-place,recover", pods=(2, 2))
    machine.fault(3)
    actions: list[Callable[[], object]] = [
        machine.stopped,
        machine.offers,
        lambda: machine.reports(499, "recover"),
    ]
    for tell in actions:
        for write in machine.said(WriteResetConfig):
            before = machine.state
            outcome = machine.send(ClusterWriteFailed(write.sequence, "no such ConfigMap"))
            assert outcome.state == before
            assert "no such ConfigMap" in outcome.because
        tell()
    machine.replace_pods(1)
    machine.reports(0, "recover")
    at(machine, Idle)


class TestShrinking:
    """20: a direct success, a second 201 or another strategy's report leaves the job stuck."""

    def shrinking(self) -> Machine:
        machine = Machine("elastic-training,dump", pods=(1, 1, 1))
        machine.fault(2)
        machine.stopped()
        machine.offers()
        at(machine, Shrinking)
        return machine

    def test_shrinking_succeeds_at_once(self) -> None:
        machine = self.shrinking()
        machine.reports(0, "downgrade")
        at(machine, Shrunk)

    def test_more_ranks_leave_twice(self) -> None:
        machine = self.shrinking()
        machine.reports(201, "downgrade", 2)
        machine.reports(201, "downgrade", 1)
        assert machine.order.nodes == (NodeRank(1),)
        machine.reports(0, "downgrade")
        assert isinstance(machine.state, Shrunk)
        assert machine.state.round.ranks == (1, 2)

    def test_unexpected_report_is_refused_and_the_wait_continues(self) -> None:
        machine = self.shrinking()
        assert machine.reports(0, "recover").answer == RecoverCode.OrderMix
        at(machine, Shrinking)

    def test_missing_report_ends_the_shrinking(self) -> None:
        machine = self.shrinking()
        machine.wait(900)
        at(machine, HandedOver)


class TestUnexpectedCodes:
    """21: an unexpected code ends the wait without an event."""

    @pytest.mark.parametrize("code", [1, 404, 405, 406, 407, 499, 12345])
    def test_while_links_are_switched(self, code: int) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedNic((Rank(0),), (True,)))
        machine.stopped()
        machine.reports(code, "")
        at(machine, Stopping)

    @pytest.mark.parametrize("code", [1, 406, 12345])
    def test_while_devices_are_tested(self, code: int) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedStress({Rank(0): (0,)}))
        machine.stopped()
        machine.reports(code, "")
        at(machine, StressTesting)
        machine.send(StressResult({}))
        at(machine, Stopping)

    @pytest.mark.parametrize("code", [1, 405, 12345])
    def test_while_the_job_moves(self, code: int) -> None:
        machine = self.moving()
        machine.pods.pop(1)
        machine.see_pods(self.backup)
        at(machine, Migrating)
        machine.reports(code, "migration")
        at(machine, HandedOver)

    def test_an_old_pod_that_never_goes(self) -> None:
        machine = self.moving()
        at(machine, AwaitingRemoval)
        machine.wait(300)
        at(machine, HandedOver)
        assert machine.outcome.answer == RecoverCode.ScheduleTimeout

    def test_an_old_pod_that_has_gone_already(self) -> None:
        machine = self.preparing()
        machine.pods.pop(1)
        machine.see_pods(self.backup)
        machine.offers("migration")
        at(machine, Migrating)

    backup = Pod(NodeRank(1), "backup", "backup", "host9", (Rank(2), Rank(3)), backup=True)

    def preparing(self) -> Machine:
        machine = Machine("recover", pods=(2, 2), sub_health="hotSwitch")
        machine.send(seen(3, "SubHealthFault"))
        machine.see_pods(self.backup)
        return machine

    def moving(self) -> Machine:
        machine = self.preparing()
        machine.offers("migration")
        return machine


class TestStopCodes:
    """22: every code but 404 counts as a completed stop."""

    def test_processes_not_ready_kills_the_job(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.fault(3)
        machine.stopped(404)
        assert machine.order.type == "killMaster"

    @pytest.mark.parametrize("code", [1, 499, 500])
    def test_failed_stop_gives_up(self, code: int) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.fault(3)
        machine.stopped(code)
        at(machine, HandedOver)
        assert f"({code})" in machine.outcome.because


class TestReportsAreChecked:
    """23: the client's word decides which branch is taken; acknowledgements match by type."""

    def test_the_result_of_another_strategy(self) -> None:
        machine = Machine("recover-in-place")
        machine.fault(3)
        machine.stopped()
        machine.offers()
        for strategy in ("retry", "dump", "upgrade", "nonsense"):
            assert machine.reports(0, strategy).answer == RecoverCode.OrderMix
        at(machine, Replacing)

    def test_deliveries_are_matched_by_number(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.fault(3)
        stop = machine.order
        machine.stopped(404)
        at(machine, Killing)
        machine.send(SignalDelivered(stop.sequence))
        at(machine, Killing)


class TestPodsThatChange:
    """24: an unchanged pod counts as replaced; a change is seen once, and lost on a failure."""

    def test_unchanged_pods_do_not_count_as_replaced(self) -> None:
        machine = Machine("recover-in-place", pods=(2, 2))
        machine.send(FaultReport((Fault(Rank(3), in_place=False), Fault(Rank(0)))))
        machine.stopped()
        machine.offers()
        machine.see_pods()
        assert isinstance(machine.state, Replacing)
        assert machine.state.pods_by is not None
        machine.replace_pods(1)
        assert isinstance(machine.state, Replacing)
        assert machine.state.pods_by is None

    def test_growing_is_tried_again_after_another_fault(self) -> None:
        machine = Machine("elastic-training", pods=(1, 1, 1))
        machine.fault(2)
        machine.stopped()
        machine.offers()
        machine.reports(0, "downgrade")
        machine.replace_pods(2)
        at(machine, Growing)
        machine.fault(1)
        machine.stopped()
        machine.offers()
        machine.reports(0, "downgrade")
        machine.replace_pods(1)
        at(machine, Growing)


def test_25_healing_in_place_is_given_up_when_the_device_turns_out_broken() -> None:
    machine = Machine("recover-in-place,recover", pods=(2, 2))
    machine.fault(3)
    machine.stopped()
    machine.offers()
    assert machine.order.extra == "recover-in-place"
    machine.send(seen(3, "SeparateNPU"))
    at(machine, Stopping)
    machine.stopped()
    machine.offers()
    assert machine.order.extra == ""
    assert machine.order.nodes == (NodeRank(1),)


def test_26_a_job_does_not_shrink_around_its_first_pod() -> None:
    machine = Machine("recover,elastic-training,dump", pods=(2, 2))
    machine.fault(0)
    machine.stopped()
    machine.offers()
    at(machine, Replacing)
    machine.wait(270)
    at(machine, Stopping)
    machine.stopped()
    machine.offers()
    assert machine.order.strategy == "dump"
    assert "node 0 is lost" in machine.outcome.because


def test_27_next_strategy_is_used_if_retry_is_not_offered() -> None:
    machine = Machine("retry,recover,dump")
    machine.fault(3, kind=FaultKind.NETWORK)
    machine.stopped()
    machine.offers("recover", "dump", "exit")
    assert machine.order.strategy == "recover"


class TestPlatform:
    """28: before the platform has answered, retryable faults are treated as deaths."""

    def test_no_node_is_replaced_for_a_retryable_fault(self) -> None:
        machine = Machine("retry,recover", pods=(2, 2), platform=True)
        machine.send(seen(3, "RestartBusiness", "80E01801"))
        assert not machine.said(Signal)
        machine.send(PlatformSeen(strategy="retry"))
        assert machine.order.faults[0].kind is FaultKind.MEMORY

    def test_faults_that_the_platform_adds_are_announced(self) -> None:
        machine = Machine("retry,recover", pods=(2, 2), platform=True)
        machine.send(PlatformSeen(strategy="retry"))
        machine.fault(3, kind=FaultKind.MEMORY)
        machine.stopped()
        machine.send(PlatformSeen(strategy="recover", confirm="3:0", result="0:1"))
        assert [fault.rank for fault in machine.order.faults] == [0, 1, 2, 3]

    def test_processes_are_restarted_in_place_by_the_strategy_alone(self) -> None:
        """The platform turns a retryable fault into an ordinary round: no node has to exit yet."""
        machine = Machine("retry,recover-in-place,recover", pods=(2, 2), platform=True)
        machine.send(PlatformSeen(strategy="retry"))
        machine.fault(3, kind=FaultKind.MEMORY)
        machine.stopped()
        machine.send(PlatformSeen(strategy="recover", confirm="3:0", result="0:1"))
        assert machine.order.actions == ("on_global_rank", "fault_nodes_exit")
        assert (machine.order.nodes, machine.order.timeout_s) == ((), 0)
        machine.offers()
        machine.send(PlatformSeen("recover", "3:0", "0:1", "true"))
        assert machine.order.actions == ("change_strategy", "fault_nodes_restart")
        assert machine.order.nodes == (NodeRank(0), NodeRank(1))

    def test_foreign_confirmation_is_not_overwritten(self) -> None:
        machine = Machine("retry,recover", pods=(2, 2), platform=True)
        machine.send(PlatformSeen(strategy="recover", confirm="7:1"))
        machine.fault(3)
        outcome = machine.stopped()
        assert outcome.answer == RecoverCode.WriteConfirmFaultOrWaitPlatResultFault
        at(machine, HandedOver)

    @pytest.mark.parametrize("asked", ["strategy", "faults"])
    def test_silent_platform_ends_the_round(self, asked: str) -> None:
        machine = Machine("retry,recover", pods=(2, 2), platform=True)
        if asked == "faults":
            machine.send(PlatformSeen(strategy="recover"))
        machine.fault(3)
        if asked == "faults":
            machine.stopped()
        outcome = machine.wait(300)
        expected = {
            "strategy": RecoverCode.WaitPlatStrategyTimeout,
            "faults": RecoverCode.WriteConfirmFaultOrWaitPlatResultFault,
        }
        assert outcome.answer == expected[asked]
        at(machine, HandedOver)
        late = machine.send(StrategiesReport(("retry",)))
        assert late.answer == expected[asked]


def test_29_retryable_faults_are_handled_without_retry_configured() -> None:
    machine = Machine("recover-in-place")
    machine.fault(3, kind=FaultKind.NETWORK)
    at(machine, Stopping)
    machine.stopped()
    machine.offers()
    assert machine.order.extra == "recover-in-place"


def test_30_blanks_in_the_list_are_tolerated_and_mistakes_named() -> None:
    config, mistakes = read_pod_group({}, {"recover-strategy": "retry, recover"})
    assert config.strategies == (Strategy.RETRY, Strategy.RECOVER, Strategy.EXIT)
    assert not mistakes
    wrong = {"recover-strategy": "retry,recovery", "wait-reschedule-timeout": "10"}
    config, mistakes = read_pod_group({}, wrong)
    assert config.strategies == (Strategy.RETRY, Strategy.EXIT), "the known words count"
    assert config.reschedule_timeout_s is None
    assert "unknown value 'recovery'" in mistakes[0]
    assert "30 to 270" in mistakes[1]


class TestRestartIsProven:
    """31: a job that still runs after `pause` counts as restarted."""

    def test_phase_running_alone_is_not_a_restart(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        handed_over(machine)
        machine.see_pods()
        at(machine, HandedOver)
        machine.see_pods(phase="Pending")
        machine.see_pods()
        at(machine, Idle)

    def test_new_pods_count_as_restart_after_the_order_to_exit(self) -> None:
        machine = Machine("", pods=(2, 2))
        machine.fault(3)
        machine.stopped()
        machine.send(Unsubscribed())
        machine.offers("exit")
        order = machine.order
        machine.replace_pods(1)
        machine.see_pods()
        at(machine, HandedOver)
        machine.send(SignalDelivered(order.sequence))
        machine.see_pods()
        at(machine, Idle)

    def test_job_restarted_by_the_scheduler_is_stopped_again(self) -> None:
        """The ranks that were parked are gone; the new ones train."""
        machine = Machine("recover", pods=(2, 2))
        machine.fault(3)
        machine.stopped()
        machine.replace_pods(0, 1)
        at(machine, Stopping)
        assert machine.order.incident == 2


def test_32_finished_wait_leaves_no_state_behind() -> None:
    """A late answer of the old round is refused, and the new round does not change."""
    machine = Machine("recover-in-place")
    machine.fault(3)
    old = machine.uuid
    machine.stopped()
    machine.fault(2)
    state = machine.state
    for report in (
        StrategiesReport(("retry",), old),
        ResultReport(0, "recover", uuid=old),
    ):
        outcome = machine.send(report)
        assert outcome.answer == RecoverCode.ControllerEventCancel
        assert outcome.state == state


class TestHotSwitch:
    """35: no uuid, and one failure switches it off for good."""

    def test_every_signal_has_the_uuid_of_its_attempt(self) -> None:
        machine = Machine("recover", pods=(2, 2), sub_health="hotSwitch")
        machine.send(seen(3, "SubHealthFault"))
        first = machine.order.uuid
        assert first
        machine.wait(60)
        at(machine, Idle)
        machine.wait(600)
        assert machine.order.uuid not in ("", first)

    def test_job_that_cannot_move_goes_on_training(self) -> None:
        machine = Machine("recover", pods=(2, 2), sub_health="hotSwitch")
        machine.send(seen(3, "SubHealthFault"))
        assert machine.offers("exit").answer == RecoverCode.OK
        at(machine, Idle)
        assert machine.order.actions == ("stop switch",)
        assert AnnotatePod("pod1", "needOperatorOpe", None, 0) in [
            replace(done, sequence=0) for done in machine.said(AnnotatePod)
        ]
        machine.wait(600)
        assert not machine.commands()

    def test_job_that_offers_to_move_before_its_backup_runs_is_refused(self) -> None:
        machine = Machine("recover", pods=(2, 2), sub_health="hotSwitch")
        machine.send(seen(3, "SubHealthFault"))
        assert machine.offers("migration", "exit").answer == RecoverCode.OrderMix
        at(machine, AwaitingBackup)

    def test_node_0_is_not_moved(self) -> None:
        machine = Machine("recover", pods=(2, 2), sub_health="hotSwitch")
        machine.send(seen(0, "SubHealthFault"))
        at(machine, Idle)


class TestOddRanks:
    """36: one rank that cannot be read empties the whole list."""

    def test_unknown_rank_is_skipped_and_the_others_count(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.fault(3, 999, -1)
        assert [fault.rank for fault in machine.order.faults] == [3]

    def test_report_without_known_ranks_starts_nothing(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.fault(999)
        at(machine, Idle)

    def test_invalid_platform_entry_is_skipped_and_the_others_count(self) -> None:
        machine = Machine("recover", pods=(2, 2), platform=True)
        machine.send(PlatformSeen(strategy="recover"))
        machine.fault(3)
        machine.stopped()
        machine.send(PlatformSeen(strategy="recover", result=f"x:1,,2:9,{'3' * 5000}:1, 1 : 1 "))
        assert [fault.rank for fault in machine.order.faults] == [0, 1, 2, 3]

    def test_rank_whose_pod_has_succeeded_is_not_lost(self) -> None:
        """Ascend's agents do not say that they have finished: they only disconnect."""
        machine = Machine("recover", pods=(2, 2))
        machine.pods[1] = replace(machine.pods[1], running=False, finished=True)
        machine.see_pods()
        assert machine.fault(2, 3).answer == RecoverCode.OK
        machine.send(seen(3))
        at(machine, Idle)
        machine.fault(1, 3)
        assert [fault.rank for fault in machine.order.faults] == [1]

    def test_a_rank_is_known_also_while_its_pod_is_away(self) -> None:
        machine = Machine("recover", pods=(2, 2))
        machine.pods.pop(1)
        machine.see_pods()
        machine.fault(3)
        at(machine, Stopping)


def test_37_pods_may_have_different_sizes() -> None:
    machine = Machine("recover", pods=(1, 3, 2))
    machine.fault(4)
    machine.stopped()
    assert machine.order.nodes == (NodeRank(2),)
    assert [fault.rank for fault in machine.order.faults] == [4, 5]


@pytest.mark.parametrize("sub_health", ["ignore", "graceExit", "hotSwitch"])
@pytest.mark.parametrize(
    "levels", [("SubHealthFault", "SeparateNPU"), ("SeparateNPU", "SubHealthFault")]
)
def test_38_and_40_sub_health_does_not_hide_a_broken_device(
    levels: tuple[str, str], sub_health: str
) -> None:
    """In any order, and for every setting for sub-healthy devices."""
    machine = Machine("recover-in-place,recover", pods=(2, 2), sub_health=sub_health)
    picture = [SeenFault(Rank(3), f"code{n}", level) for n, level in enumerate(levels)]
    machine.send(FaultsSeen(tuple(picture)))
    at(machine, PreExiting)
    machine.wait(10)
    machine.stopped()
    assert machine.order.actions == ("on_global_rank", "fault_nodes_exit")
    assert machine.order.nodes == (NodeRank(1),)
    machine.offers()
    assert machine.order.extra == ""


class TestNetworkFaults:
    """39: a broken link is never recorded as evidence for the job's report."""

    down = SeenFault(Rank(3), "81078603", "NotHandleFault")

    def test_report_without_evidence_is_accepted(self) -> None:
        machine = Machine("retry,recover", pods=(2, 2))
        machine.fault(3, kind=FaultKind.NETWORK)
        machine.stopped()
        machine.offers()
        assert machine.order.strategy == "retry"

    def test_link_fault_of_a_device_is_seen(self) -> None:
        machine = Machine("retry,recover", pods=(2, 2))
        machine.send(FaultsSeen((self.down,)))
        assert machine.state.job.seen == (self.down,)
        machine.send(FaultsSeen((self.down, SeenFault(Rank(3), "8C1F860B", "RestartBusiness"))))
        assert machine.outcome.because.endswith(
            "network error of rank 3 (RestartBusiness 8C1F860B)"
        )


@pytest.mark.parametrize("answered", [True, False])
def test_41_a_retry_ends_with_its_result_or_at_its_deadline(answered: bool) -> None:
    machine = Machine("retry", pods=(2, 2))
    machine.fault(3, kind=FaultKind.MEMORY)
    machine.stopped()
    machine.offers()
    at(machine, Retrying)
    assert machine.state.deadline == machine.now + 900
    if answered:
        machine.reports(0, "retry")
    else:
        machine.wait(900)
    at(machine, Idle if answered else HandedOver)


class TestOperations:
    @pytest.mark.parametrize(
        "event",
        [
            OperatorAskedNic((), ()),
            OperatorAskedNic((Rank(0),), (True, False)),
            OperatorAskedNic((Rank(99),), (True,)),
            OperatorAskedStress({}),
            OperatorAskedStress({Rank(0): ()}),
            OperatorAskedStress({Rank(0): (0, 0)}),
            OperatorAskedStress({Rank(0): (2,)}),
        ],
    )
    def test_invalid_operations_are_refused(
        self, event: OperatorAskedNic | OperatorAskedStress
    ) -> None:
        machine = Machine("retry", pods=(2, 2))
        assert machine.send(event).answer == RecoverCode.OMParamInvalid
        at(machine, Idle)

    def test_link_switch_without_a_backup_interface_is_refused(self) -> None:
        machine = Machine("retry", pods=(2, 2), no_backup_nic=True)
        outcome = machine.send(OperatorAskedNic((Rank(0),), (True,)))
        assert outcome.answer == RecoverCode.OMParamInvalid
        assert "--nics" in outcome.because
        at(machine, Idle)

    def test_one_operation_at_a_time(self) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedNic((Rank(0),), (True,)))
        outcome = machine.send(OperatorAskedStress({Rank(0): (0,)}))
        assert outcome.answer == RecoverCode.OMIsRunning

    def test_failed_pause_resumes_the_ranks(self) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedNic((Rank(0),), (True,)))
        machine.stopped(499)
        at(machine, Resuming)
        machine.reports(0, "continue")
        at(machine, Idle)
        assert machine.said(ReplyOperator)[0].text == "om failed, pause train failed"

    def test_job_that_cannot_resume_is_ended(self) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedNic((Rank(0),), (True,)))
        machine.stopped()
        machine.send(NicResult(True))
        machine.reports(499, "continue")
        at(machine, Ended)
        assert "(499)" in machine.outcome.because

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["499", "0"], "om failed, pause train failed"),
            (["silence", "0"], "pause train timeout"),
            (["0", "no"], "switch nic failed, switch nic failed"),
            (["0", "406"], "switch nic failed, report error when switching nic"),
            (["0", "silence"], "switch nic failed, report switch nic timeout"),
            (["0", "yes", "0"], "switch nic finish"),
            (["0", "yes", "499"], "switch nic failed, continue train failed"),
            (["0", "yes", "silence"], "switch nic failed, continue train timeout"),
        ],
    )
    def test_operator_gets_upstream_texts(self, words: list[str], text: str) -> None:
        machine = Machine("retry")
        machine.send(OperatorAskedNic((Rank(0),), (True,)))
        for number, word in enumerate(words):
            if word == "silence":
                machine.wait(900)
            elif word in ("yes", "no"):
                machine.send(NicResult(word == "yes"))
            elif number == 0:
                machine.stopped(int(word))
            else:
                machine.reports(int(word), "continue")
        (reply,) = machine.said(ReplyOperator)
        assert reply.text == text


def test_a_label_that_cannot_be_written_leads_to_the_last_resort() -> None:
    machine = Machine("recover", pods=(2, 2))
    handed_over(machine)
    (label,) = machine.said(LabelPodGroup)
    outcome = machine.send(ClusterWriteFailed(label.sequence, "forbidden"))
    assert outcome.answer == RecoverCode.OperatePodGroupError
    at(machine, Killing)


def test_settling_times_apply_only_where_they_are_set() -> None:
    config = RecoveryConfig(flush_s=1.0, convergence_s=3.0)
    machine = Machine("recover", pods=(2, 2), config=config)
    machine.fault(3)
    machine.stopped()
    at(machine, Settling)
    machine.wait(1)
    at(machine, Negotiating)
    plain = Machine("recover", config=config)
    plain.fault(3)
    plain.stopped()
    at(plain, Negotiating)


def test_negative_waits_and_zero_deadlines_are_refused() -> None:
    with pytest.raises(ValueError, match="flush_s must be 0 or positive, got -1"):
        RecoveryConfig(flush_s=-1.0)
    with pytest.raises(ValueError, match="stop_timeout_s must be positive, got 0"):
        RecoveryConfig(stop_timeout_s=0.0)
