"""torchelastic's events, written by us, read by torch's own class."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch.distributed.elastic.events.api import Event as TorchEvent

from taskd.agent.run import plan
from taskd.agent.run.arguments import add_arguments
from taskd.agent.run.elastic_events import EventLog
from taskd.core.agent.machine import Node, State, Waiting, WorkersConfig, step
from taskd.model import messages as m
from taskd.model.agent import Event, WorkerStarted
from taskd.model.ids import Incarnation, NodeRank, Rank


def test_job_writes_the_events_that_torchrun_writes(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (tmp_path / "t.py").touch()
    words = ["--event-log-handler=console", "--nproc-per-node=2", str(tmp_path / "t.py")]
    made = plan.read(parser.parse_args(words))
    assert made.events
    lines: list[str] = []
    log = EventLog(made, lines.append, lambda: 100.0)
    state: State = Waiting(Node(NodeRank(0), (Rank(0), Rank(1)), 5))
    events: list[Event] = [
        m.StartWorkers(5),
        *(WorkerStarted(Rank(r), Incarnation(0), 70 + r) for r in (0, 1)),
        m.WorkerExited(Rank(0), Incarnation(0), 70, 0, None, ""),
        m.WorkerExited(Rank(1), Incarnation(0), 71, None, 9, ""),
        m.EndJob(1, "enough"),
    ]
    for event in events:
        before, state = state, step(state, event, 0.0, WorkersConfig()).state
        log.observe(event, before, state)
    written = [TorchEvent.deserialize(line) for line in lines]
    states = [(each.source.value, each.metadata["state"]) for each in written]
    assert states == [
        ("WORKER", "START"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("WORKER", "FAILED"),
        ("AGENT", "FAILED"),
    ]
    assert json.loads(str(written[3].metadata["metadata"]))["exit_code"] == [-9]
