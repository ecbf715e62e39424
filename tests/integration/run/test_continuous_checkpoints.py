"""Everything of a job is killed at once: the next start loses only the steps since a checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from taskd.runtime.address import free_port
from tests.integration.run.run_job import Ended, Job, script

STEPS, EVERY, KILLED_AFTER = 24, 4, 14

TRAIN = """
    import glob, hashlib, os, signal, sys, threading
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    import taskd.torch as taskd

    kind, stop, every = sys.argv[1], int(sys.argv[2]), 4
    job = taskd.init("gloo")
    torch.manual_seed(7)
    norm = nn.BatchNorm1d(16) if kind == "own" else nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), nn.Linear(16, 4))
    if kind == "sharded":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif kind == "divided":
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4 + job.rank))
    else:
        model = DDP(model, forward_sync_buffers=kind != "own")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)

    def written(step):
        pause = threading.Event()
        for _ in range(3000):
            if glob.glob(f"{os.environ['TASKD_DUMP_DIR']}/step-{step}.*/taskd.json"):
                return
            pause.wait(0.02)
        raise SystemExit(f"no checkpoint of step {step}")

    for step in job.steps(24):
        if stop and step and step % every == 0:
            written(int(step))
        for attempt in step:
            with attempt:
                generator = torch.Generator().manual_seed(1000 * int(step) + job.rank)
                loss = model(torch.randn(4, 8, generator=generator)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        if job.rank == 0:
            print("done", int(step), flush=True)
        if step + 1 == stop:
            if job.rank == 0:
                print("here", flush=True)
            signal.pause()
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(tensor.detach().numpy().tobytes())
    print("weights", digest.hexdigest(), optimizer.param_groups[0]["lr"], flush=True)
"""


def weights(*ended: Ended) -> set[str]:
    assert [one.code for one in ended] == [0] * len(ended), ended
    return {line for one in ended for line in re.findall(r"rank \d\]: weights .*", one.out)}


def kill_all(*jobs: Job) -> None:
    """As if the machine had lost its power, with its memory and its temporary files."""
    for job in jobs:
        job.look()
    processes = [one for job in jobs for one in (job.process, *job.family())]
    for one in processes:
        one.send_signal(signal.SIGSTOP)
    for one in processes:
        one.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    for job in jobs:
        job.popen.communicate()
        for path in job.left():
            shutil.rmtree(path)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["replicated", "sharded", "own", "divided"])
def test_all_processes_are_killed(tmp_path: Path, kind: str) -> None:
    path = script(tmp_path, TRAIN)
    words = ["--nproc-per-node=2", "--dump-dir=out", f"--checkpoint-every={EVERY}", path, kind]
    job = Job(tmp_path, *words, str(KILLED_AFTER))
    job.wait_for("here")
    kill_all(job)
    again = Job(tmp_path, *words, "0").end()
    steps = [int(number) for number in re.findall(r"done (\d+)", again.out)]
    assert steps == list(range(KILLED_AFTER // EVERY * EVERY, STEPS))
    assert not list(tmp_path.glob("out/*/taskd.json")), "the job has finished"
    words = ["--nproc-per-node=2", "--dump-dir=none", path, kind, "0"]
    assert weights(again) == weights(Job(tmp_path, *words).end())
    assert "no checkpoint" not in again.err, again.err


@pytest.mark.timeout(500)
def test_two_nodes_are_killed(tmp_path: Path) -> None:
    """Each node writes its part; the last one completes the checkpoint."""
    path = script(tmp_path, TRAIN)

    def start(stop: int, name: str) -> list[Job]:
        ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
        options = ["--nnodes=2", *ports, "--nproc-per-node=1", "--rdzv-id=both"]
        options += [f"--dump-dir={tmp_path}/{name}", f"--checkpoint-every={EVERY}"]
        jobs = []
        for node in range(2):
            folder = tmp_path / f"node{node}"
            folder.mkdir(exist_ok=True)
            jobs.append(Job(folder, *options, f"--node-rank={node}", path, "sharded", str(stop)))
        return jobs

    jobs = start(KILLED_AFTER, "out")
    jobs[0].wait_for("here")
    kill_all(*jobs)
    again = [job.end() for job in start(0, "out")]
    steps = [int(number) for number in re.findall(r"done (\d+)", again[0].out)]
    assert steps[0] == KILLED_AFTER // EVERY * EVERY
    words = ["--nproc-per-node=2", "--dump-dir=none", path, "sharded", "0"]
    assert weights(*again) == weights(Job(tmp_path, *words).end())


def test_folder_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = script(tmp_path, TRAIN)
    words = ["--nproc-per-node=2", f"--checkpoint-every={EVERY}", path, "replicated", "0"]
    ended = Job(tmp_path, f"--dump-dir={tmp_path}/file/out", *words).end()
    assert len(weights(ended)) == 2


def test_script_without_taskd_is_told_that_there_are_no_checkpoints(tmp_path: Path) -> None:
    path = script(tmp_path, "print('trained')")
    ended = Job(tmp_path, "--nproc-per-node=1", "--checkpoint-every=5", path).end()
    assert ended.code == 0
    assert "no checkpoint was written: the script does not use taskd.torch" in ended.err
    assert not os.path.exists(tmp_path / "taskd-dump")
