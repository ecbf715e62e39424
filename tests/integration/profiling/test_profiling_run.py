"""Profiling of running jobs: unmodified scripts, the switch file, stragglers, the examples."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from taskd.commands import trace
from tests import ROOT
from tests.integration.run.run_job import Job, script

EXAMPLES = ROOT / "examples"
DEADLINE_S = 60.0

UNMODIFIED = """
    import os, sys, threading
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=4)
    over = torch.zeros(1)
    while not over:
        for batch in data:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            over.fill_(os.path.exists("stop"))
        dist.broadcast(over, 0)
    torch.save(model.state_dict(), f"model{dist.get_rank()}.pt")
    dist.destroy_process_group()
"""


def until(happened: Callable[[], bool], expected: str) -> None:
    """Poll the result of another process, which sends no event."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.05)):
        if happened():
            return
        pause.wait(0.05)
    raise AssertionError(f"not in time: {expected}")


def test_switch_file_controls_an_unmodified_script(tmp_path: Path) -> None:
    switch, base = tmp_path / "profilingSwitch", tmp_path / "profiling"
    job = Job(
        tmp_path,
        "--nproc-per-node=2",
        "--job-id=filed",
        script(tmp_path, UNMODIFIED),
        TASKD_PROFILING_DIR=str(base),
        TASKD_PROFILING_SWITCH=str(switch),
    )
    names = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
    switch.write_text(json.dumps(dict.fromkeys(names, "on")))
    until(lambda: len(list(base.glob("filed/*/*"))) == 2, "both ranks write records")
    (tmp_path / "stop").touch()
    ended = job.end()
    assert ended.code == 0, ended.err
    for rank, spans in trace.read([base], "filed").items():
        found = {span.name.split()[0] for span in spans if span.domain == "default"}
        assert found == {"dataloader", "forward", "step", "save_checkpoint"}, rank
        assert any("allreduce" in span.name for span in spans)


def test_unusable_directory_does_not_harm_training(tmp_path: Path) -> None:
    switch, elsewhere = tmp_path / "profilingSwitch", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "profiling").symlink_to(elsewhere)
    switch.write_text('{"Step": "on"}')
    job = Job(
        tmp_path,
        "--nproc-per-node=2",
        "--job-id=linked",
        script(tmp_path, UNMODIFIED),
        TASKD_PROFILING_DIR=str(tmp_path / "profiling"),
        TASKD_PROFILING_SWITCH=str(switch),
    )
    command = [sys.executable, "-m", "taskd", "status", "linked"]

    def status() -> str:
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout

    until(lambda: "is a symbolic link" in status(), "status shows the reason")
    (tmp_path / "stop").touch()
    ended = job.end()
    assert ended.code == 0, ended.err
    assert "is a symbolic link" in ended.out + ended.err
    assert not list(elsewhere.iterdir())


SLOW_LOADING = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            time.sleep(0.03 if dist.get_rank() == 1 else 0.0)  # a slow disk
            return torch.ones(8)

    over = torch.zeros(1)
    while not over:
        for batch in torch.utils.data.DataLoader(Samples()):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            over.fill_(os.path.exists("stop"))
        dist.broadcast(over, 0)
    dist.destroy_process_group()
"""


def test_rank_with_slow_data_loading_is_named_until_recording_ends(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        "--nproc-per-node=2",
        "--job-id=loading",
        script(tmp_path, SLOW_LOADING),
        TASKD_PROFILING_DIR=str(tmp_path / "profiling"),
        TASKD_STRAGGLER_WINDOW_S="4",
    )

    def taskd(*arguments: str) -> str:
        command = [sys.executable, "-m", "taskd", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout

    def named() -> list[tuple[int, str]] | None:
        """None: the job has no status yet."""
        if not (text := taskd("status", "loading", "--json")):
            return None
        view = json.loads(text)
        return [(slow["rank"], slow["cause"]) for slow in view.get("stragglers", ())]

    until(lambda: named() == [], "the job runs")
    taskd("profile", "loading", "on")
    until(lambda: bool(named()), "a straggler is found")
    assert named() == [(1, "data loading")]
    taskd("profile", "loading", "off")
    until(lambda: named() == [], "no straggler is shown without recording")
    (tmp_path / "stop").touch()
    ended = job.end()
    assert ended.code == 0, ended.err


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["07_profile.py", "08_straggler.py"])
def test_example_ends_with_the_same_weights(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "weights identical to the undisturbed run: yes" in ran.stdout
