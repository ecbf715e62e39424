from __future__ import annotations

from typing import Any

import pytest

from taskd.dashboard.actions import order_of
from taskd.errors import SettingsError
from tests.unit.dashboard.history import status


@pytest.mark.parametrize(
    ("action", "settings", "method", "sentence"),
    [
        ("profile", {"switch": "on"}, "ModifyTrainingDataTraceSwitch", "start to record"),
        ("stress", {"nodes": "node1"}, "StressTest", "stress test of node node1"),
        ("nic", {"to": "backup", "ranks": "1,2"}, "SwitchNicTrack", "move ranks 1,2 to the backup"),
        ("fault", {"ranks": "3", "because": "hot"}, "ReportFault", "process fault of rank 3: hot"),
        ("drain", {"node": "1"}, "ReportFault", "drain node 1: its 2 ranks move away"),
        (
            "drain",
            {"node": "1", "because": "hot"},
            "ReportFault",
            "drain node 1 (hot): its 2 ranks",
        ),
    ],
)
def test_action_says_what_it_will_do(
    action: str, settings: dict[str, Any], method: str, sentence: str
) -> None:
    order = order_of(action, settings, status(), "ada")
    assert order.method == method
    assert sentence in order.sentence


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [("3", "report a process fault of rank 3"), ("1,3", "report a process fault of ranks 1, 3")],
)
def test_fault_without_an_observation_is_a_whole_sentence(ranks: str, sentence: str) -> None:
    assert order_of("fault", {"ranks": ranks, "because": ""}, status(), "ada").sentence == sentence


def test_drain_names_all_ranks_of_the_node_and_the_person() -> None:
    request = order_of("drain", {"node": "1"}, status(), "ada").request
    assert [fault.rank for fault in request.faults] == [2, 3]
    assert (request.drain, request.reporter) == (True, "ada")


@pytest.mark.parametrize(
    ("action", "settings"),
    [
        ("reboot", {}),
        ("profile", {"switch": "maybe"}),
        ("profile", {"switch": ["on"]}),
        ("stress", {"ops": "burn"}),
        ("nic", {"to": "backup", "ranks": "99"}),
        ("nic", {"to": "moon"}),
        ("fault", {"ranks": "-1"}),
        ("fault", {"ranks": ""}),
        ("fault", {"ranks": "1", "kind": "demon"}),
        ("fault", {"ranks": "1" * 4000}),
        ("drain", {"node": "7"}),
        ("drain", {"node": "one"}),
    ],
)
def test_invalid_settings_are_refused(action: str, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        order_of(action, settings, status(), "ada")
