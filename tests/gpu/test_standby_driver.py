"""A replacement finds the driver of the device started: its standby has done so in advance."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.run.run_job import Ended, run, script

TRAIN = """
    import os, signal, time

    began = time.perf_counter()
    import torch
    {first}
    assert torch.cuda.is_available()
    took = time.perf_counter() - began
    incarnation = int(os.environ["TASKD_INCARNATION"])
    print(f"incarnation {{incarnation}} driver {{took * 1000:.1f}} ms", flush=True)

    import taskd.torch as taskd

    job = taskd.init("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(100):
        with step:
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.06)  # the standby looks for the ranks' reports once per second
        if int(step) == 80 and job.rank == 1 and not incarnation:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def driver_ms(ended: Ended, incarnation: int) -> list[float]:
    assert ended.code == 0, ended.out + ended.err
    assert "recover-in-place: recovered" in ended.err, ended.err
    found = re.findall(rf"incarnation {incarnation} driver ([\d.]+) ms", ended.out)
    return [float(one) for one in found]


def test_replacement_does_not_wait_for_the_driver(tmp_path: Path) -> None:
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN.format(first="")))
    at_start, in_replacement = driver_ms(ended, 0), driver_ms(ended, 1)
    assert len(in_replacement) == 1
    assert in_replacement[0] < min(at_start) / 4


def test_script_that_chooses_its_device_gets_it_in_a_replacement(tmp_path: Path) -> None:
    first = "os.environ['CUDA_VISIBLE_DEVICES'] = '0'"
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN.format(first=first)))
    assert len(driver_ms(ended, 1)) == 1
