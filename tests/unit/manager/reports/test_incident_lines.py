from __future__ import annotations

import os
import select

from taskd.manager.reports.incident_lines import IncidentLines

WAIT_S = 20.0


def incident(number: int, rank: int, outcome: str = "recovered") -> dict[str, object]:
    fault = {"rank": rank, "kind": "exited", "evidence": "signal 9, SIGKILL"}
    parts = {"stopped": 3.0, "step": 4.0}
    strategy = {"strategy": "recover-in-place", "outcome": outcome, "because": "why"}
    return {"incident": number, "faults": [fault], "parts_ms": parts, **strategy}


def test_each_incident_that_is_over_is_one_line() -> None:
    read, write = os.pipe()
    shown = IncidentLines(write)
    shown.show(incident(1, 2, "superseded"))
    shown.show(incident(2, 3))
    shown.show(incident(3, 0, "ended"))
    shown.show(incident(4, 1))
    text = b""
    while text.count(b"\n") < 2:
        assert select.select([read], [], [], WAIT_S)[0], text
        text += os.read(read, 4096)
    assert text.decode().splitlines() == [
        "taskd: incident 1 to 2: rank 2 (signal 9, SIGKILL), rank 3 (signal 9, SIGKILL)"
        " -> recover-in-place: recovered in 14 ms",
        "taskd: incident 4: rank 1 (signal 9, SIGKILL) -> recover-in-place: recovered in 7 ms",
    ]


def test_terminal_that_is_not_read_stops_nothing() -> None:
    _, write = os.pipe()
    shown = IncidentLines(write)
    for number in range(5_000):
        shown.show(incident(number, 1))
