"""A round without a cluster, step by step: orders, waits, refusals."""

from __future__ import annotations

import re

import pytest

from taskd.core.clusterd.states import (
    Dumping,
    Ended,
    Idle,
    Negotiating,
    Replacing,
    Retrying,
    Shrinking,
    Shrunk,
    State,
    Stopping,
)
from taskd.model.clusterd import (
    ClusterWriteDone,
    FaultReport,
    FaultsSeen,
    JobDeleted,
    ResultReport,
    Signal,
    SignalDelivered,
    SignalFailed,
    StopReport,
    StrategiesReport,
    Subscribed,
    Unsubscribed,
)
from taskd.model.codes import RecoverCode
from taskd.model.faults import Fault, FaultKind, SeenFault, merge
from taskd.model.ids import Rank
from taskd.model.types import Tick
from tests.unit.core.clusterd.recovering import OFFERS, Machine, at


def test_round_without_settling_times_never_waits() -> None:
    """Without a cluster, every answer is followed by the next order at once."""
    machine = Machine("recover-in-place")
    orders = []
    machine.fault(3)
    orders.append(machine.order)
    machine.stopped()
    orders.append(machine.order)
    machine.offers("recover", "exit")
    orders.append(machine.order)
    machine.reports(0, "recover")
    at(machine, Idle)
    assert [signal.type for signal in orders] == ["stopTrain", "globalFault", "changeStrategy"]
    assert {signal.uuid for signal in orders} == {orders[0].uuid}
    assert [signal.sequence for signal in orders] == [1, 2, 3]
    assert {signal.incident for signal in orders} == {1}


def test_uuid_has_upstream_format_and_is_new_in_every_round() -> None:
    machine = Machine()
    machine.fault(3)
    first = machine.uuid
    machine.stopped()
    machine.fault(2)
    assert re.fullmatch(r"[0-9A-F]+-[0-9a-f]{32}", first)
    assert machine.uuid != first


def test_duplicate_fault_report_changes_nothing() -> None:
    machine = Machine()
    machine.fault(3)
    state = machine.state
    outcome = machine.fault(3)
    assert outcome.state == state
    assert not outcome.commands


def test_fault_of_another_rank_after_the_stop_starts_an_incident_with_all_faults() -> None:
    machine = Machine()
    machine.fault(3)
    machine.stopped()
    machine.fault(1)
    at(machine, Stopping)
    assert machine.order.incident == 2
    assert [fault.rank for fault in machine.order.faults] == [1, 3]


def test_death_that_explains_a_lost_connection_belongs_to_the_same_incident() -> None:
    """A survivor reports its lost connection first; the dead rank is known a moment later."""
    machine = Machine()
    machine.fault(1, kind=FaultKind.NETWORK)
    stop = machine.order
    outcome = machine.fault(3)
    at(machine, Stopping)
    assert not outcome.commands, "the ranks have been ordered to stop already"
    assert machine.state.job.incident == stop.incident
    machine.stopped()
    assert machine.order.type == "globalFault"
    assert machine.order.incident == stop.incident
    assert [fault.rank for fault in machine.order.faults] == [1, 3]


def test_lost_connection_that_the_job_takes_back_costs_no_node() -> None:
    """Rank 1 has only lost its connection to rank 3, which has died on another node."""
    machine = Machine("recover", pods=(2, 2))
    machine.fault(1, kind=FaultKind.NETWORK)
    machine.fault(3)
    machine.stopped(faults=(Fault(Rank(3)),))
    assert machine.order.type == "globalFault"
    assert machine.order.nodes == (1,)
    assert [fault.rank for fault in machine.order.faults] == [2, 3]


def test_lost_connection_counts_unless_the_job_takes_it_back() -> None:
    for faults in ((), (Fault(Rank(1), FaultKind.NETWORK), Fault(Rank(3)))):
        machine = Machine("recover", pods=(2, 2))
        machine.fault(1, kind=FaultKind.NETWORK)
        machine.fault(3)
        machine.stopped(faults=faults)
        assert machine.order.nodes == (0, 1)


def test_duplicate_report_is_accepted_and_stale_report_refused() -> None:
    machine = Machine()
    machine.fault(3)
    old = machine.uuid
    machine.stopped()
    assert machine.send(StopReport(0, old)).answer == RecoverCode.OK
    at(machine, Negotiating)
    machine.fault(1)
    assert machine.send(StopReport(0, old)).answer == RecoverCode.ControllerEventCancel
    at(machine, Stopping)
    assert machine.send(StopReport(0, "never heard of")).answer == RecoverCode.OrderMix
    at(machine, Stopping)


def test_unexpected_reports_are_refused() -> None:
    machine = Machine()
    for report in (
        StopReport(0),
        StrategiesReport(("retry",)),
        ResultReport(0, "retry"),
    ):
        assert machine.send(report).answer == RecoverCode.OrderMix
        at(machine, Idle)


def test_a_report_without_a_uuid_is_checked_by_state_and_strategy() -> None:
    machine = Machine()
    machine.fault(3)
    machine.send(StopReport(0))
    machine.send(StrategiesReport(("recover", "exit")))
    assert machine.send(ResultReport(0, "retry")).answer == RecoverCode.OrderMix
    assert machine.send(ResultReport(0, "")).answer == RecoverCode.OrderMix
    at(machine, Replacing)
    assert machine.send(ResultReport(0, "recover")).answer == RecoverCode.OK
    at(machine, Idle)


def test_same_strategies_without_uuid_answer_the_question_after_a_failed_retry() -> None:
    machine = Machine("retry,recover,dump")
    machine.fault(3, kind=FaultKind.NETWORK)
    machine.send(StopReport(0), StrategiesReport(OFFERS))
    at(machine, Retrying)
    assert machine.send(StrategiesReport(OFFERS)).answer == RecoverCode.OK, "a duplicate"
    at(machine, Retrying)
    machine.send(ResultReport(405, "retry"))
    at(machine, Negotiating)
    machine.send(StrategiesReport(OFFERS))
    at(machine, Replacing)
    assert machine.order.strategy == "recover"


@pytest.mark.parametrize(
    ("strategies", "order"),
    [
        ("recover,elastic-training,dump", "downgrade"),
        ("recover,dump", "dump"),
        ("recover", "exit"),
    ],
)
def test_ascend_job_that_waits_for_a_pod_gets_the_next_strategy_without_a_stop(
    strategies: str, order: str
) -> None:
    """MindIO waits for new processes itself. Meanwhile it takes another strategy, but no stop."""
    machine = Machine(strategies, pods=(2, 2))
    machine.fault(3)
    machine.send(StopReport(0), StrategiesReport(("exit", "dump", "recover", "downgrade")))
    at(machine, Replacing)
    waited = machine.uuid
    machine.wait(270)
    assert (machine.order.strategy, machine.order.incident) == (order, 1)
    assert machine.order.uuid != waited
    late = machine.send(ResultReport(406, "recover"))
    assert late.answer == RecoverCode.ScheduleTimeout


def test_ranks_in_a_result_of_ascend_are_those_that_were_repaired() -> None:
    """Ascend's managers send MindIO's list of faults with every result, not only with 201."""
    machine = Machine("recover")
    machine.fault(3)
    machine.send(StopReport(0), StrategiesReport(OFFERS))
    machine.send(ResultReport(0, "recover", (Rank(3),)))
    at(machine, Idle)


def test_ascend_job_whose_recovery_failed_saves_a_checkpoint_and_does_not_shrink() -> None:
    """After 406 MindIO takes nothing but an order to save or to exit."""
    machine = Machine("recover,elastic-training,dump", pods=(2, 2))
    machine.fault(3)
    machine.send(StopReport(0), StrategiesReport(("exit", "dump", "recover", "downgrade")))
    machine.replace_pods(1)
    machine.send(ResultReport(406, "recover"))
    assert machine.order.strategy == "dump"


def test_same_failure_without_uuid_ends_the_second_strategy_too() -> None:
    machine = Machine("recover-in-place,recover,dump")
    machine.fault(3)
    machine.send(StopReport(0), StrategiesReport(OFFERS))
    assert machine.order.extra == "recover-in-place"
    machine.send(ResultReport(499, "recover"))
    at(machine, Replacing)
    assert machine.order.extra == ""
    machine.send(ResultReport(499, "recover"))
    at(machine, Dumping)


@pytest.mark.parametrize("cut", ["stop", "negotiate", "repair"])
def test_unanswered_order_is_sent_again_with_the_same_number(cut: str) -> None:
    machine = Machine()
    machine.fault(3)
    if cut != "stop":
        machine.stopped()
    if cut == "repair":
        machine.offers()
    order = machine.order
    machine.send(SignalFailed(order.sequence), Unsubscribed(), Subscribed())
    assert machine.order == order


def test_tick_before_the_deadline_changes_nothing() -> None:
    machine = Machine()
    machine.fault(3)
    state = machine.state
    machine.now = state.deadline - 0.1
    assert machine.send(Tick()).state == state


def test_strategy_interrupted_too_often_is_given_up() -> None:
    """A replacement that dies at once must not be tried forever."""
    machine = Machine("recover-in-place,dump")
    for _ in range(4):
        machine.fault(3)
        machine.stopped()
        machine.offers()
    assert machine.order.strategy == "dump"
    assert "new faults interrupted it 3 times" in machine.outcome.because


def test_last_strategy_is_not_given_up_if_only_the_end_is_left() -> None:
    """The manager stops offering it when it brings no new step."""
    machine = Machine("retry,recover")
    for _ in range(5):
        machine.fault(3)
        machine.stopped()
        machine.offers()
        assert machine.order.strategy == "recover"
    assert "interrupted it 4 times; nothing else is left" in machine.outcome.because
    machine.fault(3)
    machine.stopped()
    machine.offers("dump", "exit")
    assert machine.order.strategy == "exit"


def test_success_clears_the_history() -> None:
    machine = Machine("recover-in-place,dump")
    for _ in range(5):
        machine.fault(3)
        machine.stopped()
        machine.offers()
        machine.reports(0, "recover")
        at(machine, Idle)


def test_retryable_faults_of_two_kinds_are_not_retried() -> None:
    machine = Machine("retry,recover-in-place")
    faults = (Fault(Rank(1), FaultKind.MEMORY), Fault(Rank(2), FaultKind.NETWORK))
    machine.send(FaultReport(faults))
    machine.stopped()
    machine.offers()
    assert machine.order.extra == "recover-in-place"


def test_shrunk_job_is_ordered_to_grow_when_it_offers_to() -> None:
    """Without a cluster, only the job knows that its ranks can be placed again."""
    machine = Machine("elastic-training")
    machine.fault(3)
    machine.stopped()
    machine.offers()
    machine.reports(0, "downgrade")
    at(machine, Shrunk)
    machine.offers("upgrade")
    assert machine.order.strategy == "upgrade"
    machine.reports(0, "upgrade")
    at(machine, Idle)


@pytest.mark.parametrize("strategies", ["elastic-training", "recover", "dump,recover"])
def test_without_scheduler_only_the_dead_process_is_replaced(strategies: str) -> None:
    machine = Machine(strategies, pods=(4,), cluster=False)
    machine.fault(3)
    machine.stopped()
    assert machine.order.nodes == ()
    machine.offers()
    assert machine.order.strategy in ("downgrade", "recover")
    assert [fault.rank for fault in machine.order.faults] == [3]


def test_broken_device_replaces_its_whole_node() -> None:
    machine = Machine("recover", pods=(2, 2), cluster=False)
    machine.send(FaultReport((Fault(Rank(3), in_place=False),)))
    machine.stopped()
    assert machine.order.nodes == (1,)
    assert [fault.rank for fault in machine.order.faults] == [2, 3]


def test_removed_rank_stays_lost_when_another_fails() -> None:
    machine = Machine("retry,recover-in-place,elastic-training")
    machine.fault(3, kind=FaultKind.MEMORY)
    machine.stopped()
    machine.offers("retry", "downgrade")
    machine.reports(406, "retry")
    at(machine, Shrinking)
    machine.reports(0, "downgrade")
    machine.fault(1, kind=FaultKind.MEMORY)
    machine.stopped()
    machine.offers()
    assert machine.order.extra == "recover-in-place", "a retry would bring rank 3 back from nowhere"
    assert [fault.rank for fault in machine.order.faults] == [1, 3]


@pytest.mark.parametrize(
    ("code", "strategy"), [(405, "recover"), (406, "downgrade"), (499, "exit")]
)
def test_code_of_a_failed_retry_limits_the_next_strategies(code: int, strategy: str) -> None:
    machine = Machine(
        "retry,recover,elastic-training,dump" if code != 499 else "retry,recover,dump"
    )
    machine.fault(3, kind=FaultKind.NETWORK)
    machine.stopped()
    machine.offers()
    at(machine, Retrying)
    uuid = machine.uuid
    machine.reports(code, "retry")
    if code == 405:
        assert machine.order.type == "globalFault"
        assert machine.uuid != uuid
        machine.offers()
    assert machine.order.strategy == strategy


def test_order_to_exit_says_what_spoke_against_the_other_strategies() -> None:
    machine = Machine("recover")
    machine.fault(3)
    machine.stopped()
    machine.offers("exit")
    at(machine, Ended)
    assert machine.order.because == "exit is chosen (recover: the job does not offer it)"


def test_order_to_exit_is_repeated_until_it_is_delivered() -> None:
    machine = Machine("")
    machine.fault(3)
    machine.stopped()
    machine.send(Unsubscribed())
    machine.offers("exit")
    order = machine.order
    machine.register()
    at(machine, Ended)
    machine.send(Subscribed())
    assert machine.order == order
    machine.send(SignalDelivered(order.sequence))
    assert machine.fault(2).answer == RecoverCode.ControllerEventCancel
    machine.register()
    at(machine, Idle)
    machine.fault(1)
    assert machine.order.incident == 2


def test_a_deleted_job_ends() -> None:
    machine = Machine()
    machine.fault(3)
    machine.send(JobDeleted())
    at(machine, Ended)


def test_an_unknown_write_or_delivery_changes_nothing() -> None:
    machine = Machine()
    machine.fault(3)
    state = machine.state
    assert machine.send(ClusterWriteDone(99), SignalDelivered(99)).state == state


def test_a_fault_gets_worse_but_never_better() -> None:
    once = Fault(Rank(1), FaultKind.ORDINARY, in_place=False)
    again = Fault(Rank(1), FaultKind.MEMORY, hardware=True)
    (merged,) = merge([once], [again])
    assert merged == Fault(Rank(1), FaultKind.ORDINARY, hardware=True, in_place=False)
    (merged,) = merge([again], [once])
    assert merged == Fault(Rank(1), FaultKind.ORDINARY, hardware=True, in_place=False)


def test_job_on_a_sub_healthy_device_saves_before_it_exits() -> None:
    machine = Machine("dump", pods=(2, 2), sub_health="graceExit")
    machine.send(FaultsSeen((SeenFault(Rank(3), "40F84E00", "SubHealthFault"),)))
    assert machine.order.type == "saveAndExit"
    other = Machine("recover,dump", pods=(2, 2), sub_health="graceExit")
    other.send(FaultsSeen((SeenFault(Rank(3), "40F84E00", "SubHealthFault"),)))
    at(other, Idle)


def test_every_numbered_command_has_a_unique_number() -> None:
    machine = Machine("recover-in-place", pods=(2, 2))
    numbers = []
    for outcome in (machine.fault(3), machine.stopped(), machine.offers()):
        numbers += [
            command.sequence for command in outcome.commands if hasattr(command, "sequence")
        ]
    assert numbers == sorted(set(numbers))
    assert 0 not in numbers


@pytest.mark.parametrize("state", [Stopping, Negotiating, Replacing])
def test_missing_answer_ends_the_job_with_a_reason(state: type[State]) -> None:
    machine = Machine("recover-in-place")
    machine.fault(3)
    if state is not Stopping:
        machine.stopped()
    if state is Replacing:
        machine.offers()
    at(machine, state)
    uuid = machine.uuid
    machine.wait(900)
    at(machine, Ended)
    assert machine.order.extra == "dump_exit"
    late = machine.send(ResultReport(0, "recover", uuid=""))
    assert late.answer == RecoverCode.WaitReportTimeout
    assert machine.send(StopReport(1, uuid)).answer == RecoverCode.ControllerEventCancel


def test_signals_match_upstream_fields() -> None:
    """A signal's fields are plain values: it can be sent and journaled as it is."""
    machine = Machine("retry")
    machine.fault(3, kind=FaultKind.MEMORY)
    assert isinstance(machine.order, Signal)
    assert machine.order.faults[0].kind == "0"
