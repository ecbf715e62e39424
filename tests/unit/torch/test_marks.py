from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from taskd.torch.marks import NAME, IncidentMarks


@dataclass
class Training:
    rank: int = 0
    incident: int = 0


@dataclass
class Tool:
    """Accepts every call of a tool, and remembers it."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: self.calls.append((name, (*args, *more.values())))


def run(job: Training, **tools: Any) -> None:
    marks = IncidentMarks(job, **tools)
    for step in range(6):
        job.incident = 2 if step >= 3 else 0
        marks(step)


def test_each_incident_is_marked_once_at_its_step() -> None:
    writer, run_, mlflow = Tool(), Tool(), Tool()
    run(Training(), tensorboard=writer, wandb=run_, mlflow=mlflow)
    assert writer.calls[0] == ("add_scalar", (NAME, 2, 3))
    assert len(writer.calls) == 2
    assert run_.calls == [("log", ({NAME: 2}, 3))]
    assert mlflow.calls == [("log_metric", (NAME, 2, 3))]


def test_new_process_of_rank_0_marks_the_incident_that_it_has_come_with() -> None:
    writer = Tool()
    marks = IncidentMarks(Training(incident=3), tensorboard=writer)
    marks(7)
    marks(8)
    assert [call for call in writer.calls if call[0] == "add_scalar"] == [
        ("add_scalar", (NAME, 3, 7))
    ]


def test_only_rank_0_writes() -> None:
    writer = Tool()
    run(Training(rank=1), tensorboard=writer)
    assert writer.calls == []


def test_tool_that_fails_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    run(Training(), mlflow=object())
    assert "incident 2 is not marked" in caplog.text
