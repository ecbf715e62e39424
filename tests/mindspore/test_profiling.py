"""Profiling of MindSpore, switched by the manager or by the file; the weights stay the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.mindspore.job import HERE, VENV, Done, run, weights

from taskd.commands import trace
from taskd.worker.profiling.records import COMMUNICATION, Span

ALL_ON = json.dumps(
    dict.fromkeys(("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader"), "on")
)
DEADLINE_S = 120.0


def names(spans: list[Span]) -> set[str]:
    return {span.name.split()[0] for span in spans if span.domain != COMMUNICATION}


def test_profiling_records_both_ranks_and_keeps_the_weights(tmp_path: Path) -> None:
    plain, recorded, base = tmp_path / "plain", tmp_path / "recorded", tmp_path / "profiling"
    switch = tmp_path / "profilingSwitch"
    switch.write_text(ALL_ON)

    def profiled(folder: Path, switch: Path, wanted: str) -> Done:
        folder.mkdir()
        return run(
            folder,
            TRAIN=str(HERE / "profiled.py"),
            MS_NODE_RANK="0",
            TASKD_PROFILING_DIR=str(base),
            TASKD_PROFILING_SWITCH=str(switch),
            PROFILED=wanted,
        )

    done = profiled(plain, tmp_path / "none", "")
    assert done.code == 0, done.log
    assert not base.exists(), "nothing was requested"
    done = profiled(recorded, switch, "1")
    assert done.code == 0, done.log
    assert weights(recorded) == weights(plain)
    found = trace.read([base], "ms")
    assert sorted(found) == [0, 1]
    for rank, spans in found.items():
        assert names(spans) == {"step", "forward", "dataloader", "save_checkpoint"}, rank
        collectives = [json.loads(span.name) for span in spans if span.domain == COMMUNICATION]
        assert {one["opName"] for one in collectives} == {"allreduce"}
        assert {one["groupName"] for one in collectives} == {"mccl_world_group"}
        assert {one["dataType"] for one in collectives} == {"float32"}
    merged, offsets = trace.merge(found)
    assert all(offset.within_ns >= 0 for offset in offsets.values()), "collectives align the clocks"
    assert merged["traceEvents"]


def test_switch_file_works_without_a_manager(tmp_path: Path) -> None:
    switch, base = tmp_path / "profilingSwitch", tmp_path / "profiling"
    switch.write_text(ALL_ON)
    done = subprocess.run(
        [VENV / "bin/python", HERE / "compiled.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "MS_NODE_RANK": "0",
            "MINDX_TASK_ID": "alone",
            "TASKD_PROXY": "127.0.0.1:1",
            "TASKD_PROFILING_DIR": str(base),
            "TASKD_PROFILING_SWITCH": str(switch),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (spans,) = trace.read([base], "alone").values()
    assert names(spans) == {"step", "dataloader", "save_checkpoint"}
