"""Scripts that fork: DataLoader workers, multiprocessing, subprocesses. None disturbs its rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.run.run_job import run, script


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: loader workers put a socket below it, whose path may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        yield Path(folder)


LOADER = """
    import os, signal, sys, threading
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info
    import taskd.torch as taskd

    how, persistent = sys.argv[1], sys.argv[2:] == ["persistent"]

    class Data(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if os.environ["RANK"] == "1" and os.environ["TASKD_INCARNATION"] == "0":
                if how == "slow" and index == 24:
                    threading.Event().wait(4)
                if how == "killed" and index == 24:
                    os.kill(os.getpid(), signal.SIGKILL)
            return torch.full((8,), float(index))

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    loader = DataLoader(Data(), 2, num_workers=2, persistent_workers=persistent)
    batches = iter(())
    for step in job.steps(60):
        if (batch := next(batches, None)) is None:
            batches = iter(loader)
            batch = next(batches)
        with step:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("trained", job.step)
"""

FORKS = """
    import multiprocessing, os, subprocess, sys
    import torch
    import taskd.torch as taskd

    def answer(queue):
        queue.put(os.getpid())

    def child(step):
        if step % 2:
            raise ValueError("only in the child")
        sys.exit(3)

    def main():
        job = taskd.init()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        job.protect(model=model, optimizer=optimizer)
        fork = multiprocessing.get_context("fork")
        for step in job.steps(12):
            queue = fork.SimpleQueue()
            process = fork.Process(target=answer, args=(queue,))
            process.start()
            assert queue.get() == process.pid
            process.join()
            assert process.exitcode == 0
            if (pid := os.fork()) == 0:
                child(int(step))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (1 if step % 2 else 3)
            subprocess.run(["true"], check=True)
            subprocess.run(["true"], check=True, preexec_fn=lambda: None)
            with step:
                model(torch.ones(8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"])
        print("trained", job.step)

    main()
"""


@pytest.mark.parametrize("workers", ["persistent", ""])
def test_loader_workers_run_without_a_fault(tmp_path: Path, workers: str) -> None:
    path = script(tmp_path, LOADER)
    ended = run(tmp_path, "--nproc-per-node=2", path, "healthy", workers)
    assert ended.code == 0, ended.err
    assert ended.out.count("trained 60") == 2
    assert "0 faults" in ended.err, ended.err


def test_forked_children_run_without_a_fault(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, FORKS))
    assert ended.code == 0, ended.err
    assert ended.out.count("trained 12") == 2
    assert "0 faults" in ended.err, ended.err


def test_rank_that_waits_for_its_loader_worker_is_not_hung(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, LOADER), "slow")
    assert ended.code == 0, ended.err
    assert ended.out.count("trained 60") == 2
    assert "0 faults" in ended.err, ended.err


def test_killed_loader_worker_is_an_error_of_its_script(tmp_path: Path) -> None:
    path, state = script(tmp_path, LOADER), tmp_path / "state"
    ended = run(tmp_path, "--nproc-per-node=2", f"--state-dir={state}", path, "killed")
    assert ended.code == 0, ended.err
    incidents = json.loads((state / "summary.json").read_text())["incidents"]
    faults = [fault for incident in incidents for fault in incident["faults"]]
    assert {(fault["rank"], fault["kind"]) for fault in faults} == {(1, "exited")}
    assert "DataLoader worker" in faults[0]["evidence"]
