"""Looking into MindSpore: switched by the manager, switched by the file alone, the same weights."""

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


def test_both_ranks_are_recorded_and_train_the_same(tmp_path: Path) -> None:
    calm, watched, base = tmp_path / "calm", tmp_path / "watched", tmp_path / "profiling"
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

    done = profiled(calm, tmp_path / "none", "")
    assert done.code == 0, done.told
    assert not base.exists(), "nobody has asked for anything"
    done = profiled(watched, switch, "1")
    assert done.code == 0, done.told
    assert weights(watched) == weights(calm)
    found = trace.read([base], "ms")
    assert sorted(found) == [0, 1]
    for rank, spans in found.items():
        assert names(spans) == {"step", "forward", "dataloader", "save_checkpoint"}, rank
        told = [json.loads(span.name) for span in spans if span.domain == COMMUNICATION]
        assert {one["opName"] for one in told} == {"allreduce"}
        assert {one["groupName"] for one in told} == {"mccl_world_group"}
        assert {one["dataType"] for one in told} == {"float32"}
    merged, offsets = trace.merge(found)
    assert all(offset.within_ns >= 0 for offset in offsets.values()), "collectives tie the clocks"
    assert merged["traceEvents"]


def test_without_a_manager_the_file_switches(tmp_path: Path) -> None:
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
