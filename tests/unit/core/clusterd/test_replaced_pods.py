"""Which pods a round replaces: the ones at fault, and none of their replacements."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.clusterd.states import Idle, PreExiting, Replacing
from taskd.model.clusterd import DeletePod, FaultsSeen, LabelPod, PodsSeen
from taskd.model.faults import SeenFault
from taskd.model.ids import Rank
from tests.unit.core.clusterd.recovering import Machine, at


def deleting() -> Machine:
    """A machine that deletes pods, with two pods of two ranks."""
    machine = Machine("recover,dump", pods=(2, 2))
    machine.job_config = replace(machine.job_config, deletes_pods=True)
    machine.register()
    return machine


def decided(machine: Machine) -> list[str]:
    """From the stop to the order `recover`; the pods that are deleted."""
    machine.stopped()
    machine.wait(20)
    machine.offers("recover", "dump")
    at(machine, Replacing)
    return [command.pod for command in machine.said(DeletePod)]


def test_late_report_about_a_deleted_pod_does_not_cost_its_replacement() -> None:
    """A manager notices the end of a pod later than the cluster replaces it."""
    machine = deleting()
    machine.fault(2, 3)
    assert decided(machine) == ["pod1"]
    machine.replace_pods(1)
    machine.fault(2, 3)
    assert not machine.said(LabelPod), "the scheduler would delete what is labelled"
    assert decided(machine) == []
    machine.reports(0, "recover")
    at(machine, Idle)


def test_late_report_finds_a_replacement_that_does_not_run_yet() -> None:
    machine = deleting()
    machine.fault(2)
    assert decided(machine) == ["pod1"]
    machine.pods[1] = replace(machine.pods[1], uid="new", running=False, ranks=(), devices=())
    machine.see_pods()
    for _ in range(2):
        machine.fault(2, 3)
        assert decided(machine) == []
    machine.replace_pods(1)
    machine.reports(0, "recover")
    at(machine, Idle)


def test_report_about_a_pod_that_came_after_the_fault_does_not_cost_it() -> None:
    """When the incident began, the pod had gone already."""
    machine = deleting()
    machine.send(PodsSeen((machine.pods[0],), "Running"))
    machine.fault(2)
    machine.replace_pods(1)
    machine.fault(3)
    assert decided(machine) == []


def test_late_report_after_the_end_of_the_incident_does_not_cost_the_replacement() -> None:
    """The old pod had trained until then: the next leader of clusterd deletes it once more."""
    machine = deleting()
    machine.fault(2, 3)
    assert decided(machine) == ["pod1"]
    machine.reports(0, "recover")
    at(machine, Idle)
    machine.replace_pods(1)
    machine.fault(2, 3)
    assert not machine.said(LabelPod)
    machine.see_pods()
    assert decided(machine) == []
    machine.reports(0, "recover")
    at(machine, Idle)


def test_job_whose_only_pod_was_replaced_is_not_restarted_because_of_a_late_report() -> None:
    machine = Machine("recover,dump", pods=(2,))
    machine.replace_pods(0)
    machine.fault(0)
    incident = machine.state.job.incident
    machine.see_pods()
    assert machine.state.job.incident == incident


def test_replacement_that_fails_again_is_replaced() -> None:
    machine = deleting()
    machine.fault(2, 3)
    assert decided(machine) == ["pod1"]
    machine.replace_pods(1)
    machine.fault(2, 3)
    assert decided(machine) == []
    machine.fault(2, 3)
    assert [command.pod for command in machine.said(LabelPod)] == ["pod1'"]
    assert decided(machine) == ["pod1'"]


def test_replacement_on_a_broken_device_is_replaced_in_the_next_round() -> None:
    """The cluster says which pod has the device."""
    machine = deleting()
    machine.fault(2, 3)
    assert decided(machine) == ["pod1"]
    machine.replace_pods(1)
    machine.send(FaultsSeen((SeenFault(Rank(3), "80E18005", "SeparateNPU", "pod1'"),)))
    machine.reports(0, "recover")
    machine.wait(0)
    at(machine, PreExiting)
    machine.wait(20)
    assert decided(machine) == ["pod1'"]


def test_fault_of_a_device_that_was_left_does_not_start_another_round() -> None:
    machine = deleting()
    machine.send(FaultsSeen((SeenFault(Rank(3), "80E18005", "SeparateNPU", "pod1"),)))
    machine.wait(20)
    assert decided(machine) == ["pod1"]
    machine.replace_pods(1)
    machine.reports(0, "recover")
    machine.wait(0)
    at(machine, Idle)


def test_replacement_that_has_trained_for_a_while_is_a_pod_like_any_other() -> None:
    machine = deleting()
    machine.fault(2, 3)
    assert decided(machine) == ["pod1"]
    machine.replace_pods(1)
    machine.reports(0, "recover")
    machine.wait(20)
    machine.fault(2)
    assert decided(machine) == ["pod1'"]
